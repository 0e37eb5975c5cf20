//! Products with packed weights.

use half::f16;

use super::super::ggml::dequantise;
use super::super::{
    Activation, Cpu, CpuLevel, GgmlType, Linear, LinearMode, Operand, Rows, Scratch, Target, gelu_tanh_mul, products,
    rms_norm, silu_mul,
};
use super::blocks::{HALVES, QUANTISED, quantised_output, quantised_passes, scale_bytes, tensor};
use super::{Numbers, bits, cpus, relative_error};

fn forward(linear: &Linear, cpu: &Cpu, x: &[f32]) -> Vec<f32> {
    let m = x.len() / linear.k();
    let mut y = vec![f32::NAN; m * linear.n()];
    linear.forward(cpu, x, m, &mut y, &mut Scratch::default()).unwrap();
    y
}

#[test]
fn quantised_products_are_those_of_the_blocks() {
    let mut numbers = Numbers::new(3);
    for (n, blocks) in [(16usize, 1usize), (1, 1), (49, 3), (176, 18), (15, 2), (33, 5)] {
        for ggml_type in QUANTISED {
            // So many blocks of 32, or as few super-blocks of 256 as have them.
            let k = (32 * blocks).next_multiple_of(ggml_type.block_len());
            let data = tensor(ggml_type, n, k, &mut numbers);
            let mut x = numbers.units(64 * k);
            x[k..k + 32].fill(0.0); // a block without a scale
            x[2 * k + 16..2 * k + 32].fill(0.0); // half a block
            let weights: Vec<&[u8]> = data.chunks_exact(data.len() / n).collect();
            for (mode, passes) in [(LinearMode::Quantised, 1), (LinearMode::Precise, 2)] {
                let linear = Linear::from_ggml(ggml_type, n, k, &data, mode).unwrap();
                let row = |x: &[f32]| -> Vec<f32> {
                    let output = |w: &&[u8]| quantised_output(ggml_type, w, x, passes);
                    weights.iter().map(output).collect()
                };
                let expected: Vec<f32> = x.chunks_exact(k).flat_map(row).collect();
                for (cpu, m) in cpus()
                    .iter()
                    .flat_map(|cpu| (1..=17).chain([64]).map(move |m| (cpu, m)))
                {
                    assert_eq!(
                        bits(&forward(&linear, cpu, &x[..m * k])),
                        bits(&expected[..m * n]),
                        "{ggml_type:?} {mode:?} {n} x {k}, {m} rows, {}",
                        cpu.level().as_str()
                    );
                }
            }
        }
    }
}

#[test]
fn halves_are_widened_exactly() {
    let mut numbers = Numbers::new(11);
    for (n, k) in [(16, 1), (1, 7), (49, 33), (177, 100)] {
        for ggml_type in HALVES {
            let data = tensor(ggml_type, n, k, &mut numbers);
            let mut w = vec![0.0; n * k];
            dequantise(ggml_type, &data, &mut w).unwrap();
            let floats = Linear::from_f32(n, k, &w).unwrap();
            let x = numbers.units(13 * k);
            for mode in [LinearMode::Quantised, LinearMode::Float32] {
                let linear = Linear::from_ggml(ggml_type, n, k, &data, mode).unwrap();
                assert_eq!(2 * linear.bytes(), floats.bytes());
                for (cpu, m) in cpus().iter().flat_map(|cpu| (1..=13).map(move |m| (cpu, m))) {
                    assert_eq!(
                        bits(&forward(&linear, cpu, &x[..m * k])),
                        bits(&forward(&floats, cpu, &x[..m * k])),
                        "{ggml_type:?} {n} x {k}, {m} rows, {}",
                        cpu.level().as_str()
                    );
                }
            }
        }
    }
}

#[test]
fn packed_weights_are_hardly_larger_than_the_file() {
    let mut numbers = Numbers::new(12);
    for ggml_type in QUANTISED.into_iter().chain(HALVES) {
        let data = tensor(ggml_type, 64, 512, &mut numbers);
        let linear = Linear::from_ggml(ggml_type, 64, 512, &data, LinearMode::Quantised).unwrap();
        let ratio = linear.bytes() as f64 / data.len() as f64;
        assert!(
            (1.0..1.04).contains(&ratio),
            "{ggml_type:?}: {ratio} times the file's size"
        );
    }
}

