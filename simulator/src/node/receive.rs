//! The receiver's end of a handoff, as `kv_transfer::receiver` runs it, over the reservations of the node.

use bytes::Bytes;
use engine::plan::BlockId;
use kv_transfer::core::{CommitAction, Extent, HeaderAction, PayloadAction, ReceiveLimits, ReceiveSession, Refusal};
use protocol::ids::Ticket;
use protocol::moved::Moved;
use protocol::transfer::{FrameHeader, PushCommit, PushOpen, PushReply};

use super::push::MAX_RESENDS;
use super::{KvMessage, Node, Out, PushId, Timer, Work};
use crate::model::{LAYOUT, layout};
use crate::scenario::COMMIT_TIMEOUT;

/// Largest payload of a frame.
const MAX_PAYLOAD: u32 = 1 << 20;

/// See the head of the file.
pub(super) struct Receive {
    ticket: Ticket,
    /// Blocks that were cached: they come before those that are written.
    have: u32,
    /// Blocks that the reservation had when the handoff was granted. They may be somebody else's by now: what keeps late
    /// frames out of them is the session.
    blocks: Vec<BlockId>,
    session: ReceiveSession,
    /// What the sender knows to have arrived.
    told: u32,
}

impl Receive {
    pub(super) fn is_over(&self) -> bool {
        self.session.is_over()
    }
}

impl Node {
    /// A sender says something. Whatever comes for a handoff that is over goes to its session all the same.
    pub fn push_message(&mut self, id: PushId, message: KvMessage) {
        match message {
            KvMessage::Open(open) => self.receive_open(id, &open),
            KvMessage::Frame(header, payload) => self.receive_frame(id, &header, &payload),
            KvMessage::Commit(commit) => {
                let Some(receive) = self.receives.get_mut(&id) else {
                    return;
                };
                if receive.is_over() {
                    return;
                }
                let action = receive.session.on_commit(commit);
                self.received(id, action);
            }
        }
    }

    fn receive_open(&mut self, id: PushId, open: &PushOpen) {
        match self.grant(open) {
            Ok((moved, blocks)) => {
                let extent = Extent::of(&layout(self.engine.limits().groups), &moved);
                let limits = ReceiveLimits {
                    max_payload_bytes: MAX_PAYLOAD,
                    max_resends: MAX_RESENDS,
                };
                let session = ReceiveSession::new(open.ticket, open.epoch, LAYOUT, extent, limits);
                let receive = Receive {
                    ticket: open.ticket,
                    have: moved.first(),
                    blocks,
                    session,
                    told: 0,
                };
                self.receives.insert(id, receive);
                self.out.push(Out::Reply(id, PushReply::Received { below: 0 }));
            }
            Err(reason) => self.out.push(Out::Reply(id, PushReply::Refused { reason })),
        }
    }

    /// The blocks that a push may write.
    fn grant(&self, open: &PushOpen) -> Result<(Moved, Vec<BlockId>), String> {
        if open.fingerprint != self.fingerprint {
            return Err("fingerprint: model or KV layout differ".to_owned());
        }
        let leg = self.tickets.get(&open.ticket);
        let leg = leg.ok_or_else(|| format!("ticket {} is not open", open.ticket))?;
        let Some(Work::Decode(work)) = self.jobs.get(leg) else {
            return Err(format!("ticket {} has no job", open.ticket));
        };
        if (work.job.epoch, work.job.request) != (open.epoch, open.request) {
            return Err(format!("ticket {} belongs to another request or epoch", open.ticket));
        }
        let busy = |receive: &&Receive| receive.ticket == open.ticket && !receive.is_over();
        if self.receives.values().find(busy).is_some() {
            return Err(format!("ticket {} is being pushed to already", open.ticket));
        }
        let blocks = work.reserved(open.ticket);
        blocks.ok_or_else(|| format!("ticket {} has no blocks", open.ticket))
    }

    /// A frame comes, to whichever handoff it belongs. Blocks that are not reserved for that handoff are canaries.
    pub fn receive_frame(&mut self, id: PushId, header: &FrameHeader, payload: &Bytes) {
        let reserved = self.receives.get(&id).and_then(|receive| {
            let leg = self.tickets.get(&receive.ticket)?;
            match self.jobs.get(leg)? {
                Work::Decode(work) => work.reserved(receive.ticket),
                Work::Prefill(_) => None,
            }
        });
        let own = reserved.map_or(Vec::new(), |(_, blocks)| blocks);
        let total = self.engine.limits().total_blocks as u32;
        let canaries = || (0..total).map(BlockId).filter(|block| !own.contains(block));
        let before = self.pool.fingerprint(canaries());
        self.take_frame(id, header, payload);
        if self.pool.fingerprint(canaries()) != before {
            self.problem = Some(format!("a frame has changed blocks that are not its own: {header:?}"));
        }
    }

