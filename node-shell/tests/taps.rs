//! Taps hear of lost blocks before anybody else writes them: what taps are told and what steps write, in one order.

use protocol::kv::KvPlace;
use protocol::window::Groups;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use engine::engine::Engine;
use engine::fake::{ScriptedModel, ScriptedRunner};
use engine::limits::EngineLimits;
use engine::plan::{BlockId, SequenceId, StepOutput, StepPlan};
use engine::runner::{LayerObserver, Runner, RunnerError};
use engine::sequence::SequenceSpec;
use node_shell::engine_thread::{EngineThread, SequenceEvent, StepTap, start};
use node_shell::handle::{AwaitedPrompt, EngineHandle, SequenceStream};
use runtime::clock::Clock;

const BLOCKS: usize = 160;
const BLOCK_TOKENS: usize = 4;
const MODEL: ScriptedModel = ScriptedModel::new(1000);
/// Sequences are numbered as they come: see [`Bench::two`].
const YOUNG: SequenceId = SequenceId(2);
/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

fn engine() -> Engine {
    Engine::new(EngineLimits {
        total_blocks: BLOCKS,
        block_tokens: BLOCK_TOKENS,
        max_num_seqs: 8,
        max_batch_tokens: 16,
        prefill_chunk_tokens: 8,
        max_seq_len: BLOCKS * BLOCK_TOKENS,
        mixed_prefill_tokens: 1_000,
        mixed_prefill_time: Duration::ZERO,
        prefix_cache: true,
        groups: Groups::ONE,
    })
    .expect("the limits are consistent")
}

fn spec(prompt: &[u32], max_tokens: u32) -> SequenceSpec {
    SequenceSpec::greedy(prompt.to_vec(), max_tokens)
}

/// What happens, in the order in which it does.
#[derive(Debug, PartialEq)]
enum Seen {
    /// The tap hears that a step begins: tokens computed, block table.
    Begins(u32, Vec<BlockId>),
    /// The tap hears how many tokens are computed, in some layer.
    Layer(u32),
    /// The tap hears that the blocks are lost.
    Preempted,
    /// The tap is dropped.
    Gone,
    /// A step writes rows of a sequence into a block.
    Writes(SequenceId, BlockId),
}

/// A runner that waits for a permit before every step, and notes what the step writes.
struct Witness {
    inner: ScriptedRunner,
    permits: Receiver<()>,
    log: SyncSender<Seen>,
}

impl Runner for Witness {
    fn execute(
        &mut self,
        plan: &StepPlan,
        observer: &mut dyn LayerObserver,
        output: &mut StepOutput,
    ) -> Result<(), RunnerError> {
        self.permits
            .recv()
            .map_err(|_| RunnerError::Failed("no more permits".to_owned()))?;
        for planned in &plan.sequences {
            let start = planned.start_position as usize;
            let table = &plan.block_ids[planned.blocks.range()];
            let last = (start + planned.rows.len as usize - 1) / BLOCK_TOKENS;
            for block in &table[start / BLOCK_TOKENS..=last] {
                // The log is long enough for a whole test.
                drop(self.log.try_send(Seen::Writes(planned.id, *block)));
            }
        }
        self.inner.execute(plan, observer, output)
    }
}

/// A tap that notes what it is told.
struct Notes(SyncSender<Seen>);

impl StepTap for Notes {
    fn step_begins(&mut self, computed_tokens: u32, blocks: &[BlockId]) {
        drop(self.0.try_send(Seen::Begins(computed_tokens, blocks.to_vec())));
    }

    fn layer_computed(&mut self, _place: KvPlace, computed_tokens: u32) {
        drop(self.0.try_send(Seen::Layer(computed_tokens)));
    }

    fn preempted(&mut self) {
        drop(self.0.try_send(Seen::Preempted));
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        drop(self.0.try_send(Seen::Gone));
    }
}

/// An engine whose steps wait for permits, and what happens on it.
struct Bench {
    handle: EngineHandle,
    thread: EngineThread,
    permits: SyncSender<()>,
    notes: SyncSender<Seen>,
    seen: Receiver<Seen>,
}

