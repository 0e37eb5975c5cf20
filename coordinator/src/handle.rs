//! How the HTTP layer talks to the driver: submit a request, read its events, drop the stream to cancel it.

use std::sync::Arc;

use protocol::ids::RequestId;
use tokio::sync::{mpsc, oneshot, watch};

use crate::core::block_audit::{AuditError, AuditReport};
use crate::core::cluster::{Asked, Explained, Order, OrderError};
use crate::core::recent::RequestRecord;
use crate::core::stop::StopMatcher;
use crate::core::types::{ClientEvent, ClusterStatus, ServeError, ServeErrorKind, ServeRequest};

/// The requests of one call on their way to the driver.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) requests: Vec<Submitted>,
    /// Admitted or refused, all of them together.
    pub(crate) reply: oneshot::Sender<Result<(), ServeError>>,
}

/// One of them.
#[derive(Debug)]
pub(crate) struct Submitted {
    pub(crate) request: ServeRequest,
    /// Built from the request's stop strings: the driver has no time for it.
    pub(crate) matcher: StopMatcher,
    /// Where the request's events go. Its capacity bounds how far a client may fall behind.
    pub(crate) events: mpsc::Sender<ClientEvent>,
}

/// What a handle sends to the driver.
#[derive(Debug)]
pub(crate) enum FromHandle {
    /// A new request.
    Submit(Box<Submission>),
    /// The client of a request is gone.
    Cancel(RequestId),
    /// An operator's order.
    Order(Box<Ordered>),
    /// Somebody wants to know why a request went where it went.
    Decisions(Asked, oneshot::Sender<Explained>),
    /// Somebody wants to see so many requests that run, and so many that have ended.
    Requests(usize, oneshot::Sender<RecentRequests>),
    /// Somebody wants to know whose the nodes' blocks are.
    AuditBlocks(oneshot::Sender<Result<AuditReport, AuditError>>),
}

/// Requests that run, the oldest first; requests that have ended, the last one first.
pub type RecentRequests = (Vec<RequestRecord>, Vec<RequestRecord>);

/// An operator's order on its way to the driver.
#[derive(Debug)]
pub(crate) struct Ordered {
    pub(crate) node: String,
    pub(crate) order: Order,
    pub(crate) reply: oneshot::Sender<Result<(), OrderError>>,
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

    /// Hands the requests of one call to the cluster. `Ok`: they are queued, and each stream ends with exactly one `Done`
    /// or `Failed`. `Err`: all were refused, with the reason and, if the cluster is full, the time after which to try again.
    pub async fn submit(&self, requests: Vec<ServeRequest>) -> Result<Vec<RequestStream>, ServeError> {
        let (reply, admitted) = oneshot::channel();
        let stopped = || ServeError::new(ServeErrorKind::Unavailable, "the coordinator stops");
        let (mut submitted, mut streams) = (Vec::new(), Vec::new());
        let mut last: Option<(Arc<[String]>, StopMatcher)> = None;
        for request in requests {
            // The requests of a call share their stop strings.
            let matcher = match &last {
                Some((strings, matcher)) if Arc::ptr_eq(strings, &request.stop_strings) => matcher.clone(),
                _ => matcher_of(&request).await.ok_or_else(stopped)?,
            };
            last = Some((Arc::clone(&request.stop_strings), matcher.clone()));
            let (events, receiver) = mpsc::channel(self.capacity(&request));
            streams.push(RequestStream {
                id: request.id,
                events: receiver,
                inputs: self.inputs.clone(),
                ended: false,
            });
            submitted.push(Submitted {
                request,
                matcher,
                events,
            });
        }
        let submission = Submission {
            requests: submitted,
            reply,
        };
        // From here on dropping the streams (also while waiting for the reply) must cancel.
        self.inputs
            .send(FromHandle::Submit(Box::new(submission)))
            .await
            .map_err(|_| stopped())?;
        match admitted.await.unwrap_or_else(|_| Err(stopped())) {
            Ok(()) => Ok(streams),
            Err(refused) => {
                streams.iter_mut().for_each(|stream| stream.ended = true);
                Err(refused)
            }
        }
    }

