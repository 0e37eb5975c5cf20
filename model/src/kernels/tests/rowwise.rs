//! Norms, rope, activations, softmax: against f64, and every instruction set against the portable one.

use super::super::{
    Cpu, KernelError, RopeStyle, RopeTable, add, add_bias, add_scaled, argmax, gelu_tanh_mul, log_softmax, log_sum_exp,
    rms_norm, rms_norm_in_place, rope, scale_and_cap, sigmoid, silu_mul, softmax,
};
use super::{Numbers, bits, cpus, relative_error};

/// Runs a kernel at every level; all must agree with the portable one, which is returned.
fn everywhere(run: impl Fn(&Cpu) -> Result<Vec<f32>, KernelError>) -> Vec<f32> {
    let cpus = cpus();
    let expected = run(&cpus[0]).unwrap();
    for cpu in &cpus[1..] {
        assert_eq!(bits(&run(cpu).unwrap()), bits(&expected), "{}", cpu.level().as_str());
    }
    expected
}

#[test]
fn rms_norm_divides_by_the_root_mean_square() {
    let mut numbers = Numbers::new(31);
    for (rows, dim) in [(1, 1), (3, 16), (5, 40), (2, 576)] {
        let (x, weight, eps) = (numbers.units(rows * dim), numbers.units(dim), 1e-5f32);
        let mut expected = Vec::new();
        for row in x.chunks_exact(dim) {
            let mean = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / dim as f64;
            let root = (mean + f64::from(eps)).sqrt();
            expected.extend(
                row.iter()
                    .zip(&weight)
                    .map(|(&x, &w)| f64::from(x) / root * f64::from(w)),
            );
        }
        let found = everywhere(|cpu| {
            let mut out = vec![0.0; x.len()];
            rms_norm(cpu, &x, &weight, eps, &mut out)?;
            Ok(out)
        });
        assert!(relative_error(&found, &expected) < 3e-7, "{rows} rows of {dim}");
        let in_place = everywhere(|cpu| {
            let mut out = x.clone();
            rms_norm_in_place(cpu, &mut out, &weight, eps)?;
            Ok(out)
        });
        assert_eq!(bits(&in_place), bits(&found));
        let mut threads = x.clone();
        rms_norm_in_place(&Cpu::new(3).unwrap(), &mut threads, &weight, eps).unwrap();
        assert_eq!(bits(&threads), bits(&found));
        // A row is the same alone.
        let last = everywhere(|cpu| {
            let mut out = x[(rows - 1) * dim..].to_vec();
            rms_norm_in_place(cpu, &mut out, &weight, eps)?;
            Ok(out)
        });
        assert_eq!(bits(&last), bits(&found[(rows - 1) * dim..]));
    }
    let cpu = Cpu::new(1).unwrap();
    let error = rms_norm_in_place(&cpu, &mut [0.0; 5], &[1.0; 2], 0.0)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("length of the last row of a norm is 1, must be 2"),
        "{error}"
    );
}

#[test]
fn rope_turns_pairs_by_the_angle_of_the_position() {
    let mut numbers = Numbers::new(32);
    let (rows, heads, dim, width) = (4, 3, 20, 16);
    let frequencies = RopeTable::plain_frequencies(10_000.0, width);
    assert_eq!(frequencies.len(), width / 2);
    assert!((frequencies[1] - 10_000f64.powf(-2.0 / 16.0)).abs() < 1e-15);
    let table = RopeTable::new(&frequencies, 2000, 1.5);
    let positions = [0u32, 1, 777, 1999];
    let x = numbers.units(rows * heads * dim);
    for style in [RopeStyle::Interleaved, RopeStyle::Half] {
        let mut expected: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        for (i, head) in expected.chunks_exact_mut(dim).enumerate() {
            for (pair, frequency) in frequencies.iter().enumerate() {
                let (a, b) = match style {
                    RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
                    RopeStyle::Half => (pair, pair + width / 2),
                };
                let (sin, cos) = (f64::from(positions[i / heads]) * frequency).sin_cos();
                (head[a], head[b]) = (
                    1.5 * (head[a] * cos - head[b] * sin),
                    1.5 * (head[a] * sin + head[b] * cos),
                );
            }
        }
        let found = everywhere(|cpu| {
            let mut x = x.clone();
            rope(cpu, &table, style, &mut x, dim, &positions)?;
            Ok(x)
        });
        assert!(relative_error(&found, &expected) < 1e-6, "{style:?}");
        // What is beyond the rotated width stays.
        for (head, before) in found.chunks_exact(dim).zip(x.chunks_exact(dim)) {
            assert_eq!(head[width..], before[width..]);
        }
        // A row is the same alone.
        let last = everywhere(|cpu| {
            let mut x = x[3 * heads * dim..].to_vec();
            rope(cpu, &table, style, &mut x, dim, &positions[3..])?;
            Ok(x)
        });
        assert_eq!(bits(&last), bits(&found[3 * heads * dim..]));
    }
}

