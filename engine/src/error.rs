//! Why the engine refuses a sequence, and why a step comes to nothing.

use thiserror::Error;

use crate::beam::BeamError;
use crate::runner::RunnerError;
use crate::sequence::SpecError;

/// Why a sequence cannot be added.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum AddError {
    /// The sequence is impossible on this engine.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The beam search is impossible on this engine.
    #[error(transparent)]
    Beam(#[from] BeamError),
    /// Log-probabilities of a prompt that several sequences share.
    #[error("prompt_logprobs is set for another than the first of several sequences; they are told once")]
    PromptLogprobs,
    /// Too many wait already.
    #[error("{waiting} sequences are waiting; at most {limit} may")]
    Full {
        /// Sequences that wait.
        waiting: usize,
        /// Most that may wait.
        limit: usize,
    },
}

/// Why a step came to nothing. The sequences in it have ended; their events say so.
#[derive(Debug, Error)]
pub enum StepError {
    /// There is an output but no plan.
    #[error("no step is planned: every output belongs to exactly one plan")]
    NoStep,
    /// The output contradicts the plan.
    #[error("the output of step {step} contradicts its plan: {reason}")]
    Output {
        /// Number of the step.
        step: u64,
        /// What does not fit.
        reason: String,
    },
    /// The runner failed.
    #[error(transparent)]
    Runner(#[from] RunnerError),
}
