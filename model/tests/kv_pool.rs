//! The KV pool against plain memory, its exclusion rules, and writers on several threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::plan::{BlockCopy, BlockId, GroupBlocks, PlannedSequence, SequenceId, Span, StepPlan};
use half::{bf16, f16};
use model::kernels::Cpu;
use model::kv_pool::{KvError, KvPool};
use protocol::kv::{KvDtype, KvLayout};
use protocol::window::Groups;

fn layout(dtype: KvDtype) -> KvLayout {
    KvLayout {
        num_layers: 3,
        num_kv_heads: 2,
        head_dim: 80,
        block_tokens: 4,
        dtype,
        latent: false,
        groups: Groups::ONE,
    }
}

fn pool(dtype: KvDtype, blocks: usize) -> Arc<KvPool> {
    Arc::new(KvPool::new(layout(dtype), blocks).unwrap())
}

fn ids(list: &[u32]) -> Vec<BlockId> {
    list.iter().copied().map(BlockId).collect()
}

/// The number stored for an element.
fn element(layer: usize, block: usize, half: usize, head: usize, token: usize, dim: usize) -> f32 {
    ((((layer * 5 + block) * 2 + half) * 3 + head) * 7 + token * 11 + dim) as f32 / 4.0
}

/// The canonical bytes of a (layer, block), written down plainly.
fn canonical(layout: &KvLayout, layer: usize, block: usize) -> Vec<u8> {
    let mut out = Vec::new();
    let mut push = |half, head, token, dim| {
        let x = element(layer, block, half, head, token, dim);
        match layout.dtype {
            KvDtype::F16 => out.extend_from_slice(&f16::from_f32(x).to_le_bytes()),
            KvDtype::Bf16 => out.extend_from_slice(&bf16::from_f32(x).to_le_bytes()),
            KvDtype::F32 => out.extend_from_slice(&x.to_le_bytes()),
            KvDtype::Int8 => panic!("see the kernels' own tests"),
        }
    };
    for head in 0..layout.num_kv_heads as usize {
        for (dim, token) in (0..80).flat_map(|dim| (0..4).map(move |token| (dim, token))) {
            push(0, head, token, dim);
        }
        for (token, dim) in (0..4).flat_map(|token| (0..80).map(move |dim| (token, dim))) {
            push(1, head, token, dim);
        }
    }
    out
}

/// Keys or values of a token, all heads.
fn row(layer: usize, block: usize, half: usize, slot: usize) -> Vec<f32> {
    let head = |head| (0..80).map(move |dim| element(layer, block, half, head, slot, dim));
    (0..2).flat_map(head).collect()
}

#[test]
fn tokens_are_stored_in_canonical_order() {
    let cpu = Cpu::new(1).unwrap();
    for dtype in [KvDtype::F16, KvDtype::Bf16, KvDtype::F32] {
        let pool = pool(dtype, 6);
        let layout = *pool.layout();
        let blocks = ids(&[4, 1]);
        let mut access = pool.claim(&blocks).unwrap();
        for layer in 0..3 {
            // Positions 0 to 7 of a sequence with blocks 4 and 1: a part of a block, the rest and more, the last.
            for positions in [0..3, 3..7, 7..8] {
                let rows = |half| -> Vec<f32> {
                    let of = |p: usize| row(layer, blocks[p / 4].0 as usize, half, p % 4);
                    positions.clone().flat_map(of).collect()
                };
                access.write_rows(
                    &cpu,
                    layer as u32,
                    (GroupBlocks::new(&blocks, 1, 0), positions.start),
                    (&rows(0), &rows(1)),
                );
            }
            access.expect_write(&cpu, layer as u32, blocks[0], 3);
        }
        for layer in 0..3 {
            for &block in &blocks {
                assert_eq!(
                    access.block(layer as u32, block),
                    canonical(&layout, layer, block.0 as usize)
                );
            }
        }
        // Within the step, on its thread, its blocks and idle ones can be copied.
        let inside = pool.gather(1..3, &ids(&[4, 0, 1])).unwrap();
        drop(access);
        let zero = vec![0; layout.layer_block_bytes()];
        let expected = [
            canonical(&layout, 1, 4),
            zero.clone(),
            canonical(&layout, 1, 1),
            canonical(&layout, 2, 4),
            zero,
            canonical(&layout, 2, 1),
        ]
        .concat();
        assert_eq!(inside, expected);
        assert_eq!(pool.gather(1..3, &ids(&[4, 0, 1])).unwrap(), expected);
    }
}

