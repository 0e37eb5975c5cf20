//! A job's grammar is compiled before its sequences come to the engine, away from the compute thread.

use grammar::Grammars;
use protocol::control::{JobError, JobErrorKind};
use protocol::sampling::SamplingParams;
use tokio::task::spawn_blocking;

/// Makes sure that the grammar of a job, if it has one, is compiled.
///
/// # Errors
/// [`JobErrorKind::Invalid`] if it cannot be; [`JobErrorKind::Draining`] if the process stops.
pub async fn prepare(grammars: Option<&Grammars>, sampling: &SamplingParams) -> Result<(), JobError> {
    let Some(grammar) = &sampling.grammar else {
        return Ok(());
    };
    let failed = |kind, message: &str| JobError {
        kind,
        message: message.to_owned(),
    };
    let Some(grammars) = grammars.cloned() else {
        return Err(failed(
            JobErrorKind::Invalid,
            "this node has no vocabulary for grammars",
        ));
    };
    let grammar = grammar.clone();
    match spawn_blocking(move || grammars.prepare(&grammar)).await {
        Ok(Ok(())) => Ok(()),
        // What the compiler says may quote the client's grammar, which is nobody else's business.
        Ok(Err(_)) => Err(failed(JobErrorKind::Invalid, "the grammar cannot be compiled")),
        Err(_) => Err(failed(JobErrorKind::Draining, "the node stops")),
    }
}
