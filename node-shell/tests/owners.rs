//! Whose the blocks are: what the engine thread knows, and what a coordinator is told of it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use engine::engine::Engine;
use engine::limits::EngineLimits;
use engine::owners::{Holding, JobName, Origin, Ownership};
use engine::plan::{StepOutput, StepPlan};
use engine::runner::{LayerObserver, Runner, RunnerError};
use engine::sequence::SequenceSpec;
use engine::stats::EngineStats;
use node_shell::engine_thread::{EngineThread, start};
use node_shell::handle::{AwaitedPrompt, EngineHandle};
use node_shell::job_list::JobList;
use protocol::blocks::{JobKey, JobKind, MAX_BLOCK_OWNERS, MAX_BLOCK_PROBLEMS, MAX_PROBLEM_BYTES, OwnerKind};
use protocol::ids::{Epoch, NodeId, RequestId};
use protocol::kv::KvPlace;
use protocol::sampling::SampledToken;
use protocol::window::Groups;
use runtime::clock::Clock;

const BLOCKS: usize = 64;

fn origin(start: Instant, after_ms: u64, request: u128, coordinator: &str) -> Origin {
    let key = JobKey {
        request: RequestId(request),
        epoch: Epoch(1),
        kind: JobKind::Decode,
    };
    Origin {
        since: Some(start + Duration::from_millis(after_ms)),
        job: Some(Arc::new(JobName {
            key,
            coordinator: NodeId(coordinator.to_owned()),
        })),
    }
}

fn holding(origin: Origin, blocks: u32) -> Holding {
    Holding {
        origin,
        kind: OwnerKind::Sequence,
        parts: 1,
        blocks,
        counted: blocks,
    }
}

fn ownership(holdings: Vec<Holding>) -> Ownership {
    Ownership {
        stats: EngineStats::default(),
        holdings,
        unowned: 0,
        unbooked: 0,
        problems: Vec::new(),
    }
}

#[test]
fn jobs_are_told_once_and_others_coordinators_are_named() {
    let start = Clock.now();
    let (mine, theirs, waits) = (
        origin(start, 0, 1, "c0"),
        origin(start, 40, 2, "c1"),
        origin(start, 70, 3, "c0"),
    );
    let of = ownership(vec![
        holding(mine.clone(), 3),
        holding(theirs, 2),
        holding(Origin::default(), 1),
    ]);
    let answer = of.answer(
        7,
        start + Duration::from_millis(100),
        &NodeId("c0".to_owned()),
        [mine, waits],
    );
    let shown = answer.owners.iter().map(|owner| {
        let request = owner.job.map(|job| job.request.0);
        let elsewhere = owner.elsewhere.as_ref().map(|name| name.0.as_str());
        (request, elsewhere, owner.kind, owner.blocks, owner.age_ms)
    });
    let shown: Vec<_> = shown.collect();
    assert_eq!(
        shown,
        [
            (Some(1), None, OwnerKind::Sequence, 3, Some(100)),
            (Some(2), Some("c1"), OwnerKind::Sequence, 2, Some(60)),
            (None, None, OwnerKind::Sequence, 1, None),
            (Some(3), None, OwnerKind::Job, 0, Some(30)),
        ]
    );
    assert_eq!(answer.number, 7);
}

#[test]
fn what_is_too_much_is_summed_up() {
    let start = Clock.now();
    let more = 5;
    let holdings = (0..MAX_BLOCK_OWNERS + more).map(|i| holding(origin(start, i as u64, i as u128, "c0"), 2));
    let mut of = ownership(holdings.collect());
    of.problems = vec!["ä".repeat(MAX_PROBLEM_BYTES); MAX_BLOCK_PROBLEMS + 1];
    let answer = of.answer(1, start, &NodeId("c0".to_owned()), []);
    assert_eq!(answer.excess(), None);
    assert_eq!(answer.owners.len(), MAX_BLOCK_OWNERS);
    assert_eq!(
        (answer.further_owners, answer.further_blocks),
        (more as u32, 2 * more as u32)
    );
    assert_eq!(answer.problems.len(), MAX_BLOCK_PROBLEMS);
}

fn limits() -> EngineLimits {
    EngineLimits {
        total_blocks: BLOCKS,
        block_tokens: 4,
        max_num_seqs: 8,
        max_batch_tokens: 64,
        prefill_chunk_tokens: 64,
        max_seq_len: 128,
        mixed_prefill_tokens: 1_000,
        mixed_prefill_time: Duration::from_secs(1),
        prefix_cache: true,
        groups: Groups::ONE,
    }
}

fn spec(first: u32, tokens: u32) -> SequenceSpec {
    SequenceSpec::greedy((first..first + tokens).collect(), 20)
}

/// What an owner is shown as: request, kind, parts, counted blocks.
type Shown = (Option<u128>, OwnerKind, u32, u32);

