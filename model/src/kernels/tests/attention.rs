//! Attention over paged KV.

use engine::plan::BlockId;
use half::f16;
use protocol::kv::KvDtype;

use super::super::attention_unit::CHUNK;
use super::super::dispatch::{self, Kernel};
use super::super::lanes::{LANES, Lanes};
use super::super::math::exp;
use super::super::{
    AttentionShape, Cpu, CpuLevel, KernelError, KvShape, PagedAttention, Scratch, SequenceRows, write_kv,
};
use super::{Numbers, bits, cpus, relative_error};

/// A sequence with its keys and values, and a pool that holds them in scattered blocks among garbage.
struct Case {
    shape: AttentionShape,
    positions: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    pool: Vec<u8>,
    blocks: Vec<BlockId>,
}

fn case(shape: AttentionShape, positions: usize, seed: u64) -> Case {
    let kv = shape.kv;
    let mut numbers = Numbers::new(seed);
    let q: Vec<f32> = numbers
        .units(positions * shape.num_heads * kv.head_dim)
        .iter()
        .map(|x| x * 4.0)
        .collect();
    let row = kv.num_kv_heads * kv.head_dim;
    let (k, v) = (numbers.units(positions * row), numbers.units(positions * row));
    let count = positions.div_ceil(kv.block_tokens);
    // Every third block, backwards; all else is NaN, which would show.
    let blocks: Vec<BlockId> = (0..count as u32).rev().map(|i| BlockId(3 * i + 1)).collect();
    let mut pool = vec![0xff; (3 * count + 1) * kv.block_bytes()];
    let cpu = Cpu::with_level(CpuLevel::Portable, 1).unwrap();
    for position in 0..positions {
        let at = blocks[position / kv.block_tokens].0 as usize * kv.block_bytes();
        let block = &mut pool[at..at + kv.block_bytes()];
        let (k, v) = (&k[position * row..][..row], &v[position * row..][..row]);
        write_kv(&cpu, &kv, position % kv.block_tokens, (k, v), block).unwrap();
    }
    Case {
        shape,
        positions,
        q,
        k,
        v,
        pool,
        blocks,
    }
}

impl Case {
    fn row(&self) -> usize {
        self.shape.num_heads * self.shape.kv.head_dim
    }

    fn block(&self, id: BlockId) -> &[u8] {
        let size = self.shape.kv.block_bytes();
        &self.pool[id.0 as usize * size..][..size]
    }

    /// Attention of positions `start..end`, in one call.
    fn run(&self, cpu: &Cpu, start: usize, end: usize, scratch: &mut Scratch) -> Vec<f32> {
        let row = self.row();
        let mut out = vec![f32::NAN; (end - start) * row];
        let sequences = [SequenceRows {
            rows: 0..end - start,
            first_position: start,
            blocks: &self.blocks,
        }];
        let kv = |id| self.block(id);
        let attention = PagedAttention {
            shape: &self.shape,
            sequences: &sequences,
            kv: &kv,
        };
        attention
            .run(cpu, &self.q[start * row..end * row], &mut out, scratch)
            .unwrap();
        out
    }

