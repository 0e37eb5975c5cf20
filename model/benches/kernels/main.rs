//! Speed of the kernels, one by one: rounding of activations and products of every type on the shapes of SmolLM2-135M and
//! Gemma 3 270M, weights that stream from memory, attention, norms, rotary embeddings, activations, the sampler.
//!
//! `scripts/bench kernels [FILTER]`, for example `scripts/bench kernels Q4_1/576x1536`. One thread at the CPU's best level,
//! unless `BATON_BENCH_THREADS` and `BATON_BENCH_LEVEL` say otherwise. Products end with a table of their share of the int8
//! peak measured in this run; see [`products`].
#![allow(clippy::print_stdout, reason = "a benchmark prints")]
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark reads the clock and takes its threads from the environment"
)]

mod attention;
mod products;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput};
use model::kernels::{Cpu, CpuLevel, RopeStyle, RopeTable, gelu_tanh_mul, rms_norm, rope, silu_mul};
use model::sampler::{Draw, Sampler};
use protocol::sampling::SamplingParams;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

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

/// What a call does, for rates.
#[derive(Clone, Copy)]
enum Work {
    Operations(f64),
    Bytes(usize),
    Uncounted,
}

/// Everything the benchmarks share.
struct Bench {
    cpu: Cpu,
    /// The best time of a call, in seconds, of each benchmark that has run.
    times: RefCell<BTreeMap<String, f64>>,
}

impl Bench {
    /// A benchmark whose best time is kept.
    fn run(&self, group: &mut BenchmarkGroup<'_, WallTime>, id: (&str, String), work: Work, mut call: impl FnMut()) {
        match work {
            Work::Operations(operations) => group.throughput(Throughput::Elements(operations as u64)),
            Work::Bytes(bytes) => group.throughput(Throughput::Bytes(bytes as u64)),
            Work::Uncounted => group,
        };
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
        if best < f64::MAX {
            self.times.borrow_mut().insert(format!("{}/{}", id.0, id.1), best);
        }
    }

    fn rowwise(&self, c: &mut Criterion) -> Result<()> {
        let mut group = c.benchmark_group("rows");
        for m in [1, 16, 256] {
            let rows = format!("m={m}");
            let (x, weight, mut out) = (numbers(m * 576), numbers(576), vec![0.0; m * 576]);
            self.run(&mut group, ("rms_norm/576", rows.clone()), Work::Uncounted, || {
                rms_norm(&self.cpu, &x, &weight, 1e-5, &mut out).expect("the buffers fit");
            });
            let table = RopeTable::new(&RopeTable::plain_frequencies(10_000.0, 64), m, 1.0);
            let positions: Vec<u32> = (0..u32::try_from(m)?).collect();
            for (name, style) in [
                ("rope_half/9x64", RopeStyle::Half),
                ("rope_interleaved/9x64", RopeStyle::Interleaved),
            ] {
                let mut heads = numbers(m * 576);
                self.run(&mut group, (name, rows.clone()), Work::Uncounted, || {
                    rope(&self.cpu, &table, style, &mut heads, 64, &positions).expect("the buffers fit");
                });
            }
            // The gate is copied anew each time: multiplied again and again it would vanish.
            let (fresh, mut gate, up) = (numbers(m * 1536), vec![0.0; m * 1536], numbers(m * 1536));
            self.run(&mut group, ("silu_mul/1536", rows.clone()), Work::Uncounted, || {
                gate.copy_from_slice(&fresh);
                silu_mul(&self.cpu, &mut gate, &up).expect("the buffers fit");
            });
            let (fresh, mut gate, up) = (numbers(m * 2048), vec![0.0; m * 2048], numbers(m * 2048));
            self.run(&mut group, ("gelu_tanh_mul/2048", rows), Work::Uncounted, || {
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
                self.run(&mut group, (name, vocab.to_string()), Work::Uncounted, || {
                    position += 1;
                    let draw = Draw {
                        params,
                        further: 0,
                        position,
                        history: if params.needs_history() { &history } else { &[] },
                        prompt_len: if params.needs_history() { 256 } else { 0 },
                        mask: None,
                    };
                    black_box(sampler.sample(&logits, &draw).expect("finite logits"));
                });
            }
        }
        group.finish();
        Ok(())
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

fn main() -> Result<()> {
    let threads = std::env::var("BATON_BENCH_THREADS").map_or(Ok(1), |threads| threads.parse())?;
    let level = match std::env::var("BATON_BENCH_LEVEL") {
        Ok(word) => {
            let level = CpuLevel::ALL.into_iter().find(|level| level.as_str() == word);
            level.ok_or_else(|| format!("BATON_BENCH_LEVEL: there is no level {word}"))?
        }
        Err(_) => CpuLevel::detect(),
    };
    let bench = Bench {
        cpu: Cpu::with_level(level, threads)?,
        times: RefCell::default(),
    };
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(50))
        .measurement_time(Duration::from_millis(250))
        .without_plots()
        .configure_from_args();
    let peak = products::int8_peak();
    products::rounding(&bench, &mut criterion)?;
    products::products(&bench, &mut criterion)?;
    // The clock of a CPU changes with its load, so the peak is that of two moments.
    let peak = peak.zip(products::int8_peak()).map(|(before, after)| before.max(after));
    products::streamed(&bench, &mut criterion)?;
    attention::attention(&bench, &mut criterion);
    bench.rowwise(&mut criterion)?;
    bench.sampler(&mut criterion)?;
    criterion.final_summary();
    products::table(&bench, peak);
    Ok(())
}
