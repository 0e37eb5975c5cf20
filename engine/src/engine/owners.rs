//! Who has which blocks.

use super::Engine;
use crate::owners::{Holding, Origin, Owner, Ownership, narrow};
use crate::plan::BlockId;
use protocol::blocks::OwnerKind;

/// An owner with its blocks; [`BlockId::NONE`] where it has let go of them.
type Owned<'a> = (Owner, &'a [BlockId]);

impl Engine {
    /// Everybody who has blocks or waits for some, with their blocks.
    pub fn owners(&self) -> impl Iterator<Item = Owned<'_>> {
        let sequences = self.scheduler.sequences();
        let sequences = sequences.map(|sequence| (Owner::Sequence(sequence.owner), sequence.table.blocks()));
        let held = self
            .held
            .iter()
            .map(|(id, held)| (Owner::Held(*id), held.table.blocks()));
        let limbo = self.limbo.iter().map(|table| (Owner::Step, table.blocks()));
        sequences.chain(held).chain(self.reservations.owners()).chain(limbo)
    }

    /// All blocks by owner; `origin` says what is known of each owner. Owners of one kind with the same origin are taken
    /// together. Costs time in proportion to the pool and to all tables.
    pub fn ownership(&self, mut origin: impl FnMut(Owner) -> Origin) -> Ownership {
        let mut owners: Vec<((Origin, OwnerKind), &[BlockId])> = self
            .owners()
            .map(|(owner, blocks)| ((origin(owner), owner.kind()), blocks))
            .collect();
        owners.sort_by(|a, b| a.0.cmp(&b.0));
        // For each block the number of the group that named it last, from 1; 0: nobody has.
        let mut named_by = vec![0_usize; self.blocks.total()];
        let mut holdings: Vec<Holding> = Vec::new();
        for ((origin, kind), blocks) in owners {
            let goes_on = holdings
                .last()
                .is_some_and(|last| last.origin == origin && last.kind == kind);
            if !goes_on {
                holdings.push(Holding {
                    origin,
                    kind,
                    parts: 0,
                    blocks: 0,
                    counted: 0,
                });
            }
            let group = holdings.len();
            let Some(holding) = holdings.last_mut() else { continue };
            holding.parts += 1;
            for block in blocks.iter().filter(|block| block.is_some()) {
                let before = std::mem::replace(&mut named_by[block.0 as usize], group);
                holding.blocks += u32::from(before != group);
                holding.counted += u32::from(before == 0);
            }
        }
        let in_use = |index: usize| self.blocks.is_referred_to(BlockId(narrow(index)));
        let disagree = |named: bool| {
            let all = named_by.iter().enumerate();
            let of = all.filter(|(index, by)| (**by > 0) == named && in_use(*index) != named);
            narrow(of.count())
        };
        Ownership {
            stats: self.stats(),
            unowned: disagree(false),
            unbooked: disagree(true),
            problems: self.check_invariants().err().map_or(Vec::new(), |error| error.problems),
            holdings,
        }
    }
}

#[cfg(test)]
mod tests {
    use protocol::window::Groups;
    use std::sync::Arc;
    use std::time::Duration;

    use protocol::blocks::{JobKey, JobKind};
    use protocol::ids::{Epoch, NodeId, RequestId};

    use super::*;
    use crate::block_manager::BlockTable;
    use crate::limits::EngineLimits;
    use crate::owners::JobName;
    use crate::sequence::SequenceSpec;

    fn engine() -> Engine {
        Engine::new(EngineLimits {
            total_blocks: 64,
            block_tokens: 4,
            max_num_seqs: 8,
            max_batch_tokens: 64,
            prefill_chunk_tokens: 64,
            mixed_prefill_tokens: 64,
            mixed_prefill_time: Duration::from_secs(1),
            max_seq_len: 128,
            prefix_cache: true,
            groups: Groups::ONE,
        })
        .expect("limits that fit")
    }

    fn spec(tokens: usize) -> SequenceSpec {
        SequenceSpec::greedy((0..tokens as u32).collect(), 8)
    }

    fn job(request: u128) -> Origin {
        let key = JobKey {
            request: RequestId(request),
            epoch: Epoch(1),
            kind: JobKind::Decode,
        };
        Origin {
            since: None,
            job: Some(Arc::new(JobName {
                key,
                coordinator: NodeId("c0".to_owned()),
            })),
        }
    }

