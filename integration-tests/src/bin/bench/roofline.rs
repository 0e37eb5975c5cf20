//! The machine's roofline: peaks of arithmetic and of reading memory, and what they allow a step.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow};
use model::StepCost;
use model::kernels::roofline::{Arithmetic, ReadMemory};
use runtime::clock::Clock;
use serde_json::{Value, json};

use crate::machine::Caches;

/// Places that memory is read from.
const PLACES: [&str; 3] = ["l2", "l3", "dram"];

/// What the machine does at most with a number of threads: the best of all rounds.
#[derive(Clone, Debug)]
pub(crate) struct Peaks {
    pub(crate) threads: usize,
    /// Operations a second (a multiply-add is two) of int8, bf16 and f32; `None`: not measured on this CPU.
    arithmetic: [Option<f64>; 3],
    /// Bytes read a second from L2, L3 and DRAM.
    read: [f64; 3],
}

/// Memory for one thread's reads.
struct Places([ReadMemory; 3]);

/// Measures peaks, a sample at a time.
pub(crate) struct Roofline {
    /// One for each thread of the largest number of threads.
    places: Vec<Places>,
    sample: Duration,
}

/// What a piece of work is made of.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Demand {
    product_ops: f64,
    attention_ops: f64,
    bytes: f64,
}

/// The shortest time that the peaks allow a piece of work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub(crate) seconds: f64,
    /// `arithmetic` or `memory`: which of the two takes that long.
    pub(crate) by: &'static str,
}

impl Roofline {
    /// Prepares for up to `threads` threads; each figure takes about `sample`.
    pub(crate) fn new(threads: usize, sample: Duration, small: bool) -> Result<Self> {
        let caches = Caches::read();
        // Half of L2 at most. Well beyond L2 and well within L3, shared by the threads. Several times L3.
        let l3 = (caches.l3 / 4 / threads.max(1)).max(2 * caches.l2).min(8 << 20);
        let dram = if small {
            2 * caches.l3
        } else {
            (8 * caches.l3).max(256 << 20)
        };
        let sizes = [caches.l2 / 4, l3, dram / threads.max(1)];
        let place = |_| {
            let memory = sizes.map(ReadMemory::new);
            let [l2, l3, dram] = memory;
            Ok(Places([l2?, l3?, dram?]))
        };
        Ok(Self {
            places: (0..threads).map(place).collect::<Result<_>>()?,
            sample,
        })
    }

    /// One sample of every figure with `threads` threads.
    pub(crate) fn measure(&self, threads: usize) -> Result<Peaks> {
        let mut arithmetic = [None; 3];
        for (rate, kind) in arithmetic.iter_mut().zip(Arithmetic::ALL) {
            *rate = self.rate(threads, |_| kind.run(20_000).map(|work| work.operations))?;
        }
        let mut read = [0.0; 3];
        for (place, rate) in read.iter_mut().enumerate() {
            let read = |places: &Places| {
                let memory = &places.0[place];
                // Small memory several times, or the clock would be most of what is measured.
                let times = ((1 << 20) / memory.len()).max(1);
                for _ in 0..times {
                    std::hint::black_box(memory.read());
                }
                Some((times * memory.len()) as f64)
            };
            *rate = self.rate(threads, read)?.unwrap_or(0.0);
        }
        Ok(Peaks {
            threads,
            arithmetic,
            read,
        })
    }

    /// Sum over the threads of what `work` says it did a second. `None` if it cannot be done.
    fn rate(&self, threads: usize, work: impl Fn(&Places) -> Option<f64> + Sync) -> Result<Option<f64>> {
        let (barrier, work, sample) = (&Barrier::new(threads), &work, self.sample);
        let rates = thread::scope(|scope| {
            let running: Vec<_> = self.places[..threads]
                .iter()
                .map(|places| {
                    scope.spawn(move || {
                        // Warms caches and clocks up.
                        work(places)?;
                        barrier.wait();
                        let start = Clock.now();
                        let mut done = 0.0;
                        loop {
                            done += work(places)?;
                            let elapsed = start.elapsed();
                            if elapsed >= sample {
                                return Some(done / elapsed.as_secs_f64());
                            }
                        }
                    })
                })
                .collect();
            running
                .into_iter()
                .map(thread::ScopedJoinHandle::join)
                .collect::<Vec<_>>()
        });
        let mut sum = 0.0;
        for rate in rates {
            match rate.map_err(|_| anyhow!("a measuring thread has panicked"))? {
                Some(rate) => sum += rate,
                None => return Ok(None),
            }
        }
        Ok(Some(sum))
    }
}

