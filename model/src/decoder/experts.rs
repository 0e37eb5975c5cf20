//! Sparse feed-forward networks: a router scores the experts for each row, and the row goes through the best of them.
//!
//! What a row gets depends on the row alone: its scores, its choice (of equal scores the lower number), and its sum, which
//! goes over its experts in the order of their numbers, each product rounded before it is added, and ends with what all
//! rows go through. Rows that share an expert are gathered and computed together.

use super::{Buffers, Decoder, Dense, input, sized};
use crate::arch::{Experts, Scoring};
use crate::kernels::{
    Cpu, KernelError, Linear, Operand, Rows, Scratch, Target, add_scaled, products, rms_norm, sigmoid, softmax,
};

/// The weights of a layer's sparse network.
#[derive(Default)]
pub(super) struct Sparse {
    pub(super) router: Option<Linear>,
    /// Added to the scores where experts are chosen.
    pub(super) choice_bias: Option<Vec<f32>>,
    pub(super) experts: Vec<Dense>,
    /// What all rows go through.
    pub(super) shared: Option<Dense>,
}

/// Which rows go where, and buffers for computing them; reused from step to step.
#[derive(Default)]
pub(super) struct Routes {
    /// Normed rows, \[rows\]\[hidden\].
    normed: Vec<f32>,
    /// \[rows\]\[experts\].
    scores: Vec<f32>,
    chosen: Chosen,
    /// By expert: its rows and their weights.
    by_expert: Vec<Vec<(usize, f32)>>,
    gathered: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    out: Vec<f32>,
    operand: Operand,
    kernels: Scratch,
}

/// A row's experts and their weights, and memory for finding them.
#[derive(Default)]
pub(super) struct Chosen {
    experts: Vec<(usize, f32)>,
    /// What they are chosen by.
    by: Vec<f32>,
    groups: Vec<f32>,
}

impl Decoder {
    /// The sparse network of the first `rows` rows of the residual stream.
    pub(super) fn sparse(
        &self,
        index: usize,
        sparse: &Sparse,
        rows: usize,
        b: &mut Buffers,
    ) -> Result<(), KernelError> {
        let (config, cpu, layer) = (&self.config, &self.cpu, &self.layers[index]);
        let (Some(shape), Some(router)) = (&config.experts, &sparse.router) else {
            return Ok(());
        };
        let hidden = config.hidden_size;
        let x = &mut b.x[..rows * hidden];
        let r = &mut b.routes;
        let normed = sized(&mut r.normed, rows * hidden);
        match input(x, layer.ffn_norm.as_ref(), config.norm_eps) {
            Rows::Normed { x, weight, eps } => rms_norm(cpu, x, weight, eps, normed)?,
            _ => normed.copy_from_slice(x),
        }
        let scores = sized(&mut r.scores, rows * shape.count);
        router.forward(cpu, normed, rows, scores, &mut r.kernels)?;
        r.by_expert.resize_with(shape.count, Vec::new);
        r.by_expert.iter_mut().for_each(Vec::clear);
        for (row, scores) in scores.chunks_exact_mut(shape.count).enumerate() {
            choose(cpu, shape, sparse.choice_bias.as_deref(), scores, &mut r.chosen);
            for &(expert, weight) in &r.chosen.experts {
                r.by_expert[expert].push((row, weight));
            }
        }
        let delta = sized(&mut b.delta, rows * hidden);
        delta.fill(0.0);
        for (expert, network) in sparse.experts.iter().enumerate() {
            self.add_expert(network, expert, r, delta)?;
        }
        if let Some(shared) = &sparse.shared {
            self.network(
                shared,
                Rows::Plain(&r.normed[..rows * hidden]),
                &mut r.operand,
                (&mut r.gate, &mut r.up),
                &mut r.out,
            )?;
            add_scaled(cpu, delta, &r.out[..rows * hidden], 1.0)?;
        }
        self.add_delta(layer.ffn_out_norm.as_deref(), delta, x)
    }