    fn seen(&self, position: usize) -> std::ops::Range<usize> {
        let end = position + 1;
        self.shape.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// As the cache holds it.
    fn stored(&self, x: f32) -> f32 {
        if self.shape.kv.dtype == KvDtype::F16 {
            f16::from_f32(x).to_f32()
        } else {
            x
        }
    }

    fn query(&self, position: usize, head: usize) -> &[f32] {
        let dim = self.shape.kv.head_dim;
        &self.q[(position * self.shape.num_heads + head) * dim..][..dim]
    }

    /// Key and value that a query head sees at a position.
    fn key_value(&self, position: usize, head: usize) -> (Vec<f32>, Vec<f32>) {
        let kv = self.shape.kv;
        let kv_head = head / (self.shape.num_heads / kv.num_kv_heads);
        let of = |x: &[f32]| -> Vec<f32> {
            let row = &x[(position * kv.num_kv_heads + kv_head) * kv.head_dim..][..kv.head_dim];
            row.iter().map(|&x| self.stored(x)).collect()
        };
        (of(&self.k), of(&self.v))
    }

    /// Softmax of the scores times the values, in f64.
    fn exact(&self, position: usize, head: usize) -> Vec<f64> {
        let q = self.query(position, head);
        let pairs: Vec<(f64, Vec<f32>)> = self
            .seen(position)
            .map(|j| {
                let (k, v) = self.key_value(j, head);
                let dot: f64 = q.iter().zip(k).map(|(&q, k)| f64::from(q) * f64::from(k)).sum();
                (dot * f64::from(self.shape.scale), v)
            })
            .collect();
        let max = pairs.iter().fold(f64::MIN, |a, p| a.max(p.0));
        let sum: f64 = pairs.iter().map(|p| (p.0 - max).exp()).sum();
        let weighted = |d: usize| pairs.iter().map(|p| (p.0 - max).exp() * f64::from(p.1[d])).sum::<f64>() / sum;
        (0..q.len()).map(weighted).collect()
    }

    /// The definition in the module's text, for one row and head alone, in plain code.
    fn defined(&self, cpu: &Cpu, position: usize, head: usize) -> Vec<f32> {
        let exp = |x: f32| dispatch::run(cpu, Exp(x));
        let q = self.query(position, head);
        let q: Vec<f32> = q.iter().map(|q| q * self.shape.scale).collect();
        let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; q.len()]);
        let seen = self.seen(position);
        for chunk in seen.start / CHUNK..seen.end.div_ceil(CHUNK) {
            let keys = seen.start.max(chunk * CHUNK)..seen.end.min((chunk + 1) * CHUNK);
            let pairs: Vec<(f32, Vec<f32>)> = keys
                .clone()
                .map(|j| {
                    let (k, v) = self.key_value(j, head);
                    (q.iter().zip(k).fold(0.0f32, |acc, (&q, k)| k.mul_add(q, acc)), v)
                })
                .collect();
            let new = pairs.iter().fold(max, |a, p| a.max(p.0));
            let factor = exp(max - new);
            max = new;
            let mut lanes = [0.0f32; LANES];
            out.iter_mut().for_each(|o| *o *= factor);
            for (j, (score, v)) in keys.zip(pairs) {
                let weight = exp(score - max);
                lanes[j % LANES] += weight;
                out.iter_mut().zip(v).for_each(|(o, v)| *o = v.mul_add(weight, *o));
            }
            for width in [8, 4, 2, 1] {
                for i in 0..width {
                    lanes[i] += lanes[i + width];
                }
            }
            sum = sum.mul_add(factor, lanes[0]);
        }
        out.iter().map(|o| o / sum).collect()
    }
}

struct Exp(f32);

impl Kernel for Exp {
    type Output = f32;
    #[inline(always)]
    fn run<S: Lanes>(self) -> f32 {
        exp(S::splat(self.0)).to_array()[0]
    }
}

fn shape(num_heads: usize, num_kv_heads: usize, head_dim: usize, block_tokens: usize) -> AttentionShape {
    let kv = KvShape {
        num_kv_heads,
        head_dim,
        block_tokens,
        dtype: KvDtype::F16,
    };
    AttentionShape {
        kv,
        num_heads,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: None,
    }
}

/// Shapes of all sorts: grouped heads, odd widths and block sizes, both types, windows.
fn cases() -> Vec<Case> {
    let float = |mut shape: AttentionShape| {
        shape.kv.dtype = KvDtype::F32;
        shape
    };
    let window = |mut shape: AttentionShape, window| {
        shape.window = Some(window);
        shape
    };
    vec![
        case(shape(9, 3, 64, 16), 150, 41),
        case(float(shape(9, 3, 64, 16)), 150, 42),
        case(shape(2, 2, 8, 5), 290, 43),
        case(float(shape(4, 1, 20, 32)), 140, 44),
        case(window(shape(4, 2, 16, 16), 37), 300, 45),
        case(window(float(shape(3, 3, 40, 7)), 1), 40, 46),
        case(window(shape(2, 1, 32, 16), 200), 420, 47),
    ]
}

