//! Rounds rows of activations to int8 blocks.
#![allow(unsafe_code, reason = "threads write disjoint rows of one operand")]

use std::mem::MaybeUninit;

use super::int8_block::{GROUP, Int8Block, block_index};
use super::lanes::Lanes;
use super::pack::BLOCK;
use super::shared::SharedMut;

/// Blocks that are rounded together, if a CPU has a way to do that.
const TOGETHER: usize = 8;

/// Rounds a row of `32 * blocks` values to int8 blocks in `out`, all rows' activations: in one pass, or in two, of which
/// the second rounds what the first has left over. The bits are those of [`Int8Block::new`] at every level.
///
/// # Panics
/// If the blocks are not in `out`.
///
/// # Safety
/// No other thread may use the blocks of this row.
#[inline(always)]
pub(super) unsafe fn quantise_row<S: Lanes>(x: &[f32], row: usize, passes: usize, out: &SharedMut<'_, Int8Block>) {
    let (blocks, _) = x.as_chunks::<BLOCK>();
    let last = block_index(row, (passes - 1, passes), blocks.len(), blocks.len());
    assert!(last < out.len() + GROUP, "room for the row's blocks");
    let mut rest = MaybeUninit::<[[f32; BLOCK]; TOGETHER]>::uninit();
    for start in (0..blocks.len()).step_by(TOGETHER) {
        // The last ones go together with some that are done already: they come out the same.
        let start = start.min(blocks.len().saturating_sub(TOGETHER));
        let part = &blocks[start..blocks.len().min(start + TOGETHER)];
        let first = block_index(row, (0, passes), start, blocks.len());
        let second = block_index(row, (1, passes), start, blocks.len());
        let (first, second) = (out.start().wrapping_add(first), out.start().wrapping_add(second));
        let left = rest.as_mut_ptr().cast::<f32>();
        let (mut from, mut to, mut done) = (part.as_ptr().cast::<f32>(), first, part.len() == TOGETHER);
        // SAFETY: eight blocks are read; those written are the row's, which the caller vouches for.
        unsafe {
            if done && passes == 2 {
                done = S::round_eight::<true>(from, first, left);
                (from, to) = (left.cast_const(), second);
            }
            done = done && S::round_eight::<false>(from, to, left);
        }
        if done {
            continue;
        }
        for (i, x) in part.iter().enumerate() {
            let block = Int8Block::new(x);
            // SAFETY: as above.
            unsafe {
                first.wrapping_add(i * GROUP).write(block);
                if passes == 2 {
                    second
                        .wrapping_add(i * GROUP)
                        .write(Int8Block::new(&block.remainder(x)));
                }
            }
        }
    }
}
