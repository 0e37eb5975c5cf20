//! Speed of the CPU kernels: GFLOP/s of products and of attention, on one thread unless given another number.
//!
//! `cargo run --release -p model --example kernel_bench [threads] [level] [part: products, attention]`
#![allow(clippy::print_stdout, reason = "a benchmark prints")]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::time::Instant;

use engine::plan::BlockId;
use model::kernels::{
    AttentionShape, Cpu, CpuLevel, GgmlType, KvShape, Linear, LinearMode, Operand, PagedAttention, Rows, Scratch,
    SequenceRows, Target, int8_peak, products as multiply,
};
use model::kv_pool::KvPool;
use protocol::kv::{KvDtype, KvLayout};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Best of many runs within about 0.2 s, in seconds.
fn best(mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let (start, mut best) = (Instant::now(), f64::MAX);
    while start.elapsed().as_secs_f64() < 0.2 {
        let one = Instant::now();
        run()?;
        best = best.min(one.elapsed().as_secs_f64());
    }
    Ok(best)
}

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

/// Types with kernels of their own.
const TYPES: [GgmlType; 10] = [
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q4K,
    GgmlType::Q5K,
    GgmlType::Q6K,
    GgmlType::F16,
    GgmlType::Bf16,
];

/// A tensor of legal blocks: pseudo-random quants, scale (and minimum) 1/64.
fn tensor(ggml_type: GgmlType, n: usize, k: usize) -> Result<Vec<u8>> {
    let mut bytes: Vec<u8> = numbers(ggml_type.row_bytes(k)? * n)
        .iter()
        .map(|x| (x * 127.0) as i8 as u8)
        .collect();
    let scales: &[usize] = match ggml_type {
        GgmlType::Q6K => &[208],
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 | GgmlType::F16 | GgmlType::Bf16 => &[0],
        _ => &[0, 2],
    };
    for block in bytes.chunks_exact_mut(ggml_type.block_bytes()) {
        for &at in scales {
            block[at..at + 2].copy_from_slice(&0x2400u16.to_le_bytes());
        }
    }
    Ok(bytes)
}

/// Operations per second of integer products alone, in billions, on one thread.
fn peak(cpu: &Cpu) -> Result<f64> {
    let mut operations = 0;
    let seconds = best(|| {
        operations = int8_peak(cpu, 20_000);
        Ok(())
    })?;
    Ok(operations as f64 / seconds / 1e9)
}

/// Products of all types, one size, of rows that are rounded already. `peak` is that of integer products on all threads.
fn products(cpu: &Cpu, peak: f64, n: usize, k: usize, batches: &[usize]) -> Result<()> {
    let mut operand = Operand::default();
    let mut named = vec![("f32".to_owned(), Linear::from_f32(n, k, &numbers(n * k))?)];
    for ggml_type in TYPES.into_iter().filter(|t| k.is_multiple_of(t.block_len())) {
        let data = tensor(ggml_type, n, k)?;
        for (mode, suffix) in [(LinearMode::Quantised, ""), (LinearMode::Precise, " precise")] {
            // Both ends of the usual types, in the mode of two passes.
            if mode == LinearMode::Quantised || matches!(ggml_type, GgmlType::Q4_1 | GgmlType::Q8_0) {
                let name = format!("{}{suffix}", ggml_type.as_str());
                named.push((name, Linear::from_ggml(ggml_type, n, k, &data, mode)?));
            }
        }
    }
    for (name, linear) in named.iter().filter(|(name, _)| name.starts_with("Q4_1")) {
        let x = numbers(64 * k);
        let seconds = best(|| Ok(operand.prepare(cpu, Rows::Plain(&x), &[linear])?))?;
        println!("{name:12} rounding 64 rows of {k}: {:9.1} us", seconds * 1e6);
    }
    for (name, linear) in &named {
        for &m in batches {
            let (x, mut y) = (numbers(m * k), vec![0.0; m * n]);
            operand.prepare(cpu, Rows::Plain(&x), &[linear])?;
            let seconds = best(|| Ok(multiply(cpu, &operand, [(linear, Target::Store(&mut y))])?))?;
            let gflops = 2.0 * (m * n * k) as f64 / seconds / 1e9;
            let gb = linear.bytes() as f64 / seconds / 1e9;
            let share = 100.0 * gflops / peak;
            println!(
                "{name:12} {k} -> {n} m={m:<4} {gflops:7.1} GFLOP/s = {share:5.1} % of the int8 peak {:9.1} us, {gb:6.1} GB/s of weights",
                seconds * 1e6
            );
        }
    }
    Ok(())
}

