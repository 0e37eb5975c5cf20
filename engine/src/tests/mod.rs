//! Tests of the whole engine with the scripted runner.

mod audit;
mod groups;
mod lifecycle;
mod prefixes;
mod pressure;
mod properties;
mod refusals;
mod schedules;
mod script;
mod windows;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;
use protocol::sampling::{FinishReason, PromptLogprob, SampledToken, SamplingParams, StopRules};
use protocol::window::Groups;

use crate::engine::Engine;
use crate::event::{CacheEvent, EngineEvent};
use crate::fake::{ScriptedModel, ScriptedRunner};
use crate::limits::EngineLimits;
use crate::plan::{BlockId, PlannedSequence, SequenceId, StepPlan};
use crate::reservation::Reservation;
use crate::runner::{NoObserver, Runner};
use crate::sequence::{OnFinish, SequenceSpec};
use crate::stats::StepStats;

const MODEL: ScriptedModel = ScriptedModel::new(997);

fn limits() -> EngineLimits {
    EngineLimits {
        total_blocks: 64,
        block_tokens: 4,
        max_num_seqs: 8,
        max_batch_tokens: 16,
        prefill_chunk_tokens: 8,
        mixed_prefill_tokens: 1_000,
        mixed_prefill_time: std::time::Duration::ZERO,
        max_seq_len: 64,
        prefix_cache: false,
        groups: Groups::ONE,
    }
}

fn stop_at(max_tokens: u32) -> StopRules {
    StopRules {
        max_tokens,
        eos_token_ids: Vec::new(),
        ignore_eos: false,
        stop_token_ids: Vec::new(),
    }
}

fn sampled(seed: u64) -> Arc<SamplingParams> {
    Arc::new(SamplingParams {
        greedy: false,
        seed,
        ..SamplingParams::greedy()
    })
}

/// A prompt of `len` tokens that only `salt` has.
fn prompt(salt: u32, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|i| (salt * 131 + i * 7 + 1) % MODEL.vocab_size)
        .collect()
}

fn spec(token_ids: Vec<u32>, max_tokens: u32) -> SequenceSpec {
    SequenceSpec {
        prompt_len: token_ids.len(),
        token_ids,
        sampling: Arc::new(SamplingParams::greedy()),
        stop: stop_at(max_tokens),
        prompt_logprobs: None,
        on_finish: OnFinish::Release,
        first_only: None,
        adapter: None,
        cache_key: 0,
    }
}

/// What has been seen of a sequence, beside what it must come to.
#[derive(Debug)]
struct Observed {
    spec: SequenceSpec,
    /// What is told of its prompt, if that is asked for.
    prompt_logprobs: Option<Vec<PromptLogprob>>,
    /// What an undisturbed engine generates.
    expected: Vec<SampledToken>,
    /// The first tokens of the choices after the first one, if `first_only` asks for some.
    others: Vec<(SampledToken, Option<FinishReason>)>,
    /// What its last token says about its end; `None` if only `first_only` ends it.
    finish: Option<FinishReason>,
    seen: usize,
    /// What its events say.
    cached_tokens: Option<u32>,
    ended: bool,
    failed: bool,
}

/// An engine with a scripted runner. Compares every event with the answer of an undisturbed run, and audits the books
/// after every call.
#[derive(Debug)]
struct Bench {
    model: ScriptedModel,
    engine: Engine,
    runner: ScriptedRunner,
    observed: BTreeMap<SequenceId, Observed>,
    beams: BTreeMap<SequenceId, groups::ObservedBeams>,
    reservations: Vec<Reservation>,
    /// Reservations for known prompts: of how many tokens the KV is to come, and of what sequence.
    promised: Vec<(Reservation, usize, SequenceSpec)>,
    preempted: usize,
    /// What the prefix cache has told of itself.
    cached_names: BTreeSet<u64>,
    /// Who was in the last step.
    last_step: BTreeSet<SequenceId>,
}

/// Everything in one group, or groups with windows below `most_window`, alone and beside groups without.
fn groups(most_window: u32) -> impl Strategy<Value = Groups> {
    let some = (0u32..3, 1u32..3, 1..most_window);
    prop::option::of(some).prop_map(|some| match some {
        None => Groups::ONE,
        Some((0, _, window)) => Groups::sliding(window),
        Some((full, sliding, window)) => Groups::mixed(full, sliding, window),
    })
}

