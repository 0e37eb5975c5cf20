//! Attention over paged KV.

use engine::plan::{BlockId, GroupBlocks};
use protocol::kv::KvDtype;

use super::super::attention_chunk::CHUNK;
use super::super::dispatch::{self, Kernel};
use super::super::lanes::{LANES, Lanes};
use super::super::math::{exp2, soft_cap};
use super::super::{AttentionShape, Cpu, KernelError, KvShape, PagedAttention, Scratch, SequenceRows, write_kv};
use super::kv_block::stored;
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
    let (k, mut v) = (numbers.units(positions * row), numbers.units(positions * row));
    if kv.latent {
        v.clone_from(&k);
    }
    let count = positions.div_ceil(kv.block_tokens);
    // Every third block, backwards; all else is NaN, which would show.
    let blocks: Vec<BlockId> = (0..count as u32).rev().map(|i| BlockId(3 * i + 1)).collect();
    let mut pool = vec![0xff; (3 * count + 1) * kv.block_bytes()];
    let cpu = Cpu::portable();
    for position in 0..positions {
        let at = blocks[position / kv.block_tokens].0 as usize * kv.block_bytes();
        let block = &mut pool[at..at + kv.block_bytes()];
        let (k, v) = (&k[position * row..][..row], &v[position * row..][..row]);
        let v = if kv.latent { &[] } else { v };
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
        // Blocks of which no row sees anything may be gone.
        let mut blocks = self.blocks.clone();
        let unseen = self.seen(start).start / self.shape.kv.block_tokens;
        blocks[..unseen].fill(BlockId::NONE);
        let sequences = [SequenceRows {
            rows: 0..end - start,
            first_position: start,
            blocks: GroupBlocks::new(&blocks, 1, 0),
        }];
        let kv = |id| self.block(id);
        let attention = PagedAttention {
            shape: &self.shape,
            group: 0,
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

    fn query(&self, position: usize, head: usize) -> &[f32] {
        let dim = self.shape.kv.head_dim;
        &self.q[(position * self.shape.num_heads + head) * dim..][..dim]
    }

    /// Key and value that a query head sees at a position: what the cache holds, and what it is multiplied with.
    fn key_value(&self, position: usize, head: usize) -> [(Vec<f32>, f32); 2] {
        let kv = self.shape.kv;
        let kv_head = head / (self.shape.num_heads / kv.num_kv_heads);
        [&self.k, &self.v].map(|x| {
            let row = &x[(position * kv.num_kv_heads + kv_head) * kv.head_dim..][..kv.head_dim];
            stored(kv.dtype, row)
        })
    }

    /// Softmax of the scores times the values, in f64.
    fn exact(&self, position: usize, head: usize) -> Vec<f64> {
        let q = self.query(position, head);
        let pairs: Vec<(f64, Vec<f64>)> = self
            .seen(position)
            .map(|j| {
                let [(k, key_scale), (v, value_scale)] = self.key_value(j, head);
                let dot: f64 = q.iter().zip(k).map(|(&q, k)| f64::from(q) * f64::from(k)).sum();
                let v = v.into_iter().map(|v| f64::from(v) * f64::from(value_scale)).collect();
                let score = dot * f64::from(key_scale) * f64::from(self.shape.scale);
                let cap = |cap: f32| f64::from(cap) * (score / f64::from(cap)).tanh();
                (self.shape.cap.map_or(score, cap), v)
            })
            .collect();
        let max = pairs.iter().fold(f64::MIN, |a, p| a.max(p.0));
        let sum: f64 = pairs.iter().map(|p| (p.0 - max).exp()).sum();
        let weighted = |d: usize| pairs.iter().map(|p| (p.0 - max).exp() * p.1[d]).sum::<f64>() / sum;
        (0..q.len()).map(weighted).collect()
    }

    /// The definition in the module's text, for one row and head alone, in plain code.
    fn defined(&self, cpu: &Cpu, position: usize, head: usize) -> Vec<f32> {
        let exp2 = |x: f32| dispatch::run(cpu, Exp2(x));
        let scaled = self.shape.kv.dtype == KvDtype::Int8;
        let factor = self.shape.scale * std::f32::consts::LOG2_E;
        let q: Vec<f32> = self.query(position, head).iter().map(|q| q * factor).collect();
        let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; q.len()]);
        let seen = self.seen(position);
        for chunk in seen.start / CHUNK..seen.end.div_ceil(CHUNK) {
            let keys = seen.start.max(chunk * CHUNK)..seen.end.min((chunk + 1) * CHUNK);
            let pairs: Vec<(f32, Vec<f32>, f32)> = keys
                .clone()
                .map(|j| {
                    let [(k, key_scale), (v, value_scale)] = self.key_value(j, head);
                    let score = q.iter().zip(k).fold(0.0f32, |acc, (&q, k)| k.mul_add(q, acc));
                    let score = if scaled { score * key_scale } else { score };
                    let cap = |cap: f32| dispatch::run(cpu, SoftCap(score, cap * std::f32::consts::LOG2_E));
                    (self.shape.cap.map_or(score, cap), v, value_scale)
                })
                .collect();
            let m = pairs.iter().fold(f32::NEG_INFINITY, |a, p| a.max(p.0));
            let (mut lanes, mut o) = ([0.0f32; LANES], vec![0.0f32; q.len()]);
            for (j, (score, v, value_scale)) in keys.zip(pairs) {
                let p = exp2(score - m);
                lanes[j % LANES] += p;
                let p = if scaled { p * value_scale } else { p };
                o.iter_mut().zip(v).for_each(|(o, v)| *o = v.mul_add(p, *o));
            }
            for width in [8, 4, 2, 1] {
                for i in 0..width {
                    lanes[i] += lanes[i + width];
                }
            }
            let new = max.max(m);
            let (a, b) = (exp2(max - new), exp2(m - new));
            max = new;
            sum = sum * a + lanes[0] * b;
            out.iter_mut().zip(o).for_each(|(out, o)| *out = *out * a + o * b);
        }
        out.iter().map(|o| o / sum).collect()
    }
}

