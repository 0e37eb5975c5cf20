//! Tests of handoffs: the sessions alone, both ends in memory under seeded faults, both ends over QUIC on loopback.

mod faults;
mod frames;
mod groups;
mod handoff;
mod link;
mod node;
mod properties;
mod sessions;
mod staging;

use std::time::{Duration, Instant};

use bytes::Bytes;
use config::TransferConfig;
use kv_transfer::core::{Extent, Part};
use kv_transfer::error::TransferError;
use kv_transfer::pusher::{Push, PushError, PushSettings};
use kv_transfer::receiver::{Outcome, Receiver};
use kv_transfer::transport::memory;
use protocol::ids::{Epoch, RequestId, Ticket};
use protocol::kv::{Fingerprint, KvDtype, KvLayout};
use protocol::transfer::PushOpen;
use protocol::window::Groups;
use runtime::clock::Clock;

use node::Node;

const LAYOUT: KvLayout = KvLayout {
    num_layers: 5,
    num_kv_heads: 2,
    head_dim: 8,
    block_tokens: 4,
    dtype: KvDtype::F16,
    latent: false,
    groups: Groups::ONE,
};
const FINGERPRINT: Fingerprint = Fingerprint(7);
const TICKET: Ticket = Ticket(0xabcd);
const EPOCH: Epoch = Epoch(3);
/// Blocks 2..12 of a prompt of 45 tokens.
const EXTENT: Extent = Extent::of_one_group(5, 2, 10);
const NUM_TOKENS: u32 = 45;
/// Far longer than anything here takes: a wait that reaches it has failed.
const PATIENCE: Duration = Duration::from_secs(20);

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not happen within {PATIENCE:?}"),
    }
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    soon(what, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

fn far() -> Instant {
    Clock.now() + 2 * PATIENCE
}

fn transfer() -> TransferConfig {
    TransferConfig {
        frame_bytes: 4_096,
        staging_bytes: 1 << 20,
        ..TransferConfig::default()
    }
}

fn open() -> PushOpen {
    PushOpen {
        request: RequestId(1),
        ticket: TICKET,
        epoch: EPOCH,
        fingerprint: FINGERPRINT,
    }
}

fn first_tokens() -> Vec<u32> {
    vec![42, 7]
}

/// The bytes that the prefill node holds for one block of one layer: different everywhere.
fn block_bytes(layout: &KvLayout, layer: u32, block: u32) -> Vec<u8> {
    let seed = (u64::from(layer) << 32 | u64::from(block)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = |n: u64| (seed ^ n).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40;
    (0..layout.layer_block_bytes() as u64).map(|n| mixed(n) as u8).collect()
}

/// The canonical bytes of a rectangle.
fn payload(layout: &KvLayout, part: Part) -> Bytes {
    let layers = part.first_layer..part.first_layer + part.layers;
    let blocks = part.first_block..part.first_block + part.blocks;
    layers
        .flat_map(|layer| blocks.clone().flat_map(move |block| block_bytes(layout, layer, block)))
        .collect()
}

/// An extent as a prefill node computes it: chunk by chunk, layer by layer.
fn computed(extent: Extent, chunk_blocks: u32) -> Vec<Part> {
    let chunks = (0..extent.blocks).step_by(chunk_blocks as usize);
    chunks
        .flat_map(|offset| {
            (0..extent.layers).map(move |first_layer| Part {
                first_layer,
                layers: 1,
                first_block: extent.first_block + offset,
                blocks: chunk_blocks.min(extent.blocks - offset),
            })
        })
        .collect()
}

async fn push_all(push: &Push, extent: Extent) -> Result<(), PushError> {
    let handle = push.staging();
    for part in computed(extent, 3) {
        handle.push(part, payload(&LAYOUT, part)).await?;
    }
    Ok(())
}

fn receiver(node: &Node) -> Receiver {
    Receiver::new(node.table(), FINGERPRINT, LAYOUT, &transfer())
}

/// Gives one end of a stream the first time it is called; the second time there is none.
fn once<O, I>(end: (O, I)) -> impl FnMut() -> std::future::Ready<Result<(O, I), TransferError>> {
    let mut end = Some(end);
    move || {
        std::future::ready(end.take().ok_or(TransferError::Link {
            reason: "no second stream".to_owned(),
        }))
    }
}

/// Starts a push to `node` in memory; `capacity` messages fit into each direction.
fn in_memory(node: &Node, capacity: usize) -> (Push, tokio::task::JoinHandle<Outcome>) {
    let (push_end, (outgoing, incoming)) = memory::stream(capacity);
    let receiver = receiver(node);
    let task = tokio::spawn(async move { receiver.handle(outgoing, incoming).await.0 });
    let settings = PushSettings::new(LAYOUT, &transfer()).expect("settings");
    let push = settings.start(once(push_end), open(), EXTENT, far()).expect("starts");
    (push, task)
}

fn refused(error: &TransferError) -> &str {
    match error {
        TransferError::Refused { reason } => reason,
        other => panic!("expected a refusal, got: {other}"),
    }
}