#[test]
fn rope_refuses_what_does_not_fit() {
    let cpu = Cpu::new(1).unwrap();
    let table = RopeTable::new(&[1.0, 0.1], 10, 1.0);
    assert_eq!((table.width(), table.positions()), (4, 10));
    let run = |x: usize, dim: usize, positions: &[u32]| {
        rope(&cpu, &table, RopeStyle::Half, &mut vec![0.0; x], dim, positions).map_err(|e| e.to_string())
    };
    assert_eq!(run(16, 4, &[0, 9]), Ok(()));
    assert_eq!(run(0, 4, &[]), Ok(()));
    assert!(
        run(16, 4, &[0, 10])
            .unwrap_err()
            .contains("a position is 10, must be below")
    );
    assert!(run(16, 3, &[0, 1]).unwrap_err().contains("width of a head is 3"));
    assert!(
        run(15, 4, &[0, 1])
            .unwrap_err()
            .contains("length of rope's input is 15")
    );
    assert!(
        run(4, 4, &[])
            .unwrap_err()
            .contains("length of rope's input is 4, must be 0")
    );
}

#[test]
fn gated_activations_follow_their_formulas() {
    let mut numbers = Numbers::new(33);
    let gate: Vec<f32> = numbers.units(1001).iter().map(|x| x * 12.0).collect();
    let up = numbers.units(1001);
    let silu = |g: f64| g / (1.0 + (-g).exp());
    let gelu = |g: f64| 0.5 * g * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3))).tanh());
    let expect = |f: &dyn Fn(f64) -> f64| -> Vec<f64> {
        gate.iter()
            .zip(&up)
            .map(|(&g, &u)| f(f64::from(g)) * f64::from(u))
            .collect()
    };
    let found = everywhere(|cpu| {
        let mut gate = gate.clone();
        silu_mul(cpu, &mut gate, &up)?;
        Ok(gate)
    });
    assert!(relative_error(&found, &expect(&silu)) < 3e-7);
    let found = everywhere(|cpu| {
        let mut gate = gate.clone();
        gelu_tanh_mul(cpu, &mut gate, &up)?;
        Ok(gate)
    });
    assert!(relative_error(&found, &expect(&gelu)) < 3e-7);
    // Far out: no infinity, no NaN.
    let extreme = everywhere(|cpu| {
        let mut gate = [1e4, -1e4, 200.0, -200.0];
        silu_mul(cpu, &mut gate, &[1.0; 4])?;
        Ok(gate.to_vec())
    });
    assert_eq!((extreme[0], extreme[2]), (1e4, 200.0));
    assert!(extreme[1].abs() < 1e-30 && extreme[3].abs() < 1e-30, "{extreme:?}");
    let cpu = Cpu::new(1).unwrap();
    assert!(silu_mul(&cpu, &mut [0.0; 2], &[0.0; 3]).is_err());
    assert!(gelu_tanh_mul(&cpu, &mut [0.0; 2], &[0.0; 3]).is_err());
}

#[test]
fn additions_are_by_element_and_by_row() {
    let found = everywhere(|cpu| {
        let mut x = (0..40u8).map(f32::from).collect::<Vec<_>>();
        add(cpu, &mut x, &[0.5; 40])?;
        add_bias(cpu, &mut x, &[1.0, 2.0, 3.0, 4.0])?;
        Ok(x)
    });
    for (i, x) in found.iter().enumerate() {
        assert_eq!(*x, i as f32 + 0.5 + (i % 4 + 1) as f32);
    }
    let cpu = Cpu::new(1).unwrap();
    assert!(add(&cpu, &mut [0.0; 2], &[0.0; 3]).is_err());
    assert!(add_bias(&cpu, &mut [0.0; 7], &[0.0; 3]).is_err());
    assert!(add_bias(&cpu, &mut [0.0; 7], &[]).is_err());
}

