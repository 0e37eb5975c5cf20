//! Numbers about the engine, for load reports, metrics and the audit. The engine only returns them; shells publish.

use std::time::Duration;

use protocol::control::WorkDone;
use thiserror::Error;

/// State of an engine between two calls. `free_blocks + cached_blocks + owned_blocks = total_blocks`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EngineStats {
    /// Blocks of the pool.
    pub total_blocks: usize,
    /// Blocks nobody uses.
    pub free_blocks: usize,
    /// Blocks kept only as prefix cache.
    pub cached_blocks: usize,
    /// Blocks of sequences (running, waiting, held), of reservations, and of a step that is not applied yet.
    pub owned_blocks: usize,
    /// Sequences in the running batch.
    pub running: usize,
    /// Sequences that wait for a slot or for blocks.
    pub waiting: usize,
    /// Those of them that had started and have lost their blocks to others.
    pub preempted: usize,
    /// Ended sequences whose blocks are held.
    pub held: usize,
    /// Reservations that are neither committed nor released.
    pub reservations: usize,
    /// Steps applied since the start.
    pub steps: u64,
    /// What these steps took, as far as [`crate::engine::Engine::note_step_time`] has told.
    pub step_time: Duration,
    /// Sequences that these steps advanced, summed over the steps.
    pub batched_sequences: u64,
    /// Rows computed since the start.
    pub rows: u64,
    /// Tokens sampled since the start.
    pub sampled_tokens: u64,
    /// Preemptions since the start.
    pub preemptions: u64,
    /// Rows that preemptions have thrown away since the start.
    pub preempted_rows: u64,
    /// Tokens of sequences for which the prefix cache was asked when they started, and of prompts when they were reserved
    /// for ([`crate::engine::Engine::reserve_prompt`]), since the start.
    pub cache_queried_tokens: u64,
    /// Tokens of these whose KV was there.
    pub cache_hit_tokens: u64,
    /// Tokens of preempted sequences whose KV was still there when they went on, since the start.
    pub cache_resumed_tokens: u64,
    /// Cached blocks that were forgotten because others needed the room, since the start.
    pub cache_evictions: u64,
    /// Rows that the sequences lack before each has its next token. What some have in common, and nobody has computed,
    /// counts once; what the prefix cache may have of those that wait counts.
    pub queued_rows: u64,
}

/// What one applied step was.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepStats {
    /// Number of the step, from 1.
    pub step: u64,
    /// Sequences in the batch.
    pub batch_size: u32,
    /// Rows computed.
    pub rows: u32,
    /// Tokens sampled, those of sequences cancelled meanwhile included.
    pub sampled_tokens: u32,
}

/// The books do not balance: a defect of the engine, or a reservation that was dropped.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("engine invariants violated: {}", problems.join("; "))]
pub struct AuditError {
    /// Each in one line.
    pub problems: Vec<String>,
}

impl EngineStats {
    /// What it has done since its start, as load reports tell it; the bytes of handoffs are not its business.
    pub fn done(&self) -> WorkDone {
        WorkDone {
            step_us: u64::try_from(self.step_time.as_micros()).unwrap_or(u64::MAX),
            batched_sequences: self.batched_sequences,
            rows: self.rows,
            sampled_tokens: self.sampled_tokens,
            preemptions: self.preemptions,
            preempted_rows: self.preempted_rows,
            cache_queried_tokens: self.cache_queried_tokens,
            cache_hit_tokens: self.cache_hit_tokens,
            cache_evictions: self.cache_evictions,
            sent_bytes: 0,
            received_bytes: 0,
        }
    }
}