struct SoftCap(f32, f32);

impl Kernel for SoftCap {
    type Output = f32;
    #[inline(always)]
    fn run<S: Lanes>(self) -> f32 {
        soft_cap(S::splat(self.0), self.1, -2.0 / self.1).to_array()[0]
    }
}

struct Exp2(f32);

impl Kernel for Exp2 {
    type Output = f32;
    #[inline(always)]
    fn run<S: Lanes>(self) -> f32 {
        exp2(S::splat(self.0)).to_array()[0]
    }
}

fn shape(num_heads: usize, num_kv_heads: usize, head_dim: usize, block_tokens: usize) -> AttentionShape {
    let kv = KvShape {
        num_kv_heads,
        head_dim,
        block_tokens,
        dtype: KvDtype::F16,
        latent: false,
    };
    AttentionShape {
        kv,
        num_heads,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: None,
        cap: None,
    }
}

fn with(shape: AttentionShape, dtype: KvDtype, window: Option<usize>) -> AttentionShape {
    let kv = KvShape { dtype, ..shape.kv };
    AttentionShape { kv, window, ..shape }
}

/// Shapes of all sorts: grouped heads, odd widths and block sizes, all types, windows.
fn cases() -> Vec<Case> {
    use KvDtype::{Bf16, F16, F32, Int8};
    let shapes = [
        // As models have them: heads of whole vectors, blocks of whole tiles.
        (shape(9, 3, 64, 16), F16, None, 150),
        (shape(9, 3, 64, 16), Bf16, None, 150),
        (shape(9, 3, 64, 16), Int8, None, 150),
        (shape(9, 3, 64, 16), F32, None, 150),
        (shape(1, 1, 128, 32), F16, None, 140),
        (shape(7, 1, 32, 48), Int8, None, 150),
        (shape(4, 2, 96, 256), Bf16, None, 270),
        (shape(5, 1, 80, 16), F32, None, 140),
        // As no vector likes them.
        (shape(2, 2, 8, 5), F16, None, 290),
        (shape(4, 1, 20, 32), F32, None, 140),
        (shape(2, 1, 20, 24), Int8, None, 150),
        (shape(2, 1, 16, 1), Int8, None, 140),
        (shape(3, 3, 36, 8), Bf16, None, 140),
        (shape(4, 2, 16, 16), F16, Some(37), 300),
        (shape(3, 3, 40, 7), F32, Some(1), 40),
        (shape(2, 1, 32, 16), F16, Some(200), 420),
        (shape(3, 1, 48, 32), Int8, Some(130), 300),
        (shape(2, 2, 12, 24), Bf16, Some(60), 200),
    ];
    let capped = |shape, cap| AttentionShape {
        cap: Some(cap),
        ..shape
    };
    let capped = [
        (capped(shape(4, 2, 64, 16), 2.0), F16, None, 150),
        (capped(shape(4, 2, 64, 16), 0.7), Int8, None, 150),
        (capped(shape(3, 3, 40, 7), 1.5), F32, Some(60), 200),
        (capped(shape(8, 1, 16, 32), 3.0), Bf16, Some(130), 300),
    ];
    let latent = |shape: AttentionShape| {
        let kv = KvShape {
            latent: true,
            ..shape.kv
        };
        AttentionShape { kv, ..shape }
    };
    let latent = [
        (latent(shape(4, 1, 32, 16)), F32, None, 150),
        (latent(shape(4, 1, 40, 32)), F16, None, 290),
        (latent(shape(16, 1, 72, 16)), Int8, None, 150),
        (latent(shape(3, 1, 20, 7)), Int8, Some(60), 150),
        (latent(shape(5, 1, 36, 24)), Bf16, None, 140),
    ];
    let capped = capped.into_iter().chain(latent);
    let case = |(i, (shape, dtype, window, positions))| case(with(shape, dtype, window), positions, 41 + i as u64);
    shapes.into_iter().chain(capped).enumerate().map(case).collect()
}

