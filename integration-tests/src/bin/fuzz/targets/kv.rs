//! A handoff's stream as it comes to a decode node: messages and payloads, one after the other, into a receiving session.

use kv_transfer::core::{
    CommitAction, Extent, HeaderAction, Part, PayloadAction, ReceiveLimits, ReceiveSession, SendLimits, SendSession,
    checksum, digest,
};
use protocol::codec::{HEAD_BYTES, MAX_PAYLOAD_BYTES, MAX_TRANSFER_BYTES, decode_body, decode_head, encode};
use protocol::ids::{Epoch, RequestId, Ticket};
use protocol::kv::{Fingerprint, KvDtype, KvLayout};
use protocol::transfer::{PushCommit, PushMessage, PushOpen};
use protocol::window::Groups;

use super::Target;
use crate::corpus::shape;

pub(crate) struct Frames;

const LAYOUT: KvLayout = KvLayout {
    num_layers: 3,
    num_kv_heads: 1,
    head_dim: 2,
    block_tokens: 4,
    dtype: KvDtype::F16,
    latent: false,
    groups: Groups::ONE,
};
const EXTENT: Extent = Extent::of_one_group(3, 1, 4);
const NUM_TOKENS: u32 = 18;
const TICKET: Ticket = Ticket(7);
const EPOCH: Epoch = Epoch(2);
const LIMITS: ReceiveLimits = ReceiveLimits {
    max_payload_bytes: MAX_PAYLOAD_BYTES as u32,
    max_resends: 4,
};

/// One message of a stream, and where its payload is.
struct Piece {
    message: PushMessage,
    payload: std::ops::Range<usize>,
}

/// The messages of a stream, up to the first that is none; and what is wrong with that.
fn pieces(input: &[u8]) -> (Vec<Piece>, String) {
    let (mut at, mut all) = (0, Vec::new());
    loop {
        let Some((head, rest)) = input[at..].split_first_chunk::<HEAD_BYTES>() else {
            let end = if at == input.len() { "end" } else { "half a head" };
            return (all, end.to_owned());
        };
        let body = match decode_head(*head, MAX_TRANSFER_BYTES) {
            Ok(length) => rest.get(..length),
            Err(error) => return (all, error.to_string()),
        };
        let Some(body) = body else {
            return (all, "half a body".to_owned());
        };
        let message = match decode_body(body) {
            Ok(message) => message,
            Err(error) => return (all, error.to_string()),
        };
        let start = at + HEAD_BYTES + body.len();
        let length = match &message {
            PushMessage::Frame(header) => header.payload_len as usize,
            PushMessage::Open(_) | PushMessage::Commit(_) => 0,
        };
        let payload = start..start.saturating_add(length).min(input.len());
        at = payload.end;
        all.push(Piece { message, payload });
    }
}

impl Target for Frames {
    fn name(&self) -> &'static str {
        "kv"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        [1, 2, 5]
            .into_iter()
            .filter_map(|blocks| good_stream(blocks).ok())
            .collect()
    }

    fn run(&self, input: &[u8]) -> Result<String, String> {
        let (pieces, mut end) = pieces(input);
        let mut session = ReceiveSession::new(TICKET, EPOCH, LAYOUT, EXTENT, LIMITS);
        let mut pool = Pool::default();
        let mut steps = String::new();
        for piece in &pieces {
            let step = match &piece.message {
                PushMessage::Open(_) => "open".to_owned(),
                PushMessage::Commit(commit) => pool.commit(session.on_commit(commit.clone()))?,
                PushMessage::Frame(header) => {
                    let payload = &input[piece.payload.clone()];
                    match session.on_header(header) {
                        HeaderAction::Skip => "skip".to_owned(),
                        HeaderAction::Refuse(refusal) => shape(&refusal.to_string()),
                        HeaderAction::Read if payload.len() < header.payload_len as usize => {
                            "half a payload".to_owned()
                        }
                        HeaderAction::Read => match session.on_payload(header, payload) {
                            PayloadAction::Write => {
                                pool.write(&Part::from(header), payload)?;
                                pool.commit(session.on_written(header))?
                            }
                            PayloadAction::Skip => "skip payload".to_owned(),
                            PayloadAction::Resend { .. } => "resend".to_owned(),
                            PayloadAction::Refuse(refusal) => shape(&refusal.to_string()),
                        },
                    }
                }
            };
            if !steps.ends_with(&step) {
                steps = format!("{steps}; {step}");
            }
            if session.is_over() {
                end = "over".to_owned();
                break;
            }
        }
        Ok(format!("{steps}; {}", shape(&end)))
    }

    /// Checksums of frames, the commit's digest and count.
    fn repair(&self, input: &mut Vec<u8>) {
        let mut fixed = Vec::new();
        let (all, _) = pieces(input);
        let (mut sums, mut last) = (Vec::new(), 0);
        for Piece { message, payload } in all {
            last = payload.end;
            let bytes = &input[payload];
            let message = match message {
                PushMessage::Frame(mut header) => {
                    header.checksum = checksum(bytes);
                    header.payload_len = bytes.len() as u32;
                    sums.push((header.number, header.checksum));
                    PushMessage::Frame(header)
                }
                PushMessage::Commit(commit) => {
                    sums.sort_unstable();
                    sums.dedup();
                    PushMessage::Commit(PushCommit {
                        digest: digest(sums.iter().map(|(_, sum)| *sum)),
                        frames: sums.len() as u32,
                        ..commit
                    })
                }
                open @ PushMessage::Open(_) => open,
            };
            let Ok(said) = encode(&message, MAX_TRANSFER_BYTES) else {
                return;
            };
            fixed.extend_from_slice(&said);
            fixed.extend_from_slice(bytes);
        }
        fixed.extend_from_slice(&input[last..]);
        *input = fixed;
    }
}

