//! How the HTTP layer talks to the driver: submit a request, read its events, drop the stream to cancel it.

use std::sync::Arc;

use protocol::ids::RequestId;
use tokio::sync::{mpsc, oneshot, watch};

use crate::core::stop::StopMatcher;
use crate::core::types::{ClientEvent, ClusterStatus, ServeError, ServeErrorKind, ServeRequest};

/// A request on its way to the driver.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) request: ServeRequest,
    /// Built from the request's stop strings: the driver has no time for it.
    pub(crate) matcher: StopMatcher,
    /// Where the request's events go. Its capacity bounds how far a client may fall behind.
    pub(crate) events: mpsc::Sender<ClientEvent>,
    /// Admitted or refused.
    pub(crate) reply: oneshot::Sender<Result<(), ServeError>>,
}

/// What a handle sends to the driver.
#[derive(Debug)]
pub(crate) enum FromHandle {
    /// A new request.
    Submit(Box<Submission>),
    /// The client of a request is gone.
    Cancel(RequestId),
}

/// The way into the cluster. Cheap to clone.
#[derive(Clone, Debug)]
pub struct CoordinatorHandle {
    inputs: mpsc::Sender<FromHandle>,
    status: watch::Receiver<Arc<ClusterStatus>>,
    stream_buffer_tokens: usize,
}

impl CoordinatorHandle {
    /// A handle of the driver at the other ends of `inputs` and `status`. `stream_buffer_tokens`: most events that wait
    /// for a client; one that falls further behind is cancelled.
    pub(crate) fn new(
        inputs: mpsc::Sender<FromHandle>,
        status: watch::Receiver<Arc<ClusterStatus>>,
        stream_buffer_tokens: usize,
    ) -> Self {
        Self {
            inputs,
            status,
            stream_buffer_tokens,
        }
    }

    /// Hands a request to the cluster. `Ok`: it is queued, and the stream ends with exactly one `Done` or `Failed`.
    /// `Err`: it was refused, with the reason and, if the cluster is full, the time after which to try again.
    pub async fn submit(&self, request: ServeRequest) -> Result<RequestStream, ServeError> {
        // Prefill, the tokens, and the end: a queue for that many events never fills up. Only the tokens count against the
        // client's buffer.
        let tokens = (request.stop.max_tokens as usize).min(self.stream_buffer_tokens.max(1));
        let capacity = tokens.saturating_add(2);
        let (events, receiver) = mpsc::channel(capacity);
        let (reply, admitted) = oneshot::channel();
        let id = request.id;
        let stopped = || ServeError::new(ServeErrorKind::Unavailable, "the coordinator stops");
        let matcher = StopMatcher::new(&request.stop_strings, request.include_stop_str);
        let submission = Submission {
            request,
            matcher,
            events,
            reply,
        };
        self.inputs
            .send(FromHandle::Submit(Box::new(submission)))
            .await
            .map_err(|_| stopped())?;
        // From here on dropping the stream (also while waiting for the reply) must cancel.
        let mut stream = RequestStream {
            id,
            events: receiver,
            inputs: self.inputs.clone(),
            ended: false,
        };
        match admitted.await.unwrap_or_else(|_| Err(stopped())) {
            Ok(()) => Ok(stream),
            Err(refused) => {
                stream.ended = true;
                Err(refused)
            }
        }
    }

    /// What the cluster looks like; at most a fraction of a second old.
    pub fn status(&self) -> Arc<ClusterStatus> {
        self.status.borrow().clone()
    }
}

/// The events of one request. Dropping it cancels the request on every node.
#[derive(Debug)]
pub struct RequestStream {
    id: RequestId,
    events: mpsc::Receiver<ClientEvent>,
    inputs: mpsc::Sender<FromHandle>,
    ended: bool,
}

impl RequestStream {
    /// The next event; `None` after `Done` or `Failed`.
    pub async fn next(&mut self) -> Option<ClientEvent> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().await.unwrap_or_else(|| {
            // The driver is gone without having ended the request: it must not look like a normal end.
            ClientEvent::Failed(ServeError::new(ServeErrorKind::Unavailable, "the coordinator stops"))
        });
        self.ended = matches!(event, ClientEvent::Done(_) | ClientEvent::Failed(_));
        Some(event)
    }

    /// The request's name.
    pub fn id(&self) -> RequestId {
        self.id
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.ended {
            // If the queue is full the driver finds the closed channel at its next sweep.
            let _sent = self.inputs.try_send(FromHandle::Cancel(self.id)).is_ok();
        }
    }
}