/// Decoding's way to read weights: about 96 MB of matrices, one row each.
fn streamed(cpu: &Cpu, ggml_type: GgmlType, m: usize) -> Result<()> {
    let (n, k) = (1536, 768);
    let data = tensor(ggml_type, n, k)?;
    let copies = 96_000_000 / data.len();
    let pack = |_| Linear::from_ggml(ggml_type, n, k, &data, LinearMode::Quantised);
    let linears = (0..copies).map(pack).collect::<std::result::Result<Vec<_>, _>>()?;
    let (x, mut y, mut scratch) = (numbers(m * k), vec![0.0; m * n], Scratch::default());
    // The best of each matrix over several passes: other programs disturb a whole pass more often than not.
    let mut times = vec![f64::MAX; copies];
    for _ in 0..12 {
        for (linear, time) in linears.iter().zip(&mut times) {
            let one = Instant::now();
            linear.forward(cpu, &x, m, &mut y, &mut scratch)?;
            *time = time.min(one.elapsed().as_secs_f64());
        }
    }
    let seconds: f64 = times.iter().sum();
    let bytes: usize = linears.iter().map(Linear::bytes).sum();
    let gb = bytes as f64 / seconds / 1e9;
    let tokens = (m * copies * n * k) as f64 / seconds / 134.5e6;
    println!(
        "{} streamed m={m:<3} {gb:6.1} GB/s of weights, {tokens:7.0} tokens/s for 134.5 M weights",
        ggml_type.as_str()
    );
    Ok(())
}

/// KV heads, query heads and head width of the attention that is measured.
const KV_HEADS: usize = 3;
const HEADS: usize = 9;
const DIM: usize = 64;
const BLOCK: usize = 16;

/// A KV cache, written, for some sequences of equal length; blocks of a sequence lie apart.
struct Cache {
    pool: KvPool,
    shape: AttentionShape,
    tables: Vec<Vec<BlockId>>,
    all: Vec<BlockId>,
}

impl Cache {
    fn new(cpu: &Cpu, dtype: KvDtype, layers: u32, sequences: usize, tokens: usize) -> Result<Self> {
        let layout = KvLayout {
            num_layers: layers,
            num_kv_heads: KV_HEADS as u32,
            head_dim: DIM as u32,
            block_tokens: BLOCK as u32,
            dtype,
        };
        let each = tokens.div_ceil(BLOCK);
        let total = each * sequences;
        // A prime: neighbours in a sequence are far from each other, and none is met twice.
        let id = |i: usize| BlockId((i * 7919 % total) as u32);
        let tables: Vec<Vec<BlockId>> = (0..sequences)
            .map(|s| (s * each..(s + 1) * each).map(id).collect())
            .collect();
        let cache = Self {
            pool: KvPool::new(layout, total)?,
            shape: AttentionShape {
                kv: KvShape::from(&layout),
                num_heads: HEADS,
                scale: 0.125,
                window: None,
            },
            tables,
            all: (0..total).map(|i| BlockId(i as u32)).collect(),
        };
        let x = numbers(each * BLOCK * KV_HEADS * DIM);
        let mut access = cache.pool.claim(&cache.all)?;
        for layer in 0..layers {
            for table in &cache.tables {
                access.write_rows(cpu, layer, (table, 0), (&x, &x));
            }
        }
        drop(access);
        Ok(cache)
    }

    /// The last `rows` rows of every sequence.
    fn sequences(&self, tokens: usize, rows: usize) -> Vec<SequenceRows<'_>> {
        let one = |(i, blocks)| SequenceRows {
            rows: i * rows..(i + 1) * rows,
            first_position: tokens - rows,
            blocks,
        };
        self.tables.iter().map(Vec::as_slice).enumerate().map(one).collect()
    }
}

/// One layer's attention of `rows` rows after `past` tokens.
fn attention(cpu: &Cpu, dtype: KvDtype, past: usize, rows: usize) -> Result<()> {
    let cache = Cache::new(cpu, dtype, 1, 1, past + rows)?;
    let access = cache.pool.claim(&cache.all)?;
    let (q, mut out, mut scratch) = (
        numbers(rows * HEADS * DIM),
        vec![0.0; rows * HEADS * DIM],
        Scratch::default(),
    );
    let attention = PagedAttention {
        shape: &cache.shape,
        sequences: &cache.sequences(past + rows, rows),
        kv: &|id| access.block(0, id),
    };
    let seconds = best(|| Ok(attention.run(cpu, &q, &mut out, &mut scratch)?))?;
    let keys: usize = (past + 1..=past + rows).sum();
    let gflops = 4.0 * (keys * HEADS * DIM) as f64 / seconds / 1e9;
    println!(
        "attention {} {rows} rows after {past}: {:8.3} ms a layer, {gflops:6.1} GFLOP/s of the causal part",
        dtype.as_str(),
        seconds * 1e3
    );
    Ok(())
}

