//! What a step's output does to the sequences.

use super::{Engine, Held};
use crate::block_manager::BlockTable;
use crate::event::EngineEvent;
use crate::plan::{PlannedSequence, SequenceId, StepOutput, StepPlan, Wanted};
use crate::sequence::OnFinish;
use protocol::sampling::SampledToken;

impl Engine {
    /// Appends what the step computed to the sequences that still run.
    pub(super) fn advance(&mut self, plan: &StepPlan, output: &StepOutput, events: &mut Vec<EngineEvent>) {
        let mut sampled = output.sampled.iter();
        let mut candidates = output.candidates.iter();
        let mut logprobs = output.prompt_logprobs.iter();
        let mut failed = output.failed.iter().peekable();
        for planned in &plan.sequences {
            if let Some((_, reason)) = failed.next_if(|(id, _)| *id == planned.id) {
                // What spoilt it would spoil others.
                self.fail(planned, reason, events, BlockTable::spoilt);
                continue;
            }
            let new_logprobs = if planned.targets.len > 0 { logprobs.next() } else { None };
            let wanted = planned.sample.as_ref().map(|sample| sample.wanted);
            let tokens = match wanted {
                Some(Wanted::Tokens(count)) => sampled.as_slice().get(..count as usize).unwrap_or_default(),
                Some(Wanted::Candidates(_)) | None => &[],
            };
            sampled = sampled.as_slice()[tokens.len()..].iter();
            let list = matches!(wanted, Some(Wanted::Candidates(_)))
                .then(|| candidates.next())
                .flatten();
            let Some(sequence) = self.scheduler.running_mut(planned.id) else {
                continue;
            };
            sequence.advance(
                planned.rows.len as usize,
                new_logprobs.map_or(&[], |(_, values)| values),
            );
            if let Some((_, list)) = list {
                sequence.parked = true;
                sequence.publish(&mut self.blocks, true);
                sequence.slide(&mut self.blocks);
                let cached_tokens = sequence.cached_tokens.unwrap_or(0) as u32;
                let prompt_logprobs = sequence.take_prompt_logprobs();
                if self.owes_prompt(planned.owner) {
                    events.push(EngineEvent::Computed {
                        id: planned.owner,
                        batch_size: plan.sequences.len() as u32,
                        cached_tokens,
                        prompt_logprobs,
                    });
                }
                self.put_candidates(planned, list.clone());
            } else {
                self.accept(planned.id, tokens, plan.sequences.len() as u32, events);
            }
        }
        self.step_beams(plan.sequences.len() as u32, events);
    }

    /// The sampled tokens of a sequence, if any; ends it if it has all it wants.
    fn accept(
        &mut self,
        id: SequenceId,
        tokens: &[(SequenceId, SampledToken)],
        batch_size: u32,
        events: &mut Vec<EngineEvent>,
    ) {
        let Some(sequence) = self.scheduler.running_mut(id) else {
            return;
        };
        let cached_tokens = sequence.cached_tokens.unwrap_or(0) as u32;
        let Some(((_, token), others)) = tokens.split_first() else {
            let computed = sequence.pending() == 0 && sequence.first_only() == Some(0);
            sequence.publish(&mut self.blocks, !computed);
            if !computed {
                sequence.slide(&mut self.blocks);
            } else {
                events.push(EngineEvent::Computed {
                    id,
                    batch_size,
                    cached_tokens,
                    prompt_logprobs: sequence.take_prompt_logprobs(),
                });
                self.end(id);
            }
            return;
        };
        let others = others
            .iter()
            .map(|(_, other)| (other.clone(), sequence.finish(other.token)));
        let others = others.collect();
        let accepted = sequence.accept(token);
        // Whoever reads the blocks of an ended sequence knows them by the table of its last step.
        sequence.publish(&mut self.blocks, !accepted.ended);
        if !accepted.ended {
            sequence.slide(&mut self.blocks);
        }
        events.push(EngineEvent::Token {
            id,
            token: token.clone(),
            batch_size,
            cached_tokens,
            prompt_logprobs: accepted.prompt_logprobs,
            finish: accepted.finish,
            others,
        });
        if accepted.ended {
            self.end(id);
        }
    }

    /// A sequence of the step in flight came to nothing, and with it the beam search it belongs to; its blocks go `with` what
    /// that means for them.
    pub(super) fn fail(
        &mut self,
        planned: &PlannedSequence,
        message: &str,
        events: &mut Vec<EngineEvent>,
        with: impl Fn(BlockTable) -> BlockTable,
    ) {
        // Those cancelled meanwhile have no owner who waits for an event.
        let ended = self.end_beams(planned.owner, &with)
            || match self.scheduler.remove(planned.id) {
                Some(sequence) => {
                    self.limbo.push(with(sequence.table));
                    true
                }
                None => false,
            };
        if ended {
            events.push(EngineEvent::Failed {
                id: planned.owner,
                message: message.to_owned(),
            });
        }
    }

    /// A sequence has ended by itself.
    fn end(&mut self, id: SequenceId) {
        let Some(sequence) = self.scheduler.remove(id) else {
            return;
        };
        match sequence.on_finish() {
            OnFinish::Release => self.free(sequence.table),
            OnFinish::Hold => {
                self.held.insert(
                    id,
                    Held {
                        num_computed: sequence.num_computed,
                        table: sequence.table,
                    },
                );
            }
        }
    }
}
