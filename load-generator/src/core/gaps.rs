//! Gaps between the tokens of running streams while something else happens.

/// When the tokens of a stream came, in seconds from a common start: one list for each request, as a stream that ends is begun
/// again, and the time in between is no gap.
pub type Stream = Vec<Vec<f64>>;

/// What streams did in a window of time.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// All gaps that lie in the window, or reach into it, in seconds.
    pub gaps_s: Vec<f64>,
    /// Tokens a second of a stream, on average.
    pub tokens_per_s: f64,
}

impl Window {
    /// Looks at streams from `from` to `to`.
    pub fn of(streams: &[Stream], from: f64, to: f64) -> Self {
        let mut gaps_s = Vec::new();
        let mut tokens = 0_usize;
        for times in streams.iter().flatten() {
            tokens += times.iter().filter(|time| **time > from && **time <= to).count();
            let inside = times.windows(2).filter(|pair| pair[1] > from && pair[0] < to);
            gaps_s.extend(inside.map(|pair| pair[1] - pair[0]));
        }
        let seconds = (to - from).max(f64::MIN_POSITIVE) * streams.len().max(1) as f64;
        Self {
            gaps_s,
            tokens_per_s: tokens as f64 / seconds,
        }
    }

    /// The longest gap, in seconds; none if there is none.
    pub fn worst_s(&self) -> Option<f64> {
        self.gaps_s.iter().copied().reduce(f64::max)
    }
}

/// The median; none of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted.get(middle).copied()
    } else {
        Some((sorted.get(middle.checked_sub(1)?)? + sorted.get(middle)?) / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_that_reach_into_the_window_count_whole() {
        let streams = vec![
            vec![vec![0.0, 1.0, 4.0, 4.5]],
            vec![vec![0.5, 1.5], vec![3.0, 3.5, 6.0]],
        ];
        let window = Window::of(&streams, 2.0, 4.2);
        // 1 to 4 and 4 to 4.5; of the second stream 3 to 3.5 and 3.5 to 6, and not the time between its requests.
        assert_eq!(window.gaps_s, [3.0, 0.5, 0.5, 2.5]);
        assert_eq!(window.worst_s(), Some(3.0));
        assert!((window.tokens_per_s - 3.0 / 2.2 / 2.0).abs() < 1e-12);
    }

    #[test]
    fn nothing_has_no_worst_gap() {
        let window = Window::of(&[vec![vec![1.0]]], 0.0, 2.0);
        assert_eq!((window.worst_s(), window.tokens_per_s), (None, 0.5));
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