#[test]
fn the_arena_starts_on_a_huge_page() {
    for dtype in KvDtype::ALL {
        let pool = pool(dtype, 6);
        assert_eq!(pool.bytes(), 6 * pool.layout().block_bytes());
        let blocks = ids(&[0, 5]);
        let access = pool.claim(&blocks).unwrap();
        let first = access.block(0, blocks[0]).as_ptr() as usize;
        assert_eq!(first % (2 << 20), 0);
        let last = access.block(2, blocks[1]).as_ptr_range().end as usize;
        assert_eq!(last - first, pool.bytes());
    }
}

#[test]
fn what_was_gathered_can_be_written_elsewhere() {
    let from = pool(KvDtype::F16, 4);
    let source = from.writer(ids(&[3, 0])).unwrap();
    let bytes: Vec<u8> = (0..2 * from.layout().block_bytes())
        .map(|i| (i * 31 % 251) as u8)
        .collect();
    source.write(0, 3, 0, 2, &bytes).unwrap();
    source.revoke();
    let whole = from.gather(0..3, &ids(&[3, 0])).unwrap();
    assert_eq!(whole, bytes);

    let to = pool(KvDtype::F16, 9);
    let target = to.writer(ids(&[7, 2])).unwrap();
    for layer in 0..3 {
        for (index, block) in [3, 0].into_iter().enumerate() {
            let piece = from.gather(layer..layer + 1, &ids(&[block])).unwrap();
            target.write(layer, 1, index as u32, 1, &piece).unwrap();
        }
    }
    drop(target);
    assert_eq!(to.gather(0..3, &ids(&[7, 2])).unwrap(), whole);
}

#[test]
fn writes_outside_of_the_reservation_change_nothing() {
    let pool = pool(KvDtype::F16, 4);
    let chunk = pool.layout().layer_block_bytes();
    let writer = pool.writer(ids(&[1, 2])).unwrap();
    let payload = vec![7; 6 * chunk];
    let cases = [
        (
            writer.write(0, 3, 1, 2, &payload),
            KvError::OutsideReservation {
                start: 1,
                end: 3,
                owned: 2,
            },
        ),
        (
            writer.write(0, 3, u32::MAX, 2, &payload),
            KvError::OutsideReservation {
                start: u32::MAX,
                end: u64::from(u32::MAX) + 2,
                owned: 2,
            },
        ),
        (
            writer.write(1, 3, 0, 2, &payload),
            KvError::NoSuchLayers {
                start: 1,
                end: 4,
                total: 3,
            },
        ),
        (
            writer.write(2, u32::MAX, 0, 2, &payload),
            KvError::NoSuchLayers {
                start: 2,
                end: u64::from(u32::MAX) + 2,
                total: 3,
            },
        ),
        (
            writer.write(0, 3, 0, 2, &payload[1..]),
            KvError::PayloadLength {
                expected: 6 * chunk as u64,
                found: 6 * chunk as u64 - 1,
            },
        ),
        (
            writer.write(0, 2, 0, 2, &payload),
            KvError::PayloadLength {
                expected: 4 * chunk as u64,
                found: 6 * chunk as u64,
            },
        ),
    ];
    for (result, expected) in cases {
        assert_eq!(result, Err(expected));
    }
    writer.revoke();
    writer.revoke();
    assert_eq!(writer.write(0, 3, 0, 2, &payload), Err(KvError::Revoked));
    let all = pool.gather(0..3, &ids(&[0, 1, 2, 3])).unwrap();
    assert!(all.iter().all(|&b| b == 0));
}

