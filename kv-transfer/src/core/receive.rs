//! The decode node's end of one handoff.
//!
//! ```text
//! Receiving --commit, all there--> Over (Complete)
//!     |  \--commit, frames missing--> CommitPending --last frame written--> Over (Complete)
//!     \--anything that does not fit--> Over (Refuse)
//! ```
//!
//! Nothing is written for a frame that does not pass every check, and nothing at all once the handoff is over.

use std::collections::BTreeMap;

use protocol::ids::{Epoch, Ticket};
use protocol::kv::KvLayout;
use protocol::transfer::{FrameHeader, PushCommit};
use thiserror::Error;

use super::{Coverage, Extent, Part, checksum, digest};

/// Bounds of what a sender may ask for.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveLimits {
    /// Largest payload of a frame, in bytes.
    pub max_payload_bytes: u32,
    /// Most repeats that are requested in one handoff.
    pub max_resends: u32,
}

/// Why a handoff is refused. The text goes to the sender.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// A frame is empty or goes beyond the reservation.
    #[error("frame {number}: {part} is empty or outside of the reservation's {extent}")]
    OutsideExtent {
        /// Its number.
        number: u32,
        /// What it claims to hold.
        part: Part,
        /// What is reserved.
        extent: Extent,
    },
    /// A frame's payload is longer than any frame may be.
    #[error("frame {number}: payload_len is {found}, at most {limit} bytes are taken")]
    PayloadTooLong {
        /// Its number.
        number: u32,
        /// Announced length.
        found: u32,
        /// The limit.
        limit: u32,
    },
    /// A frame's payload length is not what its ranges need.
    #[error("frame {number}: payload_len is {found}, {part} needs {expected} bytes")]
    PayloadLength {
        /// Its number.
        number: u32,
        /// Announced length.
        found: u32,
        /// What it claims to hold.
        part: Part,
        /// Right length.
        expected: u64,
    },
    /// A frame's number is larger than a handoff of this size can have.
    #[error("frame number is {number}, a handoff of {extent} has at most {limit} frames")]
    Number {
        /// The number.
        number: u32,
        /// What is reserved.
        extent: Extent,
        /// Most frames.
        limit: u64,
    },
    /// A frame brings what another frame has brought.
    #[error("frame {number}: {part} overlaps a frame of another number")]
    Overlap {
        /// Its number.
        number: u32,
        /// What it claims to hold.
        part: Part,
    },
    /// A frame number came twice with different headers.
    #[error("frame {number} came before as another frame")]
    Conflict {
        /// The number.
        number: u32,
    },
    /// Too many damaged frames.
    #[error("frame {number} is damaged, and {limit} repeats have been requested already")]
    TooManyResends {
        /// The frame.
        number: u32,
        /// Most repeats.
        limit: u32,
    },
    /// The commit names another reservation or generation.
    #[error("commit is for ticket {ticket} epoch {epoch}, this handoff is ticket {expected_ticket} epoch {expected_epoch}", epoch = epoch.0, expected_epoch = expected_epoch.0)]
    CommitTarget {
        /// Named ticket.
        ticket: Ticket,
        /// Named epoch.
        epoch: Epoch,
        /// This handoff's.
        expected_ticket: Ticket,
        /// This handoff's.
        expected_epoch: Epoch,
    },
    /// A second commit.
    #[error("commit came twice")]
    SecondCommit,
    /// The commit counts other frames than have come.
    #[error("commit counts {found} frames, {came} came")]
    FrameCount {
        /// Counted by the sender.
        found: u32,
        /// Written here, or the end of the numbers seen here.
        came: u64,
    },
    /// All frames have come, but not all blocks.
    #[error("incomplete: {missing} (layer, block) missing, first layer {layer}, block {block}")]
    Incomplete {
        /// How many are missing.
        missing: u64,
        /// Layer of the first.
        layer: u32,
        /// Block of the first.
        block: u32,
    },
    /// The commit's digest is not that of the frames.
    #[error("digest is {found:016x}, the frames give {expected:016x}")]
    Digest {
        /// The sender's.
        found: u64,
        /// Computed here.
        expected: u64,
    },
    /// The commit's token count does not fill the blocks.
    #[error("num_tokens is {found}: that is {needs} blocks, the handoff is of a prompt of {expected}")]
    NumTokens {
        /// The sender's.
        found: u32,
        /// Blocks for as many tokens.
        needs: u64,
        /// Blocks of the reservation that hold the prompt.
        expected: u64,
    },
    /// The blocks did not take the bytes.
    #[error("cannot write frame {number}: {reason}")]
    Write {
        /// The frame.
        number: u32,
        /// What the writer says.
        reason: String,
    },
    /// Time is up.
    #[error("not complete in time: {missing} (layer, block) missing after {frames} frames")]
    Deadline {
        /// How many are missing.
        missing: u64,
        /// Frames that have come.
        frames: usize,
    },
    /// The handoff had ended already.
    #[error("the handoff is over")]
    Over,
}