#[test]
fn attention_is_what_its_text_defines() {
    for case in cases() {
        let cpus = cpus();
        let expected: Vec<f32> = (0..case.positions)
            .flat_map(|p| (0..case.shape.num_heads).map(move |h| (p, h)))
            .flat_map(|(p, h)| case.defined(&cpus[0], p, h))
            .collect();
        let exact: Vec<f64> = (0..case.positions)
            .flat_map(|p| (0..case.shape.num_heads).map(move |h| (p, h)))
            .flat_map(|(p, h)| case.exact(p, h))
            .collect();
        let error = relative_error(&expected, &exact);
        assert!(error < 1e-6, "{:?}: relative error {error}", case.shape);
        for cpu in &cpus {
            let found = case.run(cpu, 0, case.positions, &mut Scratch::default());
            assert_eq!(
                bits(&found),
                bits(&expected),
                "{:?}, {}",
                case.shape,
                cpu.level().as_str()
            );
        }
    }
}

#[test]
fn chunks_and_threads_do_not_change_a_bit() {
    for case in cases() {
        for cpu in cpus() {
            let mut scratch = Scratch::default();
            let whole = case.run(&cpu, 0, case.positions, &mut scratch);
            for step in [1, 3, 8, 17, 50, 128] {
                let pieces: Vec<f32> = (0..case.positions)
                    .step_by(step)
                    .flat_map(|start| case.run(&cpu, start, case.positions.min(start + step), &mut scratch))
                    .collect();
                assert_eq!(bits(&pieces), bits(&whole), "{:?}, {step} rows at a time", case.shape);
            }
        }
        let whole = case.run(&Cpu::new(1).unwrap(), 0, case.positions, &mut Scratch::default());
        for threads in [2, 5] {
            let found = case.run(&Cpu::new(threads).unwrap(), 0, case.positions, &mut Scratch::default());
            assert_eq!(bits(&found), bits(&whole), "{threads} threads");
        }
    }
}

#[test]
fn sequences_of_a_step_do_not_see_each_other() {
    let shape = shape(4, 2, 32, 16);
    let cases = [case(shape, 40, 51), case(shape, 161, 52), case(shape, 7, 53)];
    // The last rows of each: a decoding sequence, a chunk, a whole prompt; and a row of nobody between them.
    let counts = [1, 30, 7];
    let row = cases[0].row();
    let (mut q, mut expected, mut sequences, mut pool) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let block_bytes = shape.kv.block_bytes();
    let mut tables = Vec::new();
    for case in &cases {
        let offset = (pool.len() / block_bytes) as u32;
        tables.push(case.blocks.iter().map(|b| BlockId(b.0 + offset)).collect::<Vec<_>>());
        pool.extend_from_slice(&case.pool);
    }
    for cpu in cpus() {
        q.clear();
        expected.clear();
        sequences.clear();
        for ((case, count), blocks) in cases.iter().zip(counts).zip(&tables) {
            let (start, first) = (q.len() / row, case.positions - count);
            q.extend_from_slice(&case.q[first * row..]);
            expected.extend(case.run(&cpu, first, case.positions, &mut Scratch::default()));
            sequences.push(SequenceRows {
                rows: start..start + count,
                first_position: first,
                blocks,
            });
            q.extend(vec![f32::NAN; row]);
            expected.extend(vec![7.0; row]);
        }
        let kv = |id: BlockId| &pool[id.0 as usize * block_bytes..][..block_bytes];
        let mut out = vec![7.0; q.len()];
        let attention = PagedAttention {
            shape: &shape,
            sequences: &sequences,
            kv: &kv,
        };
        attention.run(&cpu, &q, &mut out, &mut Scratch::default()).unwrap();
        assert_eq!(bits(&out), bits(&expected), "{}", cpu.level().as_str());
    }
}

