//! Handoffs of models whose layers are in several groups.

use kv_transfer::core::{
    CommitAction, Extent, HeaderAction, Part, PayloadAction, ReceiveLimits, ReceiveSession, Refusal, SendError,
    SendLimits, SendSession,
};
use protocol::kv::KvLayout;
use protocol::moved::{HaveBlocks, Moved};
use protocol::window::Groups;

use super::*;

/// Two groups of layers that see everything, the second of 4 layers, and one of 3 layers with a window. Blocks have 5.
const GROUPED: KvLayout = KvLayout {
    groups: Groups::mixed(2, 1, 8).with_spare(1, 2),
    ..LAYOUT
};
/// A prompt of 9 blocks.
const PROMPT: u32 = 33;

fn moved() -> Moved {
    Moved::new(GROUPED.groups, HaveBlocks { full: 3, sliding: 6 }, 9).expect("fewer than there are")
}

/// What the model has in each group.
fn parts(moved: &Moved) -> Vec<Part> {
    let of = |group: usize| {
        let places = moved.places(group);
        Part {
            first_layer: 0,
            layers: GROUPED.layers_of(group),
            first_block: moved.number(group, places.start),
            blocks: places.end - places.start,
        }
    };
    (0..3).map(of).collect()
}

fn sender(extent: Extent) -> SendSession {
    let limits = SendLimits {
        frame_bytes: 3 * GROUPED.layer_block_bytes(),
        max_resends: 2,
    };
    SendSession::new(TICKET, EPOCH, GROUPED, extent, limits)
}

#[test]
fn what_the_model_has_no_layers_for_is_not_moved() {
    let moved = moved();
    let extent = Extent::of(&GROUPED, &moved);
    assert_eq!((extent.first_block, extent.blocks, extent.places), (3, 6 + 6 + 3, 9));
    let mut sender = sender(extent);
    for part in parts(&moved) {
        sender.push(part, &payload(&GROUPED, part)).expect("it is to be moved");
    }
    let spare = Part {
        first_layer: 4,
        layers: 1,
        first_block: moved.number(1, 3),
        blocks: 1,
    };
    let refused = sender.push(spare, &payload(&GROUPED, spare));
    assert!(matches!(refused, Err(SendError::Repeated { .. })), "{refused:?}");
    let limits = ReceiveLimits {
        max_payload_bytes: 1 << 20,
        max_resends: 2,
    };
    let mut receiver = ReceiveSession::new(TICKET, EPOCH, GROUPED, extent, limits);
    let mut bytes = 0;
    while let Some(frame) = sender.next_frame() {
        assert!(matches!(receiver.on_header(&frame.header), HeaderAction::Read));
        let action = receiver.on_payload(&frame.header, &frame.payload);
        assert!(matches!(action, PayloadAction::Write), "{action:?}");
        receiver.on_written(&frame.header);
        bytes += frame.payload.len();
    }
    assert_eq!(bytes, (6 * 5 + 6 * 4 + 3 * 3) * GROUPED.layer_block_bytes());
    // As many tokens as fill the blocks of one group, and no others.
    assert!(matches!(
        sender.commit(PROMPT + 4, first_tokens()),
        Err(SendError::NumTokens { needs: 10, .. })
    ));
    let commit = sender.commit(PROMPT, first_tokens()).expect("all is sent");
    let action = receiver.on_commit(commit);
    assert!(matches!(action, CommitAction::Complete(_)), "{action:?}");
}

#[test]
fn a_frame_of_layers_that_nobody_has_is_refused() {
    let moved = moved();
    let extent = Extent::of(&GROUPED, &moved);
    let whole = Extent {
        unused: [Part::NOTHING; 2],
        ..extent
    };
    let mut sender = sender(whole);
    let part = Part {
        first_layer: 3,
        layers: 1,
        first_block: moved.number(2, 6),
        blocks: 1,
    };
    sender
        .push(part, &payload(&GROUPED, part))
        .expect("this sender moves all");
    let frame = sender.next_frame().expect("a frame");
    let limits = ReceiveLimits {
        max_payload_bytes: 1 << 20,
        max_resends: 2,
    };
    let mut receiver = ReceiveSession::new(TICKET, EPOCH, GROUPED, extent, limits);
    let action = receiver.on_header(&frame.header);
    assert!(
        matches!(action, HeaderAction::Refuse(Refusal::Overlap { .. })),
        "{action:?}"
    );
}
