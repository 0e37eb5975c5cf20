//! The decode jobs of a node, as `decode_node::role` and `decode_node::reservations` run them.

use std::time::{Duration, Instant};

use coordinator::core::nodes::LegId;
use engine::plan::{BlockId, SequenceId};
use engine::reservation::{Awaited, Reservation, ReserveError};
use engine::sequence::{OnFinish, SequenceSpec};
use protocol::control::{Beam, DecodeJob, JobErrorKind, JobEvent, KvSource, StepTiming};
use protocol::ids::Ticket;
use protocol::moved::Moved;
use protocol::transfer::PushCommit;

use super::local::{PromptHere, word};
use super::prefill::Prompt;
use super::{Command, Entry, Node, Out, Return, Timer, Work, sampling_of};
use crate::model::adapter;

/// Longest time that a job may take, in milliseconds.
const LONGEST_JOB_MS: u64 = 24 * 3_600_000;

/// A decode job.
pub(super) struct DecodeWork {
    pub(super) job: DecodeJob,
    stage: Stage,
    /// By when the commit must have come.
    pub(super) deadline: Instant,
    /// Choices that the coordinator wants no more of, said before they ran.
    updates: Vec<u32>,
    /// `Some` as long as a prompt that is computed here is not told.
    pub(super) prompt: Option<PromptHere>,
}

enum Stage {
    Entering,
    Reserved(Ticket, Reservation),
    /// The commit has come, and waits for the engine.
    Committing,
    /// The sequences, and the choice of each that has not ended.
    Running(Vec<SequenceId>, Vec<Option<u32>>),
    Searching(SequenceId),
}

impl DecodeWork {
    /// True if the blocks are reserved and their KV has not come.
    pub(super) fn awaits_commit(&self) -> bool {
        matches!(self.stage, Stage::Reserved(..))
    }

    /// What has to come of the reservation under `ticket`, and the blocks for it.
    pub(super) fn reserved(&self, ticket: Ticket) -> Option<(Moved, Vec<BlockId>)> {
        match &self.stage {
            Stage::Reserved(of, reservation) if *of == ticket => {
                Some((reservation.moved()?, reservation.blocks_to_fill()))
            }
            _ => None,
        }
    }
}

impl Node {
    pub(super) fn start_decode(&mut self, now: Instant, leg: LegId, job: DecodeJob) {
        let handoff = job.source == KvSource::Handoff;
        let deadline = Duration::from_millis(job.handoff_deadline_ms);
        let work = DecodeWork {
            deadline: now + deadline,
            job,
            stage: Stage::Entering,
            updates: Vec::new(),
            prompt: None,
        };
        let longest = Duration::from_millis(work.job.deadline_ms.min(LONGEST_JOB_MS));
        self.out.push(Out::Timer(longest, Timer::Over(leg)));
        self.jobs.insert(leg, Work::Decode(Box::new(work)));
        if handoff {
            self.out.push(Out::Timer(deadline, Timer::Job(leg)));
            self.command(Command::Reserve(leg));
        } else {
            self.command(Command::Compute(leg));
        }
    }

    pub(super) fn decode(&mut self, leg: LegId) -> Option<&mut DecodeWork> {
        match self.jobs.get_mut(&leg) {
            Some(Work::Decode(work)) => Some(work),
            Some(Work::Prefill(_)) | None => None,
        }
    }

    /// The engine reserves blocks.
    pub(super) fn enter_reserve(&mut self, now: Instant, leg: LegId) {
        let origin = self.origin(now, leg);
        let Some(Work::Decode(work)) = self.jobs.get_mut(&leg) else {
            return;
        };
        let job = &work.job;
        let choices = job.beam_width.map_or(job.choices.len(), |width| width as usize);
        let growth = job.stop.max_tokens as usize;
        let (_, cache_key) = adapter(job.adapter.as_deref()).unwrap_or_default();
        let prompt = Awaited {
            token_ids: &job.token_ids,
            cache_key,
            num_computed: computed_tokens(job),
        };
        match self.engine.reserve_prompt(&prompt, growth, choices) {
            Ok(reservation) => {
                let have_blocks = reservation.have_blocks();
                self.reserved.insert(reservation.id(), origin);
                let ticket = Ticket(self.next_ticket);
                self.next_ticket += 1;
                work.stage = Stage::Reserved(ticket, reservation);
                self.tickets.insert(ticket, leg);
                self.say(leg, JobEvent::Granted { ticket, have_blocks });
            }
            Err(ReserveError::NoBlocks { needed, free, .. }) => {
                self.counts.busy += 1;
                let (needed_blocks, free_blocks) = (needed as u32, free as u32);
                self.end(
                    leg,
                    JobEvent::Busy {
                        needed_blocks,
                        free_blocks,
                    },
                );
            }
            Err(error @ ReserveError::NoSlots { .. }) => {
                self.counts.busy += 1;
                self.fail(leg, JobErrorKind::Overloaded, error.to_string());
            }
            Err(error) => self.fail(leg, JobErrorKind::Invalid, error.to_string()),
        }
    }