/// What to do with a frame whose header has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderAction {
    /// Read the payload and hand it to [`ReceiveSession::on_payload`].
    Read,
    /// Read the payload and forget it: a repeat, or a frame of another reservation or generation.
    Skip,
    /// End the handoff.
    Refuse(Refusal),
}

/// What to do with a frame whose payload has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PayloadAction {
    /// Write it, then call [`ReceiveSession::on_written`].
    Write,
    /// Forget it.
    Skip,
    /// Forget it and ask for it again.
    Resend {
        /// Number of the frame.
        number: u32,
    },
    /// End the handoff.
    Refuse(Refusal),
}

/// What to do about the commit.
#[derive(Clone, Debug, PartialEq)]
pub enum CommitAction {
    /// Nothing yet.
    Wait,
    /// Everything is there and proven: the sequence may join.
    Complete(PushCommit),
    /// End the handoff.
    Refuse(Refusal),
}

/// What came in one handoff.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveCounters {
    /// Frames written.
    pub frames: u64,
    /// Payload bytes written.
    pub bytes: u64,
    /// Repeats of written frames, ignored.
    pub duplicate: u64,
    /// Frames that named another ticket, dropped.
    pub wrong_ticket: u64,
    /// Frames that named another epoch, dropped.
    pub wrong_epoch: u64,
    /// Frames after the end, dropped.
    pub late: u64,
    /// Frames whose payload did not match their checksum, requested again.
    pub damaged: u64,
}

#[derive(Clone, Debug)]
enum State {
    Receiving,
    CommitPending(PushCommit),
    Over,
}

/// One handoff, from the receiver's side.
#[derive(Clone, Debug)]
pub struct ReceiveSession {
    ticket: Ticket,
    epoch: Epoch,
    layout: KvLayout,
    limits: ReceiveLimits,
    state: State,
    coverage: Coverage,
    /// Written frames by number.
    frames: BTreeMap<u32, FrameHeader>,
    /// Lowest number that has not been written.
    below: u32,
    resends: u32,
    counters: ReceiveCounters,
}

impl ReceiveSession {
    /// A handoff into the reservation `ticket` of generation `epoch`, which expects `extent`.
    pub fn new(ticket: Ticket, epoch: Epoch, layout: KvLayout, extent: Extent, limits: ReceiveLimits) -> Self {
        Self {
            ticket,
            epoch,
            layout,
            limits,
            state: State::Receiving,
            coverage: Coverage::new(extent),
            frames: BTreeMap::new(),
            below: 0,
            resends: 0,
            counters: ReceiveCounters::default(),
        }
    }

    /// A frame's header has come. Nothing may be allocated for its payload unless this says [`HeaderAction::Read`].
    pub fn on_header(&mut self, header: &FrameHeader) -> HeaderAction {
        let limit = self.limits.max_payload_bytes;
        if header.payload_len > limit {
            return HeaderAction::Refuse(self.refuse(Refusal::PayloadTooLong {
                number: header.number,
                found: header.payload_len,
                limit,
            }));
        }
        if self.is_over() {
            self.counters.late += 1;
            return HeaderAction::Skip;
        }
        if header.ticket != self.ticket {
            self.counters.wrong_ticket += 1;
            return HeaderAction::Skip;
        }
        if header.epoch != self.epoch {
            self.counters.wrong_epoch += 1;
            return HeaderAction::Skip;
        }
        if self.frames.get(&header.number) == Some(header) {
            self.counters.duplicate += 1;
            return HeaderAction::Skip;
        }
        match self.check(header) {
            Ok(()) => HeaderAction::Read,
            Err(refusal) => HeaderAction::Refuse(self.refuse(refusal)),
        }
    }

    /// A new frame's payload has come. Checks header and payload; knows nothing of an earlier [`on_header`](Self::on_header).
    pub fn on_payload(&mut self, header: &FrameHeader, payload: &[u8]) -> PayloadAction {
        match self.on_header(header) {
            HeaderAction::Read => {}
            HeaderAction::Skip => return PayloadAction::Skip,
            HeaderAction::Refuse(refusal) => return PayloadAction::Refuse(refusal),
        }
        if payload.len() == header.payload_len as usize && checksum(payload) == header.checksum {
            return PayloadAction::Write;
        }
        self.counters.damaged += 1;
        if self.resends >= self.limits.max_resends {
            let limit = self.limits.max_resends;
            return PayloadAction::Refuse(self.refuse(Refusal::TooManyResends {
                number: header.number,
                limit,
            }));
        }
        self.resends += 1;
        PayloadAction::Resend { number: header.number }
    }

