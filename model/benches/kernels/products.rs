//! Products with packed weights, alone and with the rounding of their input.
//!
//! A step rounds rows once for several products (query, key and value; gate and up), so what a product costs in a step lies
//! between the two figures of the table.

use std::time::Instant;

use criterion::Criterion;
use model::kernels::roofline::Arithmetic;
use model::kernels::{GgmlType, Linear, LinearMode, Operand, Rows, Scratch, Target, products as multiply};

use super::{Bench, Result, Work, numbers};

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

/// Passes of rounding: that of most matrices, and that of query, key, value and head.
const MODES: [(&str, LinearMode); 2] = [("1-pass", LinearMode::Quantised), ("2-pass", LinearMode::Precise)];

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

fn packed(ggml_type: GgmlType, n: usize, k: usize) -> Linear {
    let data = tensor(ggml_type, n, k).expect("the type fits the width");
    Linear::from_ggml(ggml_type, n, k, &data, LinearMode::Quantised).expect("legal blocks")
}

fn is_quantised(ggml_type: GgmlType) -> bool {
    !matches!(ggml_type, GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16)
}

/// Rounding of rows to int8 blocks.
pub(crate) fn rounding(bench: &Bench, c: &mut Criterion) -> Result<()> {
    let mut group = c.benchmark_group("rounding");
    for (name, mode) in MODES {
        for k in [576, 640, 1024, 1536, 2048] {
            let data = tensor(GgmlType::Q8_0, 16, k)?;
            let linear = Linear::from_ggml(GgmlType::Q8_0, 16, k, &data, mode)?;
            for m in ROWS {
                let (x, mut operand) = (numbers(m * k), Operand::default());
                let work = Work::Bytes(x.len() * size_of::<f32>());
                bench.run(&mut group, (name, format!("{k}/m={m}")), work, || {
                    let done = operand.prepare(&bench.cpu, Rows::Plain(&x), &[&linear]);
                    done.expect("the buffers fit");
                });
            }
        }
    }
    group.finish();
    Ok(())
}

/// Products of rows that are rounded already.
pub(crate) fn products(bench: &Bench, c: &mut Criterion) -> Result<()> {
    let mut group = c.benchmark_group("product");
    for ggml_type in TYPES {
        for (k, n) in SHAPES.into_iter().chain(HEADS) {
            // The types of 256-blocks do not fit every width, and a head of f32 is no file's.
            let head = HEADS.contains(&(k, n));
            if ggml_type.row_bytes(k).is_err() || head && !is_quantised(ggml_type) {
                continue;
            }
            // Packed when the first benchmark of it runs: with a filter most do not.
            let mut linear: Option<Linear> = None;
            for m in if head { &ROWS[..3] } else { &ROWS[..] } {
                let m = *m;
                let (x, mut y, mut ready) = (numbers(m * k), vec![0.0; m * n], None);
                let work = Work::Operations(2.0 * (m * n * k) as f64);
                let id = (ggml_type.as_str(), format!("{k}x{n}/m={m}"));
                bench.run(&mut group, id, work, || {
                    let linear = linear.get_or_insert_with(|| packed(ggml_type, n, k));
                    let operand = ready.get_or_insert_with(|| {
                        let mut operand = Operand::default();
                        let done = operand.prepare(&bench.cpu, Rows::Plain(&x), &[linear]);
                        done.expect("the buffers fit");
                        operand
                    });
                    let done = multiply(&bench.cpu, operand, [(&*linear, Target::Store(&mut y))]);
                    done.expect("the buffers fit");
                });
            }
        }
    }
    group.finish();
    Ok(())
}

/// Decoding's way to read weights: about 96 MB of matrices, one after the other.
pub(crate) fn streamed(bench: &Bench, c: &mut Criterion) -> Result<()> {
    let (n, k) = (1536, 768);
    let mut group = c.benchmark_group("streamed");
    for ggml_type in TYPES.into_iter().filter(|t| t.row_bytes(k).is_ok()) {
        let mut linears: Vec<Linear> = Vec::new();
        let bytes = ggml_type.row_bytes(k)? * n;
        let copies = 96_000_000 / bytes;
        for m in [1, 4, 16] {
            let (x, mut y, mut scratch) = (numbers(m * k), vec![0.0; m * n], Scratch::default());
            let id = (ggml_type.as_str(), format!("m={m}"));
            bench.run(&mut group, id, Work::Bytes(copies * bytes), || {
                if linears.is_empty() {
                    linears.extend((0..copies).map(|_| packed(ggml_type, n, k)));
                }
                for linear in &linears {
                    let done = linear.forward(&bench.cpu, &x, m, &mut y, &mut scratch);
                    done.expect("the buffers fit");
                }
            });
        }
    }
    group.finish();
    Ok(())
}

/// The products that have run and their shares of the peak, if there is one.
pub(crate) fn table(bench: &Bench, peak: Option<f64>) {
    let times = bench.times.borrow();
    let Some(peak) = peak.map(|peak| peak * bench.cpu.threads() as f64) else {
        return;
    };
    let mut lines = Vec::new();
    for ggml_type in TYPES {
        for (k, n) in SHAPES.into_iter().chain(HEADS) {
            for m in ROWS {
                let name = format!("{}/{k}x{n}/m={m}", ggml_type.as_str());
                let Some(product) = times.get(&name) else { continue };
                let operations = 2.0 * (m * n * k) as f64;
                let share = |seconds: f64| 100.0 * operations / seconds / peak;
                let rounded = times
                    .get(&format!("1-pass/{k}/m={m}"))
                    .filter(|_| is_quantised(ggml_type))
                    .map_or(String::new(), |rounding| {
                        let (rounding, both) = (1e6 * rounding, share(product + rounding));
                        format!("; {rounding:7.1} us of rounding, {both:5.1} % with it")
                    });
                let (us, gops, share) = (1e6 * product, operations / product / 1e9, share(*product));
                lines.push(format!(
                    "{name:<28} {us:>9.1} us {gops:>7.0} Gop/s {share:>5.1} % of the int8 peak{rounded}"
                ));
            }
        }
    }
    if lines.is_empty() {
        return;
    }
    println!(
        "int8 peak: {:.0} Gop/s on {} threads; best times",
        peak / 1e9,
        bench.cpu.threads()
    );
    println!("{}", lines.join("\n"));
}

/// The best of some samples on one thread, in operations a second.
pub(crate) fn int8_peak() -> Option<f64> {
    let mut best: f64 = 0.0;
    for _ in 0..200 {
        let start = Instant::now();
        let work = Arithmetic::Int8.run(100_000)?;
        best = best.max(work.operations / start.elapsed().as_secs_f64());
    }
    Some(best)
}