#[test]
fn claims_exclude_each_other() {
    let pool = pool(KvDtype::F16, 8);
    let busy = |block, holder| KvError::Busy { block, holder };
    let handoff = "a handoff that writes it";
    let writer = pool.writer(ids(&[1, 2])).unwrap();
    assert_eq!(pool.writer(ids(&[3, 2])).unwrap_err(), busy(2, handoff));
    assert_eq!(pool.claim(&ids(&[4, 1])).unwrap_err(), busy(1, handoff));
    assert_eq!(pool.gather(0..1, &ids(&[5, 2])).unwrap_err(), busy(2, handoff));
    assert_eq!(pool.writer(ids(&[6, 6])).unwrap_err(), busy(6, handoff));
    assert_eq!(
        pool.writer(ids(&[0, 8])).unwrap_err(),
        KvError::NoSuchBlock { block: 8, total: 8 }
    );
    // Nothing of the refused claims is left.
    let blocks = ids(&[3, 4, 5, 6, 0, 4]);
    let step = pool.claim(&blocks).unwrap();
    assert_eq!(pool.claim(&ids(&[7])).unwrap_err(), KvError::StepRuns);
    assert_eq!(pool.writer(ids(&[4])).unwrap_err(), busy(4, "a running step"));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| (pool.gather(0..1, &ids(&[4])), pool.gather(0..1, &ids(&[7]))));
        let (held, idle) = other.join().unwrap();
        assert_eq!(held.unwrap_err(), busy(4, "a running step"));
        idle.unwrap();
    });
    drop(step);
    drop(pool.writer(ids(&[4])).unwrap());
    writer.revoke();
    assert_eq!(
        pool.gather(0..4, &ids(&[1])),
        Err(KvError::NoSuchLayers {
            start: 0,
            end: 4,
            total: 3
        })
    );
    assert_eq!(
        pool.gather(0..3, &ids(&[9])),
        Err(KvError::NoSuchBlock { block: 9, total: 8 })
    );
    assert_eq!(
        pool.claim(&ids(&[9])).unwrap_err(),
        KvError::NoSuchBlock { block: 9, total: 8 }
    );
    drop(pool.claim(&ids(&[1, 2, 7])).unwrap());
}

/// One row at position `start` of a sequence with the given blocks, of 4 tokens each.
fn planned(plan: &mut StepPlan, start: u32, blocks: &[u32]) {
    let (row, first) = (plan.token_ids.len() as u32, plan.block_ids.len() as u32);
    plan.token_ids.push(1);
    plan.block_ids.extend(ids(blocks));
    plan.sequences.push(PlannedSequence {
        id: SequenceId(u64::from(row)),
        owner: SequenceId(u64::from(row)),
        rows: Span { start: row, len: 1 },
        start_position: start,
        adapter: None,
        blocks: Span {
            start: first,
            len: blocks.len() as u32,
        },
        sample: None,
        targets: Span::default(),
        target_alternatives: 0,
    });
}

#[test]
fn a_shared_prefix_is_read_by_steps_and_copies_at_once_and_written_by_nobody() {
    let pool = pool(KvDtype::F16, 8);
    let tokens = pool.layout().block_tokens;
    let mut plan = StepPlan::default();
    planned(&mut plan, 2 * tokens, &[0, 1, 2]);
    planned(&mut plan, 2 * tokens + 1, &[0, 1, 3]);
    let copy = |blocks: &[u32]| std::thread::scope(|s| s.spawn(|| pool.gather(0..3, &ids(blocks))).join().unwrap());
    let step = pool.claim_plan(&plan).unwrap();
    copy(&[0, 1]).unwrap();
    let busy = |block, holder| KvError::Busy { block, holder };
    assert_eq!(copy(&[0, 2]).unwrap_err(), busy(2, "a running step"));
    assert_eq!(pool.writer(ids(&[1])).unwrap_err(), busy(1, "a running step"));
    pool.gather(0..3, &ids(&[0, 1, 2, 3])).unwrap();
    drop(step);
    // Nothing of the claims is left, and a sequence that writes what another one reads is refused.
    drop(pool.writer(ids(&[0, 1, 2, 3])).unwrap());
    planned(&mut plan, 1, &[1]);
    assert_eq!(pool.claim_plan(&plan).unwrap_err(), busy(1, "a running step"));
    drop(pool.writer(ids(&[0, 1, 2, 3])).unwrap());
}

fn copies(list: &[(u32, u32)]) -> Vec<BlockCopy> {
    let copy = |&(from, to)| BlockCopy {
        from: BlockId(from),
        to: BlockId(to),
        tokens: 1,
    };
    list.iter().map(copy).collect()
}

#[test]
fn blocks_are_copied_whole_in_all_layers_and_in_order() {
    for dtype in [KvDtype::F16, KvDtype::Int8] {
        let pool = pool(dtype, 8);
        let bytes = layout(dtype).block_bytes();
        for block in 0..4u8 {
            let payload: Vec<u8> = (0..bytes).map(|i| (i * 7 + i / 251) as u8 ^ (block << 5)).collect();
            let writer = pool.writer(ids(&[u32::from(block)])).unwrap();
            writer.write(0, 3, 0, 1, &payload).unwrap();
        }
        let before: Vec<_> = (0..4).map(|block| pool.gather(0..3, &ids(&[block])).unwrap()).collect();
        // Block 1 is overwritten after it was copied, and copied again.
        pool.copy_blocks(&copies(&[(1, 6), (2, 1), (1, 7)])).unwrap();
        let expected = [(0, 0), (1, 2), (2, 2), (3, 3), (6, 1), (7, 2)];
        for (block, origin) in expected {
            assert_eq!(
                pool.gather(0..3, &ids(&[block])).unwrap(),
                before[origin],
                "block {block}"
            );
        }
    }
}

