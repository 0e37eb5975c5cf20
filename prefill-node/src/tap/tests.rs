//! A tap and its job against a decode node in memory.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use config::TransferConfig;
use kv_transfer::core::Extent;
use kv_transfer::error::TransferError;
use kv_transfer::pusher::{Push, PushSettings};
use kv_transfer::transport::memory::{self, MemoryIncoming, MemoryOutgoing, ReceiveEnd};
use kv_transfer::transport::{Incoming, Outgoing};
use protocol::ids::{Epoch, RequestId, Ticket};
use protocol::kv::{Fingerprint, KvDtype, KvLayout};
use protocol::moved::HaveBlocks;
use protocol::transfer::{PushMessage, PushOpen, PushReply};
use protocol::window::Groups;
use runtime::clock::Clock;

use super::*;

/// Blocks of 4 tokens in 3 layers.
const LAYOUT: KvLayout = KvLayout {
    num_layers: 3,
    num_kv_heads: 1,
    head_dim: 8,
    block_tokens: 4,
    dtype: KvDtype::F16,
    latent: false,
    groups: Groups::ONE,
};
/// A prompt of 3 blocks.
const TOKENS: u32 = 12;
const BLOCKS: usize = 16;
/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// A tap, its backlog, and what the decode node receives.
struct Bench {
    pool: Arc<KvPool>,
    backlog: Backlog,
    tap: Option<Tap>,
    push: Push,
    incoming: MemoryIncoming<PushMessage>,
    /// The other direction of the stream: room comes back with what is acknowledged.
    outgoing: Option<MemoryOutgoing<PushReply>>,
    /// By layer and block of the sequence.
    received: BTreeMap<(u32, u32), Vec<u8>>,
}

/// The bytes of a block of the pool.
fn bytes_of(layer: u32, block: BlockId) -> Vec<u8> {
    (0..LAYOUT.layer_block_bytes())
        .map(|i| (layer as usize * 101 + block.0 as usize * 13 + i) as u8)
        .collect()
}

/// A pool in which every block differs.
fn pool() -> Arc<KvPool> {
    let pool = Arc::new(KvPool::new(LAYOUT, BLOCKS).unwrap());
    let blocks: Vec<BlockId> = (0..BLOCKS as u32).map(BlockId).collect();
    let writer = pool.writer(blocks.clone()).unwrap();
    for layer in 0..LAYOUT.num_layers {
        let bytes: Vec<u8> = blocks.iter().flat_map(|block| bytes_of(layer, *block)).collect();
        writer.write(layer, 1, 0, BLOCKS as u32, &bytes).unwrap();
    }
    writer.revoke();
    pool
}

/// A handoff with room for `staging_blocks` blocks of one layer that have not been taken by the network.
fn bench(staging_blocks: usize) -> Bench {
    let bytes = LAYOUT.layer_block_bytes();
    let transfer = TransferConfig {
        staging_bytes: staging_blocks * bytes,
        frame_bytes: 2 * bytes,
        ..TransferConfig::default()
    };
    let (push_end, (outgoing, incoming)): (_, ReceiveEnd) = memory::stream(1);
    let mut end = Some(push_end);
    let open = PushOpen {
        request: RequestId(1),
        ticket: Ticket(2),
        epoch: Epoch(3),
        fingerprint: Fingerprint(4),
    };
    let extent = Extent::of_one_group(LAYOUT.num_layers, 0, TOKENS / LAYOUT.block_tokens);
    let connect = move || {
        let end = end.take().ok_or(TransferError::Cancelled);
        async move { end }
    };
    let push = PushSettings::new(LAYOUT, &transfer)
        .unwrap()
        .start(connect, open, extent, Clock.now() + 2 * PATIENCE)
        .unwrap();
    let (pool, backlog) = (
        pool(),
        Backlog::new(PushSchedule::new(LAYOUT, TOKENS, HaveBlocks::NONE, bytes).unwrap()),
    );
    Bench {
        tap: Some(backlog.tap(Arc::clone(&pool), push.staging())),
        pool,
        backlog,
        push,
        incoming,
        outgoing: Some(outgoing),
        received: BTreeMap::new(),
    }
}

