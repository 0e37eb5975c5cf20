//! Plots as SVG, which a page holds without asking anyone.

use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use super::WriteError;

/// Size in pixels; pages scale it.
const SIZE: (u32, u32) = (560, 320);
/// Told apart by most eyes, also in print.
const COLOURS: [RGBColor; 6] = [
    RGBColor(31, 95, 168),
    RGBColor(214, 108, 0),
    RGBColor(46, 130, 62),
    RGBColor(196, 38, 46),
    RGBColor(120, 72, 160),
    RGBColor(90, 90, 90),
];
/// An axis whose largest value is so many times its smallest is logarithmic.
const LOGARITHMIC_FROM: f64 = 50.0;
/// More points than this are thinned out: nobody sees them, and the page grows.
const MAX_POINTS: usize = 4000;

/// Where something is: across, and up.
pub type Point = (f64, f64);

/// Points of one kind.
#[derive(Clone, Debug)]
struct Series {
    name: String,
    points: Vec<(f64, f64)>,
    joined: bool,
    marked: bool,
    /// Each two points are the corners of a box.
    boxed: bool,
}

/// A plot that is being put together.
#[derive(Clone, Debug)]
pub struct Drawing {
    x: String,
    y: String,
    may_be_logarithmic: bool,
    series: Vec<Series>,
}

impl Drawing {
    /// An empty plot with names (and units) of its axes.
    pub fn new(x: &str, y: &str) -> Self {
        Self {
            x: x.to_owned(),
            y: y.to_owned(),
            may_be_logarithmic: false,
            series: Vec::new(),
        }
    }

    /// Lets the horizontal axis be logarithmic, if its values ask for it.
    #[must_use]
    pub fn logarithmic(mut self) -> Self {
        self.may_be_logarithmic = true;
        self
    }

    /// Adds a line.
    #[must_use]
    pub fn line(self, name: &str, points: Vec<(f64, f64)>) -> Self {
        self.with(name, points, true, false)
    }

    /// Adds a line with its points marked.
    #[must_use]
    pub fn marked_line(self, name: &str, points: Vec<(f64, f64)>) -> Self {
        self.with(name, points, true, true)
    }

    /// Adds points.
    #[must_use]
    pub fn points(self, name: &str, points: Vec<(f64, f64)>) -> Self {
        self.with(name, points, false, true)
    }

    /// Adds boxes, each from its lower left to its upper right corner.
    #[must_use]
    pub fn boxes(mut self, name: &str, corners: &[(Point, Point)]) -> Self {
        self.series.push(Series {
            name: name.to_owned(),
            points: corners.iter().flat_map(|(low, high)| [*low, *high]).collect(),
            joined: false,
            marked: false,
            boxed: true,
        });
        self
    }

    fn with(mut self, name: &str, mut points: Vec<(f64, f64)>, joined: bool, marked: bool) -> Self {
        points.retain(|(x, y)| x.is_finite() && y.is_finite());
        if points.len() > MAX_POINTS {
            let step = points.len().div_ceil(MAX_POINTS);
            points = points.into_iter().step_by(step).collect();
        }
        if !points.is_empty() {
            self.series.push(Series {
                name: name.to_owned(),
                points,
                joined,
                marked,
                boxed: false,
            });
        }
        self
    }

    /// The plot as an `svg` element; none if there is nothing in it.
    pub fn svg(&self) -> Result<Option<String>, WriteError> {
        if self.series.is_empty() {
            return Ok(None);
        }
        let mut svg = String::new();
        self.draw(&mut svg)
            .map_err(|error| WriteError::Plot(error.to_string()))?;
        Ok(Some(svg))
    }

    fn bounds(&self) -> ((f64, f64), (f64, f64)) {
        let all = || self.series.iter().flat_map(|series| &series.points);
        let span = |of: fn(&(f64, f64)) -> f64| {
            let low = all().map(of).fold(f64::INFINITY, f64::min);
            let high = all().map(of).fold(f64::NEG_INFINITY, f64::max);
            (low, high)
        };
        (span(|point| point.0), span(|point| point.1))
    }