    /// Events that may wait for a client: the prefill, the tokens and the end of each choice, where it was served if it is
    /// traced, and the end. A queue for that many never fills up. Where that is more than the client's buffer, the buffer counts, and what comes at once of
    /// further choices: their first tokens and ends. The answer of a beam search comes at once as a whole.
    fn capacity(&self, request: &ServeRequest) -> usize {
        let (choices, buffer) = (request.choices as usize, self.stream_buffer_tokens.max(1));
        let tokens = choices.saturating_mul(request.stop.max_tokens as usize);
        let events = if request.beam_width.is_some() || tokens <= buffer {
            tokens.saturating_add(choices)
        } else {
            buffer.saturating_add(2 * choices.saturating_sub(1))
        };
        let others = 2 + usize::from(request.about.context.trace.is_some());
        events.saturating_add(others).min(tokio::sync::Semaphore::MAX_PERMITS)
    }

    /// Gives a node an order. `Ok`: it is on its way to the node.
    ///
    /// # Errors
    /// The outer one: the coordinator stops. The inner one: what is wrong with the order.
    pub async fn order(&self, node: String, order: Order) -> Result<Result<(), OrderError>, ServeError> {
        let stopped = || ServeError::new(ServeErrorKind::Unavailable, "the coordinator stops");
        let (reply, answer) = oneshot::channel();
        let ordered = FromHandle::Order(Box::new(Ordered { node, order, reply }));
        self.inputs.send(ordered).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())
    }

    /// What became of a request, and why it went where it went: one decision for each of its attempts, as far as they are
    /// kept (`coordinator.decision_records`). Of several with a client's name, the newest.
    ///
    /// # Errors
    /// The coordinator stops.
    pub async fn explain(&self, asked: Asked) -> Result<Explained, ServeError> {
        self.ask(|reply| FromHandle::Decisions(asked, reply)).await
    }

    /// At most `most` of the requests that run, and as many of those that ended last (`coordinator.decision_records` are kept).
    ///
    /// # Errors
    /// The coordinator stops.
    pub async fn recent_requests(&self, most: usize) -> Result<RecentRequests, ServeError> {
        self.ask(|reply| FromHandle::Requests(most, reply)).await
    }

    async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> FromHandle) -> Result<T, ServeError> {
        let stopped = || ServeError::new(ServeErrorKind::Unavailable, "the coordinator stops");
        let (reply, told) = oneshot::channel();
        self.inputs.send(question(reply)).await.map_err(|_| stopped())?;
        told.await.map_err(|_| stopped())
    }

    /// All blocks of all connected nodes by owner, compared with what is booked here. Takes at most
    /// [`crate::core::block_audit::AUDIT_TIMEOUT`]: nodes that do not answer by then are told as silent.
    ///
    /// # Errors
    /// The outer one: the coordinator stops. The inner one: enough audits run.
    pub async fn audit_blocks(&self) -> Result<Result<AuditReport, AuditError>, ServeError> {
        self.ask(FromHandle::AuditBlocks).await
    }

    /// What the cluster looks like; at most a fraction of a second old.
    pub fn status(&self) -> Arc<ClusterStatus> {
        self.status.borrow().clone()
    }
}

/// Stop strings with more bytes than this are taken to another thread: here they would hold up other connections.
const INLINE_STOP_BYTES: usize = 16_384;

/// The matcher of a request's stop strings; `None` if the process stops.
async fn matcher_of(request: &ServeRequest) -> Option<StopMatcher> {
    let (strings, keep) = (Arc::clone(&request.stop_strings), request.include_stop_str);
    if strings.iter().map(String::len).sum::<usize>() <= INLINE_STOP_BYTES {
        return Some(StopMatcher::new(&strings, keep));
    }
    let build = move || StopMatcher::new(&strings, keep);
    tokio::task::spawn_blocking(build).await.ok()
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
        self.ended = event.is_last();
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
