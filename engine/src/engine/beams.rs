//! Beam searches: the sequences behind the hypotheses.
//!
//! Every living hypothesis is a sequence of the scheduler, planned and preempted like any other. A member that has been
//! computed to its end yields candidates instead of a token and is *parked*: it waits for the other members. When all have
//! yielded theirs, the search takes a step: the first child of a hypothesis goes on with its sequence, further children
//! fork its table, and the sequences of hypotheses without children end. A parked member needs its blocks no more: if
//! they are taken from it, its children compute their tokens again.

use crate::admission::Holder;
use crate::beam::{BeamError, Candidates, Child, Rules, Search};
use crate::block_manager::BlockTable;
use crate::engine::{AddError, Engine};
use crate::event::EngineEvent;
use crate::limits::EngineLimits;
use crate::plan::{PlannedSequence, SequenceId};
use crate::reservation::{CommitError, Reservation};
use crate::sequence::{Sequence, SequenceSpec};

/// A search and its members.
#[derive(Debug)]
pub(super) struct BeamSearch {
    search: Search,
    /// As at the start: the prompt.
    spec: SequenceSpec,
    /// That the prompt is computed is still to be told.
    owes_prompt: bool,
    /// Of the living hypotheses, by rank.
    members: Vec<Member>,
    /// All ids that members may have: as many as the search is wide.
    ids: Vec<SequenceId>,
}

#[derive(Debug)]
struct Member {
    id: SequenceId,
    candidates: Option<Candidates>,
}

impl BeamSearch {
    pub(super) fn members(&self) -> impl Iterator<Item = SequenceId> {
        self.members.iter().map(|member| member.id)
    }

    pub(super) fn has_candidates(&self, id: SequenceId) -> bool {
        self.members
            .iter()
            .any(|member| member.id == id && member.candidates.is_some())
    }

    /// All members have yielded their candidates.
    fn is_ready(&self) -> bool {
        self.members.iter().all(|member| member.candidates.is_some())
    }
}

/// Whether an engine can ever carry out the search.
fn check(spec: &SequenceSpec, width: usize, limits: &EngineLimits) -> Result<(), BeamError> {
    let limit = limits.max_num_seqs;
    if width == 0 || width > limit {
        return Err(BeamError::Width { width, limit });
    }
    let generated = spec.token_ids.len() - spec.prompt_len;
    if generated > 0 {
        return Err(BeamError::Started { generated });
    }
    let fields = [
        ("first_only", spec.first_only.is_some()),
        ("a penalty", spec.sampling.needs_history()),
    ];
    if let Some((field, _)) = fields.into_iter().find(|(_, set)| *set) {
        return Err(BeamError::Parameter { field });
    }
    let tokens = longest(spec, limits);
    let shared = spec.prompt_len / limits.block_tokens;
    let kept = limits.kept();
    let needed = kept.most_blocks_of(width, shared, tokens - 1, limits.most_rows());
    if needed > limits.total_blocks {
        return Err(BeamError::Blocks {
            width,
            tokens,
            needed,
            total: limits.total_blocks,
        });
    }
    Ok(())
}

/// Most tokens of a member, prompt and output.
fn longest(spec: &SequenceSpec, limits: &EngineLimits) -> usize {
    let by_rules = spec.prompt_len.saturating_add(spec.stop.max_tokens as usize);
    by_rules.min(limits.max_seq_len)
}

impl Engine {
    /// Takes in a beam search over the continuations of `spec`, a prompt of which nothing is computed. The rules of the
    /// search are in [`crate::beam`]. It is cancelled by the id returned, under which its events come: the first one says that
    /// the prompt is computed.
    pub fn add_beams(&mut self, spec: SequenceSpec, width: usize) -> Result<SequenceId, AddError> {
        spec.validate(&self.limits)?;
        check(&spec, width, &self.limits)?;
        self.check_waiting(1)?;
        Ok(self.start_beams(spec, width, BlockTable::default(), 0))
    }

