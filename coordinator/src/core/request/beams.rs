//! The answer of a beam search: all hypotheses at once.

use std::time::{Duration, Instant};

use protocol::control::Beam;

use super::{Context, Effect, Request, State};
use crate::core::ledger::Verdict;
use crate::core::nodes::LegId;
use crate::core::types::ClientEvent;

impl Request {
    /// A decode node has finished the search.
    pub(super) fn on_beams(&mut self, now: Instant, leg: LegId, beams: Vec<Beam>, ctx: &mut Context<'_>) {
        let stranded_at = match &mut self.state {
            State::Prefilling { decode, early, .. } if *decode == Some(leg) => {
                early.beams = Some(beams);
                return;
            }
            State::Transferring { decode, .. } | State::Decoding { decode, .. } if *decode == leg => None,
            State::Resuming { decode } if *decode == leg => self.stranded_at.take(),
            State::Queued
            | State::Reserving { .. }
            | State::Prefilling { .. }
            | State::Transferring { .. }
            | State::Stranded
            | State::Resuming { .. }
            | State::Local { .. }
            | State::Decoding { .. }
            | State::Finished => return self.nonsense(now, leg, "beams", ctx),
        };
        if let Err(what) = self.check(&beams) {
            return self.nonsense(now, leg, &what, ctx);
        }
        if let Some(since) = stranded_at {
            let stall = now.saturating_duration_since(since);
            ctx.out.push(Effect::Note(super::Note::Migrated(stall)));
        }
        if let Some((_, first)) = beams.first().and_then(|beam| beam.tokens.first()) {
            self.phases.waited(now, Duration::from_micros(first.queue_us));
        }
        self.take(beams, ctx);
        self.done(now, ctx.out);
    }

    /// Each hypothesis must end by the stop rules, at its last token.
    fn check(&self, beams: &[Beam]) -> Result<(), String> {
        if self.request.beam_width.is_none() || beams.len() != self.ledgers.len() {
            return Err(format!("{} beams", beams.len()));
        }
        for beam in beams {
            for (index, (sampled, _)) in beam.tokens.iter().enumerate() {
                let number = index as u32 + 1;
                let ends = self.request.stop.finish(sampled.token, number).is_some();
                if sampled.position + 1 != number || ends != (number as usize == beam.tokens.len()) {
                    return Err(format!("beam whose token {number} is wrong"));
                }
            }
            if beam.tokens.is_empty() {
                return Err("empty beam".to_owned());
            }
        }
        Ok(())
    }

    fn take(&mut self, beams: Vec<Beam>, ctx: &mut Context<'_>) {
        for (choice, (ledger, beam)) in (0..).zip(self.ledgers.iter_mut().zip(beams)) {
            for (sampled, step) in beam.tokens {
                let Verdict::Accepted { token, completion } = ledger.accept(sampled, step) else {
                    continue;
                };
                ctx.out.push(Effect::Emit(ClientEvent::Token { choice, token }));
                if let Some(completion) = completion {
                    ctx.out.push(Effect::Emit(ClientEvent::Ended { choice, completion }));
                }
            }
        }
        self.open = 0;
    }
}
