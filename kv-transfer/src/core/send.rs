//! The prefill node's end of one handoff: cuts what is computed into frames, keeps them until they have arrived.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use protocol::ids::{Epoch, Ticket};
use protocol::kv::KvLayout;
use protocol::transfer::{FrameHeader, PushCommit};
use thiserror::Error;

use super::{Coverage, Extent, Part, checksum, digest};

/// How frames are cut and repeated.
#[derive(Clone, Copy, Debug)]
pub struct SendLimits {
    /// Size of a frame, in bytes, if blocks allow: at least one block of one layer goes into a frame.
    pub frame_bytes: usize,
    /// Most repeats in one handoff.
    pub max_resends: u32,
}

/// A frame, ready to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Its header.
    pub header: FrameHeader,
    /// Its payload.
    pub payload: Bytes,
}

/// Why a handoff cannot go on.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SendError {
    /// Not part of the handoff.
    #[error("{part} is empty or outside of the handoff's {extent}")]
    OutsideExtent {
        /// What was pushed.
        part: Part,
        /// What is moved.
        extent: Extent,
    },
    /// Pushed before.
    #[error("{part} has been pushed before, in part or whole")]
    Repeated {
        /// What was pushed.
        part: Part,
    },
    /// Payload and ranges disagree.
    #[error("payload of {found} bytes, {part} needs {expected}")]
    PayloadLength {
        /// Bytes given.
        found: usize,
        /// What was pushed.
        part: Part,
        /// Bytes needed.
        expected: u64,
    },
    /// A commit before everything was pushed.
    #[error("commit before the end: {missing} (layer, block) not pushed, first layer {layer}, block {block}")]
    Incomplete {
        /// How many are missing.
        missing: u64,
        /// Layer of the first.
        layer: u32,
        /// Block of the first.
        block: u32,
    },
    /// The token count does not fill the blocks.
    #[error("num_tokens is {found}: that is {needs} blocks, the handoff is of a prompt of {expected}")]
    NumTokens {
        /// The count.
        found: u32,
        /// Blocks for as many tokens.
        needs: u64,
        /// Blocks of the handoff.
        expected: u64,
    },
    /// Nothing goes after the commit.
    #[error("the handoff is committed already")]
    Committed,
    /// The receiver asks for what it cannot miss.
    #[error("receiver asks for frame {number}: frames {first}..{end} are kept")]
    UnknownFrame {
        /// The number.
        number: u32,
        /// First kept.
        first: u32,
        /// After the last sent.
        end: u32,
    },
    /// Too many repeats.
    #[error("receiver asks for frame {number} again, {limit} repeats have been sent already")]
    TooManyResends {
        /// The number.
        number: u32,
        /// Most repeats.
        limit: u32,
    },
}

/// One handoff, from the sender's side.
#[derive(Debug)]
pub struct SendSession {
    ticket: Ticket,
    epoch: Epoch,
    layout: KvLayout,
    limits: SendLimits,
    coverage: Coverage,
    checksums: Vec<u64>,
    /// Frames that the receiver has not confirmed, by number.
    kept: BTreeMap<u32, Frame>,
    /// Numbers to send, repeats first.
    outbox: VecDeque<u32>,
    confirmed_below: u32,
    resends: u32,
    committed: bool,
}

impl SendSession {
    /// A handoff of `extent` into the reservation `ticket` of generation `epoch`.
    pub fn new(ticket: Ticket, epoch: Epoch, layout: KvLayout, extent: Extent, limits: SendLimits) -> Self {
        Self {
            ticket,
            epoch,
            layout,
            limits,
            coverage: Coverage::new(extent),
            checksums: Vec::new(),
            kept: BTreeMap::new(),
            outbox: VecDeque::new(),
            confirmed_below: 0,
            resends: 0,
            committed: false,
        }
    }

    /// Takes the bytes of a rectangle, in canonical order, and cuts them into frames without copying.
    pub fn push(&mut self, part: Part, payload: &Bytes) -> Result<(), SendError> {
        if self.committed {
            return Err(SendError::Committed);
        }
        check_part(&part, payload.len(), &self.layout, self.coverage.extent())?;
        if !self.coverage.insert(&part) {
            return Err(SendError::Repeated { part });
        }
        let block_bytes = self.layout.layer_block_bytes();
        let mut offset = 0;
        for piece in cut(part, block_bytes, self.limits.frame_bytes) {
            let end = offset + piece.layers as usize * piece.blocks as usize * block_bytes;
            self.add_frame(piece, payload.slice(offset..end));
            offset = end;
        }
        Ok(())
    }

    fn add_frame(&mut self, part: Part, payload: Bytes) {
        // As many frames as (layer, block) pairs at most: the extent keeps both counts within u32.
        let number = self.checksums.len() as u32;
        let checksum = checksum(&payload);
        let header = FrameHeader {
            ticket: self.ticket,
            epoch: self.epoch,
            number,
            first_layer: part.first_layer,
            layers: part.layers,
            first_block: part.first_block,
            blocks: part.blocks,
            checksum,
            payload_len: payload.len() as u32,
        };
        self.checksums.push(checksum);
        self.kept.insert(number, Frame { header, payload });
        self.outbox.push_back(number);
    }

