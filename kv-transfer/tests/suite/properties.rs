//! The two sessions against a hostile network, without any shell: properties.

use std::collections::VecDeque;

use bytes::Bytes;
use kv_transfer::core::{CommitAction, Coverage, Frame, Part, checksum};
use proptest::prelude::*;
use protocol::ids::{Epoch, Ticket};

use super::sessions::{examine, feed, frames, memory, receive};
use super::{EXTENT, LAYOUT, payload};

/// What the network does to one frame.
#[derive(Clone, Debug)]
enum Mishap {
    Duplicate,
    FlipPayloadBit(usize),
    Ticket,
    Epoch,
    FirstBlock(u32),
    FirstLayer(u32),
    Blocks(u32),
    Layers(u32),
    Number(u32),
    PayloadLen(u32),
    Checksum,
}

impl Mishap {
    /// True if the handoff must survive it.
    fn is_survivable(&self) -> bool {
        matches!(self, Self::Duplicate | Self::FlipPayloadBit(_) | Self::Checksum)
    }

    /// True if the frame would land elsewhere. One of these leaves a gap and an overlap; two could trade places, which no
    /// digest over payloads sees: on a link, TLS protects headers.
    fn moves_the_frame(&self) -> bool {
        matches!(
            self,
            Self::FirstBlock(_) | Self::FirstLayer(_) | Self::Blocks(_) | Self::Layers(_)
        )
    }

    fn apply(&self, frame: &Frame) -> Vec<Frame> {
        let mut bad = frame.clone();
        let header = &mut bad.header;
        match *self {
            Self::Duplicate => return vec![frame.clone(), bad],
            Self::FlipPayloadBit(bit) => {
                let mut bytes = bad.payload.to_vec();
                let bit = bit % (bytes.len() * 8);
                bytes[bit / 8] ^= 1 << (bit % 8);
                bad.payload = Bytes::from(bytes);
            }
            Self::Ticket => header.ticket = Ticket(header.ticket.0 ^ 1),
            Self::Epoch => header.epoch = Epoch(header.epoch.0 - 1),
            Self::FirstBlock(value) => header.first_block = value,
            Self::FirstLayer(value) => header.first_layer = value,
            Self::Blocks(value) => header.blocks = value,
            Self::Layers(value) => header.layers = value,
            Self::Number(value) => header.number = value,
            Self::PayloadLen(value) => header.payload_len = value,
            Self::Checksum => header.checksum ^= 1,
        }
        // The payload is as long as the header says, as on a real stream, unless that is absurd.
        let length = bad.header.payload_len as usize;
        if length != bad.payload.len() && length <= 1 << 20 {
            let mut bytes = bad.payload.to_vec();
            bytes.resize(length, 0);
            bad.payload = Bytes::from(bytes);
        }
        vec![bad]
    }
}

fn small_or_any() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0..16_u32, 1 => any::<u32>()]
}