    /// What is counted, and whether everything that is in use has been.
    fn sums(of: &Ownership) -> (u32, u32, u32) {
        let counted: u32 = of.holdings.iter().map(|holding| holding.counted).sum();
        let stats = &of.stats;
        assert_eq!(
            stats.free_blocks + stats.cached_blocks + stats.owned_blocks,
            stats.total_blocks
        );
        assert_eq!(counted + of.unowned, stats.owned_blocks as u32 + of.unbooked);
        (counted, of.unowned, of.unbooked)
    }

    #[test]
    fn shared_blocks_count_once_and_jobs_are_taken_together() {
        let mut engine = engine();
        // Two choices of a prompt of 10 tokens: they share two full blocks and the third until one writes it.
        let reserved = engine.reserve_choices(10, 8, 2).expect("room");
        let ids = engine
            .commit_choices(reserved, vec![spec(10 + 1), spec(10 + 1)], 10)
            .expect("committed");
        let other = engine.reserve(5, 8).expect("room");
        let number = other.id();
        let of = engine.ownership(|owner| match owner {
            Owner::Sequence(id) if ids.contains(&id) => job(1),
            Owner::Reservation(id) if id == number => job(2),
            _ => Origin::default(),
        });
        let shown: Vec<_> = of
            .holdings
            .iter()
            .map(|h| (h.kind, h.parts, h.blocks, h.counted))
            .collect();
        assert_eq!(
            shown,
            [(OwnerKind::Sequence, 2, 3, 3), (OwnerKind::Reservation, 1, 2, 2)]
        );
        assert_eq!(sums(&of), (5, 0, 0));
        assert_eq!(of.problems, [""; 0]);
        // Each choice by itself: the second one has nothing that the first has not.
        let alone = engine.ownership(|owner| match owner {
            Owner::Sequence(id) => job(u128::from(id.0)),
            _ => job(9),
        });
        let shown: Vec<_> = alone.holdings.iter().map(|h| (h.parts, h.blocks, h.counted)).collect();
        assert_eq!(shown, [(1, 3, 3), (1, 3, 0), (1, 2, 2)]);
        assert_eq!(sums(&alone), (5, 0, 0));
        engine.release_reservation(other);
        ids.into_iter().for_each(|id| assert!(engine.cancel(id)));
        let rest = engine.ownership(|_| Origin::default());
        assert_eq!((rest.holdings.len(), sums(&rest)), (0, (0, 0, 0)));
    }

    #[test]
    fn what_waits_owns_nothing_and_is_told() {
        let mut engine = engine();
        let id = engine.add(spec(9)).expect("added");
        let of = engine.ownership(|_| Origin::default());
        assert_eq!(engine.owners().next(), Some((Owner::Sequence(id), &[][..])));
        assert_eq!((of.holdings[0].parts, of.holdings[0].blocks), (1, 0));
        // A sequence that ends while its step is computed leaves its blocks to the step.
        assert!(engine.plan().is_some());
        engine.cancel(id);
        let of = engine.ownership(|_| Origin::default());
        assert_eq!((of.holdings[0].kind, of.holdings[0].counted), (OwnerKind::Step, 3));
        assert_eq!(sums(&of), (3, 0, 0));
    }

    #[test]
    fn blocks_that_leak_are_unowned_and_a_lost_reservation_is_named() {
        let mut engine = engine();
        let mut lost = BlockTable::default();
        engine.blocks.grow(&mut lost, 3).expect("room");
        drop(lost);
        let dropped = engine.reserve(9, 8).expect("room");
        let number = dropped.id();
        drop(dropped);
        let found = std::cell::Cell::new(None);
        let of = engine.ownership(|owner| {
            found.set(Some(owner));
            Origin::default()
        });
        assert_eq!(found.get(), Some(Owner::Dropped(number)));
        assert_eq!((of.holdings[0].kind, of.holdings[0].counted), (OwnerKind::Dropped, 3));
        assert_eq!(sums(&of), (3, 3, 0));
        assert_eq!(of.problems.len(), 2, "{:?}", of.problems);
    }

    #[test]
    fn blocks_that_are_given_away_twice_are_unbooked() {
        let mut engine = engine();
        let reserved = engine.reserve(8, 8).expect("room");
        // As if somebody else had given back what the reservation has.
        let mut twice = BlockTable::default();
        engine.blocks.grow(&mut twice, 1).expect("room");
        engine.blocks.forget_references(reserved.blocks());
        let of = engine.ownership(|_| Origin::default());
        assert_eq!(sums(&of), (2, 1, 2));
        assert!(!of.problems.is_empty());
        drop(reserved);
    }
}