fn ids(blocks: &[u32]) -> Vec<BlockId> {
    blocks.iter().copied().map(BlockId).collect()
}

impl Bench {
    fn tap(&mut self) -> &mut Tap {
        self.tap.as_mut().unwrap()
    }

    /// A step from one number of computed tokens to another.
    fn step(&mut self, from: u32, to: u32, blocks: &[u32]) {
        self.tap().step_begins(from, &ids(blocks));
        for layer in 0..LAYOUT.num_layers {
            self.tap().layer_computed(KvPlace::in_one_group(layer), to);
        }
    }

    fn problem(&self) -> Option<String> {
        self.backlog.shared.lock().problem.clone()
    }

    /// Receives until `parts` (layer, block) pairs are there.
    async fn receive(&mut self, parts: usize) {
        let mut payload = BytesMut::new();
        let all = async {
            while self.received.len() < parts {
                let message = self.incoming.next().await.unwrap().expect("the push goes on");
                let PushMessage::Frame(frame) = message else { continue };
                self.incoming
                    .payload(frame.payload_len as usize, &mut payload)
                    .await
                    .unwrap();
                let below = frame.number + 1;
                let acknowledged = PushReply::Received { below };
                let replies = self.outgoing.as_mut().expect("the stream is open");
                replies.send(acknowledged, Bytes::new()).await.unwrap();
                let mut bytes = payload.chunks_exact(LAYOUT.layer_block_bytes());
                for layer in frame.first_layer..frame.first_layer + frame.layers {
                    for block in frame.first_block..frame.first_block + frame.blocks {
                        let part = bytes.next().expect("as many bytes as the header says");
                        let again = self.received.insert((layer, block), part.to_vec());
                        assert_eq!(again, None, "layer {layer} of block {block} came twice");
                    }
                }
            }
        };
        tokio::time::timeout(PATIENCE, all).await.expect("all parts come");
    }

    /// All of the prompt has come, out of the given blocks.
    fn assert_received(&self, blocks: &[u32]) {
        for (place, block) in blocks.iter().enumerate() {
            for layer in 0..LAYOUT.num_layers {
                assert_eq!(
                    self.received.get(&(layer, place as u32)),
                    Some(&bytes_of(layer, BlockId(*block))),
                    "layer {layer} of number {place}"
                );
            }
        }
    }
}

#[tokio::test]
async fn finished_layers_are_handed_over_within_the_step() {
    let mut bench = bench(100);
    bench.step(0, 8, &[5, 3]);
    bench.receive(6).await;
    bench.step(8, 12, &[5, 3, 9]);
    bench.receive(9).await;
    bench.assert_received(&[5, 3, 9]);
    assert!(
        bench.backlog.shared.lock().schedule.is_complete(),
        "nothing is left for the job"
    );
    assert_eq!(bench.problem(), None);
}

#[tokio::test]
async fn what_the_cache_had_and_what_found_no_room_is_sent_by_the_job() {
    // Room for less than a chunk, and the network takes nothing yet.
    let mut bench = bench(2);
    bench.step(4, 8, &[5, 3]);
    bench.step(8, 12, &[5, 3, 9]);
    assert!(!bench.backlog.shared.lock().schedule.is_complete(), "there was no room");
    let (backlog, pool, push) = (bench.backlog.clone(), Arc::clone(&bench.pool), bench.push.staging());
    let flush = tokio::spawn(async move { backlog.flush(&pool, &push).await });
    bench.receive(9).await;
    assert_eq!(flush.await.unwrap(), Ok(()));
    bench.assert_received(&[5, 3, 9]);
}

