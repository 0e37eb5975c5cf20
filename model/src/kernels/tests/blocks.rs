//! What a quantised product is, written once more from the definition of ggml's formats, value by value.

use half::f16;

use super::super::GgmlType;
use super::Numbers;

/// All types with int8 kernels.
pub(super) const QUANTISED: [GgmlType; 8] = [
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q4K,
    GgmlType::Q5K,
    GgmlType::Q6K,
];

/// Types of two bytes a value.
pub(super) const HALVES: [GgmlType; 2] = [GgmlType::F16, GgmlType::Bf16];

/// Where a block has halves: scales and minima.
pub(super) fn scale_bytes(ggml_type: GgmlType) -> &'static [usize] {
    match ggml_type {
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 => &[0],
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
        GgmlType::Q6K => &[208],
        _ => &[],
    }
}

/// A tensor of random blocks with small scales and minima, or of random numbers.
pub(super) fn tensor(ggml_type: GgmlType, n: usize, k: usize, numbers: &mut Numbers) -> Vec<u8> {
    if HALVES.contains(&ggml_type) {
        let values = numbers.units(n * k);
        return values
            .into_iter()
            .flat_map(|x| match ggml_type {
                GgmlType::F16 => f16::from_f32(x).to_le_bytes(),
                _ => half::bf16::from_f32(x).to_le_bytes(),
            })
            .collect();
    }
    let mut bytes: Vec<u8> = (0..n * ggml_type.row_bytes(k).unwrap())
        .map(|_| (numbers.bits() >> 24) as u8)
        .collect();
    for block in bytes.chunks_exact_mut(ggml_type.block_bytes()) {
        for (&at, size) in scale_bytes(ggml_type).iter().zip([0.02, 0.1]) {
            block[at..at + 2].copy_from_slice(&f16::from_f32(numbers.unit() * size).to_le_bytes());
        }
    }
    bytes
}

/// 32 weights: `scales[j / 16] * q + min`.
struct Weights {
    q: Vec<i32>,
    scales: [f32; 2],
    min: Option<f32>,
}

/// The scale and the minimum of block `b` of a K type: six bits each, in 12 bytes.
fn six_bits(packed: &[u8], b: usize) -> (f32, f32) {
    let (scale, min) = if b < 4 {
        (packed[b] & 63, packed[b + 4] & 63)
    } else {
        let (low, high) = (packed[b + 4], b - 4);
        (
            (low & 15) + 16 * (packed[high] / 64),
            low / 16 + 16 * (packed[high + 4] / 64),
        )
    };
    (f32::from(scale), f32::from(min))
}

/// The weights of block `b` of 32 in a block or super-block of the file.
fn weights(ggml_type: GgmlType, block: &[u8], b: usize) -> Weights {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    let nibble = |at: usize, high: bool| i32::from(if high { block[at] / 16 } else { block[at] % 16 });
    let bit = |at: usize, i: usize| i32::from(block[at + i / 8] >> (i % 8)) & 1;
    let plain = |q: &dyn Fn(usize) -> i32, min| Weights {
        q: (0..32).map(q).collect(),
        scales: [half(0); 2],
        min,
    };
    match ggml_type {
        GgmlType::Q4_0 => plain(&|j| nibble(2 + j % 16, j >= 16) - 8, None),
        GgmlType::Q4_1 => plain(&|j| nibble(4 + j % 16, j >= 16), Some(half(2))),
        GgmlType::Q5_0 => plain(&|j| nibble(6 + j % 16, j >= 16) + 16 * bit(2, j) - 16, None),
        GgmlType::Q5_1 => plain(&|j| nibble(8 + j % 16, j >= 16) + 16 * bit(4, j), Some(half(2))),
        GgmlType::Q8_0 => plain(&|j| i32::from(block[2 + j].cast_signed()), None),
        GgmlType::Q4K | GgmlType::Q5K => {
            let (scale, min) = six_bits(&block[4..16], b);
            let five = ggml_type == GgmlType::Q5K;
            let qs = if five { 48 } else { 16 };
            let q = |j: usize| {
                let low = nibble(qs + 32 * (b / 2) + j, b % 2 == 1);
                low + if five { 16 * bit(16 + j, b) } else { 0 }
            };
            Weights {
                q: (0..32).map(q).collect(),
                scales: [half(0) * scale; 2],
                min: Some(-half(2) * min),
            }
        }
        GgmlType::Q6K => {
            let (part, quarter) = (b / 4, b % 4);
            let q = |j: usize| {
                let low = nibble(64 * part + 32 * (quarter % 2) + j, quarter >= 2);
                let high = block[128 + 32 * part + j] >> (2 * quarter) & 3;
                low + 16 * i32::from(high) - 32
            };
            let scale = |i: usize| half(208) * f32::from(block[192 + 2 * b + i].cast_signed());
            Weights {
                q: (0..32).map(q).collect(),
                scales: [scale(0), scale(1)],
                min: None,
            }
        }
        other => panic!("{other:?} has no int8 kernel"),
    }
}

/// 16 activations as the kernels round them: scale and integers.
fn rounded(x: &[f32]) -> (f32, Vec<i32>) {
    let largest = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let (d, inverse) = if largest < 1e-30 {
        (0.0, 0.0)
    } else {
        (largest / 127.0, 127.0 / largest)
    };
    (d, x.iter().map(|x| (x * inverse).round_ties_even() as i32).collect())
}

/// One output of a quantised product, straight from the file's blocks: what the kernels are defined to compute.
pub(super) fn quantised_output(ggml_type: GgmlType, row: &[u8], x: &[f32], passes: usize) -> f32 {
    let [first, second] = quantised_passes(ggml_type, row, x, passes);
    first + second
}

/// What each of the passes comes to; 0 for the second one if there is only one.
pub(super) fn quantised_passes(ggml_type: GgmlType, row: &[u8], x: &[f32], passes: usize) -> [f32; 2] {
    let mut acc = [0.0f32; 2];
    for (i, x) in x.chunks_exact(32).enumerate() {
        let in_block = ggml_type.block_len() / 32;
        let block = &row[i / in_block * ggml_type.block_bytes()..][..ggml_type.block_bytes()];
        let w = weights(ggml_type, block, i % in_block);
        let mut x = x.to_vec();
        for acc in &mut acc[..passes] {
            let halves = [rounded(&x[..16]), rounded(&x[16..])];
            let d = [halves[0].0, halves[1].0];
            let dot = |h: usize| -> f32 {
                let products = w.q[16 * h..].iter().zip(&halves[h].1).map(|(w, x)| w * x);
                products.sum::<i32>() as f32
            };
            if ggml_type == GgmlType::Q6K {
                *acc = (dot(0) * d[0]).mul_add(w.scales[0], *acc);
                *acc = (dot(1) * d[1]).mul_add(w.scales[1], *acc);
            } else {
                *acc = dot(1).mul_add(d[1], dot(0) * d[0]).mul_add(w.scales[0], *acc);
            }
            if let Some(min) = w.min {
                let sum = |h: usize| -> f32 { halves[h].1.iter().sum::<i32>() as f32 };
                *acc = min.mul_add(d[0] * sum(0) + d[1] * sum(1), *acc);
            }
            for (i, x) in x.iter_mut().enumerate() {
                *x -= d[i / 16] * halves[i / 16].1[i % 16] as f32;
            }
        }
    }
    acc
}