    fn draw(&self, svg: &mut String) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
        let ((x_low, x_high), (_, y_high)) = self.bounds();
        // Plots have no logarithmic axis whose type is that of a linear one: its values are the exponents.
        let logarithmic = self.may_be_logarithmic && x_low > 0.0 && x_high / x_low >= LOGARITHMIC_FROM;
        let place = |x: f64| if logarithmic { x.log10() } else { x };
        let (from, to) = if logarithmic {
            (place(x_low), place(x_high))
        } else {
            (x_low.min(0.0), x_high)
        };
        // An axis needs some length, and the largest values some distance from the edge.
        let to = if to > from { to + (to - from) * 0.02 } else { from + 1.0 };
        // Names of several series need room above the data; of one, the page tells.
        let has_names = self.series.len() > 1;
        let room = if has_names { 1.3 } else { 1.05 };
        let top = if y_high > 0.0 { y_high * room } else { 1.0 };

        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(62)
            .build_cartesian_2d(from..to, 0.0..top)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .bold_line_style(RGBColor(225, 225, 225))
            .x_desc(&self.x)
            .y_desc(&self.y)
            .x_labels(8)
            .y_labels(6)
            .x_label_formatter(&|x| number(if logarithmic { 10_f64.powf(*x) } else { *x }))
            .y_label_formatter(&|y| number(*y))
            .label_style(("sans-serif", 12))
            .draw()?;
        for (index, series) in self.series.iter().enumerate() {
            let points: Vec<(f64, f64)> = series.points.iter().map(|(x, y)| (place(*x), *y)).collect();
            series.draw(&mut chart, &points, COLOURS[index % COLOURS.len()])?;
        }
        if has_names {
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperLeft)
                .background_style(WHITE.mix(0.8))
                .label_font(("sans-serif", 12))
                .draw()?;
        }
        root.present()
    }
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

impl Series {
    fn draw(
        &self,
        chart: &mut Chart<'_, '_>,
        points: &[(f64, f64)],
        colour: RGBColor,
    ) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
        let sample = move |(x, y): (i32, i32)| Rectangle::new([(x, y - 3), (x + 12, y + 3)], colour.filled());
        if self.joined {
            let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2));
            chart.draw_series(line)?.label(&self.name).legend(sample);
        }
        if self.boxed {
            let boxes = points
                .chunks_exact(2)
                .map(|corners| Rectangle::new([corners[0], corners[1]], colour.filled()));
            chart.draw_series(boxes)?.label(&self.name).legend(sample);
        }
        if self.marked {
            let marks = points
                .iter()
                .map(|point| Circle::new(*point, 2, colour.mix(0.7).filled()));
            let drawn = chart.draw_series(marks)?;
            if !self.joined {
                drawn.label(&self.name).legend(sample);
            }
        }
        Ok(())
    }
}

/// A number with the digits that a label has room for.
fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 1e6 {
        format!("{:.1}M", value / 1e6)
    } else if size >= 1e4 {
        format!("{:.0}k", value / 1e3)
    } else if size >= 100.0 || size == 0.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_is_an_svg_with_its_words() {
        let drawing = Drawing::new("ms", "share")
            .line("TTFT <b>", vec![(1.0, 0.5), (2.0, 1.0)])
            .points("other", vec![(1.0, 1.0)]);
        let svg = drawing.svg().expect("drawn").expect("not empty");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert!(svg.contains("share") && svg.contains("TTFT &lt;b&gt;"), "{svg}");
    }

    #[test]
    fn nothing_is_no_plot_and_odd_numbers_are_left_out() {
        let empty = Drawing::new("x", "y").line("a", vec![(f64::NAN, 1.0)]);
        assert_eq!(empty.svg().expect("drawn"), None);
        let single = Drawing::new("x", "y").logarithmic().points("a", vec![(5.0, 0.0)]);
        assert!(single.svg().expect("drawn").is_some());
        let zero = Drawing::new("x", "y").points("a", vec![(0.0, 0.0)]);
        assert!(zero.svg().expect("drawn").is_some());
    }

    #[test]
    fn wide_values_get_a_logarithmic_axis() {
        let wide = |drawing: Drawing| {
            drawing
                .line("a", vec![(1.0, 0.0), (10_000.0, 1.0)])
                .svg()
                .expect("drawn")
        };
        let (linear, logarithmic) = (wide(Drawing::new("x", "y")), wide(Drawing::new("x", "y").logarithmic()));
        let has =
            |svg: &Option<String>, label: &str| svg.as_ref().is_some_and(|svg| svg.lines().any(|line| line == label));
        assert!(has(&linear, "4000") && !has(&linear, "100"), "{linear:?}");
        assert!(
            has(&logarithmic, "100") && !has(&logarithmic, "4000"),
            "{logarithmic:?}"
        );
    }

    #[test]
    fn labels_are_short() {
        for (value, expected) in [
            (0.0, "0"),
            (0.127, "0.13"),
            (12.34, "12.3"),
            (123.4, "123"),
            (12_345.0, "12k"),
            (2.5e6, "2.5M"),
        ] {
            assert_eq!(number(value), expected);
        }
    }
}
