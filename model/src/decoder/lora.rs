//! Low-rank adapters within a step: y += B (A x) for the rows of the sequences that have one.
//!
//! x is what the matrix itself is multiplied with, in f32 and before any rounding; A and B are f32, and B holds the
//! adapter's scale. The sum over x goes in the order of k from 0, that over the rank likewise, each with one fused
//! accumulator (as all f32 products, see [`crate::kernels`]), and what comes out is added to what the base model and its bias
//! give. So a row's bits depend on the row and its adapter alone. Rows of one adapter are gathered and computed together;
//! a step without adapters does nothing here.

use std::ops::Range;

use super::sized;
use crate::kernels::{Cpu, KernelError, Linear, Operand, Rows, Target, add, products};
use crate::tensor_names::Part;

/// What is added to one matrix.
pub(crate) struct LowRank {
    /// A, \[rank\]\[k\].
    pub(crate) a: Linear,
    /// B times the scale, \[n\]\[rank\].
    pub(crate) b: Linear,
}

/// An adapter: for each layer what is added to its matrices, by [`Part`].
#[derive(Default)]
pub(crate) struct Adapter {
    pub(crate) layers: Vec<[Option<LowRank>; Part::ALL.len()]>,
}

impl Adapter {
    fn at(&self, layer: usize, part: Part) -> Option<&LowRank> {
        self.layers.get(layer)?[part as usize].as_ref()
    }

    /// Bytes of its matrices.
    pub(super) fn bytes(&self) -> usize {
        let all = self.layers.iter().flatten().flatten();
        all.map(|matrix| matrix.a.bytes() + matrix.b.bytes()).sum()
    }
}

/// The rows of a step that have an adapter, and memory for what is computed with them.
#[derive(Default)]
pub(super) struct Adapted {
    /// The first `groups` are this step's.
    rows: Vec<Group>,
    groups: usize,
    gathered: [Vec<f32>; 2],
    operand: Operand,
    inner: Vec<f32>,
    inner_operand: Operand,
    out: Vec<f32>,
}

/// The rows of one adapter.
#[derive(Default)]
struct Group {
    adapter: usize,
    rows: Vec<usize>,
}

impl Adapted {
    /// Notes which rows have which adapter.
    pub(super) fn group(&mut self, sequences: impl Iterator<Item = (Option<u32>, Range<usize>)>) {
        self.groups = 0;
        for (adapter, rows) in sequences {
            let Some(adapter) = adapter.map(|number| number as usize) else {
                continue;
            };
            let known = self.rows[..self.groups]
                .iter()
                .position(|group| group.adapter == adapter);
            let at = known.unwrap_or(self.groups);
            if known.is_none() {
                if self.rows.len() == at {
                    self.rows.push(Group::default());
                }
                self.rows[at].adapter = adapter;
                self.rows[at].rows.clear();
                self.groups += 1;
            }
            self.rows[at].rows.extend(rows);
        }
    }

    /// Adds what the rows' adapters make of `input` to the products of some of a layer's matrices with it, which are
    /// `targets`. `adapters` are those of the model, which the step's plan names by number.
    pub(super) fn add<const N: usize>(
        &mut self,
        cpu: &Cpu,
        adapters: &[Adapter],
        layer: usize,
        input: Rows<'_>,
        mut targets: [(Part, &mut [f32]); N],
    ) -> Result<(), KernelError> {
        for group in &self.rows[..self.groups] {
            // A plan that names another is refused before.
            let Some(adapter) = adapters.get(group.adapter) else {
                continue;
            };
            let Some(any) = targets.iter().find_map(|(part, _)| adapter.at(layer, *part)) else {
                continue;
            };
            let input = gather(input, &group.rows, any.a.k(), &mut self.gathered);
            self.operand.prepare(cpu, input, &[&any.a])?;
            for (part, y) in &mut targets {
                let Some(LowRank { a, b }) = adapter.at(layer, *part) else {
                    continue;
                };
                let inner = sized(&mut self.inner, group.rows.len() * a.n());
                products(cpu, &self.operand, [(a, Target::Store(&mut *inner))])?;
                self.inner_operand.prepare(cpu, Rows::Plain(inner), &[b])?;
                let out = sized(&mut self.out, group.rows.len() * b.n());
                products(cpu, &self.inner_operand, [(b, Target::Store(&mut *out))])?;
                for (&row, out) in group.rows.iter().zip(out.chunks_exact(b.n())) {
                    add(cpu, &mut y[row * b.n()..(row + 1) * b.n()], out)?;
                }
            }
        }
        Ok(())
    }
}