async fn shown(handle: &EngineHandle) -> Vec<Shown> {
    let of = handle.ownership().await.expect("the engine runs");
    assert_eq!(of.problems, [""; 0]);
    assert_eq!((of.unowned, of.unbooked), (0, 0));
    let counted: u32 = of.holdings.iter().map(|holding| holding.counted).sum();
    assert_eq!(counted as usize, of.stats.owned_blocks);
    let (free, cached, owned) = (of.stats.free_blocks, of.stats.cached_blocks, of.stats.owned_blocks);
    assert_eq!(free + cached + owned, BLOCKS);
    let show = |holding: &Holding| {
        let request = holding.origin.job.as_ref().map(|job| job.key.request.0);
        (request, holding.kind, holding.parts, holding.counted)
    };
    of.holdings.iter().map(show).collect()
}

/// Asks while a step is being computed, and lets it end.
async fn after_a_step(handle: &EngineHandle, permits: &SyncSender<()>) -> Vec<Shown> {
    let (answered, ()) = tokio::join!(shown(handle), async { permits.send(()).expect("room") });
    answered
}

fn job(request: u128) -> Arc<JobName> {
    let job = origin(Clock.now(), 0, request, "c0").job;
    job.expect("it has one")
}

/// Takes a step for each permit; every token is the same, and no KV is looked at.
struct Gated(Receiver<()>);

impl Runner for Gated {
    fn execute(
        &mut self,
        plan: &StepPlan,
        observer: &mut dyn LayerObserver,
        output: &mut StepOutput,
    ) -> Result<(), RunnerError> {
        let permit = self.0.recv();
        permit.map_err(|error| RunnerError::Failed(error.to_string()))?;
        observer.layer_computed(KvPlace::in_one_group(0));
        output.clear();
        for planned in &plan.sequences {
            let sampled = planned.sample.as_ref().map(|sample| SampledToken {
                position: sample.output_position,
                token: 7,
                logprob: 0.0,
                raw_logprob: 0.0,
                top_logprobs: Vec::new(),
            });
            output.sampled.extend(sampled.map(|token| (planned.id, token)));
        }
        Ok(())
    }
}

fn gated() -> (EngineHandle, EngineThread, SyncSender<()>) {
    let engine = Engine::new(limits()).expect("the limits are consistent");
    let (permits, receiver) = sync_channel(1_000);
    let (handle, thread) = start(engine, Box::new(Gated(receiver)), Clock, 64, None).expect("a thread");
    (handle, thread, permits)
}

#[tokio::test]
async fn what_a_job_has_is_named_from_its_reservation_to_its_end() {
    let (handle, _thread, permits) = gated();
    let (reserves, computes) = (handle.for_job(&job(1)), handle.for_job(&job(2)));
    let prompt = AwaitedPrompt {
        token_ids: (500..510).collect(),
        cache_key: 0,
        num_computed: 10,
    };
    let reserved = reserves.reserve(prompt, 20, 2).await.expect("room");
    assert_eq!(shown(&handle).await, [(Some(1), OwnerKind::Reservation, 1, 3)]);
    let specs = vec![spec(500, 11), spec(500, 11)];
    let committed = reserves.commit_choices(reserved, specs, 10).await.expect("committed");
    // The thread is in the first step now.
    let answered = after_a_step(&handle, &permits).await;
    assert_eq!(answered.len(), 1, "{answered:?}");
    // Two full blocks are shared, and each has written into one of its own.
    assert_eq!(answered[0], (Some(1), OwnerKind::Sequence, 2, 4));
    let alone = computes.add(spec(700, 9), None);
    let (alone, _) = tokio::join!(alone, async { permits.send(()).expect("room") });
    let alone = alone.expect("added");
    let answered = after_a_step(&handle, &permits).await;
    // How much of its prompt the first step takes beside the others is the scheduler's business.
    let (whose, kind, sequences, blocks) = answered[1];
    assert_eq!(
        (whose, kind, sequences),
        (Some(2), OwnerKind::Sequence, 1),
        "{answered:?}"
    );
    assert!((1..=3).contains(&blocks), "{answered:?}");
    assert_eq!(answered[0].0, Some(1));
    drop((alone, committed));
    (0..100).for_each(|_| permits.send(()).expect("room"));
    assert_eq!(shown(&handle).await, []);
}

#[tokio::test]
async fn a_sequence_of_no_job_is_shown_as_one() {
    let (handle, _thread, permits) = gated();
    let nobodys = handle.add(spec(1, 9), None).await.expect("added");
    assert_eq!(
        after_a_step(&handle, &permits).await,
        [(None, OwnerKind::Sequence, 1, 3)]
    );
    drop(nobodys);
    permits.send(()).expect("room");
}

#[test]
fn jobs_are_on_the_list_while_they_run() {
    let list = Arc::new(JobList::default());
    let (first, second) = (job(1), job(2));
    let one = list.enter(Clock.now(), &first);
    // The same name twice: two streams may carry it while the first one is being ended.
    let (again, two) = (list.enter(Clock.now(), &first), list.enter(Clock.now(), &second));
    drop(one);
    let names: Vec<_> = list.all().into_iter().filter_map(|origin| origin.job).collect();
    assert_eq!(names, [first, second]);
    drop((again, two));
    assert_eq!(list.all(), []);
}
