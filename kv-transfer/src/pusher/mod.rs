//! The prefill node's side: warm connections to decode nodes, one budget of staged bytes, many handoffs.

mod pump;
mod push;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use config::TransferConfig;
use protocol::codec::MAX_PAYLOAD_BYTES;
use protocol::control::HandoffTarget;
use protocol::ids::{NodeId, Role};
use protocol::kv::KvLayout;
use protocol::transfer::{PushMessage, PushOpen, PushReply};
use quinn::PathStats;
use runtime::clock::Clock;
use runtime::framing::FramingError;
use runtime::quic::{Alpn, Expect, Link, QuicEndpoint};

pub use push::{Push, PushError, PushHandle, Room};

use pump::Handoff;

use crate::MAX_PARTS;
use crate::core::{Extent, SendLimits};
use crate::error::TransferError;
use crate::staging::Staging;
use crate::stats::announce_sending;
use crate::transport::quic::{QuicIncoming, QuicOutgoing, halves};
use crate::transport::{Incoming, Outgoing};

/// What all handoffs of a process share, whatever carries them. Clones share the staging budget.
#[derive(Clone)]
pub struct PushSettings {
    layout: KvLayout,
    limits: SendLimits,
    staging: Staging,
    commit_timeout: Duration,
    /// Payload bytes of the handoffs that are over.
    sent: Arc<AtomicU64>,
}

impl PushSettings {
    /// Settings for a KV cache of `layout`. Errors if one block of one layer is more than a frame may carry, or more than the
    /// staging budget.
    pub fn new(layout: KvLayout, transfer: &TransferConfig) -> Result<Self, TransferError> {
        let block = layout.layer_block_bytes();
        if block > MAX_PAYLOAD_BYTES || block > transfer.staging_bytes {
            return Err(TransferError::Setting {
                field: "transfer.staging_bytes",
                value: transfer.staging_bytes.to_string(),
                rule: format!(
                    "one KV block of one layer is {block} bytes: at most {MAX_PAYLOAD_BYTES} and staging_bytes ({layout})"
                ),
            });
        }
        Ok(Self {
            layout,
            limits: SendLimits {
                frame_bytes: transfer.frame_bytes.min(MAX_PAYLOAD_BYTES),
                max_resends: transfer.max_resends,
            },
            staging: Staging::new(transfer.staging_bytes),
            commit_timeout: Duration::from_millis(transfer.commit_timeout_ms),
            sent: Arc::default(),
        })
    }

    /// Starts a handoff of `extent` on the stream that `connect` gives; it is called again if that stream turns out to be
    /// dead from the beginning. Everything ends by `deadline`. Must run on a tokio runtime; returns at once.
    pub fn start<C, F, O, I>(
        &self,
        connect: C,
        open: PushOpen,
        extent: Extent,
        deadline: Instant,
    ) -> Result<Push, TransferError>
    where
        C: FnMut() -> F + Send + 'static,
        F: Future<Output = Result<(O, I), TransferError>> + Send + 'static,
        O: Outgoing<PushMessage> + 'static,
        I: Incoming<PushReply> + 'static,
    {
        if extent.parts() > MAX_PARTS || extent.layers != self.layout.num_layers {
            return Err(TransferError::Setting {
                field: "extent",
                value: extent.to_string(),
                rule: format!(
                    "{} layers, at most {MAX_PARTS} (layer, block) pairs",
                    self.layout.num_layers
                ),
            });
        }
        Ok(Push::spawn(self.clone(), connect, Handoff { open, extent, deadline }))
    }
}

/// Pushes handoffs to decode nodes. Clones share connections and the staging budget.
#[derive(Clone)]
pub struct Pusher {
    settings: PushSettings,
    links: Arc<Links>,
}

impl Pusher {
    /// A pusher that dials from `endpoint`.
    pub fn new(
        endpoint: Arc<QuicEndpoint>,
        layout: KvLayout,
        transfer: &TransferConfig,
    ) -> Result<Self, TransferError> {
        announce_sending();
        let links = Arc::new(Links {
            endpoint,
            slots: Mutex::default(),
        });
        Ok(Self {
            settings: PushSettings::new(layout, transfer)?,
            links,
        })
    }

    /// Payload bytes of all handoffs that are over, repeats and those that failed included.
    pub fn sent_bytes(&self) -> u64 {
        self.settings.sent.load(Ordering::Relaxed)
    }