/// Some rows, each `width` long, one after the other.
fn gather<'a>(input: Rows<'a>, rows: &[usize], width: usize, memory: &'a mut [Vec<f32>; 2]) -> Rows<'a> {
    let [first, second] = memory;
    match input {
        Rows::Plain(x) => Rows::Plain(pick(x, rows, width, first)),
        Rows::Normed { x, weight, eps } => Rows::Normed {
            x: pick(x, rows, width, first),
            weight,
            eps,
        },
        Rows::Gated { gate, up, activation } => Rows::Gated {
            gate: pick(gate, rows, width, first),
            up: pick(up, rows, width, second),
            activation,
        },
    }
}

fn pick<'a>(from: &[f32], rows: &[usize], width: usize, memory: &'a mut Vec<f32>) -> &'a [f32] {
    memory.clear();
    for &row in rows {
        memory.extend_from_slice(&from[row * width..(row + 1) * width]);
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::CpuLevel;

    /// Numbers from -1 to 1 that look like nothing in particular.
    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
        let next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (f64::from(state) / f64::from(u32::MAX) * 2.0 - 1.0) as f32
        };
        std::iter::repeat_with(next).take(count).collect()
    }

    /// Row by row and column by column, as the head of the file says.
    fn plain(x: &[f32], a: &[f32], b: &[f32], rank: usize, y: &mut [f32]) {
        let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).fold(0.0_f32, |sum, (x, w)| x.mul_add(*w, sum));
        let inner: Vec<f32> = a.chunks_exact(x.len()).map(|a| dot(x, a)).collect();
        for (y, b) in y.iter_mut().zip(b.chunks_exact(rank)) {
            *y += dot(&inner, b);
        }
    }

    #[test]
    fn rows_of_any_mixture_equal_the_plain_sums_at_every_level() {
        let (n, k) = (37, 75);
        let ranks = [1, 8, 21];
        let matrices: Vec<_> = ranks
            .iter()
            .map(|&rank| (numbers(rank * k, rank as u32), numbers(n * rank, 100 + rank as u32)))
            .collect();
        let adapters: Vec<Adapter> = ranks
            .iter()
            .zip(&matrices)
            .map(|(&rank, (a, b))| {
                let mut layer = [const { None }; Part::ALL.len()];
                layer[Part::Up as usize] = Some(LowRank {
                    a: Linear::from_f32(rank, k, a).unwrap(),
                    b: Linear::from_f32(n, rank, b).unwrap(),
                });
                Adapter { layers: vec![layer] }
            })
            .collect();
        // Runs of rows: of which adapter, how many.
        let steps: [&[(Option<u32>, usize)]; 4] = [
            &[(Some(1), 1)],
            &[
                (Some(0), 3),
                (None, 2),
                (Some(2), 1),
                (Some(0), 1),
                (Some(1), 40),
                (Some(2), 9),
            ],
            &[(None, 5)],
            &[(Some(2), 33), (Some(1), 2)],
        ];
        for level in CpuLevel::ALL.into_iter().filter(|level| level.is_supported()) {
            for threads in [1, 3] {
                let cpu = Cpu::with_level(level, threads).unwrap();
                let mut adapted = Adapted::default();
                for step in steps {
                    let rows: usize = step.iter().map(|(_, rows)| rows).sum();
                    let (x, before) = (numbers(rows * k, 7), numbers(rows * n, 8));
                    let (mut expected, mut runs, mut row) = (before.clone(), Vec::new(), 0);
                    for &(adapter, count) in step {
                        runs.push((adapter, row..row + count));
                        for row in row..row + count {
                            let Some(adapter) = adapter.map(|adapter| adapter as usize) else {
                                continue;
                            };
                            let (a, b) = &matrices[adapter];
                            let y = &mut expected[row * n..(row + 1) * n];
                            plain(&x[row * k..(row + 1) * k], a, b, ranks[adapter], y);
                        }
                        row += count;
                    }
                    adapted.group(runs.into_iter());
                    let (mut y, mut other) = (before.clone(), before.clone());
                    let targets = [(Part::Gate, &mut other[..]), (Part::Up, &mut y[..])];
                    adapted.add(&cpu, &adapters, 0, Rows::Plain(&x), targets).unwrap();
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&y), bits(&expected), "{level:?}, {threads} threads, {step:?}");
                    assert_eq!(other, before, "a matrix that is not adapted");
                }
            }
        }
    }
}