#[test]
fn attention_is_what_its_text_defines() {
    for case in cases() {
        let cpus = cpus();
        let all = || (0..case.positions).flat_map(|p| (0..case.shape.num_heads).map(move |h| (p, h)));
        let expected: Vec<f32> = all().flat_map(|(p, h)| case.defined(&cpus[0], p, h)).collect();
        let exact: Vec<f64> = all().flat_map(|(p, h)| case.exact(p, h)).collect();
        let error = relative_error(&expected, &exact);
        // A cap takes away digits of small scores.
        let limit = if case.shape.cap.is_some() { 3e-6 } else { 1e-6 };
        assert!(error < limit, "{:?}: relative error {error}", case.shape);
        for cpu in &cpus {
            let level = cpu.level().as_str();
            let found = case.run(cpu, 0, case.positions, &mut Scratch::default());
            assert_eq!(bits(&found), bits(&expected), "{:?}, {level}", case.shape);
        }
    }
}

#[test]
fn chunks_and_threads_do_not_change_a_bit() {
    for case in cases() {
        let pieces = |cpu: &Cpu, step: usize, scratch: &mut Scratch| -> Vec<f32> {
            (0..case.positions)
                .step_by(step)
                .flat_map(|start| case.run(cpu, start, case.positions.min(start + step), scratch))
                .collect()
        };
        for cpu in cpus() {
            let mut scratch = Scratch::default();
            let whole = case.run(&cpu, 0, case.positions, &mut scratch);
            for step in [1, 2, 3, 8, 17, 50, 128] {
                let found = pieces(&cpu, step, &mut scratch);
                assert_eq!(bits(&found), bits(&whole), "{:?}, {step} rows at a time", case.shape);
            }
        }
        let whole = case.run(&Cpu::new(1).unwrap(), 0, case.positions, &mut Scratch::default());
        for threads in [2, 5] {
            let (cpu, mut scratch) = (Cpu::new(threads).unwrap(), Scratch::default());
            for step in [1, 40, case.positions] {
                let found = pieces(&cpu, step, &mut scratch);
                assert_eq!(
                    bits(&found),
                    bits(&whole),
                    "{:?}, {threads} threads, {step} rows",
                    case.shape
                );
            }
        }
    }
}

#[test]
fn long_contexts_are_the_same_however_they_are_cut() {
    for (i, dtype) in KvDtype::ALL.into_iter().enumerate() {
        let case = case(with(shape(3, 1, 32, 16), dtype, None), 4_200, 81 + i as u64);
        let (first, row) = (4_150, case.row());
        let whole = case.run(&Cpu::portable(), first, 4_200, &mut Scratch::default());
        for position in [first, 4_180, 4_199] {
            let found = &whole[(position - first) * row..][..row];
            let expected: Vec<f32> = (0..3)
                .flat_map(|h| case.defined(&Cpu::portable(), position, h))
                .collect();
            assert_eq!(bits(found), bits(&expected), "{dtype:?}, position {position}");
        }
        let multi = [2, 3].map(|threads| Cpu::new(threads).unwrap());
        for cpu in cpus().iter().chain(&multi) {
            let mut scratch = Scratch::default();
            let alone: Vec<f32> = (first..4_200)
                .flat_map(|p| case.run(cpu, p, p + 1, &mut scratch))
                .collect();
            let together = case.run(cpu, first, 4_200, &mut scratch);
            let what = (cpu.level().as_str(), cpu.threads(), dtype);
            assert_eq!(bits(&alone), bits(&whole), "row by row, {what:?}");
            assert_eq!(bits(&together), bits(&whole), "all rows, {what:?}");
        }
    }
}

