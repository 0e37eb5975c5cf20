//! The seam between deciding and computing.

use protocol::kv::KvPlace;
use thiserror::Error;

use crate::plan::{StepOutput, StepPlan};

/// Executes plans. The real one computes a model; a fake one stands in for it in tests.
pub trait Runner: Send {
    /// Computes all rows of `plan`, writes their K and V into the blocks, samples. Calls
    /// `observer.layer_computed` after the K and V of a layer of all rows are in the pool, for each layer in order.
    ///
    /// The output is a function of the sequences' tokens, parameters and KV alone: it does not depend on what else is in
    /// the plan, nor on how the rows of a sequence are cut into steps. It replaces what `output` holds, whose memory is
    /// used again. A sequence without a result (logits that are no numbers) is named in `StepOutput::failed`; an error
    /// means that the whole step came to nothing.
    fn execute(
        &mut self,
        plan: &StepPlan,
        observer: &mut dyn LayerObserver,
        output: &mut StepOutput,
    ) -> Result<(), RunnerError>;

    /// As [`Runner::execute`], with an output of its own: for those who run few steps.
    fn run(&mut self, plan: &StepPlan, observer: &mut dyn LayerObserver) -> Result<StepOutput, RunnerError> {
        let mut output = StepOutput::default();
        self.execute(plan, observer, &mut output)?;
        Ok(output)
    }
}

/// Is told of the progress within a step, on the compute thread: must not block.
pub trait LayerObserver {
    /// K and V of a layer are in the pool for every row of the plan: at `place` in the blocks.
    fn layer_computed(&mut self, place: KvPlace);
}

/// An observer that does nothing.
#[derive(Debug, Default)]
pub struct NoObserver;

impl LayerObserver for NoObserver {
    fn layer_computed(&mut self, _place: KvPlace) {}
}

/// A step that could not be computed.
#[derive(Debug, Error)]
pub enum RunnerError {
    /// The plan contradicts the model's or the pool's limits.
    #[error("invalid plan: {0}")]
    InvalidPlan(String),
    /// The computation failed.
    #[error("step failed: {0}")]
    Failed(String),
}