#[tokio::test]
async fn a_sequence_that_lost_its_blocks_is_sent_out_of_its_new_ones() {
    let mut bench = bench(2);
    // The cached block is due, and nobody has taken it when the blocks are lost.
    bench.step(4, 8, &[5, 3]);
    bench.tap().preempted();
    {
        let state = bench.backlog.shared.lock();
        let left = (state.schedule.early(), state.blocks.len());
        assert_eq!(left, (None, 0), "nothing may be read");
    }
    let received = bench.backlog.next();
    assert_eq!(received, Ok(None));
    bench.step(0, 12, &[7, 8, 10]);
    let (backlog, pool, push) = (bench.backlog.clone(), Arc::clone(&bench.pool), bench.push.staging());
    let flush = tokio::spawn(async move { backlog.flush(&pool, &push).await });
    bench.receive(9).await;
    assert_eq!(flush.await.unwrap(), Ok(()));
    // Some of the second block may have gone in the first attempt, out of block 3.
    for layer in 0..LAYOUT.num_layers {
        let second = &bench.received[&(layer, 1)];
        assert!([3, 8].iter().any(|block| *second == bytes_of(layer, BlockId(*block))));
    }
    for (place, block) in [(0, 7), (2, 10)] {
        assert_eq!(bench.received[&(2, place)], bytes_of(2, BlockId(block)));
    }
}

#[tokio::test]
async fn a_piece_that_is_not_due_any_more_is_not_copied() {
    let mut bench = bench(100);
    bench.tap().step_begins(8, &ids(&[5, 3, 9]));
    let piece = bench.backlog.next().unwrap().expect("cached blocks are due");
    let push = bench.push.staging();
    let room = push.reserve(bench.backlog.shared.part(piece)).await.unwrap();
    // Between room and copy.
    bench.tap().preempted();
    assert_eq!(bench.backlog.send(&bench.pool, piece, room), Ok(()));
    assert!(bench.backlog.shared.lock().schedule.early().is_none());
    // It is due again when it has been computed again, out of the new blocks.
    bench.step(0, 12, &[1, 2, 4]);
    let (backlog, pool) = (bench.backlog.clone(), Arc::clone(&bench.pool));
    let flush = tokio::spawn(async move { backlog.flush(&pool, &push).await });
    bench.receive(9).await;
    assert_eq!(flush.await.unwrap(), Ok(()));
    bench.assert_received(&[1, 2, 4]);
}

#[tokio::test]
async fn the_engine_waits_for_a_copy_under_way_before_it_goes_on() {
    for case in 0..3 {
        let mut bench = bench(100);
        bench.tap().step_begins(4, &ids(&[5, 3]));
        let shared = Arc::clone(&bench.backlog.shared);
        let reading = lock(&shared.reading);
        let mut tap = bench.tap.take().unwrap();
        let (done, finished) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::spawn(move || {
            match case {
                0 => tap.preempted(),
                // Another block at the same place.
                1 => tap.step_begins(4, &ids(&[6, 3])),
                _ => drop(tap),
            }
            done.send(()).unwrap();
        });
        let early = finished.recv_timeout(Duration::from_millis(50));
        assert!(early.is_err(), "case {case} did not wait");
        drop(reading);
        finished.recv_timeout(PATIENCE).expect("it goes on after the copy");
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn a_step_without_lost_blocks_does_not_wait_for_a_copy() {
    let mut bench = bench(100);
    bench.tap().step_begins(4, &ids(&[5, 3]));
    let shared = Arc::clone(&bench.backlog.shared);
    let _reading = lock(&shared.reading);
    // Waits for ever if it waits.
    bench.step(8, 12, &[5, 3, 9]);
}

#[tokio::test]
async fn the_job_hears_why_it_cannot_go_on() {
    let mut bench = bench(100);
    bench.tap = None;
    let push = bench.push.staging();
    let why = bench.backlog.send_early(&bench.pool, &push);
    let why = tokio::time::timeout(PATIENCE, why).await.expect("it ends");
    assert_eq!(why, "the sequence has left the engine");
    // The handoff is over: the compute thread says so once, and drops what is due.
    let mut bench = self::bench(100);
    bench.outgoing = None;
    let failed = tokio::time::timeout(PATIENCE, bench.push.failed());
    failed.await.expect("the peer has gone");
    bench.step(0, 12, &[5, 3, 9]);
    assert!(
        bench.problem().is_some_and(|problem| problem.contains("over")),
        "{:?}",
        bench.problem()
    );
}
