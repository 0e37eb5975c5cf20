//! The engine thread with a scripted runner: every event arrives, and whatever is dropped is given back.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use engine::engine::Engine;
use engine::fake::{ScriptedModel, ScriptedRunner};
use engine::limits::EngineLimits;
use engine::plan::{BlockId, StepOutput, StepPlan};
use engine::runner::{LayerObserver, Runner, RunnerError};
use engine::sequence::{OnFinish, SequenceSpec};
use node_shell::engine_thread::{SequenceEvent, StepTap, start};
use node_shell::handle::{AwaitedPrompt, EngineHandle, EngineLoad, SequenceStream, SubmitError};
use protocol::kv::KvPlace;
use protocol::sampling::{FinishReason, SamplingParams};
use protocol::window::Groups;
use runtime::clock::Clock;

const BLOCKS: usize = 64;
const MODEL: ScriptedModel = ScriptedModel::new(1000);

fn limits() -> EngineLimits {
    EngineLimits {
        total_blocks: BLOCKS,
        block_tokens: 4,
        max_num_seqs: 8,
        max_batch_tokens: 16,
        prefill_chunk_tokens: 8,
        max_seq_len: 128,
        mixed_prefill_tokens: 1_000,
        mixed_prefill_time: Duration::ZERO,
        prefix_cache: true,
        groups: Groups::ONE,
    }
}

fn spec(prompt: &[u32], max_tokens: u32) -> SequenceSpec {
    SequenceSpec::greedy(prompt.to_vec(), max_tokens)
}

/// A prompt of so many tokens that nobody else has.
fn prompt(tokens: u32) -> AwaitedPrompt {
    AwaitedPrompt {
        token_ids: (500..500 + tokens).collect(),
        cache_key: 0,
        num_computed: tokens as usize,
    }
}

fn engine() -> Engine {
    Engine::new(limits()).expect("the limits are consistent")
}

fn scripted() -> ScriptedRunner {
    ScriptedRunner::new(MODEL, BLOCKS, 4)
}

async fn tokens(stream: &mut SequenceStream) -> Vec<u32> {
    let mut out = Vec::new();
    while let Some(event) = stream.next().await {
        let SequenceEvent::Token(event) = event else {
            panic!("failed: {event:?}")
        };
        assert_eq!(event.token.position as usize, out.len());
        out.push(event.token.token);
        if event.finish.is_some() {
            break;
        }
    }
    out
}

/// Waits until the engine holds nothing.
async fn idle(handle: &EngineHandle) {
    let mut load = handle.watch_load();
    let nothing = |load: &EngineLoad| {
        (load.owned_blocks, load.running, load.waiting, load.reservations) == (0, 0, 0, 0)
            && (load.free_blocks + load.cached_blocks) as usize == BLOCKS
    };
    let waited = tokio::time::timeout(Duration::from_secs(20), load.wait_for(nothing)).await;
    assert!(waited.is_ok_and(|r| r.is_ok()), "not idle: {:?}", handle.load());
}

#[tokio::test]
async fn many_sequences_get_their_tokens_and_leave_nothing_behind() {
    let (handle, thread) = start(engine(), Box::new(scripted()), Clock, 64, None).expect("a thread");
    let mut streams = Vec::new();
    for i in 0..20u32 {
        let prompt: Vec<u32> = (0..5 + i).map(|t| t * 7 + i).collect();
        let (expected, _) = MODEL.generate(
            &prompt,
            prompt.len(),
            &SamplingParams::greedy(),
            &spec(&prompt, 9).stop,
            128,
        );
        streams.push((handle.add(spec(&prompt, 9), None).await.expect("added"), expected));
    }
    for (stream, expected) in &mut streams {
        let expected: Vec<u32> = expected.iter().map(|token| token.token).collect();
        assert_eq!(tokens(stream).await, expected);
    }
    drop(streams);
    idle(&handle).await;
    handle.close();
    assert!(thread.join());
}

