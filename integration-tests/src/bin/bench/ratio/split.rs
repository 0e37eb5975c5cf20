//! How many nodes of which role there are, and on which cores each of them runs.

use std::fmt;
use std::str::FromStr;

/// Nodes that share the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split {
    /// Nodes of fixed roles.
    Apart {
        /// Prefill nodes.
        prefill: usize,
        /// Decode nodes.
        decode: usize,
    },
    /// Nodes that do both.
    Both(usize),
}

/// Most nodes of a split.
const MOST_NODES: usize = 64;

impl FromStr for Split {
    type Err = String;

    /// `P:D`, or `both:N`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is no split: P:D (prefill nodes : decode nodes) or both:N, with 1 to {MOST_NODES} nodes each"
            )
        };
        let (left, right) = text.split_once(':').ok_or_else(wrong)?;
        let count = |word: &str| match word.parse() {
            Ok(count @ 1..=MOST_NODES) => Ok(count),
            _ => Err(wrong()),
        };
        Ok(match left {
            "both" => Self::Both(count(right)?),
            prefill => Self::Apart {
                prefill: count(prefill)?,
                decode: count(right)?,
            },
        })
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Apart { prefill, decode } => write!(f, "{prefill}:{decode}"),
            Self::Both(nodes) => write!(f, "both:{nodes}"),
        }
    }
}

/// A node of a split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// `prefill`, `decode` or `both`.
    pub(super) role: &'static str,
    /// Its number among those of its role.
    pub(super) index: usize,
    /// The cores on which it runs, one compute thread each.
    pub(super) cores: Vec<usize>,
}

impl Split {
    /// All ways to give each of `cores` to one node of a fixed role, then nodes that do both: one on all cores, and one on each.
    pub(super) fn all_of(cores: usize) -> Vec<Self> {
        let apart = (1..cores).map(|prefill| Self::Apart {
            prefill,
            decode: cores - prefill,
        });
        let both = if cores > 1 { vec![1, cores] } else { vec![1] };
        apart.chain(both.into_iter().map(Self::Both)).collect()
    }

    /// Nodes of each role: prefill, decode, both.
    pub(super) fn counts(self) -> [(&'static str, usize); 3] {
        match self {
            Self::Apart { prefill, decode } => [("prefill", prefill), ("decode", decode), ("both", 0)],
            Self::Both(nodes) => [("prefill", 0), ("decode", 0), ("both", nodes)],
        }
    }

    /// Where its nodes run. Cores are dealt out evenly; if there are more nodes than cores, several share one.
    pub(super) fn places(self, cores: &[usize]) -> Vec<Place> {
        let nodes: Vec<(&'static str, usize)> = self
            .counts()
            .into_iter()
            .flat_map(|(role, count)| (0..count).map(move |index| (role, index)))
            .collect();
        let (all, total) = (nodes.len(), cores.len());
        let share = |i: usize| match all <= total {
            true => cores[i * total / all..(i + 1) * total / all].to_vec(),
            false => cores.get(i % total.max(1)).copied().into_iter().collect(),
        };
        let place = |(i, (role, index))| Place {
            role,
            index,
            cores: share(i),
        };
        nodes.into_iter().enumerate().map(place).collect()
    }

    /// Whether several nodes have to share a core.
    pub(super) fn is_crowded(self, cores: usize) -> bool {
        self.counts().iter().map(|(_, count)| count).sum::<usize>() > cores
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_are_read_as_they_are_written() {
        for text in ["1:1", "3:2", "both:4"] {
            assert_eq!(
                text.parse::<Split>().map(|split| split.to_string()),
                Ok(text.to_owned())
            );
        }
        for text in ["", "1", "0:1", "1:0", "both:0", "1:2:3", "a:1", "65:1", "-1:1"] {
            assert!(
                text.parse::<Split>().is_err_and(|error| error.contains("P:D")),
                "{text}"
            );
        }
    }

    #[test]
    fn every_core_is_used_once_where_there_are_enough() {
        for (split, cores) in [("1:1", 2), ("1:1", 4), ("1:2", 8), ("both:1", 2), ("3:1", 5)] {
            let split: Split = split.parse().expect("a split");
            let cores: Vec<usize> = (0..cores).collect();
            let used: Vec<usize> = split.places(&cores).into_iter().flat_map(|place| place.cores).collect();
            assert_eq!(used, cores, "{split}");
            assert!(!split.is_crowded(cores.len()));
        }
    }

    #[test]
    fn more_nodes_than_cores_share_them() {
        let split = Split::Apart { prefill: 2, decode: 1 };
        let cores: Vec<Vec<usize>> = split.places(&[4, 6]).into_iter().map(|place| place.cores).collect();
        assert_eq!(cores, [vec![4], vec![6], vec![4]]);
        assert!(split.is_crowded(2));
    }

    #[test]
    fn without_a_wish_every_split_of_the_cores_is_tried() {
        let all: Vec<String> = Split::all_of(3).iter().map(ToString::to_string).collect();
        assert_eq!(all, ["1:2", "2:1", "both:1", "both:3"]);
        assert_eq!(Split::all_of(1), [Split::Both(1)]);
    }
}
