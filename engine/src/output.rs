//! Whether what a runner returned is an answer to its plan.

use crate::plan::{PlannedSequence, SequenceId, StepOutput, StepPlan};

/// Whether `output` answers `plan`, entry by entry.
pub(crate) fn check_output(plan: &StepPlan, output: &StepOutput) -> Result<(), String> {
    check_failed(plan, output)?;
    let living = || surviving(plan, output);
    let samples = living().filter_map(|planned| Some((planned.id, planned.sample.as_ref()?)));
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
    let targets = living().filter(|planned| planned.targets.len > 0);
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

/// The planned sequences that have not failed, if the failed ones are planned ones in the plan's order.
fn surviving<'a>(
    plan: &'a StepPlan,
    output: &'a StepOutput,
) -> impl Iterator<Item = &'a PlannedSequence> + Clone + use<'a> {
    let mut failed = failures(output).peekable();
    let living = move |planned: &&PlannedSequence| failed.next_if_eq(&planned.id).is_none();
    plan.sequences.iter().filter(living)
}

fn failures(output: &StepOutput) -> impl Iterator<Item = SequenceId> + Clone + use<'_> {
    output.failed.iter().map(|(id, _)| *id)
}

fn check_failed(plan: &StepPlan, output: &StepOutput) -> Result<(), String> {
    let mut planned = plan.sequences.iter();
    match failures(output).find(|id| !planned.any(|planned| planned.id == *id)) {
        Some(stranger) => Err(format!(
            "sequence {} failed, which is not planned or not in the plan's order",
            stranger.0
        )),
        None => Ok(()),
    }
}
