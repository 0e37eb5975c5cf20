//! Numbers, times and tables as operators read them in a terminal, at most [`WIDTH`] columns wide.

use std::fmt::Write as _;

use serde_json::Value;

/// Columns of a terminal that everything fits into.
pub const WIDTH: usize = 100;
/// Longest name that is shown in full.
const MOST_NAME: usize = 20;

/// A text from elsewhere: without characters that would steer the terminal, and of bounded length.
pub fn plain(text: &str, most: usize) -> String {
    // Beside control characters: those that turn the direction of what follows, or hide.
    let steers = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
    };
    let mut shown: String = text
        .chars()
        .take(most)
        .map(|c| if steers(c) { '?' } else { c })
        .collect();
    if text.chars().count() > most {
        shown.pop();
        shown.push('~');
    }
    shown
}

/// A name.
pub fn name(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| "-".to_owned(), |text| plain(text, MOST_NAME))
}

/// A whole number, 0 if it is none.
pub fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

/// The items of a list; none if it is none.
pub fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A time in milliseconds.
pub fn ms(ms: f64) -> String {
    if ms < 100.0 {
        format!("{ms:.1} ms")
    } else if ms < 10_000.0 {
        format!("{ms:.0} ms")
    } else if ms < 120_000.0 {
        format!("{:.1} s", ms / 1e3)
    } else {
        age(ms as u64)
    }
}

/// A time in microseconds.
pub fn us(us: u64) -> String {
    ms(us as f64 / 1e3)
}

/// How long ago, or for how long: two units at most.
pub fn age(ms: u64) -> String {
    let seconds = ms / 1_000;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{} h {} min", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

/// A number of bytes.
pub fn bytes(count: u64) -> String {
    let mut size = count as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if size < 1_024.0 {
            return if unit == "B" {
                format!("{count} B")
            } else {
                format!("{size:.1} {unit}")
            };
        }
        size /= 1_024.0;
    }
    format!("{size:.1} TiB")
}

/// How much of something happens in a second.
pub fn rate(value: &Value) -> String {
    match value.as_f64().unwrap_or(0.0) {
        0.0 => "0/s".to_owned(),
        small if small < 10.0 => format!("{small:.2}/s"),
        large => format!("{large:.0}/s"),
    }
}

/// A share of a whole in per cent.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    format!("{:.0} %", 100.0 * part as f64 / whole as f64)
}

/// Splits `width` columns among `parts`: in proportion, and at least one for whatever is not 0.
pub fn share_out(parts: &[u64], width: usize) -> Vec<usize> {
    let whole: u64 = parts.iter().sum();
    if whole == 0 {
        return vec![0; parts.len()];
    }
    let share = |part: &u64| (*part as f64 / whole as f64 * width as f64).round() as usize;
    let mut columns: Vec<usize> = parts
        .iter()
        .map(|part| share(part).max(usize::from(*part > 0)))
        .collect();
    let taken: usize = columns.iter().sum();
    // What rounding gave too much or too little is the widest part's, where nobody sees it.
    if let Some(widest) = columns.iter_mut().max() {
        *widest = (*widest + width).saturating_sub(taken);
    }
    columns
}

/// A bar: each part in its own letter.
pub fn bar(parts: &[(char, u64)], width: usize) -> String {
    let sizes: Vec<u64> = parts.iter().map(|(_, size)| *size).collect();
    let columns = share_out(&sizes, width).into_iter();
    let pieces = columns
        .zip(parts)
        .map(|(columns, (letter, _))| letter.to_string().repeat(columns));
    format!("[{}]", pieces.collect::<String>())
}

/// A table: columns aligned, to the right where the title begins with `>`.
pub struct Table {
    titles: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these titles.
    pub fn new(titles: &[&'static str]) -> Self {
        Self {
            titles: titles.to_vec(),
            rows: Vec::new(),
        }
    }

    /// One more row.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// True if there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table as lines, each behind `indent`.
    pub fn text(&self, indent: &str) -> String {
        let title = |column: usize| self.titles[column].trim_start_matches('>');
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
            widest.max(title(column).len())
        };
        let widths: Vec<usize> = (0..self.titles.len()).map(width).collect();
        let mut text = String::new();
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            let mut one = indent.to_owned();
            for ((cell, width), title) in cells.zip(&widths).zip(&self.titles) {
                let width = *width;
                // Writing to a string cannot fail.
                let _written = if title.starts_with('>') {
                    write!(one, "{cell:>width$}  ")
                } else {
                    write!(one, "{cell:<width$}  ")
                }
                .is_ok();
            }
            text.push_str(one.trim_end());
            text.push('\n');
        };
        line(&mut (0..self.titles.len()).map(title));
        for row in &self.rows {
            line(&mut row.iter().map(String::as_str));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_terminals_is_not_shown() {
        let hostile = "a\x1b[2Jb\u{202e}c\r\n";
        assert_eq!(plain(hostile, 64), "a?[2Jb?c??");
        assert_eq!(plain("0123456789", 5), "0123~");
    }

    #[test]
    fn times_are_short() {
        for (given, shown) in [
            (0.25, "0.2 ms"),
            (99.0, "99.0 ms"),
            (1_234.5, "1234 ms"),
            (12_345.0, "12.3 s"),
            (125_000.0, "2 min 5 s"),
            (7_260_000.0, "2 h 1 min"),
        ] {
            assert_eq!(ms(given), shown);
        }
        assert_eq!(age(200_000_000), "2 d 7 h");
        assert_eq!((bytes(900), bytes(1 << 21)), ("900 B".to_owned(), "2.0 MiB".to_owned()));
    }

    #[test]
    fn a_bar_has_its_width_and_shows_what_is_not_nothing() {
        assert_eq!(share_out(&[0, 1, 999_999, 1], 10), [0, 1, 8, 1]);
        assert_eq!(share_out(&[0, 0], 10), [0, 0]);
        assert_eq!(bar(&[('#', 1), ('.', 3)], 8), "[##......]");
        for parts in [[1, 1, 1], [7, 2, 90], [1, 0, 1]] {
            assert_eq!(share_out(&parts, 10).iter().sum::<usize>(), 10, "{parts:?}");
        }
    }

    #[test]
    fn columns_stand_under_their_titles() {
        let mut table = Table::new(&["NODE", ">JOBS", "STATE"]);
        table.row(vec!["a".to_owned(), "12".to_owned(), "serving".to_owned()]);
        table.row(vec!["longer".to_owned(), "1,234".to_owned(), String::new()]);
        let expected = "  NODE     JOBS  STATE\n  a          12  serving\n  longer  1,234\n";
        assert_eq!(table.text("  "), expected);
    }
}
