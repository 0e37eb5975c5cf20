//! Which tokens remain: `top_k`, `top_p`, `typical_p`, `min_p`.
//!
//! The order of tokens is total: more probable first, equals by their id. So every filter has one right answer, however
//! it finds it; none sorts the whole vocabulary unless all of it remains.

use std::cmp::Ordering;

use super::math::{exp, scaled};
use crate::kernels::{Plain, run_plain};

/// A token that may be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    /// Its id.
    pub(super) token: u32,
    /// Its logit after penalties.
    pub(super) logit: f32,
    /// `exp((logit - max) / temperature)`.
    pub(super) weight: f32,
    /// Distance of its information from the entropy, for `typical_p`.
    shift: f64,
}

impl Candidate {
    pub(super) fn new(token: u32, logit: f32, weight: f32) -> Self {
        Self {
            token,
            logit,
            weight,
            shift: 0.0,
        }
    }

    /// More probable first, equals by their id.
    pub(super) fn by_probability(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.token.cmp(&other.token))
    }

    fn by_shift(&self, other: &Self) -> Ordering {
        self.shift.total_cmp(&other.shift).then(self.by_probability(other))
    }
}

/// Puts the `k` best tokens of a row into `out`, best first (all tokens if there are fewer).
pub(super) fn top_k(logits: &[f32], k: usize, out: &mut Vec<Candidate>) {
    struct Find<'a>(&'a [f32], usize, &'a mut Vec<Candidate>);
    impl Plain for Find<'_> {
        type Output = ();
        #[inline(always)]
        fn run(self) {
            find_top_k(self.0, self.1, self.2);
        }
    }
    run_plain(Find(logits, k, out));
}

#[inline(always)]
fn find_top_k(logits: &[f32], k: usize, out: &mut Vec<Candidate>) {
    /// Tokens looked at together; most groups have nothing above the bar.
    const GROUP: usize = 16;
    out.clear();
    if k == 0 {
        return;
    }
    let capacity = k.saturating_mul(4).max(256).min(logits.len().max(1));
    let mut bar = None;
    for (group, row) in logits.chunks(GROUP).enumerate() {
        let max = row.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
        if bar.is_some_and(|bar| max <= bar) {
            continue;
        }
        for (i, &logit) in row.iter().enumerate() {
            // A later token that equals the k-th best loses to it by its id.
            if bar.is_none_or(|bar| logit > bar) {
                out.push(Candidate::new((group * GROUP + i) as u32, logit, 0.0));
            }
        }
        if out.len() + GROUP > capacity && out.len() > k {
            out.select_nth_unstable_by(k - 1, Candidate::by_probability);
            out.truncate(k);
            bar = Some(out[k - 1].logit);
        }
    }
    if out.len() > k {
        out.select_nth_unstable_by(k - 1, Candidate::by_probability);
        out.truncate(k);
    }
    out.sort_unstable_by(Candidate::by_probability);
}

/// Fills in the weights of candidates that [`top_k`] found.
pub(super) fn weigh(candidates: &mut [Candidate], max: f32, temperature: f32) {
    for c in candidates {
        c.weight = exp(scaled(c.logit, max, temperature));
    }
}

/// Sum of the weights, in the order of the list.
pub(super) fn mass(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|c| f64::from(c.weight)).sum()
}

/// Number of candidates, from the first, whose mass reaches `target`; `None` if all together do not.
pub(super) fn prefix(candidates: &[Candidate], target: f64) -> Option<usize> {
    let mut sum = 0.0;
    for (i, c) in candidates.iter().enumerate() {
        sum += f64::from(c.weight);
        if sum >= target {
            return Some(i + 1);
        }
    }
    None
}

/// Keeps the smallest set, most typical first, whose probability reaches `typical_p` (Meister, Pimentel, Wiher,
/// Cotterell: "Locally typical sampling", 2022). At least one stays.
pub(super) fn typical(candidates: &mut Vec<Candidate>, max: f32, temperature: f32, typical_p: f64) {
    let total = mass(candidates);
    let log_total = total.ln();
    let information = |c: &Candidate| log_total - f64::from(scaled(c.logit, max, temperature));
    let entropy: f64 = candidates
        .iter()
        .filter(|c| c.weight > 0.0)
        .map(|c| f64::from(c.weight) / total * information(c))
        .sum();
    for c in candidates.iter_mut() {
        c.shift = (information(c) - entropy).abs();
    }
    let target = typical_p * total;
    let (mut sorted, mut sum) = (0, 0.0);
    while sorted < candidates.len() {
        let end = (sorted * 8).max(64).min(candidates.len());
        if end < candidates.len() {
            candidates[sorted..].select_nth_unstable_by(end - sorted, Candidate::by_shift);
        }
        candidates[sorted..end].sort_unstable_by(Candidate::by_shift);
        for i in sorted..end {
            sum += f64::from(candidates[i].weight);
            if sum >= target {
                candidates.truncate(i + 1);
                return;
            }
        }
        sorted = end;
    }
}

/// Drops candidates below `min_p` of the best one that is left.
pub(super) fn min_p(candidates: &mut Vec<Candidate>, min_p: f32) {
    let best = candidates
        .iter()
        .fold(0.0_f32, |a, c| if c.weight > a { c.weight } else { a });
    candidates.retain(|c| c.weight >= min_p * best);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(n: usize, salt: u64) -> Vec<f32> {
        (0..n as u64)
            .map(|i| {
                let h = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ salt).rotate_left(23);
                // Few distinct values, so that ties are common.
                (h % 97) as f32 / 8.0
            })
            .collect()
    }

    #[test]
    fn top_k_equals_a_full_sort() {
        for n in [1, 5, 16, 100, 1_000, 5_000] {
            for k in [1, 2, 7, 40, 250, 1_000, 6_000] {
                let logits = row(n, k as u64);
                let mut all: Vec<u32> = (0..n as u32).collect();
                all.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
                all.truncate(k);
                let mut found = Vec::new();
                top_k(&logits, k, &mut found);
                let found: Vec<u32> = found.iter().map(|c| c.token).collect();
                assert_eq!(found, all, "n {n}, k {k}");
            }
        }
    }

    #[test]
    fn typical_equals_a_full_sort() {
        let logits = row(700, 3);
        let max = 96.0 / 8.0;
        for p in [0.01, 0.2, 0.5, 0.95, 1.0] {
            let mut all: Vec<Candidate> = logits
                .iter()
                .enumerate()
                .map(|(i, &x)| Candidate::new(i as u32, x, 0.0))
                .collect();
            weigh(&mut all, max, 1.0);
            let total = mass(&all);
            let info = |c: &Candidate| total.ln() - f64::from(c.logit - max);
            let entropy: f64 = all.iter().map(|c| f64::from(c.weight) / total * info(c)).sum();
            let mut naive = all.clone();
            naive.sort_by(|a, b| {
                let (x, y) = ((info(a) - entropy).abs(), (info(b) - entropy).abs());
                x.total_cmp(&y)
                    .then(b.logit.total_cmp(&a.logit))
                    .then(a.token.cmp(&b.token))
            });
            let keep = prefix(&naive, p * total).unwrap_or(naive.len());
            let naive: Vec<u32> = naive[..keep].iter().map(|c| c.token).collect();
            typical(&mut all, max, 1.0, p);
            assert_eq!(all.iter().map(|c| c.token).collect::<Vec<_>>(), naive, "typical_p {p}");
        }
    }
}
