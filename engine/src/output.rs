//! Whether what a runner returned is an answer to its plan.

use crate::plan::{StepOutput, StepPlan};

/// Whether `output` answers `plan`, entry by entry.
pub(crate) fn check_output(plan: &StepPlan, output: &StepOutput) -> Result<(), String> {
    let samples = plan
        .sequences
        .iter()
        .filter_map(|planned| Some((planned.id, planned.sample.as_ref()?)));
    let expected = samples.clone().count();
    if output.sampled.len() != expected {
        return Err(format!(
            "{} tokens were sampled instead of {expected}",
            output.sampled.len()
        ));
    }
    for ((id, sample), (got, token)) in samples.zip(&output.sampled) {
        if (*got, token.position) != (id, sample.output_position) {
            return Err(format!(
                "sequence {} has a token at position {}; expected: sequence {} at position {}",
                got.0, token.position, id.0, sample.output_position
            ));
        }
    }
    let targets = plan.sequences.iter().filter(|planned| planned.targets.len > 0);
    let expected = targets.clone().count();
    if output.prompt_logprobs.len() != expected {
        return Err(format!(
            "{} sequences have prompt log-probabilities instead of {expected}",
            output.prompt_logprobs.len()
        ));
    }
    for (planned, (got, values)) in targets.zip(&output.prompt_logprobs) {
        if *got != planned.id || values.len() != planned.targets.len as usize {
            return Err(format!(
                "sequence {} has {} prompt log-probabilities; expected: sequence {} with {}",
                got.0,
                values.len(),
                planned.id.0,
                planned.targets.len
            ));
        }
    }
    Ok(())
}