impl Peaks {
    /// The better of two samples in each figure.
    pub(crate) fn or_better(mut self, other: &Self) -> Self {
        for (mine, theirs) in self.arithmetic.iter_mut().zip(other.arithmetic) {
            *mine = mine.zip(theirs).map(|(a, b)| a.max(b));
        }
        for (mine, theirs) in self.read.iter_mut().zip(other.read) {
            *mine = mine.max(theirs);
        }
        self
    }

    /// How long the work takes at least; `None` where a peak it needs is not measured.
    pub(crate) fn bound(&self, demand: Demand) -> Option<Bound> {
        let [int8, _, f32s] = self.arithmetic;
        let arithmetic = demand.product_ops / int8? + demand.attention_ops / f32s?;
        let memory = demand.bytes / self.read[2];
        Some(if arithmetic >= memory {
            Bound {
                seconds: arithmetic,
                by: "arithmetic",
            }
        } else {
            Bound {
                seconds: memory,
                by: "memory",
            }
        })
    }

    pub(crate) fn to_json(&self) -> Value {
        let giga = |rate: Option<f64>| rate.map(|rate| rate / 1e9);
        let [int8, bf16, f32s] = self.arithmetic;
        let read: serde_json::Map<_, _> = PLACES
            .iter()
            .zip(self.read)
            .map(|(place, rate)| ((*place).to_owned(), json!(rate / 1e9)))
            .collect();
        json!({
            "threads": self.threads,
            "int8_gops": giga(int8),
            "bf16_gflops": giga(bf16),
            "f32_gflops": giga(f32s),
            "read_gb_s": read,
        })
    }

    /// The line of a table.
    pub(crate) fn to_line(&self) -> String {
        let giga = |rate: Option<f64>| rate.map_or("not measured".to_owned(), |rate| format!("{:.0}", rate / 1e9));
        let [int8, bf16, f32s] = self.arithmetic.map(giga);
        let [l2, l3, dram] = self.read.map(|rate| rate / 1e9);
        format!(
            "{:>7} {int8:>12} {bf16:>12} {f32s:>12} {dram:>10.1} {l3:>8.0} {l2:>8.0}",
            self.threads
        )
    }

    /// The head of that table.
    pub(crate) const HEAD: &'static str = "threads  int8 Gop/s  bf16 GFLOP/s  f32 GFLOP/s  DRAM GB/s  L3 GB/s  L2 GB/s";
}

impl Demand {
    /// A prompt of `tokens` tokens in chunks of `chunk`, and one sampled token. The last layer is counted in full,
    /// though only its K and V are needed for all rows.
    pub(crate) fn prefill(cost: &StepCost, tokens: usize, chunk: usize) -> Self {
        let (n, chunk) = (tokens as f64, chunk.max(1));
        let chunks = tokens.div_ceil(chunk);
        // Each chunk reads the K and V of all positions so far.
        let positions: usize = (1..=chunks).map(|i| tokens.min(i * chunk)).sum();
        Self {
            product_ops: 2.0 * (n * cost.layer_macs as f64 + cost.head_macs as f64),
            attention_ops: n * (n + 1.0) * cost.attention_macs as f64,
            bytes: chunks as f64 * cost.layer_bytes as f64
                + cost.head_bytes as f64
                + positions as f64 * cost.kv_bytes as f64,
        }
    }

    /// One step of `batch` sequences that see `positions` positions each.
    pub(crate) fn decode(cost: &StepCost, batch: usize, positions: f64) -> Self {
        let batch = batch as f64;
        Self {
            product_ops: 2.0 * batch * (cost.layer_macs + cost.head_macs) as f64,
            attention_ops: 2.0 * batch * positions * cost.attention_macs as f64,
            bytes: (cost.layer_bytes + cost.head_bytes) as f64 + batch * positions * cost.kv_bytes as f64,
        }
    }
}