    fn take_frame(&mut self, id: PushId, header: &FrameHeader, payload: &Bytes) {
        let Some(receive) = self.receives.get_mut(&id) else {
            return;
        };
        let late = receive.is_over();
        let action = match receive.session.on_header(header) {
            HeaderAction::Skip => {
                self.counts.frames_late += u64::from(late);
                self.counts.frames_dropped += u64::from(!late);
                return;
            }
            HeaderAction::Refuse(refusal) => CommitAction::Refuse(refusal),
            HeaderAction::Read => match receive.session.on_payload(header, payload) {
                PayloadAction::Skip => return,
                PayloadAction::Refuse(refusal) => CommitAction::Refuse(refusal),
                PayloadAction::Resend { number } => {
                    self.out.push(Out::Reply(id, PushReply::Resend { number }));
                    return;
                }
                PayloadAction::Write => {
                    let first = (header.first_block - receive.have) as usize;
                    let blocks = &receive.blocks[first..first + header.blocks as usize];
                    let mut parts = payload.chunks(LAYOUT.layer_block_bytes());
                    for layer in header.first_layer..header.first_layer + header.layers {
                        for (block, bytes) in blocks.iter().zip(&mut parts) {
                            self.pool.write(layer, *block, bytes);
                        }
                    }
                    receive.session.on_written(header)
                }
            },
        };
        self.received(id, action);
    }

    /// What a handoff makes of what came.
    fn received(&mut self, id: PushId, action: CommitAction) {
        let Some(receive) = self.receives.get_mut(&id) else {
            return;
        };
        let below = receive.session.received_below();
        match action {
            CommitAction::Wait => {
                if below > receive.told {
                    receive.told = below;
                    self.out.push(Out::Reply(id, PushReply::Received { below }));
                }
                if receive.session.is_commit_pending() {
                    self.out.push(Out::Timer(COMMIT_TIMEOUT, Timer::Commit(id)));
                }
            }
            CommitAction::Complete(commit) => self.receive_complete(id, &commit),
            CommitAction::Refuse(refusal) => {
                // No fault of a network leads to these.
                if matches!(
                    refusal,
                    Refusal::NumTokens { .. } | Refusal::Digest { .. } | Refusal::OutsideExtent { .. }
                ) {
                    self.problem = Some(format!("a handoff that should be right is refused: {refusal}"));
                }
                self.refuse(id, refusal.to_string());
            }
        }
    }

    fn receive_complete(&mut self, id: PushId, commit: &PushCommit) {
        let Some(receive) = self.receives.get(&id) else { return };
        let leg = self.tickets.get(&receive.ticket).copied();
        let fits = |leg| match self.jobs.get(&leg) {
            Some(Work::Decode(work)) => work.job.token_ids.len() == commit.num_tokens as usize,
            Some(Work::Prefill(_)) | None => false,
        };
        match leg.filter(|leg| fits(*leg)) {
            Some(leg) if self.take_over(leg, commit) => self.out.push(Out::Reply(id, PushReply::Committed)),
            _ => self.refuse(id, "the reservation is gone".to_owned()),
        }
    }

    fn refuse(&mut self, id: PushId, reason: String) {
        if let Some(receive) = self.receives.get_mut(&id) {
            receive.session.on_abort();
        }
        self.out.push(Out::Reply(id, PushReply::Refused { reason }));
    }

    /// The sender has reset the stream, or its connection is gone. The reservation waits for another push.
    pub fn receive_lost(&mut self, id: PushId) {
        if let Some(receive) = self.receives.get_mut(&id) {
            receive.session.on_abort();
        }
    }

    pub(super) fn receive_deadline(&mut self, id: PushId) {
        if let Some(receive) = self.receives.get_mut(&id)
            && receive.session.is_commit_pending()
        {
            let refusal = receive.session.on_deadline();
            self.out.push(Out::Reply(
                id,
                PushReply::Refused {
                    reason: refusal.to_string(),
                },
            ));
        }
    }

    /// The reservation is gone, or has been taken over.
    pub(super) fn revoke_receives(&mut self, ticket: Ticket) {
        for (id, receive) in &mut self.receives {
            if receive.ticket == ticket && !receive.is_over() {
                receive.session.on_abort();
                self.out.push(Out::StopPush(*id));
            }
        }
    }

    /// A handoff that is granted and not over, and not `id`.
    pub fn other_receive(&self, id: PushId) -> Option<PushId> {
        let open = |(other, receive): &(&PushId, &Receive)| **other != id && !receive.is_over();
        self.receives.iter().find(open).map(|(other, _)| *other)
    }

    /// Forgets handoffs that are over. Frames of theirs that are still on their way find nobody.
    pub fn forget_receives(&mut self) {
        self.receives.retain(|_, receive| !receive.is_over());
    }
}
