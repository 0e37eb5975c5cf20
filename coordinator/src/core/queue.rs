//! Whose turn it is among the requests that wait for nodes.
//!
//! Each API key has a queue of its own, ordered by deadline: of two requests the one whose time is over sooner has less
//! slack. Keys take turns by what they were given: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with the
//! tokens that a request may compute as its size. So a key that sends a thousand requests delays one that sends a single
//! one by about one request. Nothing overtakes the head of the whole, so a large request gets its blocks in the end.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Instant;

use protocol::ids::RequestId;

/// Whose request it is: the number of the API key it came with, 0 without keys.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Tenant(pub u32);

/// What decides about a request's turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Whose it is.
    pub tenant: Tenant,
    /// When its time is over.
    pub due: Instant,
    /// Place in the order of arrival, for those that are due at once.
    pub number: u64,
    /// Tokens that it may compute; 0 if its key has paid for them before.
    pub size: u64,
}

/// The requests of a key.
#[derive(Debug, Default)]
struct Line {
    waiting: BTreeSet<(Instant, u64, RequestId)>,
    /// Tokens given to it, counted on from what the others had when it came.
    start: u64,
}

/// See the head of the file.
#[derive(Debug, Default)]
pub struct WaitingQueue {
    /// Those with a request in the queue, and those ahead of the others.
    lines: BTreeMap<Tenant, Line>,
    turns: HashMap<RequestId, Turn>,
    /// Start of the request that was served last.
    now: u64,
}

impl WaitingQueue {
    /// Puts a request into the queue, in which it is not.
    pub fn insert(&mut self, id: RequestId, turn: Turn) {
        let line = self.lines.entry(turn.tenant).or_default();
        if line.waiting.is_empty() {
            line.start = line.start.max(self.now);
        }
        line.waiting.insert((turn.due, turn.number, id));
        self.turns.insert(id, turn);
    }

    /// Takes a request out; false if it is not there.
    pub fn remove(&mut self, id: RequestId) -> bool {
        let Some(turn) = self.turns.remove(&id) else {
            return false;
        };
        if let Some(line) = self.lines.get_mut(&turn.tenant) {
            line.waiting.remove(&(turn.due, turn.number, id));
        }
        self.forget();
        true
    }

    /// Takes a request out because nodes work on it now: its key has had it.
    pub fn serve(&mut self, id: RequestId) -> bool {
        if let Some(turn) = self.turns.get(&id)
            && let Some(line) = self.lines.get_mut(&turn.tenant)
        {
            self.now = self.now.max(line.start);
            line.start = line.start.saturating_add(turn.size);
        }
        self.remove(id)
    }

    /// Lines that wait for nothing and are not ahead of the others need not be remembered.
    fn forget(&mut self) {
        let now = self.now;
        self.lines
            .retain(|_, line| !line.waiting.is_empty() || line.start > now);
    }

    /// The request whose turn it is.
    pub fn first(&self) -> Option<RequestId> {
        let lines = self.lines.iter().filter(|(_, line)| !line.waiting.is_empty());
        let (_, line) = lines.min_by_key(|(tenant, line)| (line.start, **tenant))?;
        line.waiting.first().map(|(.., id)| *id)
    }

    /// About how many requests a new one of `tenant` waits for.
    pub fn ahead_of(&self, tenant: Tenant) -> usize {
        let own = self.lines.get(&tenant).map_or(0, |line| line.waiting.len());
        let others = |(of, line): (&Tenant, &Line)| {
            if *of == tenant {
                0
            } else {
                line.waiting.len().min(own + 1)
            }
        };
        own + self.lines.iter().map(others).sum::<usize>()
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.turns.len()
    }

    /// True if nobody waits.
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Those who wait, in no order.
    pub(crate) fn ids(&self) -> BTreeSet<RequestId> {
        let lines: BTreeSet<_> = self
            .lines
            .values()
            .flat_map(|line| line.waiting.iter().map(|(.., id)| *id))
            .collect();
        assert_eq!(lines, self.turns.keys().copied().collect(), "each is in one line");
        lines
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::origin::origin;

    fn turn(tenant: u32, due_s: u64, number: u64, size: u64) -> Turn {
        Turn {
            tenant: Tenant(tenant),
            due: origin() + Duration::from_secs(due_s),
            number,
            size,
        }
    }

    fn served(queue: &mut WaitingQueue) -> Vec<u128> {
        let mut order = Vec::new();
        while let Some(id) = queue.first() {
            assert!(queue.serve(id));
            order.push(id.0);
        }
        order
    }

    #[test]
    fn within_a_key_deadline_and_arrival_decide() {
        let mut queue = WaitingQueue::default();
        for (id, due_s, number) in [(1, 60, 0), (2, 60, 1), (3, 10, 2), (4, 90, 0)] {
            queue.insert(RequestId(id), turn(0, due_s, number, 100));
        }
        assert_eq!(queue.ahead_of(Tenant(0)), 4);
        assert!(queue.remove(RequestId(2)) && !queue.remove(RequestId(2)));
        assert_eq!(served(&mut queue), [3, 1, 4]);
        assert!(queue.is_empty() && queue.ids().is_empty());
    }

    #[test]
    fn keys_take_turns_by_what_they_were_given() {
        let mut queue = WaitingQueue::default();
        for id in 0..100 {
            queue.insert(RequestId(id), turn(1, 60, id as u64, 100));
        }
        (0..10).for_each(|_| {
            let id = queue.first().expect("100 wait");
            queue.serve(id);
        });
        // A key that comes now has its turn at once, and then every other one; twice as large ones every third.
        for id in 200..204 {
            queue.insert(RequestId(id), turn(2, 60, id as u64, 100));
        }
        assert_eq!((queue.ahead_of(Tenant(2)), queue.ahead_of(Tenant(3))), (9, 2));
        let order = served(&mut queue);
        let places: Vec<_> = (200..204)
            .map(|id| order.iter().position(|of| *of == id).expect("served"))
            .collect();
        assert!(places[0] <= 1 && places[3] <= 8, "{places:?}");
        assert_eq!(order.len(), 94);
    }

    #[test]
    fn a_key_gathers_no_credit_while_it_is_silent_and_pays_for_what_it_had() {
        let mut queue = WaitingQueue::default();
        for id in 0..50 {
            queue.insert(RequestId(id), turn(1, 60, id as u64, 10));
        }
        for _ in 0..40 {
            let id = queue.first().expect("50 wait");
            queue.serve(id);
        }
        for id in 100..110 {
            queue.insert(RequestId(id), turn(2, 60, id as u64, 10));
        }
        let order = served(&mut queue);
        let second: Vec<_> = order[..10].iter().filter(|id| **id >= 100).collect();
        assert!((4..=6).contains(&second.len()), "{order:?}");
        assert!(queue.lines.len() <= 2, "silent keys are forgotten: {:?}", queue.lines);
    }
}