/// Shapes, contexts and cuts drawn at random.
#[test]
fn any_cut_of_any_shape_gives_the_same_bits() {
    let mut numbers = Numbers::new(91);
    let mut pick = |list: &[usize]| list[numbers.bits() as usize % list.len()];
    let cpus = [Cpu::new(1).unwrap(), Cpu::new(2).unwrap(), Cpu::portable()];
    for seed in 0..60 {
        let kv_heads = pick(&[1, 2, 3]);
        let heads = kv_heads * pick(&[1, 2, 3, 4, 5, 8]);
        let base = shape(
            heads,
            kv_heads,
            pick(&[4, 16, 32, 48, 64, 72]),
            pick(&[1, 3, 16, 24, 32, 64, 160]),
        );
        let window = pick(&[0, 0, 0, 1, 50, 129, 300]);
        let shape = with(base, KvDtype::ALL[pick(&[0, 1, 2, 3])], (window > 0).then_some(window));
        let positions = pick(&[1, 15, 16, 127, 128, 129, 300, 530]);
        let case = case(shape, positions, 1_000 + seed);
        let whole = case.run(&cpus[2], 0, positions, &mut Scratch::default());
        let (mut found, mut scratch) = (Vec::new(), Scratch::default());
        while found.len() < whole.len() {
            let start = found.len() / case.row();
            let end = positions.min(start + pick(&[1, 1, 2, 3, 7, 16, 40, 200]));
            found.extend(case.run(&cpus[pick(&[0, 1])], start, end, &mut scratch));
        }
        assert_eq!(bits(&found), bits(&whole), "{shape:?}, {positions} positions");
    }
}

#[test]
fn sequences_of_a_step_do_not_see_each_other() {
    let shape = shape(4, 2, 32, 16);
    let lengths = [40, 161, 7, 700, 129, 1];
    let cases: Vec<Case> = (51..).zip(lengths).map(|(seed, n)| case(shape, n, seed)).collect();
    // The last rows of each: decoding sequences, a chunk, a whole prompt; and a row of nobody between them.
    let counts = [1, 30, 7, 1, 2, 1];
    let row = cases[0].row();
    let (mut q, mut expected, mut sequences, mut pool) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let block_bytes = shape.kv.block_bytes();
    let mut tables = Vec::new();
    for case in &cases {
        let offset = (pool.len() / block_bytes) as u32;
        tables.push(case.blocks.iter().map(|b| BlockId(b.0 + offset)).collect::<Vec<_>>());
        pool.extend_from_slice(&case.pool);
    }
    for cpu in cpus().into_iter().chain([Cpu::new(2).unwrap()]) {
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
                blocks: GroupBlocks::new(blocks, 1, 0),
            });
            q.extend(vec![f32::NAN; row]);
            expected.extend(vec![7.0; row]);
        }
        let kv = |id: BlockId| &pool[id.0 as usize * block_bytes..][..block_bytes];
        let mut out = vec![7.0; q.len()];
        let attention = PagedAttention {
            shape: &shape,
            group: 0,
            sequences: &sequences,
            kv: &kv,
        };
        attention.run(&cpu, &q, &mut out, &mut Scratch::default()).unwrap();
        assert_eq!(bits(&out), bits(&expected), "{}", cpu.level().as_str());
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let cpu = Cpu::new(1).unwrap();
    let case = case(shape(4, 2, 8, 16), 20, 71);
    let run = |shape: &AttentionShape, sequences: &[SequenceRows<'_>], q: usize, out: usize, bytes: usize| {
        let kv = |id| &case.block(id)[..bytes];
        let attention = PagedAttention {
            shape,
            group: 0,
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
        blocks: GroupBlocks::new(&case.blocks, 1, 0),
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