    /// The KV of a reservation has arrived and is proven. False if the sequence is not taken over.
    pub(super) fn take_over(&mut self, leg: LegId, commit: &PushCommit) -> bool {
        let Some(work) = self.decode(leg) else { return false };
        let Stage::Reserved(ticket, reservation) = std::mem::replace(&mut work.stage, Stage::Committing) else {
            return false;
        };
        let (job, firsts) = (&work.job, &commit.first_tokens);
        if firsts.len() != job.choices.len() {
            let problem = format!("{} first tokens for {} choices", firsts.len(), job.choices.len());
            self.close_door(ticket);
            self.give_back(Return::Reservation(reservation));
            self.fail(leg, JobErrorKind::Invalid, problem);
            return true;
        }
        let entry = match job.beam_width {
            Some(width) => Entry::Beams(spec(job, 0, &[]), width as usize),
            None => {
                let living = job.choices.iter().zip(firsts);
                let living = living.filter(|(_, first)| job.stop.finish(**first, 1).is_none());
                let (choices, specs) = living
                    .map(|(start, first)| (start.choice, spec(job, start.choice, &[*first])))
                    .unzip();
                Entry::Choices(choices, specs)
            }
        };
        self.close_door(ticket);
        if matches!(&entry, Entry::Choices(choices, _) if choices.is_empty()) {
            self.give_back(Return::Reservation(reservation));
            self.say(leg, JobEvent::Committed);
            self.end(leg, JobEvent::Finished);
            return true;
        }
        self.command(Command::Commit {
            leg,
            reservation,
            entry,
        });
        true
    }

    /// The engine takes the sequences of a reservation.
    pub(super) fn enter_commit(&mut self, leg: LegId, reservation: Reservation, entry: Entry) {
        self.reserved.remove(&reservation.id());
        let Some(work) = self.decode(leg) else {
            // The job was cancelled meanwhile.
            self.engine.release_reservation(reservation);
            return;
        };
        let computed = computed_tokens(&work.job);
        match entry {
            Entry::Choices(choices, specs) => match self.engine.commit_choices(reservation, specs, computed) {
                Ok(ids) => {
                    self.say(leg, JobEvent::Committed);
                    self.runs(leg, ids, choices);
                }
                Err(error) => self.fail(leg, JobErrorKind::Invalid, error.to_string()),
            },
            Entry::Beams(spec, width) => match self.engine.commit_beams(reservation, spec, computed, width) {
                Ok(id) => {
                    self.say(leg, JobEvent::Committed);
                    self.searches(leg, id);
                }
                Err(error) => self.fail(leg, JobErrorKind::Invalid, error.to_string()),
            },
        }
    }

    pub(super) fn runs(&mut self, leg: LegId, ids: Vec<SequenceId>, choices: Vec<u32>) {
        for (index, id) in ids.iter().enumerate() {
            self.owners.insert(*id, (leg, index));
        }
        let Some(work) = self.decode(leg) else { return };
        work.stage = Stage::Running(ids, choices.into_iter().map(Some).collect());
        if work.prompt.is_none() {
            self.heed_updates(leg);
        }
    }

    pub(super) fn searches(&mut self, leg: LegId, id: SequenceId) {
        self.owners.insert(id, (leg, 0));
        if let Some(work) = self.decode(leg) {
            work.stage = Stage::Searching(id);
        }
    }

