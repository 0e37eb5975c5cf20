//! The books: what the coordinator's jobs hold on the nodes.

use std::collections::BTreeSet;

use protocol::ids::RequestId;
use serde::Serialize;

use super::{BACKOFF_MIN, Leg, LegId, LinkId, Node, Nodes, Shape};

/// Prompt tokens that a node has yet to compute for a job, and how long that will take by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Work {
    /// Tokens that no cache has.
    pub tokens: usize,
    /// Predicted microseconds.
    pub us: u64,
}

impl Nodes {
    /// Books a job. `work`: what the node will have to compute before its first token.
    pub fn book(&mut self, link: LinkId, request: RequestId, shape: &Shape, work: Work) -> LegId {
        let id = LegId(self.next_leg);
        self.next_leg += 1;
        let rows = if work.tokens > 0 { self.limits.chunk_tokens } else { 1 };
        let node = self
            .nodes
            .get_mut(&link)
            .expect("a job is booked on a node that was just chosen");
        let (blocks, sequences) = (node.blocks_of(shape, rows) as u32, shape.held.sequences());
        node.legs.insert(id);
        node.breaker.booked(id);
        node.sequences += sequences;
        node.booked_blocks += blocks;
        node.unreported_blocks += i64::from(blocks);
        node.outstanding_tokens += work.tokens;
        node.computing += usize::from(work.tokens > 0);
        node.queue.unseen_us += work.us;
        self.legs.insert(
            id,
            Leg {
                request,
                link,
                sent: false,
                taken: false,
                blocks,
                sequences,
                work,
                seen: false,
            },
        );
        id
    }

    /// The job of a leg is being sent; where to. `None` if the leg is over.
    pub fn send(&mut self, leg: LegId) -> Option<LinkId> {
        let booked = self.legs.get_mut(&leg)?;
        booked.sent = true;
        Some(booked.link)
    }

    /// A sequence of a leg holds `tokens` tokens, one more than before.
    pub fn grow(&mut self, leg: LegId, tokens: usize) {
        let Some(booked) = self.legs.get_mut(&leg) else { return };
        let Some(node) = self.nodes.get_mut(&booked.link) else {
            return;
        };
        let more = (node.blocks(tokens) - node.blocks(tokens.saturating_sub(1))) as u32;
        booked.blocks += more;
        node.booked_blocks += more;
    }

    /// A sequence of a leg, one of several, has ended with `tokens` tokens, of which `prompt` are the prompt's.
    pub fn shrink(&mut self, leg: LegId, prompt: usize, tokens: usize) {
        let Some(booked) = self.legs.get_mut(&leg) else { return };
        let Some(node) = self.nodes.get_mut(&booked.link) else {
            return;
        };
        let own = (node.blocks(tokens) - node.shared_blocks(prompt)) as u32;
        booked.blocks -= own;
        booked.sequences -= 1;
        node.booked_blocks -= own;
        node.unreported_blocks -= i64::from(own);
        node.sequences -= 1;
    }

    /// The prompt of a leg has been computed: the node may have the next one.
    pub fn computed(&mut self, leg: LegId) {
        let Some(booked) = self.legs.get_mut(&leg) else { return };
        booked.taken = true;
        let (done, seen) = (std::mem::take(&mut booked.work), booked.seen);
        if let Some(node) = self.nodes.get_mut(&booked.link) {
            node.work_done(done, seen);
        }
    }

    /// A leg is over; gives back what was booked. `None` if it was over before.
    pub fn end(&mut self, leg: LegId) -> Option<Leg> {
        let ended = self.legs.remove(&leg)?;
        if let Some(node) = self.nodes.get_mut(&ended.link) {
            node.legs.remove(&leg);
            node.breaker.ended(leg);
            node.booked_blocks -= ended.blocks;
            node.sequences -= ended.sequences;
            node.unreported_blocks -= i64::from(ended.blocks);
            node.work_done(ended.work, ended.seen);
            if ended.taken {
                // What it held is free: the node's last word does not count any more.
                node.busy_until = None;
                node.backoff = BACKOFF_MIN;
            }
        }
        Some(ended)
    }

    /// Panics if the books do not add up; all legs with their requests. For tests and simulations.
    pub(crate) fn assert_consistent(&self) -> Vec<(LegId, RequestId)> {
        for (link, node) in &self.nodes {
            let legs: Vec<_> = self.legs.iter().filter(|(_, leg)| leg.link == *link).collect();
            assert_eq!(
                legs.iter().map(|(id, _)| **id).collect::<BTreeSet<_>>(),
                node.legs,
                "legs of {link:?}"
            );
            assert_eq!(
                legs.iter().map(|(_, leg)| leg.blocks).sum::<u32>(),
                node.booked_blocks,
                "blocks on {link:?}"
            );
            assert_eq!(
                legs.iter().map(|(_, leg)| leg.sequences).sum::<usize>(),
                node.sequences,
                "sequences on {link:?}"
            );
            let outstanding: usize = legs.iter().map(|(_, leg)| leg.work.tokens).sum();
            let computing = legs.iter().filter(|(_, leg)| leg.work.tokens > 0).count();
            let booked = (node.outstanding_tokens, node.computing);
            assert_eq!(booked, (outstanding, computing), "prompts on {link:?}");
            let us = |seen: bool| -> u64 {
                let of = legs.iter().filter(|(_, leg)| leg.seen == seen);
                of.map(|(_, leg)| leg.work.us).sum()
            };
            let seen_tokens: usize = legs
                .iter()
                .filter(|(_, leg)| leg.seen)
                .map(|(_, leg)| leg.work.tokens)
                .sum();
            let queue = (node.queue.unseen_us, node.queue.seen_us, node.queue.seen_tokens);
            assert_eq!(queue, (us(false), us(true), seen_tokens as u64), "queue of {link:?}");
        }
        assert!(
            self.legs.values().all(|leg| self.nodes.contains_key(&leg.link)),
            "a leg on no node"
        );
        self.legs.iter().map(|(id, leg)| (*id, leg.request)).collect()
    }
}

impl Node {
    /// Work that was booked is done, or will not be done.
    fn work_done(&mut self, work: Work, seen: bool) {
        self.outstanding_tokens -= work.tokens;
        self.computing -= usize::from(work.tokens > 0);
        if seen {
            self.queue.remove_seen(work.tokens as u64, work.us);
        } else {
            self.queue.unseen_us -= work.us;
        }
    }
}