    /// As [`Engine::add_beams`], with a reservation for at least `width` sequences whose blocks hold the KV of the first
    /// `num_computed` tokens of the prompt: all but the last one at most, as the first step starts from that one.
    pub fn commit_beams(
        &mut self,
        reservation: Reservation,
        spec: SequenceSpec,
        num_computed: usize,
        width: usize,
    ) -> Result<SequenceId, CommitError> {
        let (reserved, choices) = (reservation.tokens(), reservation.choices());
        let Some(table) = self.reservations.redeem(reservation) else {
            return Err(CommitError::Unknown);
        };
        let checked = spec.validate(&self.limits).map_err(CommitError::from).and_then(|()| {
            check(&spec, width, &self.limits)?;
            if spec.prompt_logprobs.is_some() {
                return Err(CommitError::PromptLogprobs);
            }
            let limit = reserved.min(spec.token_ids.len() - 1);
            if width > choices {
                return Err(CommitError::Choices {
                    sequences: width,
                    reserved: choices,
                });
            }
            if num_computed > limit {
                return Err(CommitError::NumComputed {
                    num_computed,
                    limit,
                    reserved,
                });
            }
            self.check_cached(&table, &spec, num_computed)
        });
        match checked {
            Ok(()) => Ok(self.start_beams(spec, width, table, num_computed)),
            Err(error) => {
                self.blocks.release(table);
                Err(error)
            }
        }
    }

    /// The first member of a search that has been checked.
    fn start_beams(&mut self, spec: SequenceSpec, width: usize, table: BlockTable, num_computed: usize) -> SequenceId {
        let ids: Vec<SequenceId> = (0..width).map(|_| self.new_id()).collect();
        let id = ids.first().copied().unwrap_or(SequenceId(self.next_id));
        let rules = Rules {
            width,
            stop: spec.stop.clone(),
            longest: longest(&spec, &self.limits) - spec.prompt_len,
            top_logprobs: spec.sampling.top_logprobs,
        };
        let committed = !table.is_empty();
        let search = BeamSearch {
            search: Search::new(rules),
            // Only the first member has anything to say about the prompt.
            spec: SequenceSpec {
                prompt_logprobs: None,
                ..spec.clone()
            },
            owes_prompt: !committed,
            members: vec![Member { id, candidates: None }],
            ids,
        };
        let mut sequence = self.member(id, &search, spec, table, num_computed);
        if committed {
            sequence.cached_tokens = Some(0);
            sequence.publish(&mut self.blocks, true);
        }
        self.scheduler.wait(sequence);
        self.beams.insert(id, search);
        id
    }

    /// A sequence of a search.
    fn member(
        &self,
        id: SequenceId,
        search: &BeamSearch,
        spec: SequenceSpec,
        table: BlockTable,
        num_computed: usize,
    ) -> Sequence {
        let owner = search.ids.first().copied().unwrap_or(id);
        let kin = self.kin(owner.0, search.ids.len(), spec.prompt_len);
        let candidates = search.search.rules().candidates() as u32;
        let mut sequence = Sequence::new(id, spec, table, num_computed, &self.limits);
        (sequence.owner, sequence.kin, sequence.candidates) = (owner, kin, Some(candidates));
        sequence
    }

    /// Ends a search, its members included; their blocks go `with` what the end means for them. False if there is none of
    /// that id (any more).
    pub(super) fn end_beams(&mut self, id: SequenceId, with: &impl Fn(BlockTable) -> BlockTable) -> bool {
        let Some(search) = self.beams.remove(&id) else {
            return false;
        };
        self.end_members(&search, with);
        true
    }

    fn end_members(&mut self, search: &BeamSearch, with: &impl Fn(BlockTable) -> BlockTable) {
        for member in search.members() {
            self.preempted.retain(|preempted| *preempted != member);
            if let Some(sequence) = self.scheduler.remove(member) {
                self.free(with(sequence.table));
            }
        }
    }

    /// Whether it is still to be told that the prompt of a search is computed. Asked when that is so.
    pub(super) fn owes_prompt(&mut self, id: SequenceId) -> bool {
        let search = self.beams.get_mut(&id);
        search.is_some_and(|search| std::mem::take(&mut search.owes_prompt))
    }

    /// A member has yielded its candidates.
    pub(super) fn put_candidates(&mut self, planned: &PlannedSequence, candidates: Candidates) {
        let search = self.beams.get_mut(&planned.owner);
        let member = search.and_then(|search| search.members.iter_mut().find(|member| member.id == planned.id));
        if let Some(member) = member {
            member.candidates = Some(candidates);
        }
    }

