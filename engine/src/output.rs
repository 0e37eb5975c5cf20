//! Whether what a runner returned is an answer to its plan.

use crate::plan::{PlannedSequence, SequenceId, StepOutput, StepPlan, Wanted};

/// Whether `output` answers `plan`, entry by entry.
pub(crate) fn check_output(plan: &StepPlan, output: &StepOutput) -> Result<(), String> {
    check_failed(plan, output)?;
    let living = || surviving(plan, output);
    check_sampled(living(), output)?;
    check_candidates(living(), output)?;
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

fn check_sampled<'a>(
    living: impl Iterator<Item = &'a PlannedSequence> + Clone,
    output: &StepOutput,
) -> Result<(), String> {
    let expected = living.flat_map(|planned| {
        let sample = planned.sample.as_ref();
        let draws = sample.map_or(0, |sample| match sample.wanted {
            Wanted::Tokens(count) => count,
            Wanted::Candidates(_) => 0,
        });
        let position = sample.map_or(0, |sample| sample.output_position);
        std::iter::repeat_n((planned.id, position), draws as usize)
    });
    let number = expected.clone().count();
    if output.sampled.len() != number {
        return Err(format!(
            "{} tokens were sampled instead of {number}",
            output.sampled.len()
        ));
    }
    for ((id, position), (got, token)) in expected.zip(&output.sampled) {
        if (*got, token.position) != (id, position) {
            return Err(format!(
                "sequence {} has a token at position {}; expected: sequence {} at position {position}",
                got.0, token.position, id.0
            ));
        }
    }
    Ok(())
}

fn check_candidates<'a>(
    living: impl Iterator<Item = &'a PlannedSequence> + Clone,
    output: &StepOutput,
) -> Result<(), String> {
    let wants = |planned: &&PlannedSequence| {
        let sample = planned.sample.as_ref();
        sample.is_some_and(|sample| matches!(sample.wanted, Wanted::Candidates(_)))
    };
    let expected = living.filter(wants).map(|planned| planned.id);
    let got = output.candidates.iter().map(|(id, _)| *id);
    if !expected.clone().eq(got) {
        return Err(format!(
            "{} sequences have candidates instead of {}, or others than were planned",
            output.candidates.len(),
            expected.count()
        ));
    }
    match output.candidates.iter().find(|(_, list)| list.is_empty()) {
        Some((id, _)) => Err(format!("sequence {} has no candidates", id.0)),
        None => Ok(()),
    }
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