    /// Starts a handoff of `extent` into the reservation of `target`, on a warm connection if there is one. Returns at once;
    /// what goes wrong is told by [`Push::failed`] and [`Push::commit`]. Must run on a tokio runtime.
    pub fn open(
        &self,
        target: &HandoffTarget,
        open: PushOpen,
        extent: Extent,
        deadline: Instant,
    ) -> Result<Push, TransferError> {
        let setting = |field, value: String, rule: String| Err(TransferError::Setting { field, value, rule });
        if open.ticket != target.ticket {
            return setting(
                "open.ticket",
                open.ticket.to_string(),
                format!("the target's ticket is {}", target.ticket),
            );
        }
        let first = self.settings.layout.groups.first_number(target.have_blocks);
        if extent.first_block != first {
            let rule = format!("the decode node has {} blocks", target.have_blocks);
            return setting("extent.first_block", extent.first_block.to_string(), rule);
        }
        let (links, node, address) = (Arc::clone(&self.links), target.node.clone(), target.address.clone());
        let connect = move || {
            let (links, node, address) = (Arc::clone(&links), node.clone(), address.clone());
            async move { links.stream(node, address).await }
        };
        self.settings.start(connect, open, extent, deadline)
    }

    /// Dials a decode node, so that its first handoff need not wait for the handshake.
    pub async fn warm(&self, node: NodeId, address: String) -> Result<(), TransferError> {
        self.links.link(node, address).await.map(drop)
    }

    /// What the connection to a decode node measures: round-trip time, datagram size, losses. `None`: there is none now.
    pub fn path(&self, node: NodeId, address: String) -> Option<PathStats> {
        let slots = self.links.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.get(&(node, address))?.try_lock().ok()?;
        slot.link
            .as_ref()
            .filter(|_| slot.is_alive())
            .map(|link| link.connection.stats().path)
    }

    /// Bytes of computed KV that have not arrived, over all handoffs.
    pub fn staged_bytes(&self) -> usize {
        self.settings.staging.used()
    }
}

/// Connections to decode nodes, one per (name, address).
struct Links {
    endpoint: Arc<QuicEndpoint>,
    slots: Mutex<HashMap<(NodeId, String), SharedSlot>>,
}

/// Locked while it is dialled.
type SharedSlot = Arc<tokio::sync::Mutex<Slot>>;

#[derive(Default)]
struct Slot {
    link: Option<Link>,
    /// The last failed dial, for those who waited meanwhile.
    failed: Option<(Instant, TransferError)>,
}

impl Slot {
    fn is_alive(&self) -> bool {
        self.link
            .as_ref()
            .is_some_and(|link| link.connection.close_reason().is_none())
    }
}

impl Links {
    async fn stream(&self, node: NodeId, address: String) -> Result<(QuicOutgoing, QuicIncoming), TransferError> {
        let link = self.link(node, address).await?;
        let stream = link.connection.open_bi().await.map_err(FramingError::from)?;
        Ok(halves(stream))
    }

    /// The live connection, or a new one. One dial at a time per node; its failure is the answer to all who wait for it.
    async fn link(&self, node: NodeId, address: String) -> Result<Link, TransferError> {
        let asked = Clock.now();
        let slot = self.slot((node.clone(), address.clone()));
        let mut slot = slot.lock().await;
        if let Some(link) = &slot.link
            && slot.is_alive()
        {
            return Ok(link.clone());
        }
        if let Some((at, error)) = &slot.failed
            && *at >= asked
        {
            return Err(error.clone());
        }
        let expect = Expect {
            role: Role::Decode,
            node: Some(node),
        };
        match self.endpoint.connect(&address, Alpn::Kv, expect).await {
            Ok(link) => {
                *slot = Slot {
                    link: Some(link.clone()),
                    failed: None,
                };
                Ok(link)
            }
            Err(error) => {
                let error = TransferError::from(error);
                *slot = Slot {
                    link: None,
                    failed: Some((Clock.now(), error.clone())),
                };
                Err(error)
            }
        }
    }

    fn slot(&self, key: (NodeId, String)) -> SharedSlot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // Nodes come and go under new addresses: forget the dead. A slot that is locked is being dialled.
        slots.retain(|_, slot| slot.try_lock().map_or(true, |slot| slot.is_alive()));
        Arc::clone(slots.entry(key).or_default())
    }
}
