//! One job's stream.

use protocol::codec::MAX_CONTROL_BYTES;
use protocol::control::{Job, JobEvent, JobUpdate};
use quinn::Connection;
use runtime::framing::{FramingError, MessageReader, MessageWriter};
use runtime::quic::{code, describe};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::FromNode;
use crate::core::cluster::is_last;
use crate::core::nodes::LegId;

/// Sends a job, later its updates, and reports what the node says about it, until its last event, the loss of the stream, or `cancel`, which
/// resets the stream in both directions. The deadlines are the core's.
///
/// The loss of the whole connection is not reported here: the link's task does, for all jobs at once. A job that reported
/// it first would be placed again on a node that is not known to be lost.
pub async fn run(
    leg: LegId,
    connection: Connection,
    job: Job,
    updates: mpsc::Receiver<JobUpdate>,
    events: mpsc::Sender<FromNode>,
    cancel: CancellationToken,
) {
    let streams = tokio::select! {
        biased;
        () = cancel.cancelled() => return,
        streams = connection.open_bi() => streams,
    };
    let lost = match streams {
        Ok((send, recv)) => {
            let mut writer = MessageWriter::new(send, MAX_CONTROL_BYTES);
            let mut reader = MessageReader::new(recv, MAX_CONTROL_BYTES);
            let end = tokio::select! {
                biased;
                () = cancel.cancelled() => {
                    writer.reset(code::CANCELLED);
                    reader.stop(code::CANCELLED);
                    return;
                }
                end = exchange(leg, &job, updates, &mut writer, &mut reader, &events) => end,
            };
            match end {
                Ok(()) => return,
                Err(FramingError::Connection { reason, .. }) => return lost_with_its_link(leg, &job, &reason),
                Err(error) => error.to_string(),
            }
        }
        Err(error) => return lost_with_its_link(leg, &job, &describe(&error)),
    };
    let report = FromNode::JobLost { leg, reason: lost };
    tokio::select! {
        biased;
        // Nobody waits for the news any more.
        () = cancel.cancelled() => {}
        _ = events.send(report) => {}
    }
}

fn lost_with_its_link(leg: LegId, job: &Job, reason: &str) {
    let context = job.context();
    tracing::debug!(
        request = %job.key().request,
        client_request_id = context.client_id.as_deref(),
        trace_id = context.trace_id().map(display),
        ?leg,
        reason,
        "job lost with its link"
    );
}

async fn exchange(
    leg: LegId,
    job: &Job,
    updates: mpsc::Receiver<JobUpdate>,
    writer: &mut MessageWriter,
    reader: &mut MessageReader,
    events: &mpsc::Sender<FromNode>,
) -> Result<(), FramingError> {
    writer.write(job).await?;
    tokio::select! {
        end = listen(leg, reader, events) => end?,
        error = pass_on(updates, writer) => return Err(error),
    }
    // The node may have closed its side of this direction already; there is nothing to say on it any more.
    if let Err(error) = writer.finish() {
        tracing::trace!(%error, "job stream was closed by the node");
    }
    Ok(())
}

/// Reports events up to the last one.
async fn listen(leg: LegId, reader: &mut MessageReader, events: &mpsc::Sender<FromNode>) -> Result<(), FramingError> {
    loop {
        let Some(event) = reader.next::<JobEvent>().await? else {
            return Err(FramingError::Closed);
        };
        let last = is_last(&event);
        if events.send(FromNode::Job { leg, event }).await.is_err() || last {
            return Ok(());
        }
    }
}

/// Sends updates; returns when that fails.
async fn pass_on(mut updates: mpsc::Receiver<JobUpdate>, writer: &mut MessageWriter) -> FramingError {
    while let Some(update) = updates.recv().await {
        if let Err(error) = writer.write(&update).await {
            return error;
        }
    }
    // There will be no more of them.
    std::future::pending().await
}
