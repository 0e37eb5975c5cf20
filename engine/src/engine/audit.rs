//! The audit of an engine's books.

use super::Engine;
use crate::stats::AuditError;

impl Engine {
    /// Audits the books: every block is free, or in exactly the tables that are counted for it; no sequence claims more
    /// KV than its blocks hold; no reservation was dropped. Costs time in proportion to the pool.
    pub fn check_invariants(&self) -> Result<(), AuditError> {
        let mut problems = Vec::new();
        let sequences = self.scheduler.sequences().map(|sequence| &sequence.table);
        let tables = sequences
            .chain(self.held.values().map(|held| &held.table))
            .chain(&self.limbo);
        self.blocks.audit(tables, self.reservations.blocks(), &mut problems);
        self.reservations.audit(&mut problems);
        for sequence in self.scheduler.sequences() {
            let (room, computed) = (
                sequence.table.places() * self.limits.block_tokens,
                sequence.num_computed,
            );
            // It has everything that its next row sees.
            for (group, kept) in self.limits.kept().groups().enumerate() {
                let (gone, needed) = (sequence.table.gone(group), kept.first_block(computed));
                if gone > needed {
                    problems.push(format!(
                        "sequence {} has let go of {gone} blocks of group {group}, with {computed} tokens computed it needs all \
                         after {needed}",
                        sequence.id.0
                    ));
                }
            }
            let most = sequence.token_ids().len() - usize::from(!sequence.parked);
            if computed > room || computed > most {
                problems.push(format!(
                    "sequence {} has {computed} of {} tokens computed, with room for {room}",
                    sequence.id.0,
                    sequence.token_ids().len()
                ));
            }
        }
        self.audit_sharing(&mut problems);
        self.audit_beams(&mut problems);
        self.scheduler.audit(self.in_flight, &mut problems);
        if !self.in_flight && !self.limbo.is_empty() {
            problems.push(format!("{} tables wait for a step that is over", self.limbo.len()));
        }
        if problems.is_empty() {
            Ok(())
        } else {
            Err(AuditError { problems })
        }
    }

    /// Where the bytes of a table's blocks are now: the copies of a step in flight have not been made.
    #[cfg(test)]
    pub(crate) fn before_copies(&self, table: &[crate::plan::BlockId]) -> Vec<crate::plan::BlockId> {
        let copies = || self.plan.copies.iter().filter(|_| self.in_flight);
        let origin = |block| copies().find(|copy| copy.to == block).map_or(block, |copy| copy.from);
        table.iter().map(|block| origin(*block)).collect()
    }

    /// Blocks that a sequence is going to write are its own. The one it writes next may be shared while no step is planned:
    /// the plan copies it first.
    fn audit_sharing(&self, problems: &mut Vec<String>) {
        for sequence in self.scheduler.sequences() {
            let next = sequence.num_computed / self.limits.block_tokens;
            let started = sequence.num_computed % self.limits.block_tokens > 0;
            let first_own = next + usize::from(started);
            let groups = self.limits.groups.count();
            let ahead = sequence.table.blocks().iter().skip(first_own * groups);
            for block in ahead.filter(|block| self.blocks.is_shared(**block)) {
                problems.push(format!(
                    "sequence {} is going to write block {}, which others name too",
                    sequence.id.0, block.0
                ));
            }
        }
        for planned in self.plan.sequences.iter().filter(|_| self.in_flight) {
            let first = planned.start_position as usize / self.limits.block_tokens;
            let first = first * self.limits.groups.count();
            let written = self.plan.block_ids[planned.blocks.range()].iter().skip(first);
            for block in written.filter(|block| self.blocks.is_shared(**block)) {
                problems.push(format!(
                    "sequence {} writes block {}, which others name too",
                    planned.id.0, block.0
                ));
            }
        }
    }

    fn audit_beams(&self, problems: &mut Vec<String>) {
        for (id, search) in &self.beams {
            for member in search.members() {
                let sequence = self.scheduler.get(member);
                let consistent = match sequence {
                    Some(sequence) => sequence.owner == *id && sequence.parked == search.has_candidates(member),
                    None => search.has_candidates(member),
                };
                if !consistent {
                    problems.push(format!(
                        "member {} of beam search {} is lost or not its own",
                        member.0, id.0
                    ));
                }
            }
        }
        for sequence in self.scheduler.sequences() {
            let owner = self.beams.get(&sequence.owner);
            let known = owner.is_some_and(|search| search.members().any(|member| member == sequence.id));
            if known != sequence.candidates.is_some() || (!known && sequence.owner != sequence.id) {
                problems.push(format!(
                    "sequence {} belongs to no beam search, or to none that knows it",
                    sequence.id.0
                ));
            }
        }
    }
}