#[test]
fn log_probabilities_sum_to_one() {
    let mut numbers = Numbers::new(34);
    for count in [1, 5, 16, 1024, 3001] {
        let x: Vec<f32> = numbers.units(count).iter().map(|x| x * 30.0 + 200.0).collect();
        let sum = x.iter().map(|&x| f64::from(x - 200.0).exp()).sum::<f64>().ln() + 200.0;
        let expected: Vec<f64> = x.iter().map(|&x| f64::from(x) - sum).collect();
        let found = everywhere(|cpu| {
            let mut out = vec![0.0; count];
            log_softmax(cpu, &x, &mut out)?;
            Ok(out)
        });
        let worst = found
            .iter()
            .zip(&expected)
            .map(|(&f, &e)| (f64::from(f) - e).abs())
            .fold(0.0, f64::max);
        assert!(worst < 2e-5, "{count} values: {worst}");
        let probabilities = everywhere(|cpu| {
            let mut out = x.clone();
            softmax(cpu, &mut out);
            Ok(out)
        });
        let expected: Vec<f64> = expected.iter().map(|e| e.exp()).collect();
        assert!(relative_error(&probabilities, &expected) < 1e-6);
    }
    let cpu = Cpu::new(1).unwrap();
    assert_eq!(log_sum_exp(&cpu, &[]), f64::NEG_INFINITY);
    assert_eq!(log_sum_exp(&cpu, &[f32::NEG_INFINITY, 2.0]), 2.0);
    assert!(log_sum_exp(&cpu, &[0.0, f32::NAN, 1.0]).is_nan());
    assert!(log_softmax(&cpu, &[0.0; 2], &mut [0.0; 3]).is_err());
}

#[test]
fn argmax_takes_the_first_of_equals() {
    assert_eq!(argmax(&[]), None);
    assert_eq!(argmax(&[f32::NAN]), None);
    assert_eq!(argmax(&[f32::NEG_INFINITY]), Some(0));
    assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), Some(1));
    assert_eq!(argmax(&[f32::NAN, -1.0, f32::NAN, -0.5]), Some(3));
    let mut long = vec![0.0; 1000];
    (long[517], long[900]) = (1.0, 1.0);
    assert_eq!(argmax(&long), Some(517));
}

#[test]
fn scales_caps_and_sigmoids_are_those_of_plain_code() {
    let mut numbers = Numbers::new(39);
    let x: Vec<f32> = numbers.units(83).iter().map(|x| x * 40.0).collect();
    let y = numbers.units(83);
    let sum = everywhere(|cpu| {
        let mut x = x.clone();
        add_scaled(cpu, &mut x, &y, 0.37)?;
        Ok(x)
    });
    let plain: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + 0.37 * y).collect();
    assert_eq!(bits(&sum), bits(&plain));
    assert!(add_scaled(&Cpu::portable(), &mut [0.0], &[], 1.0).is_err());

    for cap in [None, Some(30.0_f32), Some(0.5)] {
        let found = everywhere(|cpu| {
            let mut x = x.clone();
            scale_and_cap(cpu, &mut x, 0.25, cap);
            Ok(x)
        });
        for (found, &x) in found.iter().zip(&x) {
            let scaled = f64::from(x) * 0.25;
            let expected = cap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh());
            let limit = 3e-7 * f64::from(cap.unwrap_or(10.0));
            assert!(
                (f64::from(*found) - expected).abs() < limit,
                "{cap:?}: {found}, {expected}"
            );
        }
    }

    let found = everywhere(|cpu| {
        let mut x = x.clone();
        sigmoid(cpu, &mut x);
        Ok(x)
    });
    let expected: Vec<f64> = x.iter().map(|&x| 1.0 / (1.0 + (-f64::from(x)).exp())).collect();
    assert!(relative_error(&found, &expected) < 2e-7);
}