impl Bench {
    fn new() -> Self {
        let (notes, seen) = sync_channel(100_000);
        let (permits, allowed) = sync_channel(10_000);
        let runner = Witness {
            inner: ScriptedRunner::new(MODEL, BLOCKS, BLOCK_TOKENS),
            permits: allowed,
            log: notes.clone(),
        };
        let (handle, thread) = start(engine(), Box::new(runner), Clock, 64, None).expect("a thread");
        Self {
            handle,
            thread,
            permits,
            notes,
            seen,
        }
    }

    /// Starts two sequences in the same step; a tap follows the second. Steps have permits from then on.
    async fn two(&self, old: SequenceSpec, young: SequenceSpec) -> (SequenceStream, SequenceStream) {
        // The thread waits in the step of this one while the others' commands are in the queue.
        let mut first = self.handle.add(spec(&[999], 1), None).await.expect("added");
        let (handle, tap) = (self.handle.clone(), Notes(self.notes.clone()));
        let adding =
            tokio::spawn(async move { tokio::join!(handle.add(old, None), handle.add(young, Some(Box::new(tap)))) });
        tokio::task::yield_now().await;
        for _ in 0..10_000 {
            self.permits.try_send(()).expect("the runner lives");
        }
        first.next().await.expect("a token");
        let (old, young) = adding.await.expect("no panic");
        (old.expect("added"), young.expect("added"))
    }
}

async fn count(stream: &mut SequenceStream) -> usize {
    let mut tokens = 0;
    while let Some(event) = stream.next().await {
        let SequenceEvent::Token(event) = event else {
            panic!("failed: {event:?}")
        };
        tokens += 1;
        if event.finish.is_some() {
            break;
        }
    }
    tokens
}

#[tokio::test]
async fn a_tap_is_told_before_the_blocks_of_its_sequence_are_written_by_others() {
    let bench = Bench::new();
    // They grow beyond the forecast; the younger one loses its blocks.
    let (mut old, mut young) = bench.two(spec(&[1; 20], 400), spec(&[2; 20], 400)).await;
    let (a, b) = tokio::join!(count(&mut old), count(&mut young));
    assert_eq!((a, b), (400, 400));
    drop((old, young));
    let Bench {
        handle, thread, seen, ..
    } = bench;
    handle.close();
    assert!(thread.join());
    // `None` after a preemption: what is cached of it when it starts again varies.
    let (mut computed, mut preempted, mut gone) = (Some(0), 0, 0);
    // What the tap believes to be its sequence's.
    let mut believed: Vec<BlockId> = Vec::new();
    for seen in seen.try_iter() {
        match seen {
            Seen::Begins(start, blocks) => {
                assert_eq!(start, computed.unwrap_or(start));
                believed = blocks;
            }
            Seen::Layer(end) => computed = Some(end),
            Seen::Preempted => {
                (computed, preempted) = (None, preempted + 1);
                believed.clear();
            }
            Seen::Gone => {
                gone += 1;
                believed.clear();
            }
            Seen::Writes(writer, block) => assert_eq!(
                believed.contains(&block),
                writer == YOUNG,
                "{writer:?} writes {block:?}, and the tap believes {believed:?} to be its sequence's"
            ),
        }
    }
    assert!(preempted > 0, "nobody lost its blocks");
    assert_eq!(gone, 1);
}

#[tokio::test]
async fn a_tap_is_told_even_if_nobody_can_advance_then() {
    let bench = Bench::new();
    let everything = AwaitedPrompt {
        token_ids: vec![2; 20 * BLOCK_TOKENS],
        cache_key: 0,
        num_computed: 20 * BLOCK_TOKENS,
    };
    let reserved = bench.handle.reserve(everything, 1, 1).await.expect("reserved");
    // Two that say the same share every full block. When the pool has none left the younger one gives up its references,
    // which does not free any: nobody advances before the reservation is dropped.
    let (mut old, mut young) = bench.two(spec(&[1; 8], 600), spec(&[1; 8], 600)).await;
    let told = tokio::time::timeout(PATIENCE, async {
        loop {
            match bench.seen.try_recv() {
                Ok(Seen::Preempted) => return,
                Ok(_) => {}
                Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
            }
        }
    });
    told.await.expect("the tap is told while the reservation is there");
    let load = bench.handle.load();
    assert_eq!((load.free_blocks, load.cached_blocks), (0, 0), "{load:?}");
    drop(reserved);
    let (a, b) = tokio::join!(count(&mut old), count(&mut young));
    assert_eq!((a, b), (600, 600));
    bench.handle.close();
}