impl Bench {
    fn new(limits: EngineLimits) -> Self {
        Self::over(Engine::new(limits).unwrap())
    }

    /// Without a forecast: whoever fits now gets in, and preemptions are frequent.
    fn reckless(limits: EngineLimits) -> Self {
        Self::over(Engine::with_horizon(limits, 0).unwrap())
    }

    fn over(engine: Engine) -> Self {
        let limits = *engine.limits();
        let model = MODEL.with_groups(limits.groups);
        let runner = ScriptedRunner::new(model, limits.total_blocks, limits.block_tokens);
        Self {
            model,
            engine,
            runner,
            observed: BTreeMap::new(),
            beams: BTreeMap::new(),
            reservations: Vec::new(),
            promised: Vec::new(),
            preempted: 0,
            cached_names: BTreeSet::new(),
            last_step: BTreeSet::new(),
        }
    }

    fn observe(&mut self, id: SequenceId, spec: SequenceSpec) -> SequenceId {
        let (model, max_seq_len) = (self.model, self.engine.limits().max_seq_len);
        let (mut expected, reason) = model.generate(
            &spec.token_ids,
            spec.prompt_len,
            &spec.sampling,
            &spec.stop,
            max_seq_len,
        );
        let mut finish = (spec.first_only.is_none() || expected.len() == 1).then_some(reason);
        let mut others = Vec::new();
        if let Some(choices) = spec.first_only {
            expected.truncate(1);
            if choices == 0 {
                finish = None;
            }
            let fits = |token: &SampledToken| {
                let length = (spec.token_ids.len() + 1 >= max_seq_len).then_some(FinishReason::Length);
                spec.stop.finish(token.token, token.position + 1).or(length)
            };
            others.extend((1..choices).map(|choice| {
                let sampling = SamplingParams {
                    choice: spec.sampling.choice + choice,
                    ..(*spec.sampling).clone()
                };
                let token = model.next_token(&spec.token_ids, spec.prompt_len, &sampling);
                let finish = fits(&token);
                (token, finish)
            }));
        }
        let prompt = &spec.token_ids[..spec.prompt_len];
        let observed = Observed {
            prompt_logprobs: spec
                .prompt_logprobs
                .map(|alternatives| model.prompt_logprobs(prompt, alternatives)),
            spec,
            expected,
            others,
            finish,
            seen: 0,
            cached_tokens: None,
            ended: false,
            failed: false,
        };
        assert!(
            self.observed.insert(id, observed).is_none(),
            "{id:?} was given out twice"
        );
        self.audit();
        id
    }

    fn add(&mut self, spec: SequenceSpec) -> SequenceId {
        let id = self.engine.add(spec.clone()).unwrap();
        self.observe(id, spec)
    }

    /// Receives the KV of a whole prompt and its first token, and commits.
    fn commit(&mut self, reservation: Reservation, mut spec: SequenceSpec) -> SequenceId {
        self.receive(&reservation, &spec.token_ids);
        let num_computed = spec.token_ids.len();
        spec.token_ids.push(
            self.model
                .next_token(&spec.token_ids, spec.prompt_len, &spec.sampling)
                .token,
        );
        let id = self.engine.commit(reservation, spec.clone(), num_computed).unwrap();
        self.observe(id, spec)
    }

    /// The KV of `tokens` arrives, as far as it is not there.
    fn receive(&mut self, reservation: &Reservation, tokens: &[u32]) {
        let block_tokens = self.engine.limits().block_tokens;
        let awaited = reservation.blocks_to_fill();
        let moved = reservation.moved().unwrap();
        assert_eq!(moved.len() as usize, awaited.len());
        for ((_, place), block) in moved.iter().zip(awaited) {
            let start = place as usize * block_tokens;
            let end = tokens.len().min(start + block_tokens);
            self.runner.write_kv(&[block], &tokens[start..end]).unwrap();
        }
    }

    fn cancel(&mut self, id: SequenceId) -> bool {
        if let Some(observed) = self.observed.get_mut(&id) {
            observed.ended = true;
        }
        if let Some(beams) = self.beams.get_mut(&id) {
            beams.ended = true;
        }
        let known = self.engine.cancel(id);
        self.audit();
        known
    }

