//! The lane operations of every instruction set against those of plain Rust.
#![allow(unsafe_code, reason = "loads and stores are tested too")]

use std::array::from_fn;

use super::super::dispatch::{self, IntKernel, Kernel};
use super::super::lanes::{IntLanes, LANES, Lanes};
use super::super::math::{exp, exp2};
use super::{Numbers, bits, cpus};

const SPECIAL: [f32; 20] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    1e-40,
    -1e-45,
    65504.0,
    65519.9,
    65520.0,
    6.1e-5,
    -87.336_54,
    88.4,
];

/// Vectors of special and of ordinary values, in all sorts of pairs.
fn vectors() -> Vec<[f32; LANES]> {
    let mut numbers = Numbers::new(1);
    let mut vectors: Vec<[f32; LANES]> = (0..40)
        .map(|i| from_fn(|j| SPECIAL[(i * 7 + j * (i + 1)) % 20]))
        .collect();
    vectors.extend((0..40).map(|i| from_fn(|_| numbers.unit() * 10f32.powi(i % 9 - 4))));
    vectors
}

/// Results of all float operations on three vectors.
struct Floats([[f32; LANES]; 3]);

impl Kernel for Floats {
    type Output = Vec<f32>;
    #[inline(always)]
    fn run<S: Lanes>(self) -> Vec<f32> {
        let [a, b, c] = self.0.map(S::from_array);
        let mut results = vec![
            a.add(b),
            a.sub(b),
            a.mul(b),
            a.div(b),
            a.fma(b, c),
            a.min(b),
            a.max(b),
            exp(a),
        ];
        results.push(a.zero_where_less(b, c));
        results.push(a.add(S::splat(12_582_912.0)).pow2_of_shifted());
        let mut halves = [0u8; 32];
        // SAFETY: the array has 32 bytes.
        let read = unsafe {
            a.store_f16(halves.as_mut_ptr());
            S::load_f16(halves.as_ptr())
        };
        results.push(read);
        let (mut words, mut bytes) = ([0u8; 32], [0u8; 16]);
        // SAFETY: the arrays have 32 and 16 bytes.
        let read = unsafe {
            a.store_bf16(words.as_mut_ptr());
            a.min(S::splat(127.0))
                .max(S::splat(-127.0))
                .store_i8(bytes.as_mut_ptr());
            [S::load_bf16(words.as_ptr()), S::load_i8(bytes.as_ptr())]
        };
        results.extend(read);
        results.push(exp2(a.min(S::splat(0.0))));
        results.extend(S::transpose(from_fn(|i| {
            if i % 2 == 0 { a } else { b.add(S::splat(i as f32)) }
        })));
        let mut values: Vec<f32> = results.into_iter().flat_map(S::to_array).collect();
        values.extend([a.sum(), a.largest()]);
        values
    }
}

#[test]
fn float_operations_agree_with_plain_rust() {
    let vectors = vectors();
    let cpus = cpus();
    for i in 0..vectors.len() {
        let three = [0, 1, 3].map(|step| vectors[(i + step * 11) % vectors.len()]);
        let expected = bits(&dispatch::run(&cpus[0], Floats(three)));
        for cpu in &cpus[1..] {
            let found = bits(&dispatch::run(cpu, Floats(three)));
            let first = found.iter().zip(&expected).position(|(f, e)| f != e);
            assert_eq!(first, None, "level {}, vectors {three:?}", cpu.level().as_str());
        }
    }
}

#[test]
fn transposing_exchanges_rows_and_columns() {
    struct Transpose;
    impl Kernel for Transpose {
        type Output = [[f32; LANES]; LANES];
        #[inline(always)]
        fn run<S: Lanes>(self) -> Self::Output {
            S::transpose(from_fn(|i| S::from_array(from_fn(|j| (16 * i + j) as f32)))).map(S::to_array)
        }
    }
    for cpu in cpus() {
        let found = dispatch::run(&cpu, Transpose);
        for (i, j) in (0..LANES).flat_map(|i| (0..LANES).map(move |j| (i, j))) {
            assert!(
                (found[i][j] - (16 * j + i) as f32).abs() < 0.5,
                "level {}",
                cpu.level().as_str()
            );
        }
    }
}

/// Results of all integer operations on 64 bytes of weights and four activations.
struct Ints([u8; 64], i32);

#[repr(C, align(64))]
struct Aligned([u8; 64]);

impl IntKernel for Ints {
    type Output = Vec<f32>;
    #[inline(always)]
    fn run<S: IntLanes>(self) -> Vec<f32> {
        let (aligned, x) = (Aligned(self.0), self.1);
        // SAFETY: 64 bytes, aligned to 64.
        let w = unsafe { S::load_bytes(aligned.0.as_ptr()) };
        let sum: i32 = x.to_le_bytes().iter().map(|b| i32::from(b.cast_signed())).sum();
        let low = S::dot_small(S::int_zero(), S::low_nibbles(w), x);
        let high = S::dot_small(S::int_zero(), S::high_nibbles(w), x);
        // Bits of the bytes themselves, in another order.
        let bits = S::high_nibbles(w);
        let mut results = vec![
            S::to_f32(low),
            S::to_f32(high),
            S::to_f32(S::dot_offset(S::offset_start(-128 * sum), w, x)),
            S::to_f32(S::shifted::<5>(-sum)),
        ];
        for i in 0..8 {
            let bytes = S::with_bit(S::low_nibbles(w), w, i);
            results.push(S::to_f32(S::dot_small(low, bytes, x)));
        }
        for i in 0..4 {
            let bytes = S::with_two_bits(bits, w, i);
            results.push(S::to_f32(S::dot_small(S::int_zero(), bytes, x)));
        }
        // SAFETY: the array has more than 16 bytes.
        unsafe {
            results.push(S::load_u8(self.0.as_ptr()));
            results.push(S::load_i8(self.0.as_ptr()));
        }
        results.into_iter().flat_map(S::to_array).collect()
    }
}

