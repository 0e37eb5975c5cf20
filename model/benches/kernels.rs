//! Speed of the kernels, one by one: products of every type on the shapes of SmolLM2-135M and Gemma 3 270M, attention,
//! norms, rotary embeddings, activations, the sampler.
//!
//! `scripts/bench kernels [FILTER]`, for example `scripts/bench kernels Q4_1/576x1536`. One thread, unless
//! `BATON_BENCH_THREADS` says otherwise. Products end with a table of their share of the int8 peak measured in this run.
#![allow(clippy::print_stdout, reason = "a benchmark prints")]
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark reads the clock and takes its threads from the environment"
)]

use std::cell::RefCell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput};
use engine::plan::BlockId;
use model::kernels::roofline::Arithmetic;
use model::kernels::{
    AttentionShape, Cpu, GgmlType, KvShape, Linear, LinearMode, PagedAttention, RopeStyle, RopeTable, Scratch,
    SequenceRows, gelu_tanh_mul, rms_norm, rope, silu_mul,
};
use model::sampler::{Draw, Sampler};
use protocol::kv::KvDtype;
use protocol::sampling::SamplingParams;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Types of weights that files hold.
const TYPES: [GgmlType; 11] = [
    GgmlType::F32,
    GgmlType::F16,
    GgmlType::Bf16,
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q4K,
    GgmlType::Q5K,
    GgmlType::Q6K,
];
/// Inputs and outputs of the matrices: query or output, key, gate or up, down of both models.
const SHAPES: [(usize, usize); 8] = [
    (576, 576),
    (576, 192),
    (576, 1536),
    (1536, 576),
    (640, 1024),
    (640, 256),
    (640, 2048),
    (2048, 640),
];
/// Inputs and outputs of the heads.
const HEADS: [(usize, usize); 2] = [(576, 49_152), (640, 262_144)];
/// Rows of a product.
const ROWS: [usize; 5] = [1, 4, 16, 64, 512];