    fn step(&mut self) -> Option<StepStats> {
        let plan = self.engine.plan()?.clone();
        Some(self.execute(&plan))
    }

    /// Executes and applies a plan that has been drawn before.
    fn execute(&mut self, plan: &StepPlan) -> StepStats {
        self.check_plan(plan);
        self.last_step = plan.sequences.iter().map(|planned| planned.id).collect();
        let output = self.runner.run(plan, &mut NoObserver).unwrap();
        let mut events = Vec::new();
        let stats = self.engine.apply(&output, &mut events).unwrap();
        for event in events {
            self.check_event(event, plan);
        }
        self.audit();
        stats
    }

    /// The runner is going to fail one sequence alone.
    fn expect_failure(&mut self, id: SequenceId) {
        self.observed.get_mut(&id).unwrap().failed = true;
    }

    /// The runner fails the step that is in flight.
    fn fail(&mut self, plan: &StepPlan) {
        self.runner.fail_next("power cut");
        let message = self.runner.run(plan, &mut NoObserver).unwrap_err().to_string();
        let mut events = Vec::new();
        self.engine.fail_step(&message, &mut events);
        let planned: BTreeSet<SequenceId> = plan.sequences.iter().map(|planned| planned.owner).collect();
        let mut failed = BTreeSet::new();
        for event in events {
            if let EngineEvent::Failed { id, message } = &event {
                assert_eq!(message, "step failed: power cut");
                if let Some(beams) = self.beams.get_mut(id) {
                    assert!(!beams.ended, "{id:?} failed after its end");
                    (beams.ended, beams.failed) = (true, true);
                    failed.insert(*id);
                    continue;
                }
                let observed = self.observed.get_mut(id).unwrap();
                assert!(!observed.ended, "{id:?} failed after its end");
                (observed.ended, observed.failed) = (true, true);
                failed.insert(*id);
            } else {
                self.check_event(event, plan);
            }
        }
        let living = planned.iter().filter(|id| !self.has_ended(**id) || failed.contains(id));
        assert!(living.eq(failed.iter()), "planned {planned:?}, failed {failed:?}");
        self.audit();
    }

    /// Steps until nothing can advance; how many steps that took.
    fn run(&mut self) -> usize {
        let mut steps = 0;
        while self.step().is_some() {
            steps += 1;
            assert!(steps < 100_000, "no end in sight: {:?}", self.engine.stats());
        }
        steps
    }

    fn run_steps(&mut self, steps: usize) {
        for _ in 0..steps {
            self.step().unwrap();
        }
    }

    /// All sequences have come to their expected end, and all blocks are back.
    fn assert_complete_and_idle(&self) {
        for (id, beams) in &self.beams {
            assert!(beams.ended, "{id:?} has not ended: {beams:?}");
        }
        for (id, observed) in &self.observed {
            assert!(observed.ended, "{id:?} has not ended: {observed:?}");
        }
        let stats = self.engine.stats();
        assert_eq!(
            (stats.running, stats.waiting, stats.held, stats.reservations),
            (0, 0, 0, 0)
        );
        assert_eq!(
            (stats.free_blocks + stats.cached_blocks, stats.owned_blocks),
            (stats.total_blocks, 0)
        );
    }