#[test]
fn several_threads_pack_the_same() {
    let mut numbers = Numbers::new(13);
    let (n, k) = (1500, 1024);
    for ggml_type in [GgmlType::Q8_0, GgmlType::Q6K, GgmlType::F16] {
        let mut data = tensor(ggml_type, n, k, &mut numbers);
        let pack = |data: &[u8], threads| Linear::from_ggml_on(ggml_type, n, k, data, LinearMode::Quantised, threads);
        let (cpu, x) = (Cpu::new(1).unwrap(), numbers.units(k));
        let expected = forward(&pack(&data, 1).unwrap(), &cpu, &x);
        for threads in [2, 3, 64] {
            assert_eq!(
                bits(&forward(&pack(&data, threads).unwrap(), &cpu, &x)),
                bits(&expected),
                "{threads} threads"
            );
        }
        // A scale that only the last thread sees.
        if let Some(&at) = scale_bytes(ggml_type).first() {
            let block = data.len() - ggml_type.block_bytes();
            data[block + at..][..2].copy_from_slice(&f16::NAN.to_le_bytes());
            let message = pack(&data, 3).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(message.contains("weight row 1499, block "), "{message}");
        }
    }
}

#[test]
fn float_products_take_k_in_order() {
    let mut numbers = Numbers::new(4);
    for (n, k) in [(16, 1), (1, 7), (49, 33), (176, 100), (31, 576)] {
        let (w, x) = (numbers.units(n * k), numbers.units(3 * k));
        let linear = Linear::from_f32(n, k, &w).unwrap();
        let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).fold(0.0f32, |acc, (x, w)| w.mul_add(*x, acc));
        let expected: Vec<f32> = x
            .chunks_exact(k)
            .flat_map(|x| w.chunks_exact(k).map(|w| dot(x, w)).collect::<Vec<_>>())
            .collect();
        for cpu in cpus() {
            let found = forward(&linear, &cpu, &x);
            assert_eq!(bits(&found), bits(&expected), "{n} x {k}, {}", cpu.level().as_str());
        }
    }
}

/// One matrix of every kind. `k` must be a multiple of 256.
fn matrices(n: usize, k: usize, numbers: &mut Numbers) -> Vec<Linear> {
    let mut matrices = vec![Linear::from_f32(n, k, &numbers.units(n * k)).unwrap()];
    for ggml_type in QUANTISED.into_iter().chain(HALVES) {
        let data = tensor(ggml_type, n, k, numbers);
        for mode in [LinearMode::Quantised, LinearMode::Precise] {
            matrices.push(Linear::from_ggml(ggml_type, n, k, &data, mode).unwrap());
        }
    }
    matrices
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    let mut numbers = Numbers::new(5);
    let (n, k) = (151, 256);
    let x = numbers.units(40 * k);
    for linear in matrices(n, k, &mut numbers) {
        for cpu in cpus() {
            let alone: Vec<f32> = x.chunks_exact(k).flat_map(|x| forward(&linear, &cpu, x)).collect();
            for m in 1..=40 {
                let together = forward(&linear, &cpu, &x[..m * k]);
                assert_eq!(
                    bits(&together),
                    bits(&alone[..m * n]),
                    "first {m} rows, {}",
                    cpu.level().as_str()
                );
                let last = forward(&linear, &cpu, &x[(40 - m) * k..]);
                assert_eq!(
                    bits(&last),
                    bits(&alone[(40 - m) * n..]),
                    "last {m} rows, {}",
                    cpu.level().as_str()
                );
            }
        }
    }
}