    /// Adds what an expert gives its rows, times their weights.
    fn add_expert(&self, network: &Dense, expert: usize, r: &mut Routes, delta: &mut [f32]) -> Result<(), KernelError> {
        let hidden = self.config.hidden_size;
        if r.by_expert[expert].is_empty() {
            return Ok(());
        }
        r.gathered.clear();
        for &(row, _) in &r.by_expert[expert] {
            r.gathered
                .extend_from_slice(&r.normed[row * hidden..(row + 1) * hidden]);
        }
        self.network(
            network,
            Rows::Plain(&r.gathered),
            &mut r.operand,
            (&mut r.gate, &mut r.up),
            &mut r.out,
        )?;
        for (&(row, weight), out) in r.by_expert[expert].iter().zip(r.out.chunks_exact(hidden)) {
            add_scaled(&self.cpu, &mut delta[row * hidden..(row + 1) * hidden], out, weight)?;
        }
        Ok(())
    }

    /// down(activation(gate(x)) * up(x)) into the beginning of `out`.
    fn network(
        &self,
        network: &Dense,
        rows: Rows<'_>,
        operand: &mut Operand,
        (gate, up): (&mut Vec<f32>, &mut Vec<f32>),
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        let cpu = &self.cpu;
        let (g, u, d) = (&network.gate.linear, &network.up.linear, &network.down.linear);
        operand.prepare(cpu, rows, &[g, u])?;
        let m = operand.rows();
        let (gate, up) = (sized(gate, m * g.n()), sized(up, m * u.n()));
        products(
            cpu,
            operand,
            [(g, Target::Store(&mut *gate)), (u, Target::Store(&mut *up))],
        )?;
        let activation = self.config.activation;
        operand.prepare(cpu, Rows::Gated { gate, up, activation }, &[d])?;
        products(cpu, operand, [(d, Target::Store(sized(out, m * d.n())))])
    }
}

/// Finds a row's experts, in the order of their scores, and their weights. `scores` are the router's output; what it holds
/// afterwards is what the weights are made of.
fn choose(cpu: &Cpu, shape: &Experts, bias: Option<&[f32]>, scores: &mut [f32], chosen: &mut Chosen) {
    match shape.scoring {
        Scoring::Softmax => softmax(cpu, scores),
        Scoring::Sigmoid => sigmoid(cpu, scores),
    }
    let Chosen { experts, by, groups } = chosen;
    by.clear();
    by.extend_from_slice(scores);
    if let Some(bias) = bias {
        by.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
    }
    if let Some(grouped) = shape.groups {
        let size = shape.count / grouped.count;
        groups.clear();
        groups.extend(by.chunks_exact(size).map(|group| sum_of_best(group, grouped.best)));
        // The groups that are left out can be told by what remains: those used are marked as taken.
        for _ in 0..grouped.used {
            let best = first_largest(groups);
            groups[best] = f32::NEG_INFINITY;
        }
        for (group, &mark) in by.chunks_exact_mut(size).zip(groups.iter()) {
            if mark != f32::NEG_INFINITY {
                group.fill(f32::NEG_INFINITY);
            }
        }
    }
    experts.clear();
    for _ in 0..shape.used {
        let best = first_largest(by);
        by[best] = f32::NEG_INFINITY;
        experts.push((best, scores[best]));
    }
    let sum: f32 = experts.iter().map(|(_, score)| score).sum();
    for (_, weight) in experts.iter_mut() {
        if shape.normalised {
            *weight /= sum + 1e-20;
        }
        *weight *= shape.scale;
    }
}

/// The sum of the largest values, from the largest down.
fn sum_of_best(values: &[f32], count: usize) -> f32 {
    let (mut sum, mut taken) = (0.0, f32::INFINITY);
    let mut left = count;
    while left > 0 {
        let best = values
            .iter()
            .copied()
            .filter(|&v| v < taken)
            .fold(f32::NEG_INFINITY, f32::max);
        let equal = values.iter().filter(|&&v| v == best).count().clamp(1, left);
        for _ in 0..equal {
            sum += best;
        }
        (taken, left) = (best, left - equal);
    }
    sum
}