/// Numbers in -1..1 from a linear congruential generator.
fn numbers(count: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A tensor of legal blocks: pseudo-random quants, scales and minima 1/64.
fn tensor(ggml_type: GgmlType, n: usize, k: usize) -> Result<Vec<u8>> {
    let len = ggml_type.row_bytes(k)? * n;
    // Where a block holds halves.
    let halves: &[usize] = match ggml_type {
        GgmlType::F32 => return Ok(numbers(n * k).iter().flat_map(|x| x.to_le_bytes()).collect()),
        GgmlType::F16 => return Ok([0x00, 0x24].repeat(len / 2)),
        GgmlType::Bf16 => return Ok([0x80, 0x3c].repeat(len / 2)),
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
        GgmlType::Q6K => &[208],
        _ => &[0],
    };
    let mut bytes: Vec<u8> = numbers(len).iter().map(|x| (x * 127.0) as i8 as u8).collect();
    for block in bytes.chunks_exact_mut(ggml_type.block_bytes()) {
        for &at in halves {
            block[at..at + 2].copy_from_slice(&0x2400_u16.to_le_bytes());
        }
    }
    Ok(bytes)
}

/// A product's name and its best rate in operations a second.
type Rates = RefCell<Vec<(String, f64)>>;

/// Everything the benchmarks share.
struct Bench {
    cpu: Cpu,
    rates: Rates,
}

impl Bench {
    /// A benchmark of `operations` operations a call (0: not counted), whose best rate is kept for the table.
    fn run(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        id: (&str, String),
        operations: f64,
        mut call: impl FnMut(),
    ) {
        if operations > 0.0 {
            group.throughput(Throughput::Elements(operations as u64));
        }
        let mut best = f64::MAX;
        group.bench_function(BenchmarkId::new(id.0, &id.1), |bencher| {
            bencher.iter_custom(|calls| {
                let start = Instant::now();
                for _ in 0..calls {
                    call();
                }
                let elapsed = start.elapsed();
                best = best.min(elapsed.as_secs_f64() / calls as f64);
                elapsed
            });
        });
        if operations > 0.0 && best < f64::MAX {
            let name = format!("{}/{}", id.0, id.1);
            self.rates.borrow_mut().push((name, operations / best));
        }
    }

    fn products(&self, c: &mut Criterion) -> Result<()> {
        let mut group = c.benchmark_group("product");
        for ggml_type in TYPES {
            for (k, n) in SHAPES.into_iter().chain(HEADS) {
                // The types of 256-blocks do not fit every width, and a head of f32 is no file's.
                let head = HEADS.contains(&(k, n));
                let quantised = !matches!(ggml_type, GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16);
                if ggml_type.row_bytes(k).is_err() || head && !quantised {
                    continue;
                }
                // Packed when the first benchmark of it runs: with a filter most do not.
                let mut linear: Option<Linear> = None;
                for m in if head { &ROWS[..3] } else { &ROWS[..] } {
                    let m = *m;
                    let (x, mut y, mut scratch) = (numbers(m * k), vec![0.0; m * n], Scratch::default());
                    let operations = 2.0 * (m * n * k) as f64;
                    let id = (ggml_type.as_str(), format!("{k}x{n}/m={m}"));
                    self.run(&mut group, id, operations, || {
                        let linear = linear.get_or_insert_with(|| packed(ggml_type, n, k));
                        let done = linear.forward(&self.cpu, &x, m, &mut y, &mut scratch);
                        done.expect("the buffers fit");
                    });
                }
            }
        }
        group.finish();
        Ok(())
    }

    /// One layer's attention: `rows` rows after `past` tokens, for `batch` sequences with KV of their own.
    fn attention(&self, c: &mut Criterion) {
        let mut group = c.benchmark_group("attention");
        let smollm2 = ("9x3x64", 9, 3, 64);
        let gemma = ("4x1x256", 4, 1, 256);
        for (name, heads, kv_heads, dim) in [smollm2, gemma] {
            for dtype in [KvDtype::F16, KvDtype::F32] {
                for (past, rows, batch) in [
                    (0, 512, 1),
                    (1792, 256, 1),
                    (512, 1, 1),
                    (512, 1, 16),
                    (4096, 1, 1),
                    (4096, 1, 16),
                ] {
                    let kv = KvShape {
                        num_kv_heads: kv_heads,
                        head_dim: dim,
                        block_tokens: 16,
                        dtype,
                    };
                    let case = Attention {
                        kv,
                        heads,
                        past,
                        rows,
                        batch,
                    };
                    let keys: usize = (past + 1..=past + rows).sum();
                    let operations = 4.0 * (batch * keys * heads * dim) as f64;
                    let id = (name, format!("{}/{rows}+{past}/batch={batch}", dtype.as_str()));
                    let mut ready = None;
                    self.run(&mut group, id, operations, || {
                        ready.get_or_insert_with(|| case.ready()).run(&case, &self.cpu);
                    });
                }
            }
        }
        group.finish();
    }

    fn rowwise(&self, c: &mut Criterion) -> Result<()> {
        let mut group = c.benchmark_group("rows");
        for m in [1, 16, 256] {
            let rows = format!("m={m}");
            let (x, weight, mut out) = (numbers(m * 576), numbers(576), vec![0.0; m * 576]);
            self.run(&mut group, ("rms_norm/576", rows.clone()), 0.0, || {
                rms_norm(&self.cpu, &x, &weight, 1e-5, &mut out).expect("the buffers fit");
            });
            let table = RopeTable::new(&RopeTable::plain_frequencies(10_000.0, 64), m, 1.0);
            let positions: Vec<u32> = (0..u32::try_from(m)?).collect();
            for (name, style) in [
                ("rope_half/9x64", RopeStyle::Half),
                ("rope_interleaved/9x64", RopeStyle::Interleaved),
            ] {
                let mut heads = numbers(m * 576);
                self.run(&mut group, (name, rows.clone()), 0.0, || {
                    rope(&self.cpu, &table, style, &mut heads, 64, &positions).expect("the buffers fit");
                });
            }
            // The gate is copied anew each time: multiplied again and again it would vanish.
            let (fresh, mut gate, up) = (numbers(m * 1536), vec![0.0; m * 1536], numbers(m * 1536));
            self.run(&mut group, ("silu_mul/1536", rows.clone()), 0.0, || {
                gate.copy_from_slice(&fresh);
                silu_mul(&self.cpu, &mut gate, &up).expect("the buffers fit");
            });
            let (fresh, mut gate, up) = (numbers(m * 2048), vec![0.0; m * 2048], numbers(m * 2048));
            self.run(&mut group, ("gelu_tanh_mul/2048", rows), 0.0, || {
                gate.copy_from_slice(&fresh);
                gelu_tanh_mul(&self.cpu, &mut gate, &up).expect("the buffers fit");
            });
        }
        group.finish();
        Ok(())
    }

    fn sampler(&self, c: &mut Criterion) -> Result<()> {
        let mut group = c.benchmark_group("sampler");
        let cases = sampling();
        for vocab in [49_152, 262_144] {
            // Logits spread as a model's: most far below the best.
            let logits: Vec<f32> = numbers(vocab).iter().map(|x| 12.0 * x * x * x).collect();
            let history: Vec<u32> = (0..512).map(|i| i * 37 % 49_152).collect();
            for (name, params) in &cases {
                let mut sampler = Sampler::default();
                let mut position = 0;
                self.run(&mut group, (name, vocab.to_string()), 0.0, || {
                    position += 1;
                    let draw = Draw {
                        params,
                        position,
                        history: if params.needs_history() { &history } else { &[] },
                        prompt_len: if params.needs_history() { 256 } else { 0 },
                    };
                    black_box(sampler.sample(&logits, &draw).expect("finite logits"));
                });
            }
        }
        group.finish();
        Ok(())
    }

    /// The products' shares of the peak, and attention's of the f32 peak's.
    fn table(&self) {
        let rates = self.rates.borrow();
        let Some(peak) = self.int8_peak().filter(|_| !rates.is_empty()) else {
            return;
        };
        println!("int8 peak: {:.0} Gop/s on {} threads", peak / 1e9, self.cpu.threads());
        for (name, rate) in rates.iter() {
            println!(
                "{name:<40} {:>8.0} Gop/s {:>6.1} % of the int8 peak",
                rate / 1e9,
                100.0 * rate / peak
            );
        }
    }

    /// The best of some samples on one thread, times the threads.
    fn int8_peak(&self) -> Option<f64> {
        let mut best: f64 = 0.0;
        for _ in 0..200 {
            let start = Instant::now();
            let work = Arithmetic::Int8.run(100_000)?;
            best = best.max(work.operations / start.elapsed().as_secs_f64());
        }
        Some(best * self.cpu.threads() as f64)
    }
}

/// Sampling parameters that take different ways through the sampler.
fn sampling() -> [(&'static str, SamplingParams); 8] {
    let drawn = SamplingParams {
        greedy: false,
        temperature: 0.8,
        ..SamplingParams::greedy()
    };
    [
        ("greedy", SamplingParams::greedy()),
        (
            "greedy_top_logprobs_20",
            SamplingParams {
                top_logprobs: Some(20),
                ..SamplingParams::greedy()
            },
        ),
        ("temperature", drawn.clone()),
        (
            "top_k_40",
            SamplingParams {
                top_k: 40,
                ..drawn.clone()
            },
        ),
        (
            "top_p_0.9",
            SamplingParams {
                top_p: 0.9,
                ..drawn.clone()
            },
        ),
        (
            "typical_p_0.9",
            SamplingParams {
                typical_p: 0.9,
                ..drawn.clone()
            },
        ),
        (
            "min_p_0.05",
            SamplingParams {
                min_p: 0.05,
                ..drawn.clone()
            },
        ),
        (
            "penalties",
            SamplingParams {
                repetition_penalty: 1.1,
                frequency_penalty: 0.1,
                ..drawn
            },
        ),
    ]
}

fn packed(ggml_type: GgmlType, n: usize, k: usize) -> Linear {
    let data = tensor(ggml_type, n, k).expect("the type fits the width");
    Linear::from_ggml(ggml_type, n, k, &data, LinearMode::Quantised).expect("legal blocks")
}

/// A call of attention.
struct Attention {
    kv: KvShape,
    heads: usize,
    past: usize,
    rows: usize,
    batch: usize,
}

/// What a call of attention works on.
struct Ready {
    pool: Vec<u8>,
    blocks: Vec<BlockId>,
    q: Vec<f32>,
    out: Vec<f32>,
    scratch: Scratch,
}

impl Attention {
    fn ready(&self) -> Ready {
        let count = self.batch * (self.past + self.rows).div_ceil(16);
        let width = self.batch * self.rows * self.heads * self.kv.head_dim;
        // Halves near 1, floats near 1: any legal number will do.
        let unit: &[u8] = match self.kv.dtype {
            KvDtype::F16 => &[0x12, 0x3c],
            _ => &[0x12, 0x34, 0x80, 0x3f],
        };
        Ready {
            pool: unit
                .iter()
                .copied()
                .cycle()
                .take(count * self.kv.block_bytes())
                .collect(),
            blocks: (0..count as u32).map(BlockId).collect(),
            q: numbers(width),
            out: vec![0.0; width],
            scratch: Scratch::default(),
        }
    }
}

impl Ready {
    fn run(&mut self, case: &Attention, cpu: &Cpu) {
        let size = case.kv.block_bytes();
        let pool = &self.pool;
        let block = |id: BlockId| &pool[id.0 as usize * size..][..size];
        let shape = AttentionShape {
            kv: case.kv,
            num_heads: case.heads,
            scale: 1.0 / (case.kv.head_dim as f32).sqrt(),
            window: None,
        };
        let each = self.blocks.len() / case.batch;
        let sequences: Vec<SequenceRows<'_>> = (0..case.batch)
            .map(|i| SequenceRows {
                rows: i * case.rows..(i + 1) * case.rows,
                first_position: case.past,
                blocks: &self.blocks[i * each..(i + 1) * each],
            })
            .collect();
        let attention = PagedAttention {
            shape: &shape,
            sequences: &sequences,
            kv: &block,
        };
        let done = attention.run(cpu, &self.q, &mut self.out, &mut self.scratch);
        done.expect("the buffers fit");
    }
}

fn main() -> Result<()> {
    let threads = std::env::var("BATON_BENCH_THREADS").map_or(Ok(1), |threads| threads.parse())?;
    let bench = Bench {
        cpu: Cpu::new(threads)?,
        rates: RefCell::default(),
    };
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(50))
        .measurement_time(Duration::from_millis(250))
        .without_plots()
        .configure_from_args();
    bench.products(&mut criterion)?;
    bench.attention(&mut criterion);
    bench.rowwise(&mut criterion)?;
    bench.sampler(&mut criterion)?;
    criterion.final_summary();
    bench.table();
    Ok(())
}