#[test]
fn keys_and_values_are_written_in_canonical_order() {
    for dtype in [KvDtype::F16, KvDtype::F32] {
        for head_dim in [8, 16, 40] {
            let shape = KvShape {
                num_kv_heads: 2,
                head_dim,
                block_tokens: 3,
                dtype,
            };
            let mut numbers = Numbers::new(61);
            let row = 2 * head_dim;
            let (k, v) = (numbers.units(3 * row), numbers.units(3 * row));
            // (K then V, kv head, token, dim), little-endian, half precision rounded to even.
            let mut expected = Vec::new();
            for (x, head, token, d) in (0..2)
                .flat_map(|x| (0..2).map(move |h| (x, h)))
                .flat_map(|(x, h)| (0..3).map(move |t| (x, h, t)))
                .flat_map(|(x, h, t)| (0..head_dim).map(move |d| (x, h, t, d)))
            {
                let value = [&k, &v][x][token * row + head * head_dim + d];
                match dtype {
                    KvDtype::F16 => expected.extend(f16::from_f32(value).to_le_bytes()),
                    KvDtype::F32 => expected.extend(value.to_le_bytes()),
                }
            }
            for cpu in cpus() {
                let mut block = vec![0xaa; shape.block_bytes()];
                for slot in [2, 0, 1] {
                    let of = |x: &[f32]| x[slot * row..][..row].to_vec();
                    write_kv(&cpu, &shape, slot, (&of(&k), &of(&v)), &mut block).unwrap();
                }
                assert_eq!(block, expected, "{dtype:?}, {head_dim} wide, {}", cpu.level().as_str());
            }
        }
    }
    let (cpu, shape) = (Cpu::new(1).unwrap(), shape(2, 2, 8, 4).kv);
    let write = |slot, k: usize, v: usize, block: usize| {
        let (k, v) = (vec![0.0; k], vec![0.0; v]);
        write_kv(&cpu, &shape, slot, (&k, &v), &mut vec![0; block]).map_err(|e| e.to_string())
    };
    assert_eq!(write(3, 16, 16, 256), Ok(()));
    assert!(write(4, 16, 16, 256).unwrap_err().contains("slot of a KV block is 4"));
    assert!(
        write(0, 15, 16, 256)
            .unwrap_err()
            .contains("length of a token's key is 15, must be 16")
    );
    assert!(
        write(0, 16, 17, 256)
            .unwrap_err()
            .contains("length of a token's value is 17, must be 16")
    );
    assert!(write(0, 16, 16, 255).unwrap_err().contains("is 255, must be 256"));
}

#[test]
fn what_does_not_fit_is_named() {
    let cpu = Cpu::new(1).unwrap();
    let case = case(shape(4, 2, 8, 16), 20, 71);
    let run = |shape: &AttentionShape, sequences: &[SequenceRows<'_>], q: usize, out: usize, bytes: usize| {
        let kv = |id| &case.block(id)[..bytes];
        let attention = PagedAttention {
            shape,
            sequences,
            kv: &kv,
        };
        let result = attention.run(&cpu, &vec![0.0; q], &mut vec![0.0; out], &mut Scratch::default());
        result.map_err(|e: KernelError| e.to_string())
    };
    let (shape, bytes, row) = (case.shape, case.shape.kv.block_bytes(), case.row());
    let rows = |rows, first_position| SequenceRows {
        rows,
        first_position,
        blocks: &case.blocks,
    };
    assert_eq!(run(&shape, &[rows(0..20, 0)], 20 * row, 20 * row, bytes), Ok(()));
    assert_eq!(run(&shape, &[], 0, 0, bytes), Ok(()));
    assert_eq!(run(&shape, &[rows(3..3, 0)], 3 * row, 3 * row, bytes), Ok(()));
    let error = |r: Result<(), String>| r.unwrap_err();
    assert!(error(run(&shape, &[rows(0..20, 13)], 20 * row, 20 * row, bytes)).contains("blocks of a sequence is 2"));
    assert!(error(run(&shape, &[rows(0..20, 0)], 19 * row, 19 * row, bytes)).contains("attention's input is 608"));
    assert!(error(run(&shape, &[rows(0..20, 0)], 20 * row, 19 * row, bytes)).contains("attention's output is 608"));
    assert!(error(run(&shape, &[rows(0..20, 0)], 20 * row, 20 * row, bytes - 1)).contains("is 1023, must be 1024"));
    let overlapping = [rows(0..10, 0), rows(9..20, 0)];
    assert!(error(run(&shape, &overlapping, 20 * row, 20 * row, bytes)).contains("first row of a sequence is 9"));
    let wrong = AttentionShape { num_heads: 3, ..shape };
    assert!(error(run(&wrong, &[rows(0..1, 0)], row, row, bytes)).contains("number of query heads is 3"));
    let wrong = AttentionShape {
        window: Some(0),
        ..shape
    };
    assert!(error(run(&wrong, &[rows(0..1, 0)], row, row, bytes)).contains("attention window is 0"));
}
