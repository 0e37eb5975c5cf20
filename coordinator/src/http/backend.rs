//! The HTTP layer's view of the cluster: what it needs, and nothing of how it is done.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::stream::{self, Stream};

use crate::core::types::{ClientEvent, ClusterStatus, ServeError, ServeRequest};
use crate::handle::{CoordinatorHandle, RequestStream};

/// The events of a request. Dropping it cancels the request on every node.
pub type Events = Pin<Box<dyn Stream<Item = ClientEvent> + Send>>;

/// The requests of one call on their way into the cluster. Dropping it cancels them.
pub type Submission = Pin<Box<dyn Future<Output = Result<Vec<Events>, ServeError>> + Send>>;

/// Takes requests and tells how the cluster is: the driver, or a script in tests.
pub trait Backend: Send + Sync + 'static {
    /// Hands the requests of one call to the cluster. `Ok`: the events of each, in their order. `Err`: they were refused
    /// together; nothing works on them.
    fn submit(&self, requests: Vec<ServeRequest>) -> Submission;
    /// What the cluster looks like.
    fn status(&self) -> Arc<ClusterStatus>;
}

impl Backend for CoordinatorHandle {
    fn submit(&self, requests: Vec<ServeRequest>) -> Submission {
        let handle = self.clone();
        Box::pin(async move {
            let streams = handle.submit(requests).await?;
            let unfold = |events| {
                stream::unfold(events, |mut events: RequestStream| async move {
                    let event = events.next().await?;
                    Some((event, events))
                })
            };
            let streams = streams.into_iter().map(|events| Box::pin(unfold(events)) as Events);
            Ok(streams.collect())
        })
    }

    fn status(&self) -> Arc<ClusterStatus> {
        Self::status(self)
    }
}