    /// The next frame to send, if there is one. Cloning it copies no payload.
    pub fn next_frame(&mut self) -> Option<Frame> {
        while let Some(number) = self.outbox.pop_front() {
            // Confirmed meanwhile: a repeat that crossed its confirmation.
            if let Some(frame) = self.kept.get(&number) {
                return Some(frame.clone());
            }
        }
        None
    }

    /// The receiver knows nothing of this handoff: everything that is kept is sent from the start.
    pub fn rewind(&mut self) {
        self.outbox = self.kept.keys().copied().collect();
    }

    /// The receiver wants a frame again.
    pub fn on_resend(&mut self, number: u32) -> Result<(), SendError> {
        if !self.kept.contains_key(&number) {
            let (first, end) = (self.confirmed_below, self.checksums.len() as u32);
            return Err(SendError::UnknownFrame { number, first, end });
        }
        if self.resends >= self.limits.max_resends {
            return Err(SendError::TooManyResends {
                number,
                limit: self.limits.max_resends,
            });
        }
        self.resends += 1;
        self.outbox.push_front(number);
        Ok(())
    }

    /// The receiver has every frame below `below`: their payload is forgotten.
    pub fn on_received(&mut self, below: u32) -> Result<(), SendError> {
        let end = self.checksums.len() as u32;
        if below > end {
            return Err(SendError::UnknownFrame {
                number: below,
                first: self.confirmed_below,
                end,
            });
        }
        self.confirmed_below = self.confirmed_below.max(below);
        self.kept = self.kept.split_off(&self.confirmed_below);
        Ok(())
    }

    /// Ends the handoff: the commit to send once [`next_frame`](Self::next_frame) is empty.
    pub fn commit(&mut self, num_tokens: u32, first_tokens: Vec<u32>) -> Result<PushCommit, SendError> {
        if self.committed {
            return Err(SendError::Committed);
        }
        if let Some((layer, block)) = self.coverage.first_missing() {
            return Err(SendError::Incomplete {
                missing: self.coverage.missing(),
                layer,
                block,
            });
        }
        let needs = u64::from(num_tokens).div_ceil(u64::from(self.layout.block_tokens));
        let expected = u64::from(self.coverage.extent().places);
        if needs != expected {
            return Err(SendError::NumTokens {
                found: num_tokens,
                needs,
                expected,
            });
        }
        self.committed = true;
        Ok(PushCommit {
            ticket: self.ticket,
            epoch: self.epoch,
            digest: digest(self.checksums.iter().copied()),
            frames: self.checksums.len() as u32,
            num_tokens,
            first_tokens,
        })
    }

    /// Repeats requested so far.
    pub fn resends(&self) -> u32 {
        self.resends
    }

    /// Frames that the receiver has not confirmed.
    pub fn unconfirmed(&self) -> usize {
        self.kept.len()
    }
}

/// Checks that a rectangle belongs to the handoff and has as many bytes as it should.
pub(crate) fn check_part(part: &Part, found: usize, layout: &KvLayout, extent: Extent) -> Result<(), SendError> {
    if !extent.contains(part) {
        return Err(SendError::OutsideExtent { part: *part, extent });
    }
    let expected = part.payload_bytes(layout).unwrap_or(u64::MAX);
    if found as u64 != expected {
        return Err(SendError::PayloadLength {
            found,
            part: *part,
            expected,
        });
    }
    Ok(())
}

/// Cuts a rectangle into pieces of at most `frame_bytes` that are contiguous in its payload: groups of whole layers, or
/// where one layer is too long, ranges of blocks. Pieces are of equal size, give or take one layer or block.
fn cut(part: Part, block_bytes: usize, frame_bytes: usize) -> Vec<Part> {
    let layer_bytes = part.blocks as usize * block_bytes;
    if layer_bytes <= frame_bytes {
        let most = (frame_bytes / layer_bytes.max(1)).max(1);
        return spread(part.layers, most)
            .map(|(first, layers)| Part {
                first_layer: part.first_layer + first,
                layers,
                ..part
            })
            .collect();
    }
    let most = (frame_bytes / block_bytes.max(1)).max(1);
    (part.first_layer..part.first_layer + part.layers)
        .flat_map(|first_layer| {
            spread(part.blocks, most).map(move |(first, blocks)| Part {
                first_layer,
                layers: 1,
                first_block: part.first_block + first,
                blocks,
            })
        })
        .collect()
}

/// Divides 0..count into the fewest ranges of at most `most`, as equal as possible: (first, length).
fn spread(count: u32, most: usize) -> impl Iterator<Item = (u32, u32)> {
    let ranges = (count as usize).div_ceil(most) as u32;
    (0..ranges).map(move |n| {
        let at = |n: u32| (u64::from(count) * u64::from(n) / u64::from(ranges)) as u32;
        (at(n), at(n + 1) - at(n))
    })
}