    /// The frame that [`on_payload`](Self::on_payload) passed has been written.
    pub fn on_written(&mut self, header: &FrameHeader) -> CommitAction {
        let part = Part::from(header);
        if self.is_over() || !self.coverage.insert(&part) {
            return CommitAction::Refuse(self.refuse(Refusal::Over));
        }
        self.frames.insert(header.number, *header);
        while self.frames.contains_key(&self.below) {
            self.below += 1;
        }
        self.counters.frames += 1;
        self.counters.bytes += u64::from(header.payload_len);
        match std::mem::replace(&mut self.state, State::Receiving) {
            State::Receiving => CommitAction::Wait,
            State::CommitPending(commit) => self.decide(commit),
            State::Over => CommitAction::Refuse(self.refuse(Refusal::Over)),
        }
    }

    /// The blocks did not take the frame.
    pub fn on_write_failed(&mut self, header: &FrameHeader, reason: String) -> Refusal {
        self.refuse(Refusal::Write {
            number: header.number,
            reason,
        })
    }

    /// The sender has sent everything.
    pub fn on_commit(&mut self, commit: PushCommit) -> CommitAction {
        match self.state {
            State::Receiving => {}
            State::CommitPending(_) => return CommitAction::Refuse(self.refuse(Refusal::SecondCommit)),
            State::Over => return CommitAction::Refuse(Refusal::Over),
        }
        if (commit.ticket, commit.epoch) != (self.ticket, self.epoch) {
            return CommitAction::Refuse(self.refuse(Refusal::CommitTarget {
                ticket: commit.ticket,
                epoch: commit.epoch,
                expected_ticket: self.ticket,
                expected_epoch: self.epoch,
            }));
        }
        let needs = u64::from(commit.num_tokens).div_ceil(u64::from(self.layout.block_tokens));
        let expected = u64::from(self.coverage.extent().places);
        if needs != expected {
            let refusal = Refusal::NumTokens {
                found: commit.num_tokens,
                needs,
                expected,
            };
            return CommitAction::Refuse(self.refuse(refusal));
        }
        self.decide(commit)
    }

    /// Time is up. Returns what is missing.
    pub fn on_deadline(&mut self) -> Refusal {
        let (missing, frames) = (self.coverage.missing(), self.frames.len());
        self.refuse(Refusal::Deadline { missing, frames })
    }

    /// The sender cancelled or vanished, or the reservation was revoked: whatever comes now is late.
    pub fn on_abort(&mut self) {
        self.state = State::Over;
    }

    /// True if no frame will be written any more.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// True if the commit has come and frames are still missing.
    pub fn is_commit_pending(&self) -> bool {
        matches!(self.state, State::CommitPending(_))
    }

    /// Every frame with a number below this has been written.
    pub fn received_below(&self) -> u32 {
        self.below
    }

    /// What has come so far.
    pub fn counters(&self) -> ReceiveCounters {
        self.counters
    }

    /// Checks a header of this ticket and epoch whose frame has not been written before.
    fn check(&self, header: &FrameHeader) -> Result<(), Refusal> {
        let (number, part, extent) = (header.number, Part::from(header), self.coverage.extent());
        if self.frames.contains_key(&number) {
            return Err(Refusal::Conflict { number });
        }
        if !extent.contains(&part) {
            return Err(Refusal::OutsideExtent { number, part, extent });
        }
        if u64::from(number) >= extent.parts() {
            return Err(Refusal::Number {
                number,
                extent,
                limit: extent.parts(),
            });
        }
        let expected = part.payload_bytes(&self.layout).unwrap_or(u64::MAX);
        if u64::from(header.payload_len) != expected {
            return Err(Refusal::PayloadLength {
                number,
                found: header.payload_len,
                part,
                expected,
            });
        }
        if !self.coverage.is_free(&part) {
            return Err(Refusal::Overlap { number, part });
        }
        Ok(())
    }

    /// Completes if everything the commit counts is there, waits if frames are missing, refuses if none can help.
    fn decide(&mut self, commit: PushCommit) -> CommitAction {
        let end = self
            .frames
            .last_key_value()
            .map_or(0, |(number, _)| u64::from(*number) + 1);
        let came = self.frames.len() as u64;
        let found = commit.frames;
        if end > u64::from(found) {
            return CommitAction::Refuse(self.refuse(Refusal::FrameCount { found, came: end }));
        }
        if came < u64::from(found) && self.coverage.missing() > 0 {
            self.state = State::CommitPending(commit);
            return CommitAction::Wait;
        }
        if came != u64::from(found) {
            return CommitAction::Refuse(self.refuse(Refusal::FrameCount { found, came }));
        }
        if let Some((layer, block)) = self.coverage.first_missing() {
            let missing = self.coverage.missing();
            return CommitAction::Refuse(self.refuse(Refusal::Incomplete { missing, layer, block }));
        }
        let expected = digest(self.frames.values().map(|header| header.checksum));
        if commit.digest != expected {
            return CommitAction::Refuse(self.refuse(Refusal::Digest {
                found: commit.digest,
                expected,
            }));
        }
        self.state = State::Over;
        CommitAction::Complete(commit)
    }

    fn refuse(&mut self, refusal: Refusal) -> Refusal {
        self.state = State::Over;
        refusal
    }
}