/// Which (layer, block) has been written.
#[derive(Default)]
struct Pool {
    written: std::collections::BTreeSet<(u32, u32)>,
    committed: bool,
}

impl Pool {
    /// Promise: only whole blocks of the reservation are written, each once, and none after the commit.
    fn write(&mut self, part: &Part, payload: &[u8]) -> Result<(), String> {
        if self.committed {
            return Err("written after the commit".to_owned());
        }
        let blocks = part.layers as usize * part.blocks as usize;
        if payload.len() != blocks * LAYOUT.layer_block_bytes() {
            return Err(format!("{} bytes for {blocks} blocks", payload.len()));
        }
        for layer in part.first_layer..part.first_layer + part.layers {
            for block in part.first_block..part.first_block + part.blocks {
                let inside =
                    layer < EXTENT.layers && (EXTENT.first_block..EXTENT.first_block + EXTENT.blocks).contains(&block);
                if !inside {
                    return Err(format!("layer {layer}, block {block} is not of the reservation"));
                }
                if !self.written.insert((layer, block)) {
                    return Err(format!("layer {layer}, block {block} is written twice"));
                }
            }
        }
        Ok(())
    }

    /// Promise: what is committed is all there.
    fn commit(&mut self, action: CommitAction) -> Result<String, String> {
        match action {
            CommitAction::Wait => Ok("wait".to_owned()),
            CommitAction::Refuse(refusal) => Ok(shape(&refusal.to_string())),
            CommitAction::Complete(commit) => {
                let all = (EXTENT.layers * EXTENT.blocks) as usize;
                if self.written.len() != all || commit.num_tokens.div_ceil(LAYOUT.block_tokens) != 5 {
                    return Err(format!(
                        "committed with {} of {all} blocks: {commit:?}",
                        self.written.len()
                    ));
                }
                if std::mem::replace(&mut self.committed, true) {
                    return Err("committed twice".to_owned());
                }
                Ok("complete".to_owned())
            }
        }
    }
}

/// A handoff as a sender makes it, so many blocks a frame.
fn good_stream(blocks: u32) -> anyhow::Result<Vec<u8>> {
    let limits = SendLimits {
        frame_bytes: blocks as usize * LAYOUT.layer_block_bytes(),
        max_resends: 1,
    };
    let mut session = SendSession::new(TICKET, EPOCH, LAYOUT, EXTENT, limits);
    let mut stream = encode(
        &PushMessage::Open(PushOpen {
            request: RequestId(1),
            ticket: TICKET,
            epoch: EPOCH,
            fingerprint: Fingerprint(1),
        }),
        MAX_TRANSFER_BYTES,
    )?;
    for layer in 0..EXTENT.layers {
        let part = Part {
            first_layer: layer,
            layers: 1,
            first_block: EXTENT.first_block,
            blocks: EXTENT.blocks,
        };
        let payload = vec![layer as u8; EXTENT.blocks as usize * LAYOUT.layer_block_bytes()];
        session.push(part, &payload.into())?;
    }
    while let Some(frame) = session.next_frame() {
        stream.extend(encode(&PushMessage::Frame(frame.header), MAX_TRANSFER_BYTES)?);
        stream.extend_from_slice(&frame.payload);
    }
    let commit = session.commit(NUM_TOKENS, vec![3])?;
    stream.extend(encode(&PushMessage::Commit(commit), MAX_TRANSFER_BYTES)?);
    Ok(stream)
}