    /// The coordinator wants no more of a choice.
    pub(super) fn end_choice(&mut self, leg: LegId, choice: u32) {
        let Some(work) = self.decode(leg) else { return };
        match &mut work.stage {
            Stage::Entering | Stage::Reserved(..) | Stage::Committing => work.updates.push(choice),
            Stage::Searching(_) => {}
            // No token is known yet, so nobody can mean this.
            Stage::Running(..) if work.prompt.is_some() => work.updates.push(choice),
            Stage::Running(ids, numbers) => {
                let Some(index) = numbers.iter().position(|number| *number == Some(choice)) else {
                    return;
                };
                numbers[index] = None;
                let (id, all_ended) = (ids[index], numbers.iter().all(Option::is_none));
                self.give_back(Return::Sequence(id));
                if all_ended {
                    self.end(leg, JobEvent::Finished);
                }
            }
        }
    }

    /// A sequence of a job has one more token.
    pub(super) fn token(&mut self, (leg, index): (LegId, usize), news: Prompt) {
        let Some(work) = self.decode(leg) else { return };
        let Stage::Running(_, numbers) = &mut work.stage else {
            return;
        };
        let (Some(choice), Some((_, finish))) = (numbers[index], news.firsts.first()) else {
            return;
        };
        if finish.is_some() {
            numbers[index] = None;
        }
        let all_ended = numbers.iter().all(Option::is_none);
        let owed = work.prompt.is_some();
        let words = match &mut work.prompt {
            None => word(choice, news).into_iter().collect(),
            Some(prompt) => prompt.take((choice, index), news),
        };
        let told = owed && !words.is_empty();
        if told {
            work.prompt = None;
        }
        words.into_iter().for_each(|word| self.say(leg, word));
        if all_ended {
            self.end(leg, JobEvent::Finished);
        } else if told {
            self.heed_updates(leg);
        }
    }

    /// What the coordinator said before it could be heeded.
    fn heed_updates(&mut self, leg: LegId) {
        let Some(work) = self.decode(leg) else { return };
        for choice in std::mem::take(&mut work.updates) {
            self.end_choice(leg, choice);
        }
    }

    /// A search has ended.
    pub(super) fn beams(&mut self, leg: LegId, beams: Vec<engine::beam::Hypothesis>) {
        let beam = |hypothesis: engine::beam::Hypothesis| Beam {
            tokens: hypothesis
                .tokens
                .into_iter()
                .map(|token| (token, StepTiming::default()))
                .collect(),
            score: hypothesis.score,
        };
        self.end(leg, JobEvent::Beams(beams.into_iter().map(beam).collect()));
    }

    pub(super) fn drop_decode(&mut self, _leg: LegId, work: DecodeWork) {
        match work.stage {
            // What waits for the engine finds no job.
            Stage::Entering | Stage::Committing => {}
            Stage::Reserved(ticket, reservation) => {
                self.close_door(ticket);
                self.give_back(Return::Reservation(reservation));
            }
            Stage::Running(ids, _) => {
                for id in ids {
                    self.owners.remove(&id);
                    self.give_back(Return::Sequence(id));
                }
            }
            Stage::Searching(id) => {
                self.owners.remove(&id);
                self.give_back(Return::Sequence(id));
            }
        }
    }

    /// Nothing is written into the blocks of a reservation from here on.
    fn close_door(&mut self, ticket: Ticket) {
        self.tickets.remove(&ticket);
        self.revoke_receives(ticket);
    }
}

/// Tokens of the prompt that are computed when its KV has come.
fn computed_tokens(job: &DecodeJob) -> usize {
    job.token_ids.len() - usize::from(job.beam_width.is_some())
}

pub(super) fn spec(job: &DecodeJob, choice: u32, generated: &[u32]) -> SequenceSpec {
    // The coordinator lets in no request with an adapter that is not known.
    let (adapter, cache_key) = adapter(job.adapter.as_deref()).unwrap_or_default();
    SequenceSpec {
        token_ids: [job.token_ids.as_slice(), generated].concat(),
        prompt_len: job.token_ids.len(),
        sampling: sampling_of(&job.sampling, choice),
        stop: job.stop.clone(),
        prompt_logprobs: None,
        on_finish: OnFinish::Release,
        first_only: None,
        adapter,
        cache_key,
    }
}