#[tokio::test]
async fn dropping_a_stream_in_the_middle_frees_its_blocks() {
    let (handle, _thread) = start(engine(), Box::new(scripted()), Clock, 64, None).expect("a thread");
    for round in 0..50u32 {
        let mut stream = handle.add(spec(&[1, 2, 3, round], 100), None).await.expect("added");
        for _ in 0..round % 5 {
            stream.next().await.expect("a token");
        }
    }
    idle(&handle).await;
}

#[tokio::test]
async fn reservations_come_back_when_dropped_and_run_when_committed() {
    let (handle, _thread) = start(engine(), Box::new(scripted()), Clock, 64, None).expect("a thread");
    let reserved = handle.reserve(prompt(10), 5, 1).await.expect("reserved");
    assert_eq!(reserved.blocks().len(), 3);
    drop(reserved);
    idle(&handle).await;
    let all = handle.reserve(prompt(127), 5, 1).await.expect("reserved");
    let more = handle.reserve(prompt(127), 5, 1).await.expect("reserved");
    assert!(matches!(
        handle.reserve(prompt(127), 5, 1).await,
        Err(SubmitError::NoBlocks { needed: 32, free: 0 })
    ));
    assert!(matches!(
        handle.reserve(prompt(128), 5, 1).await,
        Err(SubmitError::Invalid(_))
    ));
    drop((all, more));
    idle(&handle).await;
}

#[tokio::test]
async fn choices_share_a_queue_and_one_of_them_can_be_cancelled() {
    let (runner, permits) = gated();
    let (handle, _thread) = start(engine(), runner, Clock, 64, None).expect("a thread");
    let prompt: Vec<u32> = (0..13).collect();
    let specs = || (0..3).map(|choice| choice_of(&prompt, choice, 90)).collect();
    let mut group = handle.add_choices(specs()).await.expect("added");
    assert_eq!(group.len(), 3);
    group.cancel(1);
    // The step under way is the last one of the cancelled sequence.
    (0..1000).for_each(|_| permits.send(()).expect("room"));
    let (mut events, mut found, mut open) = (Vec::new(), vec![Vec::new(); 3], 2);
    while open > 0 {
        group.next_all(&mut events).await;
        assert!(!events.is_empty(), "the engine has ended");
        for (index, event) in events.drain(..) {
            let SequenceEvent::Token(event) = event else {
                panic!("{event:?}")
            };
            open -= usize::from(event.finish.is_some());
            found[index].push(event.token);
        }
    }
    for (index, choice) in [(0, 0), (2, 2)] {
        let spec = choice_of(&prompt, choice, 90);
        let (expected, _) = MODEL.generate(&prompt, prompt.len(), &spec.sampling, &spec.stop, 128);
        assert_eq!(found[index], expected, "choice {choice}");
    }
    assert!(found[1].len() < 2, "the cancelled one went on");
    // Dropped in the middle, all of them end.
    let mut group = handle.add_choices(specs()).await.expect("added");
    group.next().await.expect("a token");
    drop(group);
    idle(&handle).await;
}

#[tokio::test]
async fn a_beam_search_answers_once_with_the_step_of_every_position() {
    let (handle, _thread) = start(engine(), Box::new(scripted()), Clock, 64, None).expect("a thread");
    let mut search = handle.add_beams(spec(&[4, 5, 6], 7), 3).await.expect("added");
    let Some(SequenceEvent::Computed(prompt)) = search.next().await else {
        panic!("no prompt")
    };
    assert_eq!((prompt.timing.batch_size, prompt.prompt_logprobs), (1, None));
    let Some(SequenceEvent::Beams(beams)) = search.next().await else {
        panic!("no beams")
    };
    assert_eq!(beams.len(), 3);
    for beam in &beams {
        assert_eq!(beam.tokens.len(), 7);
        assert!(beam.tokens[1..].iter().all(|(_, step)| step.batch_size == 3));
        assert_eq!(
            beam.tokens[0].1.batch_size, 1,
            "the first position comes of the prompt alone"
        );
    }
    assert!(search.next().await.is_none());
    let wide = handle.add_beams(spec(&[4, 5, 6], 7), 9).await;
    assert!(matches!(wide, Err(SubmitError::Invalid(_))));
    drop(handle.add_beams(spec(&[4, 5, 6], 50), 3).await.expect("added"));
    idle(&handle).await;
}

