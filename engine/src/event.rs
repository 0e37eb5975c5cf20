//! What a step did to the sequences.

use protocol::sampling::{FinishReason, PromptLogprob, SampledToken};

use crate::beam::Hypothesis;
use crate::plan::SequenceId;

/// A change of the prefix cache. Blocks go by their names on the wire ([`protocol::prefix::wire_name`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheEvent {
    /// A block can be found now.
    Added(u64),
    /// A block cannot be found any more.
    Removed(u64),
}

/// Something the owner of a sequence must know. `apply` and `fail_step` deliver events; those of one sequence are in
/// order.
#[derive(Clone, PartialEq, Debug)]
pub enum EngineEvent {
    /// One more token.
    Token {
        /// The sequence.
        id: SequenceId,
        /// The token.
        token: SampledToken,
        /// Sequences in the step's batch.
        batch_size: u32,
        /// Tokens of the sequence whose KV came from the prefix cache when it started here.
        cached_tokens: u32,
        /// With the first token sampled here, if asked for: what the model says of every prompt token from the second on,
        /// `prompt_len - 1` values.
        prompt_logprobs: Option<Vec<PromptLogprob>>,
        /// Why the sequence ends with this token, if it does by its stop rules or its length. A sequence with
        /// `SequenceSpec::first_only` has ended in any case.
        finish: Option<FinishReason>,
        /// The first tokens of the further choices, if `SequenceSpec::first_only` asks for several, and why each of them
        /// would end.
        others: Vec<(SampledToken, Option<FinishReason>)>,
    },
    /// A sequence that asked for no token is computed, and has ended; or the prompt of a beam search that was added
    /// ([`crate::engine::Engine::add_beams`]) is computed.
    Computed {
        /// The sequence, or the beam search.
        id: SequenceId,
        /// Sequences in the step's batch.
        batch_size: u32,
        /// As with [`EngineEvent::Token`].
        cached_tokens: u32,
        /// As with [`EngineEvent::Token`].
        prompt_logprobs: Option<Vec<PromptLogprob>>,
    },
    /// A beam search has one more position.
    BeamStep {
        /// The beam search.
        id: SequenceId,
        /// Sequences in the step's batch.
        batch_size: u32,
    },
    /// A beam search has ended.
    Beams {
        /// The beam search.
        id: SequenceId,
        /// Best first; at least one.
        beams: Vec<Hypothesis>,
    },
    /// The sequence's step failed; the sequence has ended and its blocks are free, also with `OnFinish::Hold`.
    Failed {
        /// The sequence.
        id: SequenceId,
        /// Why, in one line.
        message: String,
    },
    /// The sequence lost its blocks and will compute its tokens again; those reported so far stay valid.
    Preempted {
        /// The sequence.
        id: SequenceId,
    },
}
