//! One job stream: events out, updates and cancel in.

use std::sync::Arc;
use std::time::Duration;

use engine::owners::JobName;
use protocol::codec::MAX_CONTROL_BYTES;
use protocol::control::{Job, JobError, JobErrorKind, JobEvent, JobUpdate};
use protocol::ids::NodeId;
use quinn::{RecvStream, SendStream};
use runtime::framing::{FramingError, MessageReader, MessageWriter};
use thiserror::Error;
use tokio::time::timeout;
use tracing::field::display;

use crate::job_trace::JobTrace;

/// Longest wait until the coordinator has taken an event.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(5);

/// The job's stream is gone: the coordinator cancelled, or the link is lost. Whoever sees it lets go of everything.
#[derive(Debug, Error)]
#[error("job is gone: {0}")]
pub struct JobGone(#[from] FramingError);

/// The node's side of a job stream. Dropping it without [`JobStream::end`] resets the stream.
#[derive(Debug)]
pub struct JobStream {
    writer: MessageWriter,
    /// `None` once the coordinator has said all it will.
    updates: Option<MessageReader>,
    name: Arc<JobName>,
    trace: JobTrace,
}

impl JobStream {
    /// Reads the job of a new stream, which `coordinator` has opened. `None` if it took the job back before it was complete.
    pub(crate) async fn accept(
        send: SendStream,
        recv: RecvStream,
        coordinator: NodeId,
    ) -> Result<Option<(Job, Self)>, FramingError> {
        let writer = MessageWriter::new(send, MAX_CONTROL_BYTES);
        let mut reader = MessageReader::new(recv, MAX_CONTROL_BYTES);
        let Some(job) = reader.next::<Job>().await? else {
            return Ok(None);
        };
        let key = job.key();
        let name = Arc::new(JobName { key, coordinator });
        let stream = Self {
            writer,
            updates: Some(reader),
            trace: JobTrace::new(Arc::clone(&name), job.context().clone()),
            name,
        };
        Ok(Some((job, stream)))
    }

    /// Which job it is.
    pub fn name(&self) -> &Arc<JobName> {
        &self.name
    }

    /// Where it is noted what the job does.
    pub fn trace(&mut self) -> &mut JobTrace {
        &mut self.trace
    }

    /// Sends an event.
    pub async fn send(&mut self, event: &JobEvent) -> Result<(), JobGone> {
        self.send_all(std::slice::from_ref(event)).await
    }

    /// Sends several events at once.
    pub async fn send_all(&mut self, events: &[JobEvent]) -> Result<(), JobGone> {
        let delivered = deliver(&mut self.writer, events).await;
        delivered.map_err(|gone| self.seen(gone))
    }

    /// A job whose link is lost has failed; one that was reset has not.
    fn seen(&mut self, gone: JobGone) -> JobGone {
        if let JobGone(FramingError::Connection { reason, .. }) = &gone {
            self.trace.lost(reason);
        }
        gone
    }

    /// The coordinator's next update of the job, or its cancel, or the loss of the link. Cancel-safe.
    pub async fn update(&mut self) -> Result<JobUpdate, JobGone> {
        loop {
            let Some(updates) = &mut self.updates else {
                return Err(self.cancelled().await);
            };
            let stopped = tokio::select! {
                stopped = self.writer.stopped() => stopped,
                update = updates.next() => match update? {
                    Some(update) => return Ok(update),
                    None => {
                        self.updates = None;
                        continue;
                    }
                },
            };
            return Err(self.seen(gone(stopped)));
        }
    }

    /// Sends the job's last event and ends the stream cleanly. Returns when the coordinator has it: a node that drains
    /// closes its links when its last job has ended, and with them whatever is still under way.
    pub async fn end(mut self, event: &JobEvent) -> Result<(), JobGone> {
        self.trace.ends(event);
        deliver(&mut self.writer, std::slice::from_ref(event)).await?;
        self.writer.finish()?;
        match timeout(DELIVERY_TIMEOUT, self.writer.stopped()).await {
            // A coordinator that stops reading here has its last event, or does not want it.
            Ok(Ok(()) | Err(FramingError::Reset { .. })) => Ok(()),
            Ok(Err(lost)) => Err(lost.into()),
            Err(_) => {
                let (request, trace_id) = (self.name.key.request, self.trace.context().trace_id().map(display));
                tracing::debug!(%request, trace_id, "the coordinator does not take a job's last event");
                Ok(())
            }
        }
    }

    /// Ends the job with an error.
    pub async fn fail(self, kind: JobErrorKind, message: impl Into<String>) -> Result<(), JobGone> {
        self.end(&JobEvent::Failed(JobError {
            kind,
            message: message.into(),
        }))
        .await
    }

    /// Resolves when the coordinator cancels the job or the link is lost. Cancel-safe.
    pub async fn cancelled(&mut self) -> JobGone {
        let gone = gone(self.writer.stopped().await);
        self.seen(gone)
    }
}

fn gone(stopped: Result<(), FramingError>) -> JobGone {
    match stopped {
        // The stream was not finished, so its end cannot have been acknowledged.
        Ok(()) => JobGone(FramingError::Closed),
        Err(error) => JobGone(error),
    }
}

/// Writes events, unless the coordinator lives and takes none: whoever holds blocks must not wait for it for ever.
async fn deliver(writer: &mut MessageWriter, events: &[JobEvent]) -> Result<(), JobGone> {
    match timeout(DELIVERY_TIMEOUT, writer.write_all(events)).await {
        Ok(written) => Ok(written?),
        Err(_) => Err(JobGone(FramingError::Connection {
            reason: format!("the coordinator takes no event for {DELIVERY_TIMEOUT:?}"),
            silent: true,
        })),
    }
}

/// Checks the token ids of a job against the model: the error says which value is wrong and what would be right.
pub fn check_tokens(token_ids: &[u32], vocab_size: u32, max_seq_len: usize) -> Result<(), String> {
    if token_ids.is_empty() {
        return Err("token_ids is empty; at least one token is needed".to_owned());
    }
    if token_ids.len() >= max_seq_len {
        return Err(format!(
            "token_ids has {} tokens; with one more to generate at most {max_seq_len} fit",
            token_ids.len()
        ));
    }
    match token_ids.iter().position(|id| *id >= vocab_size) {
        Some(i) => Err(format!(
            "token_ids[{i}] = {} is not below the vocabulary size {vocab_size}",
            token_ids[i]
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_errors_name_the_value_and_the_limit() {
        assert_eq!(check_tokens(&[1, 2], 3, 3), Ok(()));
        assert!(check_tokens(&[], 3, 3).is_err_and(|e| e.contains("empty")));
        assert!(check_tokens(&[1, 3], 3, 9).is_err_and(|e| e.contains("token_ids[1] = 3") && e.contains("size 3")));
        assert!(check_tokens(&[1, 1, 1], 3, 3).is_err_and(|e| e.contains("3 tokens")));
    }
}