fn choice_of(prompt: &[u32], choice: u32, max_tokens: u32) -> SequenceSpec {
    let sampling = SamplingParams {
        greedy: false,
        choice,
        ..SamplingParams::greedy()
    };
    SequenceSpec {
        sampling: Arc::new(sampling),
        ..spec(prompt, max_tokens)
    }
}

/// A runner that waits for a permit before every step.
struct Gated {
    inner: ScriptedRunner,
    permits: Receiver<()>,
}

impl Runner for Gated {
    fn execute(
        &mut self,
        plan: &StepPlan,
        observer: &mut dyn LayerObserver,
        output: &mut StepOutput,
    ) -> Result<(), RunnerError> {
        self.permits
            .recv()
            .map_err(|_| RunnerError::Failed("no more permits".to_owned()))?;
        self.inner.execute(plan, observer, output)
    }
}

fn gated() -> (Box<Gated>, SyncSender<()>) {
    let (sender, permits) = sync_channel(1000);
    (
        Box::new(Gated {
            inner: scripted(),
            permits,
        }),
        sender,
    )
}

#[tokio::test]
async fn a_full_command_queue_refuses_and_returns_still_get_through() {
    let (runner, permits) = gated();
    let (handle, _thread) = start(engine(), runner, Clock, 2, None).expect("a thread");
    let first = handle.add(spec(&[1, 2], 50), None).await.expect("added");
    // The thread waits in the first step: whatever comes now stays in the queue.
    let waiting: Vec<_> = (0..2)
        .map(|i| {
            let handle = handle.clone();
            tokio::spawn(async move { handle.add(spec(&[i], 3), None).await.map(drop) })
        })
        .collect();
    tokio::task::yield_now().await;
    let refused = loop {
        // The two may not have been polled yet.
        match tokio::time::timeout(Duration::from_millis(20), handle.reserve(prompt(1), 1, 1)).await {
            Ok(result) => break result.map(drop),
            Err(_) => tokio::task::yield_now().await,
        }
    };
    assert!(matches!(refused, Err(SubmitError::QueueFull)), "{refused:?}");
    drop(first);
    for _ in 0..100 {
        permits.send(()).expect("the runner lives");
    }
    for task in waiting {
        assert!(task.await.is_ok());
    }
    idle(&handle).await;
}

#[tokio::test]
async fn a_failing_step_fails_its_sequences_and_the_next_ones_run() {
    let (runner, permits) = gated();
    let mut runner = *runner;
    runner.inner.fail_next("out of luck");
    let (handle, _thread) = start(engine(), Box::new(runner), Clock, 64, None).expect("a thread");
    let mut unlucky = handle.add(spec(&[1, 2, 3], 5), None).await.expect("added");
    permits.send(()).expect("the runner lives");
    match unlucky.next().await {
        Some(SequenceEvent::Failed(reason)) => assert!(reason.contains("out of luck"), "{reason}"),
        other => panic!("{other:?}"),
    }
    drop(unlucky);
    for _ in 0..20 {
        permits.send(()).expect("the runner lives");
    }
    let mut lucky = handle.add(spec(&[1, 2, 3], 5), None).await.expect("added");
    assert_eq!(tokens(&mut lucky).await.len(), 5);
    drop(lucky);
    idle(&handle).await;
}

/// What a tap is told.
#[derive(Debug, PartialEq)]
enum Told {
    /// A step begins: tokens computed, blocks.
    Begins(u32, usize),
    /// A layer is computed: its number, tokens computed.
    Layer(u32, u32),
    Preempted,
    /// The tap was dropped.
    Gone,
}

