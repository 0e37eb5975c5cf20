//! One node's membership stream.

use std::time::Duration;

use protocol::codec::MAX_CONTROL_BYTES;
use protocol::control::{CoordinatorMessage, Hello, MAX_CACHE_NAMES, NodeMessage};
use runtime::framing::{FramingError, MessageReader, MessageWriter};
use runtime::quic::{Link, code};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::{FromNode, Joined};
use crate::core::nodes::{LinkId, PeerName};

/// Why a node did not become a member, or is none any more.
#[derive(Debug, Error)]
enum LinkEnd {
    #[error(transparent)]
    Framing(#[from] FramingError),
    #[error("the node did not introduce itself within {0} ms")]
    Silent(u128),
    #[error("the node left")]
    Left,
    #[error("refused: {0}")]
    Refused(String),
    #[error("the node broke the protocol: {0}")]
    Protocol(&'static str),
    #[error("the coordinator stops")]
    Stopped,
}

/// Orders that may wait for a node to read them.
const ORDERS: usize = 16;
/// Longest wait for the jobs of a closed connection to end: they have nothing left to wait for but the driver.
const LAST_WORDS: Duration = Duration::from_secs(1);

pub(super) async fn serve(id: LinkId, link: Link, events: mpsc::Sender<FromNode>, hello_timeout: Duration) {
    let mut joined = false;
    let jobs = TaskTracker::new();
    let end = member(id, &link, &jobs, &events, hello_timeout, &mut joined).await;
    let (code, level_warn) = match &end {
        LinkEnd::Refused(_) => (code::REFUSED, true),
        LinkEnd::Protocol(_) | LinkEnd::Silent(_) => (code::PROTOCOL, true),
        // Once the driver has ended it is this side that closes the links.
        LinkEnd::Framing(_) => (code::PROTOCOL, joined && !events.is_closed()),
        LinkEnd::Left | LinkEnd::Stopped => (code::CLOSED, false),
    };
    let reason = end.to_string();
    link.connection.close(code, reason.as_bytes());
    if level_warn {
        tracing::warn!(peer = %link.peer, remote = %link.connection.remote_address(), %reason, "link ended");
    } else {
        tracing::info!(peer = %link.peer, %reason, "link ended");
    }
    jobs.close();
    if timeout(LAST_WORDS, jobs.wait()).await.is_err() {
        tracing::debug!(peer = %link.peer, jobs = jobs.len(), "jobs outlive their link");
    }
    if joined && events.send(FromNode::Lost { link: id, reason }).await.is_err() {
        tracing::trace!("the driver ended before the link");
    }
}

async fn member(
    id: LinkId,
    link: &Link,
    jobs: &TaskTracker,
    events: &mpsc::Sender<FromNode>,
    hello_timeout: Duration,
    joined: &mut bool,
) -> LinkEnd {
    let introduced = timeout(hello_timeout, introduce(link)).await;
    let (hello, mut writer, mut reader) = match introduced {
        Ok(Ok(all)) => all,
        Ok(Err(end)) => return end,
        Err(_) => return LinkEnd::Silent(hello_timeout.as_millis()),
    };
    let (answer, verdict) = oneshot::channel();
    let peer = PeerName {
        role: link.peer.role,
        node: link.peer.node.clone(),
    };
    let connection = link.connection.clone();
    let (orders, mut to_node) = mpsc::channel(ORDERS);
    let at_the_door = Box::new(Joined {
        link: id,
        peer,
        hello,
        connection,
        jobs: jobs.clone(),
        orders,
        answer,
    });
    if events.send(FromNode::Joined(at_the_door)).await.is_err() {
        return LinkEnd::Stopped;
    }
    match verdict.await {
        Ok(Ok(())) => *joined = true,
        Ok(Err(reason)) => {
            // The node reads the reason before it sees the connection go.
            if timeout(hello_timeout, refuse(&mut writer, &reason)).await.is_err() {
                tracing::debug!(peer = %link.peer, "a refused node did not read why");
            }
            return LinkEnd::Refused(reason);
        }
        Err(_) => return LinkEnd::Stopped,
    }
    if let Err(error) = writer.write(&CoordinatorMessage::Welcome).await {
        return error.into();
    }
    tokio::select! {
        end = reports(id, &mut reader, events) => end,
        end = pass_on(&mut to_node, &mut writer) => end,
    }
}

/// Tells the node what operators want of it, for as long as the link lasts.
async fn pass_on(orders: &mut mpsc::Receiver<CoordinatorMessage>, writer: &mut MessageWriter) -> LinkEnd {
    while let Some(order) = orders.recv().await {
        if let Err(error) = writer.write(&order).await {
            return error.into();
        }
    }
    // The driver knows the link no more, and closes it.
    std::future::pending().await
}

async fn introduce(link: &Link) -> Result<(Hello, MessageWriter, MessageReader), LinkEnd> {
    let (send, recv) = link.connection.accept_bi().await.map_err(FramingError::from)?;
    let writer = MessageWriter::new(send, MAX_CONTROL_BYTES);
    let mut reader = MessageReader::new(recv, MAX_CONTROL_BYTES);
    match reader.next().await? {
        Some(NodeMessage::Hello(hello)) => Ok((hello, writer, reader)),
        Some(NodeMessage::Load(_) | NodeMessage::Cache(_) | NodeMessage::Blocks(_)) => {
            Err(LinkEnd::Protocol("a report before the node's Hello"))
        }
        None => Err(LinkEnd::Left),
    }
}

async fn refuse(writer: &mut MessageWriter, reason: &str) -> Result<(), FramingError> {
    writer
        .write(&CoordinatorMessage::Refused {
            reason: reason.to_owned(),
        })
        .await?;
    writer.finish()?;
    writer.stopped().await
}

async fn reports(id: LinkId, reader: &mut MessageReader, events: &mpsc::Sender<FromNode>) -> LinkEnd {
    loop {
        match reader.next().await {
            Ok(Some(NodeMessage::Load(report))) => {
                if events.send(FromNode::Report { link: id, report }).await.is_err() {
                    return LinkEnd::Stopped;
                }
            }
            Ok(Some(NodeMessage::Cache(change))) => {
                if change.added.len() + change.removed.len() > MAX_CACHE_NAMES {
                    return LinkEnd::Protocol("a cache change of too many names");
                }
                if events.send(FromNode::Cache { link: id, change }).await.is_err() {
                    return LinkEnd::Stopped;
                }
            }
            Ok(Some(NodeMessage::Blocks(answer))) => {
                if let Some(excess) = answer.excess() {
                    return LinkEnd::Protocol(excess);
                }
                let answer = Box::new(answer);
                if events.send(FromNode::Blocks { link: id, answer }).await.is_err() {
                    return LinkEnd::Stopped;
                }
            }
            Ok(Some(NodeMessage::Hello(_))) => return LinkEnd::Protocol("a second Hello"),
            Ok(None) => return LinkEnd::Left,
            Err(error) => return error.into(),
        }
    }
}
