//! The engine thread of a node, as `node_shell::engine_thread` runs it: commands, plan, execute, apply, events.

use std::time::{Duration, Instant};

use engine::engine::AddError;
use engine::event::EngineEvent;
use protocol::control::JobErrorKind;
use protocol::kv::KvPlace;

use super::prefill::Prompt;
use super::{Command, Computes, Node, Out, Return, Timer, Work};
use crate::model;

/// What a step takes beside its rows, in microseconds.
const STEP_US: u64 = 1_500;
/// What a row takes, in microseconds.
const ROW_US: u64 = 150;

/// How a job ends whose sequences the engine does not take.
pub(super) fn kind_of(error: &AddError) -> JobErrorKind {
    match error {
        AddError::Full { .. } => JobErrorKind::Overloaded,
        AddError::Spec(_) | AddError::Beam(_) | AddError::PromptLogprobs => JobErrorKind::Invalid,
    }
}

impl Node {
    /// The engine has something to do, perhaps: it takes what has arrived and begins a step, unless one is being computed.
    pub fn wake(&mut self, now: Instant) {
        if self.stepping.is_some() {
            return;
        }
        for item in std::mem::take(&mut self.returns) {
            match item {
                Return::Sequence(id) => {
                    self.engine.cancel(id);
                    self.owners.remove(&id);
                }
                Return::Reservation(reservation) => {
                    self.reserved.remove(&reservation.id());
                    self.engine.release_reservation(reservation);
                }
            }
        }
        while let Some(command) = self.commands.pop_front() {
            match command {
                Command::Prefill(leg) => self.enter_prefill(leg),
                Command::Reserve(leg) => self.enter_reserve(now, leg),
                Command::Compute(leg) => self.enter_compute(leg),
                Command::Commit {
                    leg,
                    reservation,
                    entry,
                } => self.enter_commit(leg, reservation, entry),
                Command::Owners(number) => self.tell_owners(now, number),
            }
        }
        self.begin_step();
    }

    fn begin_step(&mut self) {
        let planned = self.engine.plan().is_some();
        for id in self.engine.preempted() {
            if let Some((leg, _)) = self.owners.get(id)
                && let Some(Work::Prefill(work)) = self.jobs.get_mut(leg)
            {
                work.preempted();
            }
        }
        if !planned {
            return;
        }
        let at_its_end = self.random.chance(500);
        let rows = self.tell_of_step();
        self.stepping = Some(if at_its_end { Computes::AtItsEnd } else { Computes::Done });
        if !at_its_end {
            self.execute();
        }
        let micros = (STEP_US + rows * ROW_US) * u64::from(self.slowness);
        self.step_time = Duration::from_micros(micros + self.random.below(micros / 4));
        self.out.push(Out::Timer(self.step_time, Timer::StepEnd));
    }

    /// Tells the prefill jobs of the step that begins. Number of its rows.
    fn tell_of_step(&mut self) -> u64 {
        let Some(plan) = self.engine.plan() else { return 0 };
        for planned in &plan.sequences {
            let Some((leg, _)) = self.owners.get(&planned.owner) else {
                continue;
            };
            if let Some(Work::Prefill(work)) = self.jobs.get_mut(leg)
                && work.step_begins(planned.start_position, &plan.block_ids[planned.blocks.range()])
            {
                let soon = self.random.micros(0..3_000);
                self.out.push(Out::Timer(soon, Timer::Early(*leg)));
            }
        }
        plan.token_ids.len() as u64
    }

    /// Computes the step, and sends what is due of each layer.
    fn execute(&mut self) {
        let Self {
            engine,
            pool,
            output,
            owners,
            jobs,
            random,
            staging_full,
            ..
        } = self;
        let Some(plan) = engine.plan() else { return };
        let mut pieces = Vec::new();
        let layer_computed = |place: KvPlace, pool: &model::Pool| {
            for planned in &plan.sequences {
                let Some((leg, _)) = owners.get(&planned.owner) else {
                    continue;
                };
                if let Some(Work::Prefill(work)) = jobs.get_mut(leg) {
                    let computed = planned.start_position + planned.rows.len;
                    let mut parts = Vec::new();
                    let room = || !random.chance(*staging_full);
                    work.layer_computed(place, computed, pool, room, &mut parts);
                    pieces.extend(work.push.map(|push| (push, parts)));
                }
            }
        };
        model::execute(plan, pool, layer_computed, output);
        for (push, parts) in pieces {
            self.push_pieces(push, parts);
        }
    }

    /// The step that is being computed is over; the next one begins.
    pub(super) fn end_step(&mut self, now: Instant) {
        if self.stepping == Some(Computes::AtItsEnd) {
            self.execute();
        }
        self.stepping = None;
        self.engine.note_step_time(self.step_time);
        let mut events = Vec::new();
        if self.random.chance(self.failing_steps) {
            self.engine.fail_step("made to fail", &mut events);
        } else if let Err(error) = self.engine.apply(&self.output, &mut events) {
            // The engine has failed the step's sequences: the answers show it.
            debug_assert!(
                events.iter().any(|event| matches!(event, EngineEvent::Failed { .. })),
                "{error}"
            );
        }
        for event in events {
            self.deliver(event);
        }
        self.wake(now);
    }

    fn deliver(&mut self, event: EngineEvent) {
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
                let Some(&(leg, index)) = self.owners.get(&id) else {
                    return;
                };
                let news = Prompt {
                    firsts: std::iter::once((token, finish)).chain(others).collect(),
                    batch_size,
                    cached_tokens,
                    prompt_logprobs,
                };
                if matches!(self.jobs.get(&leg), Some(Work::Prefill(_))) {
                    self.prompt_computed(leg, news);
                } else {
                    self.token((leg, index), news);
                }
            }
            EngineEvent::Computed {
                id,
                batch_size,
                cached_tokens,
                prompt_logprobs,
            } => {
                if let Some(&(leg, _)) = self.owners.get(&id) {
                    let prompt = Prompt {
                        firsts: Vec::new(),
                        batch_size,
                        cached_tokens,
                        prompt_logprobs,
                    };
                    if matches!(self.jobs.get(&leg), Some(Work::Prefill(_))) {
                        self.prompt_computed(leg, prompt);
                    } else {
                        self.prompt_alone(leg, prompt);
                    }
                }
            }
            EngineEvent::Beams { id, beams } => {
                if let Some(&(leg, _)) = self.owners.get(&id) {
                    self.beams(leg, beams);
                }
            }
            EngineEvent::Failed { id, message } => {
                if let Some((leg, _)) = self.owners.remove(&id) {
                    self.fail(leg, JobErrorKind::Internal, message);
                }
            }
            EngineEvent::BeamStep { .. } | EngineEvent::Preempted { .. } => {}
        }
    }
}