/// Notes what it is told.
struct Notes(SyncSender<Told>);

impl StepTap for Notes {
    fn step_begins(&mut self, computed_tokens: u32, blocks: &[BlockId]) {
        self.0
            .send(Told::Begins(computed_tokens, blocks.len()))
            .expect("the test listens");
    }

    fn layer_computed(&mut self, place: KvPlace, computed_tokens: u32) {
        self.0
            .send(Told::Layer(place.layer, computed_tokens))
            .expect("the test listens");
    }

    fn preempted(&mut self) {
        self.0.send(Told::Preempted).expect("the test listens");
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        // The test may be over.
        drop(self.0.try_send(Told::Gone));
    }
}

/// What is told of steps that end at the given numbers of tokens, from `start` on.
fn steps(mut start: u32, ends: &[(u32, usize)]) -> Vec<Told> {
    let mut told = Vec::new();
    for (end, blocks) in ends {
        told.extend([Told::Begins(start, *blocks), Told::Layer(0, *end), Told::Layer(1, *end)]);
        start = *end;
    }
    told
}

#[tokio::test]
async fn a_tap_sees_every_layer_of_every_chunk_and_held_blocks_stay_until_the_drop() {
    let (handle, _thread) = start(engine(), Box::new(scripted()), Clock, 64, None).expect("a thread");
    let (notes, heard) = sync_channel(100);
    let prompt: Vec<u32> = (0..18).collect();
    let held = SequenceSpec {
        on_finish: OnFinish::Hold,
        first_only: Some(1),
        ..spec(&prompt, 7)
    };
    let mut stream = handle.add(held, Some(Box::new(Notes(notes)))).await.expect("added");
    let Some(SequenceEvent::Token(first)) = stream.next().await else {
        panic!("no token")
    };
    assert_eq!(first.finish, None, "the first token alone does not end the request");
    assert_eq!(first.timing.batch_size, 1);
    assert_eq!(first.cached_tokens, 0);
    let told: Vec<_> = heard.try_iter().collect();
    assert_eq!(told, steps(0, &[(8, 2), (16, 4), (18, 5)]));
    let mut load = handle.watch_load();
    load.wait_for(|l| l.running == 0).await.expect("the engine lives");
    assert_eq!(handle.load().owned_blocks, 5);
    drop(stream);
    idle(&handle).await;
    assert_eq!(heard.iter().collect::<Vec<_>>(), [Told::Gone]);
    // The same prompt again: four of its blocks are there when it begins.
    let (notes, heard) = sync_channel(100);
    let again = SequenceSpec {
        on_finish: OnFinish::Hold,
        first_only: Some(1),
        ..spec(&prompt, 7)
    };
    let mut stream = handle.add(again, Some(Box::new(Notes(notes)))).await.expect("added");
    let Some(SequenceEvent::Token(second)) = stream.next().await else {
        panic!("no token")
    };
    assert_eq!((second.cached_tokens, second.token), (16, first.token));
    assert_eq!(heard.try_iter().collect::<Vec<_>>(), steps(16, &[(18, 5)]));
}

#[tokio::test]
async fn limits_end_a_sequence_with_their_reason() {
    let (handle, thread) = start(engine(), Box::new(scripted()), Clock, 64, None).expect("a thread");
    let mut stream = handle.add(spec(&[5], 1), None).await.expect("added");
    match stream.next().await {
        Some(SequenceEvent::Token(token)) => assert_eq!(token.finish, Some(FinishReason::Length)),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        handle.add(spec(&[1; 128], 1), None).await.map(drop),
        Err(SubmitError::Invalid(_))
    ));
    handle.close();
    assert!(thread.join());
    assert!(matches!(
        handle.add(spec(&[1], 1), None).await.map(drop),
        Err(SubmitError::Stopped)
    ));
}

#[test]
fn a_core_that_does_not_exist_is_named() {
    let started = start(engine(), Box::new(scripted()), Clock, 64, Some(1_000));
    let error = started.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("core 1000"), "{error}");
}