/// Index of the largest value, the first of equals; 0 if none is a number.
fn first_largest(values: &[f32]) -> usize {
    let mut best = (0, f32::NEG_INFINITY);
    for (i, &value) in values.iter().enumerate() {
        if value > best.1 {
            best = (i, value);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{ExpertGroups, ExpertNames};
    use crate::kernels::CpuLevel;

    fn shape(scoring: Scoring, used: usize, groups: Option<ExpertGroups>, normalised: bool) -> Experts {
        Experts {
            count: 12,
            used,
            ffn_size: 8,
            shared_ffn_size: 0,
            scoring,
            choice_bias: false,
            normalised,
            scale: 1.5,
            groups,
            layers: vec![true],
            names: ExpertNames::Mlp,
        }
    }

    /// By sorting, in f64.
    fn plain(shape: &Experts, bias: Option<&[f32]>, logits: &[f32]) -> Vec<(usize, f64)> {
        let powers: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp()).collect();
        let sum: f64 = powers.iter().sum();
        let scores: Vec<f64> = powers
            .iter()
            .map(|p| match shape.scoring {
                Scoring::Softmax => p / sum,
                Scoring::Sigmoid => p / (1.0 + p),
            })
            .collect();
        let by: Vec<f64> = (0..shape.count)
            .map(|i| scores[i] + bias.map_or(0.0, |bias| f64::from(bias[i])))
            .collect();
        let sorted = |mut list: Vec<(usize, f64)>| {
            list.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            list
        };
        let grouped = shape.groups.unwrap_or(ExpertGroups {
            count: 1,
            used: 1,
            best: 1,
        });
        let size = shape.count / grouped.count;
        let of_group = |group: usize| sorted((group * size..(group + 1) * size).map(|i| (i, by[i])).collect());
        let good = |group: usize| of_group(group)[..grouped.best].iter().map(|x| x.1).sum::<f64>();
        let groups = sorted((0..grouped.count).map(|group| (group, good(group))).collect());
        let candidates = groups[..grouped.used].iter().flat_map(|&(group, _)| of_group(group));
        let chosen = sorted(candidates.collect());
        let chosen = &chosen[..shape.used];
        let sum: f64 = chosen.iter().map(|x| scores[x.0]).sum();
        let weight = |i: usize| scores[i] / if shape.normalised { sum } else { 1.0 } * f64::from(shape.scale);
        chosen.iter().map(|x| (x.0, weight(x.0))).collect()
    }

    #[test]
    fn experts_are_those_of_a_plain_sort_at_every_level() {
        let groups = |count, used, best| Some(ExpertGroups { count, used, best });
        let shapes = [
            shape(Scoring::Softmax, 2, None, true),
            shape(Scoring::Softmax, 6, None, false),
            shape(Scoring::Sigmoid, 4, groups(3, 2, 2), true),
            shape(Scoring::Softmax, 3, groups(4, 1, 1), false),
            shape(Scoring::Sigmoid, 12, None, true),
        ];
        let mut state = 7_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (f64::from(state >> 8) / f64::from(1 << 23) * 3.0 - 3.0) as f32
        };
        for round in 0..200 {
            let logits: Vec<f32> = (0..12).map(|_| next()).collect();
            let bias: Vec<f32> = (0..12).map(|_| next() * 0.1).collect();
            for shape in &shapes {
                let bias = (round % 2 == 0).then_some(&bias[..]);
                let expected = plain(shape, bias, &logits);
                let mut first: Option<Vec<(usize, f32)>> = None;
                for level in CpuLevel::ALL.into_iter().filter(|level| level.is_supported()) {
                    let cpu = Cpu::with_level(level, 1).unwrap();
                    let (mut scores, mut chosen) = (logits.clone(), Chosen::default());
                    choose(&cpu, shape, bias, &mut scores, &mut chosen);
                    let found = chosen.experts;
                    let numbers: Vec<usize> = found.iter().map(|x| x.0).collect();
                    assert_eq!(numbers, expected.iter().map(|x| x.0).collect::<Vec<_>>(), "{shape:?}");
                    for (found, expected) in found.iter().zip(&expected) {
                        assert!((f64::from(found.1) - expected.1).abs() < 1e-6, "{shape:?}");
                    }
                    assert_eq!(*first.get_or_insert(found.clone()), found, "{level:?}");
                }
            }
        }
    }

    #[test]
    fn of_equal_scores_the_lower_number_is_taken() {
        let (mut scores, mut chosen) = (vec![1.0; 12], Chosen::default());
        let groups = Some(ExpertGroups {
            count: 3,
            used: 2,
            best: 2,
        });
        let shape = shape(Scoring::Softmax, 3, groups, true);
        choose(&Cpu::portable(), &shape, None, &mut scores, &mut chosen);
        let numbers: Vec<usize> = chosen.experts.iter().map(|x| x.0).collect();
        assert_eq!(numbers, [0, 1, 2]);
        assert_eq!(sum_of_best(&[2.0, 2.0, 1.0], 2), 4.0);
    }
}
