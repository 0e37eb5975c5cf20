//! Rounding of rows, at every level, against blocks rounded one by one.
#![allow(unsafe_code, reason = "blocks are written through a shared pointer")]

use super::super::dispatch::{self, Kernel};
use super::super::int8_block::{GROUP, Int8Block, block_index};
use super::super::lanes::Lanes;
use super::super::rounding::quantise_row;
use super::super::shared::SharedMut;
use super::{Numbers, cpus};

/// Everything in a block, as bits.
fn content(block: &Int8Block) -> (Vec<i8>, [u32; 2], [i32; 2], [i32; 2], u32) {
    // Which NaN comes out is not defined.
    let bits = |x: f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
    (
        block.qs.to_vec(),
        block.d.map(bits),
        block.negative,
        block.negative_128,
        bits(block.scaled_sum),
    )
}

/// Rounds one row.
struct Round<'a> {
    x: &'a [f32],
    row: usize,
    passes: usize,
    out: SharedMut<'a, Int8Block>,
}

impl Kernel for Round<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        // SAFETY: no other thread has the blocks.
        unsafe { quantise_row::<S>(self.x, self.row, self.passes, &self.out) };
    }
}

/// A row with blocks of ordinary numbers, of zeros, of tiny and huge ones, of one number, and of exact ties.
fn row(blocks: usize, numbers: &mut Numbers) -> Vec<f32> {
    let mut x = numbers.units(32 * blocks);
    for (i, half) in x.chunks_exact_mut(16).enumerate() {
        match i % 13 {
            1 => half.fill(0.0),
            3 => half.iter_mut().for_each(|x| *x *= 1e-32),
            4 => half.iter_mut().for_each(|x| *x *= 1e37),
            6 => half.fill(-3.25),
            8 => half.iter_mut().for_each(|x| *x = (*x * 254.0).round() / 2.0),
            9 => half.fill(-0.0),
            10 => half[15] = -1e30,
            11 => half.iter_mut().for_each(|x| *x *= 1e-41),
            _ => {}
        }
        if i % 13 == 8 {
            half[3] = 127.0;
        }
    }
    x
}

fn check(x: &[f32], what: &str) {
    let blocks = x.len() / 32;
    for (cpu, passes, row) in cpus()
        .iter()
        .flat_map(|cpu| [(cpu, 1, 0_usize), (cpu, 1, 5), (cpu, 2, 7), (cpu, 2, 11)])
    {
        let mut out = vec![Int8Block::ZERO; (row + 1).next_multiple_of(GROUP) * passes * blocks];
        let kernel = Round {
            x,
            row,
            passes,
            out: SharedMut::new(&mut out),
        };
        dispatch::run(cpu, kernel);
        for (i, x) in x.as_chunks::<32>().0.iter().enumerate() {
            let first = Int8Block::new(x);
            let second = Int8Block::new(&first.remainder(x));
            for (pass, expected) in [first, second].iter().enumerate().take(passes) {
                let found = &out[block_index(row, (pass, passes), i, blocks)];
                assert_eq!(
                    content(found),
                    content(expected),
                    "{what}, block {i} of {blocks}, pass {pass} of {passes}, row {row}, {}",
                    cpu.level().as_str()
                );
            }
        }
        // Rows beside it are left alone.
        let written = out.iter().filter(|block| block.qs.iter().any(|&q| q != 0)).count();
        assert!(written <= passes * blocks, "{written} blocks written");
    }
}

#[test]
fn rows_are_rounded_as_their_blocks() {
    let mut numbers = Numbers::new(21);
    for blocks in (1..=20).chain([64]) {
        check(&row(blocks, &mut numbers), "finite");
    }
}

#[test]
fn what_is_not_finite_is_rounded_as_its_blocks() {
    let mut numbers = Numbers::new(22);
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 31, 200, 255, 256, 600] {
            let mut x = row(20, &mut numbers);
            x[at] = poison;
            check(&x, "not finite");
        }
    }
}