/// Decoding's way to read the cache: about 96 MB of it in 8 layers, one row a sequence; beside it the speed at which the
/// same memory can be read at all.
fn streamed_attention(cpu: &Cpu, dtype: KvDtype, context: usize) -> Result<()> {
    const LAYERS: u32 = 8;
    let shape = KvShape {
        num_kv_heads: KV_HEADS,
        head_dim: DIM,
        block_tokens: BLOCK,
        dtype,
    };
    let sequence_bytes = context.div_ceil(BLOCK) * shape.block_bytes();
    let count = 96_000_000 / (LAYERS as usize * sequence_bytes);
    let cache = Cache::new(cpu, dtype, LAYERS, count, context)?;
    let access = cache.pool.claim(&cache.all)?;
    let (q, mut out, mut scratch) = (
        numbers(count * HEADS * DIM),
        vec![0.0; count * HEADS * DIM],
        Scratch::default(),
    );
    let sequences = cache.sequences(context, 1);
    // The best of each layer over several passes: other programs disturb a whole pass more often than not.
    let (mut times, mut reads, mut read) = ([f64::MAX; LAYERS as usize], [f64::MAX; LAYERS as usize], 0);
    for _ in 0..12 {
        for (layer, time) in (0..).zip(&mut times) {
            let attention = PagedAttention {
                shape: &cache.shape,
                sequences: &sequences,
                kv: &|id| access.block(layer, id),
            };
            let one = Instant::now();
            attention.run(cpu, &q, &mut out, &mut scratch)?;
            *time = time.min(one.elapsed().as_secs_f64());
        }
        for (layer, time) in (0..).zip(&mut reads) {
            let one = Instant::now();
            for &block in &cache.all {
                read ^= folded(access.block(layer, block));
            }
            *time = time.min(one.elapsed().as_secs_f64());
        }
    }
    std::hint::black_box(read);
    let (seconds, reading): (f64, f64) = (times.iter().sum(), reads.iter().sum());
    let gb = cache.pool.bytes() as f64 / 1e9;
    println!(
        "attention {} streamed, {count} sequences of {context}: {:6.1} us a row and layer, {:5.1} GB/s of KV; one thread \
         reads it at {:5.1} GB/s",
        dtype.as_str(),
        seconds / (count * LAYERS as usize) as f64 * 1e6,
        gb / seconds,
        gb / reading
    );
    Ok(())
}

/// Reads all of some bytes.
fn folded(bytes: &[u8]) -> u64 {
    let mut lanes = [0u64; 32];
    let (chunks, _) = bytes.as_chunks::<256>();
    for chunk in chunks {
        for (lane, eight) in lanes.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *lane ^= u64::from_le_bytes(*eight);
        }
    }
    lanes.iter().fold(0, |a, b| a ^ b)
}

fn main() -> Result<()> {
    let threads = std::env::args().nth(1).map_or(Ok(1), |t| t.parse())?;
    let level = match std::env::args().nth(2) {
        Some(word) => CpuLevel::ALL
            .into_iter()
            .find(|l| l.as_str() == word)
            .unwrap_or_else(CpuLevel::detect),
        None => CpuLevel::detect(),
    };
    let cpu = Cpu::with_level(level, threads)?;
    println!("{} on {threads} threads", level.as_str());
    let part = std::env::args().nth(3);
    let wanted = |name: &str| part.as_deref().is_none_or(|part| part == name);
    if wanted("products") {
        all_products(&cpu)?;
    }
    if wanted("attention") {
        all_attention(&cpu)?;
    }
    Ok(())
}

fn all_products(cpu: &Cpu) -> Result<()> {
    let peak = peak(cpu)? * cpu.threads() as f64;
    println!("int8 peak {peak:.0} Gop/s");
    // SmolLM2-135M's feed-forward, then Gemma 3 270M's.
    for (n, k) in [(1536, 576), (576, 1536)] {
        products(cpu, peak, n, k, &[1, 4, 16, 64, 512])?;
    }
    for (n, k) in [(2048, 640), (640, 2048)] {
        products(cpu, peak, n, k, &[1, 64])?;
    }
    for ggml_type in TYPES {
        for m in [1, 4, 16] {
            streamed(cpu, ggml_type, m)?;
        }
    }
    Ok(())
}

fn all_attention(cpu: &Cpu) -> Result<()> {
    for dtype in [KvDtype::F16, KvDtype::Bf16, KvDtype::Int8, KvDtype::F32] {
        for (past, rows) in [(0, 512), (0, 2048), (1024, 256), (512, 1), (2048, 1)] {
            attention(cpu, dtype, past, rows)?;
        }
    }
    for dtype in [KvDtype::F16, KvDtype::Bf16, KvDtype::Int8] {
        for context in [512, 2048, 4096] {
            streamed_attention(cpu, dtype, context)?;
        }
    }
    Ok(())
}