fn mishap() -> impl Strategy<Value = Mishap> {
    prop_oneof![
        4 => Just(Mishap::Duplicate),
        4 => any::<usize>().prop_map(Mishap::FlipPayloadBit),
        1 => Just(Mishap::Ticket),
        1 => Just(Mishap::Epoch),
        1 => small_or_any().prop_map(Mishap::FirstBlock),
        1 => small_or_any().prop_map(Mishap::FirstLayer),
        1 => small_or_any().prop_map(Mishap::Blocks),
        1 => small_or_any().prop_map(Mishap::Layers),
        1 => small_or_any().prop_map(Mishap::Number),
        1 => small_or_any().prop_map(Mishap::PayloadLen),
        2 => Just(Mishap::Checksum),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Whatever the network does: the bytes are exact and the commit goes through, or the failure has a name; and no byte
    /// outside of the reservation changes. What can be repaired is repaired.
    #[test]
    fn bytes_are_exact_or_the_failure_has_a_name(
        frame_bytes in 1_usize..40_000,
        chunk_blocks in 1_u32..=10,
        order in any::<prop::sample::Index>(),
        swaps in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 0..40),
        mishaps in prop::collection::vec((any::<prop::sample::Index>(), mishap()), 0..5),
        commit_at in any::<prop::sample::Index>(),
    ) {
        let (frames, commit) = frames(EXTENT, frame_bytes, chunk_blocks);
        let mut moved = false;
        let mishaps: Vec<_> = mishaps
            .into_iter()
            .filter(|(_, mishap)| !mishap.moves_the_frame() || !std::mem::replace(&mut moved, true))
            .collect();
        let mut wire: Vec<Vec<Frame>> = frames.iter().map(|frame| vec![frame.clone()]).collect();
        for (index, mishap) in &mishaps {
            let n = index.index(frames.len());
            wire[n] = mishap.apply(&frames[n]);
        }
        let mut wire: Vec<Frame> = wire.into_iter().flatten().collect();
        let start = order.index(wire.len());
        wire.rotate_left(start);
        for (a, b) in &swaps {
            let (a, b) = (a.index(wire.len()), b.index(wire.len()));
            wire.swap(a, b);
        }
        let commit_at = commit_at.index(wire.len() + 1);

        let mut session = receive(EXTENT);
        let mut memory = memory();
        let mut queue: VecDeque<(usize, Frame)> = wire.into_iter().enumerate().collect();
        let mut committed = false;
        let mut end = None;
        while end.is_none() {
            if !committed && queue.front().is_none_or(|(n, _)| *n >= commit_at) {
                committed = true;
                match session.on_commit(commit.clone()) {
                    CommitAction::Wait => {}
                    other => end = Some(other),
                }
                continue;
            }
            let Some((_, frame)) = queue.pop_front() else { break };
            let (resend, action) = feed(&mut session, &frame, &mut memory);
            if let Some(number) = resend {
                // A sender repeats what it has; a number it never used ends the handoff on its side.
                match frames.get(number as usize) {
                    Some(frame) => queue.push_back((usize::MAX, frame.clone())),
                    None => break,
                }
            }
            if action != CommitAction::Wait {
                end = Some(action);
            }
        }
        let exact = examine(&memory);
        let end = end.unwrap_or_else(|| CommitAction::Refuse(session.on_deadline()));
        match end {
            CommitAction::Complete(done) => {
                prop_assert!(exact, "committed without all bytes");
                prop_assert_eq!(done, commit);
                prop_assert!(session.is_over());
            }
            CommitAction::Refuse(refusal) => {
                prop_assert!(mishaps.iter().any(|(_, mishap)| !mishap.is_survivable()), "refused: {}", refusal);
                prop_assert!(!refusal.to_string().is_empty());
            }
            CommitAction::Wait => unreachable!("replaced above"),
        }
        // Nothing is written after the end.
        let before = memory.clone();
        for frame in &frames {
            prop_assert_eq!(feed(&mut session, frame, &mut memory), (None, CommitAction::Wait));
        }
        prop_assert_eq!(before, memory);
        prop_assert_eq!(session.counters().late, frames.len() as u64);
    }

    /// Frames are within the size, cover everything once and carry the right bytes.
    #[test]
    fn frames_tile_the_extent(frame_bytes in 1_usize..40_000, chunk_blocks in 1_u32..=10) {
        let (frames, commit) = frames(EXTENT, frame_bytes, chunk_blocks);
        let mut coverage = Coverage::new(EXTENT);
        let least = LAYOUT.layer_block_bytes();
        for (n, Frame { header, payload: bytes }) in frames.iter().enumerate() {
            let part = Part::from(header);
            prop_assert_eq!(header.number as usize, n);
            prop_assert!(coverage.insert(&part));
            prop_assert!(bytes.len() <= frame_bytes.max(least));
            prop_assert_eq!(bytes, &payload(&LAYOUT, part));
            prop_assert_eq!(header.checksum, checksum(bytes));
        }
        prop_assert_eq!(coverage.missing(), 0);
        prop_assert_eq!(commit.frames as usize, frames.len());
    }

    /// The bit set agrees with a plain list.
    #[test]
    fn coverage_agrees_with_a_list(
        parts in prop::collection::vec((0..7_u32, 0..4_u32, 0..14_u32, 0..6_u32), 0..30)
    ) {
        let mut coverage = Coverage::new(EXTENT);
        let mut seen = std::collections::BTreeSet::new();
        for (first_layer, layers, first_block, blocks) in parts {
            let part = Part { first_layer, layers, first_block, blocks };
            let cells: Vec<_> = (first_layer..first_layer + layers)
                .flat_map(|layer| (first_block..first_block + blocks).map(move |block| (layer, block)))
                .collect();
            let inside = |&(layer, block): &(u32, u32)| layer < 5 && (2..12).contains(&block);
            let free = !cells.is_empty() && cells.iter().all(|cell| inside(cell) && !seen.contains(cell));
            prop_assert_eq!(coverage.is_free(&part), free);
            prop_assert_eq!(coverage.insert(&part), free);
            if free {
                seen.extend(cells);
            }
            prop_assert_eq!(coverage.missing(), 50 - seen.len() as u64);
            let first = (0..5).flat_map(|l| (2..12).map(move |b| (l, b))).find(|cell| !seen.contains(cell));
            prop_assert_eq!(coverage.first_missing(), first);
        }
    }
}
