//! The HTTP layer's view of the cluster: what it needs, and nothing of how it is done.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::stream::{self, Stream};

use crate::core::types::{ClientEvent, ClusterStatus, ServeError, ServeRequest};
use crate::handle::CoordinatorHandle;

/// The events of a request. Dropping it cancels the request on every node.
pub type Events = Pin<Box<dyn Stream<Item = ClientEvent> + Send>>;

/// A request on its way into the cluster. Dropping it cancels the request.
pub type Submission = Pin<Box<dyn Future<Output = Result<Events, ServeError>> + Send>>;

/// Takes requests and tells how the cluster is: the driver, or a script in tests.
pub trait Backend: Send + Sync + 'static {
    /// Hands a request to the cluster. `Err`: it was refused; nothing works on it.
    fn submit(&self, request: ServeRequest) -> Submission;
    /// What the cluster looks like.
    fn status(&self) -> Arc<ClusterStatus>;
}

impl Backend for CoordinatorHandle {
    fn submit(&self, request: ServeRequest) -> Submission {
        let handle = self.clone();
        Box::pin(async move {
            let events = handle.submit(request).await?;
            let events = stream::unfold(events, |mut events| async move {
                let event = events.next().await?;
                Some((event, events))
            });
            Ok(Box::pin(events) as Events)
        })
    }

    fn status(&self) -> Arc<ClusterStatus> {
        Self::status(self)
    }
}
