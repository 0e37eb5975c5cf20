//! What handoffs cost: returned by the shells, published under the names that stand here.

use std::time::Duration;

use metrics::{counter, histogram};
use protocol::control::HandoffStats;
use runtime::measure::{Measure, WAITS};

use crate::core::ReceiveCounters;
use crate::receiver::Outcome;

/// Payload bytes sent, repeats included.
pub const SENT_BYTES: &str = "baton_kv_sent_bytes_total";
/// Frames sent, repeats included.
pub const SENT_FRAMES: &str = "baton_kv_sent_frames_total";
/// Frames sent again.
pub const RESENT_FRAMES: &str = "baton_kv_resent_frames_total";
/// Handoffs sent, by `result`.
pub const PUSHES: &str = "baton_kv_pushes_total";
/// From the end of the last prefill step to the acknowledged commit: the transfer time that users feel.
pub const EXPOSED_SECONDS: &str = "baton_kv_exposed_seconds";
/// Payload bytes written into blocks.
pub const RECEIVED_BYTES: &str = "baton_kv_received_bytes_total";
/// Frames written into blocks.
pub const RECEIVED_FRAMES: &str = "baton_kv_received_frames_total";
/// Frames not written, by `reason`.
pub const DROPPED_FRAMES: &str = "baton_kv_dropped_frames_total";
/// Handoffs received, by `result`.
pub const HANDOFFS: &str = "baton_kv_handoffs_total";

/// What the sender of handoffs measures.
pub const SENDING: &[Measure] = &[
    Measure::counter(
        SENT_BYTES,
        &[],
        "bytes",
        "KV payload sent to other nodes, repeats included.",
    ),
    Measure::counter(
        SENT_FRAMES,
        &[],
        "frames",
        "KV frames sent to other nodes, repeats included.",
    ),
    Measure::counter(RESENT_FRAMES, &[], "frames", "KV frames that had to be sent again."),
    Measure::counter(
        PUSHES,
        &["result"],
        "handoffs",
        "Handoffs sent, by how they ended; failed: no commit was acknowledged before the job was over.",
    ),
    Measure::histogram(
        EXPOSED_SECONDS,
        WAITS,
        "seconds",
        "From the end of the last prefill step to the acknowledged commit: the transfer time that users feel.",
    ),
];

/// What the receiver of handoffs measures.
pub const RECEIVING: &[Measure] = &[
    Measure::counter(
        RECEIVED_BYTES,
        &[],
        "bytes",
        "KV payload from other nodes that was written into blocks.",
    ),
    Measure::counter(
        RECEIVED_FRAMES,
        &[],
        "frames",
        "KV frames from other nodes that were written into blocks.",
    ),
    Measure::counter(
        DROPPED_FRAMES,
        &["reason"],
        "frames",
        "KV frames that were not written, by why.",
    ),
    Measure::counter(
        HANDOFFS,
        &["result"],
        "handoffs",
        "Handoffs received, by how they ended.",
    ),
];

/// Shows the results of pushes from the beginning.
pub(crate) fn announce_sending() {
    for result in ["committed", "failed"] {
        counter!(PUSHES, "result" => result).increment(0);
    }
}

/// Shows the results of handoffs, and why frames are dropped, from the beginning.
pub(crate) fn announce_receiving() {
    for result in ["committed", "refused", "cancelled", "revoked"] {
        counter!(HANDOFFS, "result" => result).increment(0);
    }
    publish_dropped(&ReceiveCounters::default());
}

/// What one handoff cost its sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStats {
    /// Payload bytes sent, repeats included.
    pub bytes: u64,
    /// Frames sent, repeats included.
    pub frames: u32,
    /// Frames sent again.
    pub resent: u32,
    /// From the call of `commit` to the receiver's answer.
    pub exposed: Duration,
}

impl From<TransferStats> for HandoffStats {
    fn from(stats: TransferStats) -> Self {
        Self {
            bytes: stats.bytes,
            frames: stats.frames,
            resent: stats.resent,
            exposed_us: u64::try_from(stats.exposed.as_micros()).unwrap_or(u64::MAX),
        }
    }
}

/// Publishes what a push cost; `committed`: whether the receiver took the sequence over.
pub(crate) fn publish_push(stats: &TransferStats, committed: bool) {
    counter!(SENT_BYTES).increment(stats.bytes);
    counter!(SENT_FRAMES).increment(stats.frames.into());
    counter!(RESENT_FRAMES).increment(stats.resent.into());
    counter!(PUSHES, "result" => if committed { "committed" } else { "failed" }).increment(1);
    if committed {
        histogram!(EXPOSED_SECONDS).record(stats.exposed.as_secs_f64());
    }
}

/// Publishes what came in a handoff.
pub(crate) fn publish_handoff(counters: &ReceiveCounters, outcome: &Outcome) {
    counter!(RECEIVED_BYTES).increment(counters.bytes);
    counter!(RECEIVED_FRAMES).increment(counters.frames);
    publish_dropped(counters);
    counter!(HANDOFFS, "result" => outcome.as_str()).increment(1);
}

fn publish_dropped(counters: &ReceiveCounters) {
    let dropped = [
        ("duplicate", counters.duplicate),
        ("wrong_ticket", counters.wrong_ticket),
        ("wrong_epoch", counters.wrong_epoch),
        ("late", counters.late),
        ("damaged", counters.damaged),
    ];
    for (reason, count) in dropped {
        counter!(DROPPED_FRAMES, "reason" => reason).increment(count);
    }
}
