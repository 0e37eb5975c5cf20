//! The sender's end of a handoff, as `kv_transfer::pusher` runs it.

use bytes::Bytes;
use coordinator::core::nodes::LegId;
use kv_transfer::core::{Extent, Part, SendLimits, SendSession};
use protocol::control::{HandoffStats, JobErrorKind};
use protocol::transfer::{PushOpen, PushReply};

use super::{KvMessage, Node, Out, PushId, Timer, Work};
use crate::model::LAYOUT;
use crate::scenario::COMMIT_TIMEOUT;

/// Most repeats in one handoff.
pub(super) const MAX_RESENDS: u32 = 64;

/// See the head of the file.
pub(super) struct Push {
    leg: LegId,
    address: String,
    open: PushOpen,
    session: SendSession,
    /// The receiver has answered: it knows the ticket.
    granted: bool,
    /// Tokens and first tokens of a commit that waits for the grant.
    wanted: Option<(u32, Vec<u32>)>,
    committing: bool,
    may_redial: bool,
    stats: HandoffStats,
}

impl Node {
    pub(super) fn open_push(&mut self, leg: LegId, address: String, open: PushOpen, extent: Extent) -> PushId {
        let id = PushId(self.next_push);
        self.next_push += 1;
        let limits = SendLimits {
            frame_bytes: self.frame_bytes,
            max_resends: MAX_RESENDS,
        };
        let session = SendSession::new(open.ticket, open.epoch, LAYOUT, extent, limits);
        self.out.push(Out::Dial(id, address.clone()));
        self.out.push(Out::Push(id, KvMessage::Open(open.clone())));
        let push = Push {
            leg,
            address,
            open,
            session,
            granted: false,
            wanted: None,
            committing: false,
            may_redial: true,
            stats: HandoffStats::default(),
        };
        self.pushes.insert(id, push);
        id
    }

    pub(super) fn push_pieces(&mut self, id: PushId, pieces: Vec<(Part, Bytes)>) {
        let Some(push) = self.pushes.get_mut(&id) else { return };
        for (part, bytes) in pieces {
            if let Err(error) = push.session.push(part, &bytes) {
                return self.push_failed(id, &error.to_string());
            }
        }
        self.pump(id);
    }

    /// Everything has been pushed.
    pub(super) fn commit_push(&mut self, id: PushId, num_tokens: u32, first_tokens: Vec<u32>) {
        let Some(push) = self.pushes.get_mut(&id) else { return };
        push.wanted = Some((num_tokens, first_tokens));
        self.out.push(Out::Timer(COMMIT_TIMEOUT, Timer::Answer(id)));
        self.pump(id);
    }

    /// Sends what may be sent.
    fn pump(&mut self, id: PushId) {
        let Some(push) = self.pushes.get_mut(&id) else { return };
        while let Some(frame) = push.session.next_frame() {
            push.stats.frames += 1;
            push.stats.bytes += frame.payload.len() as u64;
            let message = KvMessage::Frame(frame.header, frame.payload);
            self.out.push(Out::Push(id, message));
        }
        if push.granted
            && let Some((num_tokens, first_tokens)) = push.wanted.take()
        {
            match push.session.commit(num_tokens, first_tokens) {
                Ok(commit) => {
                    push.committing = true;
                    self.out.push(Out::Push(id, KvMessage::Commit(commit)));
                    self.out.push(Out::Timer(COMMIT_TIMEOUT, Timer::Answer(id)));
                }
                Err(error) => {
                    // All of it has been sent: nothing but an error of the program leads here.
                    self.problem = Some(format!("a handoff cannot be committed: {error}"));
                    self.push_failed(id, &error.to_string());
                }
            }
        }
    }

    /// The receiver answers.
    pub fn push_reply(&mut self, id: PushId, reply: PushReply) {
        let Some(push) = self.pushes.get_mut(&id) else { return };
        push.granted = true;
        let heeded = match reply {
            PushReply::Resend { number } => {
                push.stats.resent += 1;
                self.counts.frames_repeated += 1;
                push.session.on_resend(number)
            }
            PushReply::Received { below } => push.session.on_received(below),
            PushReply::Committed if push.committing => {
                let (leg, stats) = (push.leg, push.stats);
                self.pushes.remove(&id);
                return self.push_committed(leg, stats);
            }
            PushReply::Committed => return self.push_failed(id, "Committed came before Commit"),
            PushReply::Refused { reason } => return self.push_failed(id, &reason),
        };
        match heeded {
            Ok(()) => self.pump(id),
            Err(error) => self.push_failed(id, &error.to_string()),
        }
    }

    /// The connection of a push is gone. It begins again on a new one, once, if the receiver has not answered yet.
    pub fn push_lost(&mut self, id: PushId) {
        let Some(push) = self.pushes.get_mut(&id) else { return };
        if push.granted || !push.may_redial {
            return self.push_failed(id, "the connection was lost");
        }
        push.may_redial = false;
        push.session.rewind();
        self.out.push(Out::Dial(id, push.address.clone()));
        self.out.push(Out::Push(id, KvMessage::Open(push.open.clone())));
        self.pump(id);
    }

    /// The receiver has reset the stream.
    pub fn push_stopped(&mut self, id: PushId) {
        self.push_failed(id, "the receiver has stopped the handoff");
    }

    pub(super) fn push_unanswered(&mut self, id: PushId) {
        if self.pushes.contains_key(&id) {
            self.push_failed(id, "the receiver does not answer");
        }
    }

    fn push_failed(&mut self, id: PushId, reason: &str) {
        let Some(push) = self.pushes.remove(&id) else { return };
        self.out.push(Out::ResetPush(id));
        if let Some(Work::Prefill(work)) = self.jobs.get_mut(&push.leg)
            && work.push == Some(id)
        {
            work.push = None;
            self.fail(push.leg, JobErrorKind::TransferFailed, reason);
        }
    }
}