    /// Takes a step of every search that can.
    pub(super) fn step_beams(&mut self, batch_size: u32, events: &mut Vec<EngineEvent>) {
        let mut next = self.beams.first_key_value().map(|(id, _)| *id);
        while let Some(id) = next {
            if self.beams.get(&id).is_some_and(BeamSearch::is_ready) {
                self.step_search(id, batch_size, events);
            }
            let after = (std::ops::Bound::Excluded(id), std::ops::Bound::Unbounded);
            next = self.beams.range(after).next().map(|(id, _)| *id);
        }
    }

    fn step_search(&mut self, id: SequenceId, batch_size: u32, events: &mut Vec<EngineEvent>) {
        let Some(mut search) = self.beams.remove(&id) else {
            return;
        };
        let candidates = search.members.iter_mut().map(|member| member.candidates.take());
        let candidates: Vec<Candidates> = candidates.map(Option::unwrap_or_default).collect();
        let children = search.search.step(&candidates);
        events.push(EngineEvent::BeamStep { id, batch_size });
        if children.is_empty() {
            self.end_members(&search, &|table| table);
            events.push(EngineEvent::Beams {
                id,
                beams: search.search.into_hypotheses(),
            });
            return;
        }
        self.replace_members(&mut search, &children);
        self.beams.insert(id, search);
    }

    /// Gives every hypothesis that lives on a sequence.
    fn replace_members(&mut self, search: &mut BeamSearch, children: &[Child]) {
        let parents: Vec<(SequenceId, Option<Sequence>)> =
            search.members().map(|id| (id, self.scheduler.remove(id))).collect();
        let is_parent = |id: &SequenceId| {
            let rank = parents.iter().position(|(parent, _)| parent == id);
            rank.is_some_and(|rank| children.iter().any(|child| child.parent == rank))
        };
        let mut spare: Vec<SequenceId> = search.ids.iter().copied().filter(|id| !is_parent(id)).collect();
        let mut heirs: Vec<bool> = parents.iter().map(|_| false).collect();
        let mut members = Vec::with_capacity(children.len());
        for (rank, child) in children.iter().enumerate() {
            let (parent_id, parent) = &parents[child.parent];
            let inherits = !std::mem::replace(&mut heirs[child.parent], true);
            let id = if inherits {
                *parent_id
            } else {
                // As many ids as children at most are needed.
                spare.pop().unwrap_or(*parent_id)
            };
            let (table, num_computed) = match parent {
                Some(parent) => {
                    let blocks = self.limits.blocks_for(parent.num_computed);
                    (self.blocks.fork(&parent.table, blocks), parent.num_computed)
                }
                None => (BlockTable::default(), 0),
            };
            let mut spec = search.spec.clone();
            spec.token_ids.extend(search.search.living_tokens(rank));
            let mut sequence = self.member(id, search, spec, table, num_computed);
            sequence.cached_tokens = Some(0);
            members.push(Member { id, candidates: None });
            self.scheduler.enter(sequence);
        }
        for (_, parent) in parents {
            if let Some(parent) = parent {
                self.free(parent.table);
            }
        }
        search.members = members;
    }

    /// Members that searches do not have yet, or have lost, and may have at any time.
    pub(super) fn promised_to_beams(&self) -> usize {
        let missing = self.beams.values().map(|search| {
            let present = search.members().filter(|id| self.scheduler.get(*id).is_some()).count();
            search.ids.len() - present
        });
        missing.sum()
    }

    /// Adds those members to the forecast that running searches may still have. A search of which nothing runs holds
    /// nothing and waits for its turn like everybody.
    pub(super) fn collect_beams(&mut self) {
        for search in self.beams.values() {
            let present = || search.members().filter_map(|id| self.scheduler.get(id));
            let Some(member) = present().find(|member| member.owns_blocks()) else {
                continue;
            };
            let missing = search.ids.len() - present().count();
            let tokens = member.token_ids().len();
            let holder = Holder {
                blocks: 0,
                tokens,
                growth: (member.final_len() - 1).saturating_sub(tokens),
                rows: 1,
                leaves: true,
                kin: member.kin,
            };
            self.others.extend(std::iter::repeat_n(holder, missing));
        }
    }
}