#[test]
fn many_rows_are_rows_alone() {
    let mut numbers = Numbers::new(15);
    // An odd number of tiles and a part of one; more of k than is taken apart at a time; several strips of rows.
    let (n, k) = (57, 1792);
    let x = numbers.units(150 * k);
    for linear in matrices(n, k, &mut numbers) {
        let best = Cpu::new(1).unwrap();
        let alone: Vec<f32> = x.chunks_exact(k).flat_map(|x| forward(&linear, &best, x)).collect();
        for cpu in cpus().iter().chain([&Cpu::new(2).unwrap()]) {
            // Every number of rows that a register tile, or two, leave over.
            let few = (1..=17).map(|rows| 7..7 + rows);
            for rows in few.chain([0..150, 3..23, 10..73, 20..149]) {
                let together = forward(&linear, cpu, &x[rows.start * k..rows.end * k]);
                assert_eq!(
                    bits(&together),
                    bits(&alone[rows.start * n..rows.end * n]),
                    "rows {rows:?}, {}, {} threads",
                    cpu.level().as_str(),
                    cpu.threads()
                );
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let mut numbers = Numbers::new(6);
    let k = 256;
    for n in [1, 16, 40, 150] {
        let x = numbers.units(11 * k);
        for linear in matrices(n, k, &mut numbers) {
            let expected = bits(&forward(&linear, &Cpu::new(1).unwrap(), &x));
            for threads in [2, 3, 7] {
                let cpu = Cpu::new(threads).unwrap();
                assert_eq!(
                    bits(&forward(&linear, &cpu, &x)),
                    expected,
                    "{threads} threads, n = {n}"
                );
            }
        }
    }
}

#[test]
fn products_of_the_same_rows_are_those_of_each() {
    let mut numbers = Numbers::new(7);
    let (m, n, k) = (5, 24, 256);
    let (cpu, x) = (Cpu::new(1).unwrap(), numbers.units(m * k));
    for mode in [LinearMode::Quantised, LinearMode::Precise] {
        let mut matrices = vec![Linear::from_f32(n, k, &numbers.units(n * k)).unwrap()];
        for ggml_type in [GgmlType::Q4_1, GgmlType::Q8_0, GgmlType::Q6K] {
            let data = tensor(ggml_type, n, k, &mut numbers);
            matrices.push(Linear::from_ggml(ggml_type, n, k, &data, mode).unwrap());
        }
        let all: Vec<&Linear> = matrices.iter().collect();
        let mut operand = Operand::default();
        operand.prepare(&cpu, Rows::Plain(&x), &all).unwrap();
        let mut outputs = vec![vec![f32::NAN; m * n]; 4];
        let [a, b, c, d] = &mut outputs[..] else { unreachable!() };
        let targets = [
            (all[0], Target::Store(a)),
            (all[1], Target::Store(b)),
            (all[2], Target::Store(c)),
            (all[3], Target::Store(d)),
        ];
        products(&cpu, &operand, targets).unwrap();
        for (linear, output) in matrices.iter().zip(&outputs) {
            assert_eq!(bits(output), bits(&forward(linear, &cpu, &x)));
        }
    }
    // One pass and two cannot share the rounded rows.
    let matrices = matrices(n, k, &mut numbers);
    let mut operand = Operand::default();
    let error = operand
        .prepare(&cpu, Rows::Plain(&x), &[&matrices[1], &matrices[2]])
        .unwrap_err();
    assert!(error.to_string().contains("passes of a matrix"), "{error}");
    operand.prepare(&cpu, Rows::Plain(&x), &[&matrices[1]]).unwrap();
    let mut y = vec![0.0; m * n];
    for other in [&matrices[0], &matrices[2]] {
        assert!(products(&cpu, &operand, [(other, Target::Store(&mut y))]).is_err());
    }
}

#[test]
fn fused_rows_are_those_of_the_steps_one_by_one() {
    let mut numbers = Numbers::new(12);
    let (m, n, k) = (5, 40, 256);
    let (x, up, weight) = (numbers.units(m * k), numbers.units(m * k), numbers.units(k));
    let plain = Cpu::with_level(CpuLevel::Portable, 1).unwrap();
    let mut normed = vec![0.0; m * k];
    rms_norm(&plain, &x, &weight, 1e-5, &mut normed).unwrap();
    let mut with_silu = x.clone();
    silu_mul(&plain, &mut with_silu, &up).unwrap();
    let mut with_gelu = x.clone();
    gelu_tanh_mul(&plain, &mut with_gelu, &up).unwrap();
    let gated = |activation| Rows::Gated {
        gate: &x,
        up: &up,
        activation,
    };
    let norm = Rows::Normed {
        x: &x,
        weight: &weight,
        eps: 1e-5,
    };
    let cases = [
        (norm, &normed),
        (gated(Activation::Silu), &with_silu),
        (gated(Activation::GeluTanh), &with_gelu),
    ];
    for linear in matrices(n, k, &mut numbers) {
        for cpu in cpus().into_iter().chain([Cpu::new(2).unwrap(), Cpu::new(3).unwrap()]) {
            for (rows, by_steps) in &cases {
                let mut operand = Operand::default();
                operand.prepare(&cpu, *rows, &[&linear]).unwrap();
                // Of two passes each is added for itself, so one at a time is where the bits are the same.
                let before = if linear.passes() == 2 {
                    vec![0.0; m * n]
                } else {
                    numbers.units(m * n)
                };
                let product = forward(&linear, &plain, by_steps);
                let expected: Vec<f32> = product.iter().zip(&before).map(|(a, y)| y + a).collect();
                let mut y = before;
                products(&cpu, &operand, [(&linear, Target::Add(&mut y))]).unwrap();
                assert_eq!(bits(&y), bits(&expected));
            }
        }
    }
}

#[test]
fn each_of_two_passes_is_added_to_what_is_there() {
    let mut numbers = Numbers::new(13);
    // Two full tiles of columns, and one of 8 that goes through a buffer: its passes are added up there first.
    let (n, k) = (40, 256);
    for ggml_type in QUANTISED {
        let data = tensor(ggml_type, n, k, &mut numbers);
        let linear = Linear::from_ggml(ggml_type, n, k, &data, LinearMode::Precise).unwrap();
        for m in [1, 5, 17] {
            let (x, before) = (numbers.units(m * k), numbers.units(m * n));
            let weights = data.chunks_exact(data.len() / n);
            let passes = x
                .chunks_exact(k)
                .flat_map(|x| weights.clone().map(|w| quantised_passes(ggml_type, w, x, 2)));
            let expected: Vec<f32> = passes
                .zip(&before)
                .enumerate()
                .map(|(at, ([first, second], before))| match at % n {
                    0..32 => before + first + second,
                    _ => before + (first + second),
                })
                .collect();
            for cpu in cpus().into_iter().chain([Cpu::new(2).unwrap(), Cpu::new(3).unwrap()]) {
                let (mut operand, mut y) = (Operand::default(), before.clone());
                operand.prepare(&cpu, Rows::Plain(&x), &[&linear]).unwrap();
                products(&cpu, &operand, [(&linear, Target::Add(&mut y))]).unwrap();
                assert_eq!(
                    bits(&y),
                    bits(&expected),
                    "{ggml_type:?}, {m} rows, {}",
                    cpu.level().as_str()
                );
            }
        }
    }
}

#[test]
fn int8_activations_cost_less_than_one_percent() {
    let mut numbers = Numbers::new(8);
    let (m, n, k) = (4, 64, 768);
    for ggml_type in QUANTISED {
        let data = tensor(ggml_type, n, k, &mut numbers);
        let x = numbers.units(m * k);
        let mut w = vec![0.0; n * k];
        dequantise(ggml_type, &data, &mut w).unwrap();
        let dot = |x: &[f32], w: &[f32]| -> f64 { x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum() };
        let expected: Vec<f64> = x
            .chunks_exact(k)
            .flat_map(|x| w.chunks_exact(k).map(|w| dot(x, w)).collect::<Vec<_>>())
            .collect();
        let cpu = Cpu::new(1).unwrap();
        let quantised = Linear::from_ggml(ggml_type, n, k, &data, LinearMode::Quantised).unwrap();
        let error = relative_error(&forward(&quantised, &cpu, &x), &expected);
        assert!(
            error > 1e-6 && error < 0.01,
            "{ggml_type:?} quantised: relative error {error}"
        );
        let precise = Linear::from_ggml(ggml_type, n, k, &data, LinearMode::Precise).unwrap();
        let error_of_two = relative_error(&forward(&precise, &cpu, &x), &expected);
        assert!(
            error_of_two < error / 50.0,
            "{ggml_type:?} in two passes: relative error {error_of_two}, in one {error}"
        );
        let floats = Linear::from_ggml(ggml_type, n, k, &data, LinearMode::Float32).unwrap();
        let error = relative_error(&forward(&floats, &cpu, &x), &expected);
        assert!(error < 1e-6, "{ggml_type:?} in f32: relative error {error}");
        assert!(floats.bytes() > 3 * quantised.bytes());
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    let mut numbers = Numbers::new(9);
    let (n, k) = (20, 256);
    for linear in matrices(n, k, &mut numbers) {
        for cpu in cpus() {
            let clean = numbers.units(3 * k);
            let expected = forward(&linear, &cpu, &clean);
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = clean.clone();
                x[k + 40] = poison;
                let found = forward(&linear, &cpu, &x);
                assert!(
                    found[n..2 * n].iter().all(|y| !y.is_finite()),
                    "{poison} gave {:?}",
                    &found[n..2 * n]
                );
                assert_eq!(bits(&found[..n]), bits(&expected[..n]));
                assert_eq!(bits(&found[2 * n..]), bits(&expected[2 * n..]));
            }
        }
    }
}

#[test]
fn tiny_and_huge_activations_are_scaled() {
    let mut numbers = Numbers::new(10);
    let (n, k) = (16, 64);
    let data = tensor(GgmlType::Q8_0, n, k, &mut numbers);
    let linear = Linear::from_ggml(GgmlType::Q8_0, n, k, &data, LinearMode::Quantised).unwrap();
    let (cpu, x) = (Cpu::new(1).unwrap(), numbers.units(k));
    let plain: Vec<f64> = forward(&linear, &cpu, &x).iter().map(|&y| f64::from(y)).collect();
    for factor in [1e-20f32, 1e20, 1e30] {
        let scaled: Vec<f32> = x.iter().map(|x| x * factor).collect();
        let found: Vec<f32> = forward(&linear, &cpu, &scaled).iter().map(|y| y / factor).collect();
        assert!(relative_error(&found, &plain) < 0.02, "times {factor}");
    }
    let vanishing: Vec<f32> = x.iter().map(|x| x * 1e-38).collect();
    assert!(forward(&linear, &cpu, &vanishing).iter().all(|&y| y == 0.0));
}

#[test]
fn wrong_sizes_and_scales_are_named() {
    let cpu = Cpu::with_level(CpuLevel::Portable, 1).unwrap();
    let message = |result: Result<Linear, _>| match result {
        Ok(_) => String::new(),
        Err(e) => super::super::KernelError::to_string(&e),
    };
    let load = |n, k, data: &[u8]| message(Linear::from_ggml(GgmlType::Q4_1, n, k, data, LinearMode::Quantised));
    assert!(load(2, 33, &[0; 40]).contains("a row of 33 values cannot be Q4_1"));
    assert!(load(2, 32, &[0; 39]).contains("bytes of a weight tensor is 39, must be 40"));
    assert!(load(0, 32, &[]).contains("output features of a weight matrix is 0"));
    assert!(load(2, 0, &[]).contains("input features of a weight matrix is 0"));
    let mut data = [0u8; 80];
    data[62..64].copy_from_slice(&f16::INFINITY.to_le_bytes());
    assert!(load(2, 64, &data).contains("weight row 1, block 1: scale inf"));
    for ggml_type in QUANTISED {
        let (len, size) = (ggml_type.block_len(), ggml_type.block_bytes());
        for &at in scale_bytes(ggml_type) {
            let mut data = tensor(ggml_type, 3, 2 * len, &mut Numbers::new(14));
            data[5 * size + at..][..2].copy_from_slice(&f16::NEG_INFINITY.to_le_bytes());
            let found = message(Linear::from_ggml(ggml_type, 3, 2 * len, &data, LinearMode::Quantised));
            let expected = format!("weight row 2, block {}: scale -inf", len / 32);
            assert!(found.contains(&expected), "{ggml_type:?}: {found}");
        }
    }
    assert!(message(Linear::from_f32(2, 3, &[0.0; 5])).contains("number of weights is 5, must be 6"));

    let linear = Linear::from_f32(2, 3, &[1.0; 6]).unwrap();
    let run = |x: usize, m: usize, y: usize| {
        let mut scratch = Scratch::default();
        linear
            .forward(&cpu, &vec![0.0; x], m, &mut vec![0.0; y], &mut scratch)
            .map_err(|e| e.to_string())
    };
    assert_eq!(run(6, 2, 4), Ok(()));
    assert_eq!(run(0, 0, 0), Ok(()));
    assert!(
        run(5, 2, 4)
            .unwrap_err()
            .contains("length of a product's input is 5, must be 6")
    );
    assert!(
        run(6, 2, 3)
            .unwrap_err()
            .contains("length of a product's output is 3, must be 4")
    );
}
