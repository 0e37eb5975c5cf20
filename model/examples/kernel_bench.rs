//! Speed of the CPU kernels: GFLOP/s of products and of attention, on one thread unless given another number.
//!
//! `cargo run --release -p model --example kernel_bench [threads]`
#![allow(clippy::print_stdout, reason = "a benchmark prints")]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::time::Instant;

use engine::plan::BlockId;
use model::kernels::{
    AttentionShape, Cpu, CpuLevel, GgmlType, KvShape, Linear, LinearMode, PagedAttention, Scratch, SequenceRows,
};
use protocol::kv::KvDtype;

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

/// A tensor of legal blocks: pseudo-random quants, scale (and minimum) 1/64.
fn tensor(ggml_type: GgmlType, n: usize, k: usize) -> Result<Vec<u8>> {
    let mut bytes: Vec<u8> = numbers(ggml_type.row_bytes(k)? * n)
        .iter()
        .map(|x| (x * 127.0) as i8 as u8)
        .collect();
    for block in bytes.chunks_exact_mut(ggml_type.block_bytes()) {
        let header = if ggml_type == GgmlType::Q4_1 { 4 } else { 2 };
        for half in block[..header].chunks_exact_mut(2) {
            half.copy_from_slice(&0x2400u16.to_le_bytes());
        }
    }
    Ok(bytes)
}

fn products(cpu: &Cpu, n: usize, k: usize) -> Result<()> {
    let mut scratch = Scratch::default();
    let f32s = Linear::from_f32(n, k, &numbers(n * k))?;
    let mut named = vec![("f32", f32s)];
    for ggml_type in [GgmlType::Q4_0, GgmlType::Q4_1, GgmlType::Q8_0] {
        let data = tensor(ggml_type, n, k)?;
        named.push((
            ggml_type.as_str(),
            Linear::from_ggml(ggml_type, n, k, &data, LinearMode::Quantised)?,
        ));
    }
    for (name, linear) in &named {
        for m in [1, 4, 16, 64, 512] {
            let (x, mut y) = (numbers(m * k), vec![0.0; m * n]);
            let seconds = best(|| Ok(linear.forward(cpu, &x, m, &mut y, &mut scratch)?))?;
            let gflops = 2.0 * (m * n * k) as f64 / seconds / 1e9;
            let gb = linear.bytes() as f64 / seconds / 1e9;
            println!(
                "{name:5} {k} -> {n} m={m:<4} {gflops:7.1} GFLOP/s {:9.1} us, {gb:6.1} GB/s of weights",
                seconds * 1e6
            );
        }
    }
    Ok(())
}

/// Decoding's way to read weights: about 96 MB of matrices, one row each.
fn streamed(cpu: &Cpu, ggml_type: GgmlType, m: usize) -> Result<()> {
    let (n, k) = (1536, 576);
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

/// One layer's attention of `rows` rows after `past` tokens, 9 query and 3 KV heads of 64.
fn attention(cpu: &Cpu, dtype: KvDtype, past: usize, rows: usize) -> Result<()> {
    let kv = KvShape {
        num_kv_heads: 3,
        head_dim: 64,
        block_tokens: 16,
        dtype,
    };
    let shape = AttentionShape {
        kv,
        num_heads: 9,
        scale: 0.125,
        window: None,
    };
    let count = (past + rows).div_ceil(16);
    let block_ids: Vec<BlockId> = (0..u32::try_from(count)?).map(BlockId).collect();
    // Halves near 1, floats near 1: any legal number will do.
    let unit: &[u8] = if dtype == KvDtype::F16 {
        &[0x12, 0x3c]
    } else {
        &[0x12, 0x34, 0x80, 0x3f]
    };
    let pool: Vec<u8> = unit.iter().copied().cycle().take(count * kv.block_bytes()).collect();
    let size = kv.block_bytes();
    let block = |id: BlockId| &pool[id.0 as usize * size..][..size];
    let sequences = [SequenceRows {
        rows: 0..rows,
        first_position: past,
        blocks: &block_ids,
    }];
    let (q, mut out, mut scratch) = (numbers(rows * 9 * 64), vec![0.0; rows * 9 * 64], Scratch::default());
    let attention = PagedAttention {
        shape: &shape,
        sequences: &sequences,
        kv: &block,
    };
    let seconds = best(|| Ok(attention.run(cpu, &q, &mut out, &mut scratch)?))?;
    let keys: usize = (past + 1..=past + rows).sum();
    let gflops = 4.0 * (keys * 9 * 64) as f64 / seconds / 1e9;
    println!(
        "attention {} {rows} rows after {past}: {:8.3} ms a layer, {gflops:6.1} GFLOP/s of the causal part",
        dtype.as_str(),
        seconds * 1e3
    );
    Ok(())
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
    for (n, k) in [(1536, 576), (576, 1536)] {
        products(&cpu, n, k)?;
    }
    for ggml_type in [GgmlType::Q4_1, GgmlType::Q8_0] {
        for m in [1, 4, 16] {
            streamed(&cpu, ggml_type, m)?;
        }
    }
    for dtype in [KvDtype::F16, KvDtype::F32] {
        for (past, rows) in [(0, 512), (1024, 256), (512, 1), (2048, 1)] {
            attention(&cpu, dtype, past, rows)?;
        }
    }
    Ok(())
}
