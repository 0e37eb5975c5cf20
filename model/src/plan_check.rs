//! What a runner demands of a plan before it computes anything.

use engine::plan::{BlockCopy, GroupBlocks, PlannedSequence, SampleSpec, Span, StepPlan, Wanted};
use engine::runner::RunnerError;
use protocol::window::Groups;

use crate::sampler;

/// Limits of a model and its pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanLimits {
    /// Tokens of the vocabulary.
    pub(crate) vocab_size: usize,
    /// Tokens of a KV block.
    pub(crate) block_tokens: usize,
    /// Blocks of the pool.
    pub(crate) total_blocks: usize,
    /// Positions the model knows.
    pub(crate) max_positions: usize,
    /// Adapters it has.
    pub(crate) adapters: usize,
    /// The groups of layers, and how many positions a row sees in them.
    pub(crate) groups: Groups,
}

impl PlanLimits {
    /// Blocks at the beginning of a group's list of which a row at `position`, and all later ones, see nothing.
    fn unseen_blocks(&self, group: usize, position: usize) -> usize {
        let window = self.groups.window_of(group);
        let first = window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        first / self.block_tokens
    }
}

/// Checks plans; keeps scratch memory.
#[derive(Debug)]
pub(crate) struct PlanChecker {
    limits: PlanLimits,
    /// Per block: which sequence of this plan uses it (index + 1), and whether it writes.
    users: Vec<(u32, bool)>,
}

type Checked = Result<(), RunnerError>;

fn invalid(message: impl Into<String>) -> RunnerError {
    RunnerError::InvalidPlan(message.into())
}

/// `array[span]`, or an error that names the array.
fn part<'a, T>(what: &str, array: &'a [T], span: Span) -> Result<&'a [T], RunnerError> {
    let end = span.start as usize + span.len as usize;
    array.get(span.start as usize..end).ok_or_else(|| {
        invalid(format!(
            "{what} {}..{end} lie outside of the plan's {} {what}",
            span.start,
            array.len()
        ))
    })
}

impl PlanChecker {
    pub(crate) fn new(limits: PlanLimits) -> Self {
        Self {
            limits,
            users: vec![(0, false); limits.total_blocks],
        }
    }

    /// Checks spans, ids, positions, block tables and sampling parameters of a plan.
    ///
    /// # Errors
    /// [`RunnerError::InvalidPlan`] names the sequence and what is wrong with it.
    pub(crate) fn check(&mut self, plan: &StepPlan) -> Checked {
        let mut rows = 0;
        for s in &plan.sequences {
            let named = |e: RunnerError| match e {
                RunnerError::InvalidPlan(m) => invalid(format!("sequence {}: {m}", s.id.0)),
                RunnerError::Failed(m) => RunnerError::Failed(m),
            };
            if s.rows.start != rows {
                return Err(named(invalid(format!(
                    "its rows start at {}, the ones before end at {rows}",
                    s.rows.start
                ))));
            }
            self.sequence(plan, s).map_err(named)?;
            rows = s.rows.start + s.rows.len;
        }
        if plan.token_ids.len() != rows as usize {
            return Err(invalid(format!(
                "{} input tokens for {rows} rows",
                plan.token_ids.len()
            )));
        }
        self.sharing(plan)?;
        plan.copies.iter().try_for_each(|copy| self.copy(plan, copy))
    }

    /// A block is copied to one into which the rows of a sequence go next; nobody else's table has that one (`sharing`).
    fn copy(&self, plan: &StepPlan, copy: &BlockCopy) -> Checked {
        let total = self.limits.total_blocks;
        let user = self
            .users
            .get(copy.to.0 as usize)
            .and_then(|user| user.0.checked_sub(1));
        let writer = user.and_then(|user| plan.sequences.get(user as usize)).filter(|s| {
            let place = s.start_position as usize / self.limits.block_tokens;
            let groups = self.limits.groups.count();
            let written = plan.block_ids[s.blocks.range()].iter().skip(place * groups);
            written.take(groups).any(|block| *block == copy.to)
                && s.start_position % self.limits.block_tokens as u32 == copy.tokens
        });
        if copy.from.0 as usize >= total || copy.from == copy.to || writer.is_none() {
            return Err(invalid(format!(
                "block {} of a pool of {total} is copied to block {}, which no sequence writes from slot {} on",
                copy.from.0, copy.to.0, copy.tokens
            )));
        }
        Ok(())
    }