    fn check_event(&mut self, event: EngineEvent, plan: &StepPlan) {
        match event {
            EngineEvent::Token {
                id,
                token,
                batch_size,
                cached_tokens,
                prompt_logprobs,
                finish,
                others,
            } => {
                let observed = self.observed.get_mut(&id).unwrap();
                assert!(!observed.ended, "{id:?} has a token after its end");
                assert_eq!(batch_size as usize, plan.sequences.len());
                assert_eq!(*observed.cached_tokens.get_or_insert(cached_tokens), cached_tokens);
                assert_eq!(
                    token, observed.expected[observed.seen],
                    "token {} of {id:?}",
                    observed.seen
                );
                assert_ne!(observed.spec.first_only, Some(0), "{id:?} asked for no token");
                assert_eq!(others, observed.others, "first tokens of {id:?}'s other choices");
                let first = observed.seen == 0;
                assert_eq!(
                    prompt_logprobs,
                    observed.prompt_logprobs.clone().filter(|_| first),
                    "prompt of {id:?}"
                );
                observed.seen += 1;
                observed.ended = observed.seen == observed.expected.len();
                assert_eq!(finish, observed.finish.filter(|_| observed.ended), "end of {id:?}");
            }
            EngineEvent::Computed {
                id,
                batch_size,
                cached_tokens,
                prompt_logprobs,
            } => {
                if self.beams.contains_key(&id) {
                    self.check_beam_prompt(id, prompt_logprobs.as_ref());
                    return;
                }
                let observed = self.observed.get_mut(&id).unwrap();
                assert!(
                    !observed.ended && observed.spec.first_only == Some(0),
                    "{id:?} is computed"
                );
                assert_eq!(batch_size as usize, plan.sequences.len());
                assert_eq!(prompt_logprobs, observed.prompt_logprobs, "prompt of {id:?}");
                (observed.ended, observed.cached_tokens) = (true, Some(cached_tokens));
            }
            EngineEvent::BeamStep { id, batch_size } => {
                assert!(self.beams.contains_key(&id));
                assert_eq!(batch_size as usize, plan.sequences.len());
            }
            EngineEvent::Beams { id, beams } => self.check_beams(id, &beams),
            // Members of a beam search have no events of their own.
            EngineEvent::Preempted { id } if !self.observed.contains_key(&id) => self.preempted += 1,
            EngineEvent::Failed { id, message } if self.beams.contains_key(&id) => self.beams_failed(id, &message),
            EngineEvent::Preempted { id } => {
                assert!(!self.observed[&id].ended, "{id:?} was preempted after its end");
                self.preempted += 1;
            }
            EngineEvent::Failed { id, message } => {
                let observed = self.observed.get_mut(&id).unwrap();
                assert!(observed.failed && !observed.ended, "{id:?} failed: {message}");
                observed.ended = true;
            }
        }
    }

    fn beams_failed(&mut self, id: SequenceId, message: &str) {
        let beams = self.beams.get_mut(&id).unwrap();
        assert!(beams.failed && !beams.ended, "{id:?} failed: {message}");
        beams.ended = true;
    }

    fn check_plan(&self, plan: &StepPlan) {
        let limits = self.engine.limits();
        assert!(plan.sequences.len() <= limits.max_num_seqs);
        assert!(plan.token_ids.len() <= limits.max_batch_tokens);
        assert!(
            plan.sequences
                .iter()
                .all(|planned| planned.rows.len as usize <= limits.prefill_chunk_tokens)
        );
        // Who generates waits for a bounded number of others' rows.
        let draws_nothing = |id: &SequenceId| self.observed.get(id).is_some_and(|o| o.spec.first_only == Some(0));
        let single = |planned: &&PlannedSequence| {
            planned.rows.len == 1 && (planned.sample.is_some() || draws_nothing(&planned.id))
        };
        let generates = |planned: &PlannedSequence| {
            self.last_step.contains(&planned.id) && planned.sample.as_ref().is_some_and(|s| s.output_position > 0)
        };
        if plan.sequences.iter().filter(single).any(generates) {
            let others = plan.sequences.iter().filter(|planned| !single(planned));
            let rows: u32 = others.map(|planned| planned.rows.len).sum();
            assert!(
                rows as usize <= limits.mixed_prefill_tokens,
                "{rows} rows beside generation"
            );
        }
        for block in self.reserved() {
            assert!(
                !plan.block_ids.contains(&block),
                "reserved block {block:?} is in a plan"
            );
        }
    }

    /// Blocks that somebody is writing.
    fn reserved(&self) -> impl Iterator<Item = BlockId> {
        let awaited = self.promised.iter().map(|(reservation, ..)| reservation);
        let all = self.reservations.iter().chain(awaited);
        all.flat_map(Reservation::blocks_to_fill)
    }

    /// What the prefix cache tells of its changes adds up to what it holds.
    fn hear_of_the_cache(&mut self) {
        let mut changes = Vec::new();
        let told_all = self.engine.take_cache_changes(&mut changes);
        for change in changes {
            let news = match change {
                CacheEvent::Added(name) => self.cached_names.insert(name),
                CacheEvent::Removed(name) => self.cached_names.remove(&name),
            };
            assert!(news, "{change:?} is no change");
        }
        let names: BTreeSet<u64> = self.engine.cached_names().collect();
        if told_all {
            assert_eq!(self.cached_names, names);
        }
        self.cached_names = names;
    }
}