#[test]
fn integer_products_are_exact() {
    let mut numbers = Numbers::new(2);
    let extremes = [
        [127, 127, 127, 127],
        [-127, -127, -127, -127],
        [127, -127, 127, -127],
        [0, 1, -1, 0],
    ];
    for case in 0..60 {
        let random = from_fn(|_| (numbers.unit() * 127.4) as i8);
        let x: [i8; 4] = extremes.get(case % 8).copied().unwrap_or(random);
        let w: [u8; 64] = match case % 5 {
            0 => [255; 64],
            1 => [0; 64],
            _ => from_fn(|_| (numbers.bits() >> 32) as u8),
        };
        let dot = |value: &dyn Fn(u8) -> i32| -> Vec<i32> {
            let four = |w: &[u8]| w.iter().zip(x).map(|(&w, x)| value(w) * i32::from(x)).sum();
            w.chunks_exact(4).map(four).collect()
        };
        let low = dot(&|w| i32::from(w & 15));
        let mut expected = vec![low.clone(), dot(&|w| i32::from(w >> 4)), dot(&|w| i32::from(w) - 128)];
        expected.push(vec![-32 * x.iter().map(|&x| i32::from(x)).sum::<i32>(); LANES]);
        for i in 0..8 {
            let fifth = dot(&|w| i32::from(w & 15) + 16 * i32::from(w >> i & 1));
            expected.push(fifth.iter().zip(&low).map(|(a, b)| a + b).collect());
        }
        for i in 0..4 {
            expected.push(dot(&|w| i32::from(w >> 4) + 16 * i32::from(w >> (2 * i) & 3)));
        }
        expected.push(w[..LANES].iter().map(|&w| i32::from(w)).collect());
        expected.push(w[..LANES].iter().map(|&w| i32::from(w.cast_signed())).collect());
        let expected: Vec<f32> = expected.concat().into_iter().map(|x| x as f32).collect();
        for cpu in cpus() {
            let found = dispatch::run_int(&cpu, Ints(w, i32::from_le_bytes(x.map(i8::cast_unsigned))));
            assert_eq!(found, expected, "level {}, w {w:?}, x {x:?}", cpu.level().as_str());
        }
    }
}

#[test]
fn power_of_two_is_close_and_exact_at_zero() {
    struct Exp2(f32);
    impl Kernel for Exp2 {
        type Output = f32;
        #[inline(always)]
        fn run<S: Lanes>(self) -> f32 {
            exp2(S::splat(self.0)).to_array()[0]
        }
    }
    let cpu = &cpus()[0];
    let exp2 = |x: f32| dispatch::run(cpu, Exp2(x));
    assert_eq!(
        [exp2(0.0), exp2(-0.0), exp2(-1.0), exp2(-126.0)],
        [1.0, 1.0, 0.5, f32::MIN_POSITIVE]
    );
    assert_eq!([exp2(-126.6), exp2(-1e30), exp2(f32::NEG_INFINITY)], [0.0; 3]);
    assert!(exp2(f32::NAN).is_nan());
    for i in -125_000..0 {
        let x = i as f32 / 1000.0;
        let expected = f64::from(x).exp2();
        let ulps = (f64::from(exp2(x)) - expected).abs() / (expected * f64::from(f32::EPSILON));
        assert!(ulps < 2.0, "2^{x}: {ulps} units in the last place off");
    }
}

#[test]
fn exponential_is_close_and_exact_at_zero() {
    struct Exp(f32);
    impl Kernel for Exp {
        type Output = f32;
        #[inline(always)]
        fn run<S: Lanes>(self) -> f32 {
            exp(S::splat(self.0)).to_array()[0]
        }
    }
    let cpu = &cpus()[0];
    let exp = |x: f32| dispatch::run(cpu, Exp(x));
    assert_eq!([exp(0.0), exp(-0.0)], [1.0, 1.0]);
    assert_eq!([exp(-88.0), exp(f32::NEG_INFINITY)], [0.0, 0.0]);
    assert!(exp(f32::NAN).is_nan());
    assert!((2.3e38..2.5e38).contains(&exp(1000.0)));
    for i in -87_000..88_000 {
        let x = i as f32 / 1000.0;
        let expected = f64::from(x).exp();
        let ulps = (f64::from(exp(x)) - expected).abs() / (expected * f64::from(f32::EPSILON));
        assert!(ulps < 2.0, "e^{x}: {ulps} units in the last place off");
    }
}