#[test]
fn a_copy_keeps_out_of_blocks_that_others_hold() {
    let pool = pool(KvDtype::F16, 8);
    let copy = |from, to| pool.copy_blocks(&copies(&[(from, to)]));
    let busy = |block, holder| Err(KvError::Busy { block, holder });
    let writer = pool.writer(ids(&[2])).unwrap();
    let handoff = "a handoff that writes it";
    assert_eq!((copy(2, 3), copy(3, 2)), (busy(2, handoff), busy(2, handoff)));
    drop(writer);
    let five = ids(&[5]);
    let step = pool.claim(&five).unwrap();
    assert_eq!(copy(3, 5), busy(5, "a running step"));
    drop(step);
    assert_eq!(copy(4, 4), busy(4, "a copy being taken"));
    let missing = |block| Err(KvError::NoSuchBlock { block, total: 8 });
    assert_eq!((copy(8, 1), copy(1, 9)), (missing(8), missing(9)));
    // Nothing stays claimed.
    drop(pool.writer((0..8).map(BlockId).collect()).unwrap());
}

#[test]
#[should_panic(expected = "belongs to the running step")]
fn what_a_step_only_reads_it_cannot_write() {
    let pool = pool(KvDtype::F16, 8);
    let layout = *pool.layout();
    let width = (layout.num_kv_heads * layout.head_dim) as usize;
    let mut plan = StepPlan::default();
    planned(&mut plan, layout.block_tokens, &[0, 1]);
    let mut step = pool.claim_plan(&plan).unwrap();
    let row = vec![1.0; width];
    let cpu = Cpu::portable();
    step.write_rows(&cpu, 0, (GroupBlocks::new(&[BlockId(1)], 1, 0), 0), (&row, &row));
    step.write_rows(&cpu, 0, (GroupBlocks::new(&[BlockId(0)], 1, 0), 0), (&row, &row));
}

#[test]
fn impossible_pools_are_refused() {
    let nothing = KvLayout {
        head_dim: 0,
        ..layout(KvDtype::F16)
    };
    assert!(matches!(
        KvPool::new(nothing, 4),
        Err(KvError::Allocation {
            blocks: 4,
            bytes: 0,
            ..
        })
    ));
    assert!(matches!(
        KvPool::new(layout(KvDtype::F16), 0),
        Err(KvError::Allocation { .. })
    ));
    assert!(matches!(
        KvPool::new(layout(KvDtype::F16), usize::MAX),
        Err(KvError::Allocation { .. })
    ));
    let huge = KvLayout {
        num_layers: u32::MAX,
        ..layout(KvDtype::F32)
    };
    assert!(matches!(KvPool::new(huge, 1 << 20), Err(KvError::Allocation { .. })));
}

/// Four threads write frames of one handoff, a fifth revokes in the middle: afterwards the owner of the next claim sees
/// its own bytes only, whatever the late writers try.
#[test]
fn a_revoked_writer_never_writes_again() {
    let pool = pool(KvDtype::F16, 16);
    let chunk = pool.layout().layer_block_bytes();
    for round in 0..40_u8 {
        let blocks = ids(&[2, 3, 5, 7]);
        let writer = Arc::new(pool.writer(blocks.clone()).unwrap());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..4_u32 {
                let (writer, stop) = (Arc::clone(&writer), &stop);
                scope.spawn(move || {
                    let payload = vec![0xEE; chunk];
                    let mut refused = 0;
                    while !stop.load(Ordering::Relaxed) || refused == 0 {
                        match writer.write(thread % 3, 1, thread, 1, &payload) {
                            Ok(()) => assert_eq!(refused, 0, "a write after the revocation"),
                            Err(error) => {
                                assert_eq!(error, KvError::Revoked);
                                refused += 1;
                            }
                        }
                        std::thread::yield_now();
                    }
                });
            }
            if round % 2 == 0 {
                std::thread::yield_now();
            }
            writer.revoke();
            let next = pool.writer(blocks.clone()).unwrap();
            let mine = vec![round; 3 * 4 * chunk];
            next.write(0, 3, 0, 4, &mine).unwrap();
            next.revoke();
            for _ in 0..3 {
                assert_eq!(pool.gather(0..3, &blocks).unwrap(), mine);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
