//! Gaps between tokens, and their quantiles.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures_util::StreamExt;

/// Gaps of several streams that ended within some time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gaps {
    /// Milliseconds, sorted.
    sorted: Vec<f64>,
}

impl Gaps {
    /// The gaps between the times of each stream that ended in `from..=to`.
    pub(crate) fn between(streams: &[Vec<Instant>], from: Instant, to: Instant) -> Self {
        let mut sorted: Vec<f64> = streams
            .iter()
            .flat_map(|times| times.windows(2))
            .filter(|pair| from <= pair[1] && pair[1] <= to)
            .map(|pair| 1e3 * (pair[1] - pair[0]).as_secs_f64())
            .collect();
        sorted.sort_by(f64::total_cmp);
        Self { sorted }
    }

    pub(crate) fn len(&self) -> usize {
        self.sorted.len()
    }

    /// The smallest gap that a share `q` of all does not exceed, in milliseconds.
    pub(crate) fn quantile(&self, q: f64) -> f64 {
        let rank = (q * self.sorted.len() as f64).ceil().max(1.0) as usize;
        self.sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn largest(&self) -> f64 {
        self.quantile(1.0)
    }

    /// `p50 .. ms, p99 .. ms, largest .. ms`
    pub(crate) fn to_text(&self) -> String {
        format!(
            "p50 {:.2} ms, p99 {:.2} ms, largest {:.2} ms ({} gaps)",
            self.quantile(0.5),
            self.quantile(0.99),
            self.largest(),
            self.len()
        )
    }
}

/// Tells each event of a stream when it is complete, until the stream ends or the receiver has enough.
pub(crate) async fn event_times(answer: reqwest::Response, mut told: impl FnMut(Instant)) -> Result<()> {
    let (mut line_is_empty, mut is_data) = (true, false);
    let mut body = answer.bytes_stream();
    while let Some(chunk) = body.next().await {
        let now = runtime::clock::Clock.now();
        for byte in chunk? {
            match byte {
                // An empty line ends an event.
                b'\n' if line_is_empty => {
                    if std::mem::take(&mut is_data) {
                        told(now);
                    }
                }
                b'\n' => line_is_empty = true,
                _ => {
                    is_data |= line_is_empty && byte == b'd';
                    line_is_empty = false;
                }
            }
        }
    }
    Ok(())
}

/// Half of a second and the like, for sentences.
pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_gaps_within_a_window() {
        let start = runtime::clock::Clock.now();
        let at = |ms| start + Duration::from_millis(ms);
        let streams = vec![vec![at(0), at(10), at(30)], vec![at(5), at(9), at(100)]];
        let gaps = Gaps::between(&streams, at(9), at(50));
        assert_eq!(gaps.len(), 3);
        assert_eq!(gaps.quantile(0.5).round(), 10.0);
        assert_eq!(gaps.quantile(0.1).round(), 4.0);
        assert_eq!(gaps.largest().round(), 20.0);
        assert!(Gaps::default().largest().is_nan());
    }
}