    fn sequence(&self, plan: &StepPlan, s: &PlannedSequence) -> Checked {
        let tokens = part("input tokens", &plan.token_ids, s.rows)?;
        if tokens.is_empty() {
            return Err(invalid("no rows"));
        }
        self.tokens("input token", tokens)?;
        let end = s.start_position as usize + tokens.len();
        if end > self.limits.max_positions {
            return Err(invalid(format!(
                "position {} is beyond the model's {} positions",
                end - 1,
                self.limits.max_positions
            )));
        }
        if let Some(adapter) = s.adapter.filter(|&adapter| adapter as usize >= self.limits.adapters) {
            return Err(invalid(format!(
                "adapter {adapter} of a model that has {}",
                self.limits.adapters
            )));
        }
        let blocks = part("blocks", &plan.block_ids, s.blocks)?;
        let groups = self.limits.groups.count();
        if blocks.len() / groups * self.limits.block_tokens < end || !blocks.len().is_multiple_of(groups) {
            return Err(invalid(format!(
                "{} blocks of {} tokens do not cover {end} positions in {groups} groups of layers",
                blocks.len(),
                self.limits.block_tokens
            )));
        }
        for group in 0..groups {
            self.group(
                GroupBlocks::new(blocks, groups, group),
                group,
                s.start_position as usize,
            )?;
        }
        let targets = part("targets", &plan.targets, s.targets)?;
        if targets.len() > tokens.len() {
            return Err(invalid(format!("{} targets for {} rows", targets.len(), tokens.len())));
        }
        self.tokens("target", targets)?;
        s.sample.as_ref().map_or(Ok(()), |sample| self.sample(plan, sample))
    }

    /// What the rows from `start` on see of a group's blocks is there.
    fn group(&self, blocks: GroupBlocks<'_>, group: usize, start: usize) -> Checked {
        let unseen = self.limits.unseen_blocks(group, start);
        let gone = blocks.iter().take(unseen).take_while(|block| !block.is_some()).count();
        if let Some(at) = blocks.iter().skip(gone).position(|block| !block.is_some()) {
            return Err(invalid(format!(
                "block {} of its table is gone; its rows from position {start} on see all but the first {unseen} (group {group})",
                gone + at,
            )));
        }
        let total = self.limits.total_blocks;
        match blocks.iter().skip(gone).find(|block| block.0 as usize >= total) {
            Some(block) => Err(invalid(format!("block {} of a pool of {total}", block.0))),
            None => Ok(()),
        }
    }

    fn sample(&self, plan: &StepPlan, sample: &SampleSpec) -> Checked {
        if let Wanted::Tokens(0) | Wanted::Candidates(0) = sample.wanted {
            return Err(invalid("nothing is wanted of its last row"));
        }
        sampler::check(&sample.params).map_err(|e| invalid(e.to_string()))?;
        let history = part("history tokens", &plan.history, sample.history)?;
        if sample.params.needs_history() {
            self.tokens("history token", history)?;
            if history.len() < sample.prompt_len as usize {
                return Err(invalid(format!(
                    "history of {} tokens for a prompt of {}",
                    history.len(),
                    sample.prompt_len
                )));
            }
        }
        Ok(())
    }

    fn tokens(&self, what: &str, tokens: &[u32]) -> Checked {
        match tokens.iter().find(|&&t| t as usize >= self.limits.vocab_size) {
            Some(t) => Err(invalid(format!(
                "{what} {t} is outside of the vocabulary of {}",
                self.limits.vocab_size
            ))),
            None => Ok(()),
        }
    }

    /// A block that a sequence writes must not be in the table of another one, nor twice in its own.
    fn sharing(&mut self, plan: &StepPlan) -> Checked {
        self.users.fill((0, false));
        for (index, s) in plan.sequences.iter().enumerate() {
            let user = index as u32 + 1;
            let first_written = s.start_position as usize / self.limits.block_tokens;
            let end = s.start_position as usize + s.rows.len as usize;
            let used = end.div_ceil(self.limits.block_tokens);
            let groups = self.limits.groups.count();
            for (i, block) in plan.block_ids[s.blocks.range()][..used * groups].iter().enumerate() {
                if !block.is_some() {
                    continue;
                }
                let writes = i / groups >= first_written;
                let entry = &mut self.users[block.0 as usize];
                if entry.0 != 0 && (writes || entry.1) {
                    return Err(invalid(format!(
                        "sequence {}: block {} is written and also used by sequence {}",
                        s.id.0,
                        block.0,
                        plan.sequences[entry.0 as usize - 1].id.0
                    )));
                }
                *entry = (user, writes);
            }
        }
        Ok(())
    }
}
