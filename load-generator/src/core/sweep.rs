//! The search for the highest rate at which enough requests meet their objectives.

use serde::{Deserialize, Serialize};

use super::Invalid;

/// Doubles (or halves) from a first rate until it has one that is good and one that is not, then halves the ratio between
/// them. It says which rate to try next and is told how that went.
#[derive(Debug)]
pub struct Search {
    first: f64,
    good: Option<f64>,
    bad: Option<f64>,
    /// Ends when bad/good is at most 1 + this.
    precision: f64,
    runs_left: u32,
}

/// What a search found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// The highest rate that was good; none if none was.
    pub good_per_s: Option<f64>,
    /// The lowest rate that was not; none if all were good.
    pub bad_per_s: Option<f64>,
}

impl Search {
    /// `first`: the rate to begin with; `precision`: how near the two rates must be in the end, 0.1 for a tenth; `runs`: how
    /// many rates are tried at most.
    pub fn new(first: f64, precision: f64, runs: u32) -> Result<Self, Invalid> {
        let positive = |value: f64| value.is_finite() && value > 0.0;
        if !positive(first) {
            return Err(Invalid::new(
                "the first rate",
                first,
                "a number of requests a second above 0",
            ));
        }
        if !positive(precision) {
            return Err(Invalid::new(
                "the precision",
                precision,
                "a number above 0; 0.1 is a tenth",
            ));
        }
        if runs == 0 {
            return Err(Invalid::new("the number of runs", runs, "at least 1"));
        }
        Ok(Self {
            first,
            good: None,
            bad: None,
            precision,
            runs_left: runs,
        })
    }

    /// The rate to try next; none when the search has ended.
    pub fn next(&self) -> Option<f64> {
        if self.runs_left == 0 {
            return None;
        }
        match (self.good, self.bad) {
            (None, None) => Some(self.first),
            (Some(good), None) => Some(good * 2.0),
            (None, Some(bad)) => Some(bad / 2.0),
            (Some(good), Some(bad)) => (bad / good > 1.0 + self.precision).then(|| (good * bad).sqrt()),
        }
    }

    /// How the rate went that [`Self::next`] named.
    pub fn tried(&mut self, is_good: bool) {
        let Some(rate) = self.next() else { return };
        self.runs_left -= 1;
        if is_good {
            self.good = Some(rate);
        } else {
            self.bad = Some(rate);
        }
    }

    /// What is known.
    pub fn found(&self) -> Goodput {
        Goodput {
            good_per_s: self.good,
            bad_per_s: self.bad,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches where every rate up to `limit` is good; also the rates that were tried.
    fn search(first: f64, precision: f64, runs: u32, limit: f64) -> (Goodput, Vec<f64>) {
        let mut search = Search::new(first, precision, runs).expect("valid");
        let mut tried = Vec::new();
        while let Some(rate) = search.next() {
            tried.push(rate);
            search.tried(rate <= limit);
        }
        (search.found(), tried)
    }

    #[test]
    fn it_finds_the_limit_from_below_and_from_above() {
        for first in [0.01, 1.0, 7.3, 500.0] {
            for limit in [0.37, 5.0, 41.0] {
                let (found, tried) = search(first, 0.05, 100, limit);
                let (good, bad) = (found.good_per_s.expect("found"), found.bad_per_s.expect("found"));
                assert!(good <= limit && limit < bad, "{first} {limit}: {found:?}");
                assert!(bad / good <= 1.05 && tried.len() < 25, "{first} {limit}: {tried:?}");
            }
        }
    }

    #[test]
    fn steps_are_those_of_a_bisection() {
        let (_, tried) = search(1.0, 0.5, 100, 5.0);
        // 5.66 is the middle of 4 and 8 in ratio, and within half of 4.
        let rounded: Vec<f64> = tried.iter().map(|rate| (rate * 100.0).round() / 100.0).collect();
        assert_eq!(rounded, [1.0, 2.0, 4.0, 8.0, 5.66]);
    }

    #[test]
    fn it_ends_after_its_runs_whatever_it_has() {
        let (all_good, tried) = search(1.0, 0.1, 5, f64::INFINITY);
        assert_eq!(
            (all_good.good_per_s, all_good.bad_per_s, tried.len()),
            (Some(16.0), None, 5)
        );
        let (all_bad, tried) = search(1.0, 0.1, 3, 0.0);
        assert_eq!(
            (all_bad.good_per_s, all_bad.bad_per_s, tried.len()),
            (None, Some(0.25), 3)
        );
    }

    #[test]
    fn what_cannot_be_searched_is_refused() {
        for (first, precision, runs, word) in [
            (0.0, 0.1, 1, "first rate"),
            (f64::NAN, 0.1, 1, "first rate"),
            (1.0, 0.0, 1, "precision"),
            (1.0, 0.1, 0, "number of runs"),
        ] {
            let error = Search::new(first, precision, runs).expect_err(word).to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
