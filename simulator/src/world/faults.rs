//! What befalls nodes and the network.

use std::time::{Duration, Instant};

use coordinator::core::cluster::Order;
use protocol::ids::Role;

use super::front::HERE;
use super::{Event, Own, World};
use crate::network::{Place, Side};
use crate::scenario::IDLE_TIMEOUT;

/// How many times as long the steps of a slow node take.
const SLOWNESS: u32 = 20;
/// How often a node that drains looks whether it can go.
const LEAVING_LOOK: Duration = Duration::from_millis(50);
/// Longest time that a node drains.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// An operator's second try, if the first was lost with its link.
const UNDRAIN_AGAIN: Duration = Duration::from_secs(4);
/// How long a node that drains has no jobs before it goes: its last words are under way.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Incident {
    /// A node dies, and comes back after that time.
    Crash(usize, Duration),
    /// A node stops for that time.
    Freeze(usize, Duration),
    /// The places of this set (the coordinator is bit 63) and the others do not reach each other for that time.
    Partition(u64, Duration),
    /// A node is slow for that time.
    Slow(usize, Duration),
    /// It is not slow any more.
    Recover(usize),
    /// A node drains, leaves, and comes back.
    Drain(usize),
    /// An operator drains a node, and lets it serve again after that time.
    Order {
        /// Which.
        index: usize,
        /// What generates there goes on elsewhere.
        move_running: bool,
        /// When.
        time: Duration,
    },
    /// An operator gives a node another role.
    Switch(usize, Role),
    /// An operator lets a node serve again.
    Undrain(usize),
    /// Packets are lost on some connection for that time.
    Stall(Duration),
    /// Some connection ends.
    Break,
    /// A bit of some KV turns over: a fault of ours that must show.
    Rot,
    /// A node does not hear the next cancel of a job: a fault of ours that must show.
    Unheard(usize),
    /// A node forgets a job without a word: the same.
    Forget(usize),
}

/// The coordinator's bit in the set of a partition.
const COORDINATOR_BIT: u64 = 1 << 63;

impl World {
    /// Draws the scenario's incidents.
    pub(super) fn plan_incidents(&mut self) {
        let faults = self.scenario.faults;
        let nodes = self.nodes.len() as u64;
        let mut planned = Vec::new();
        let random = &mut self.random;
        let mut some = |count: u64, draw: &mut dyn FnMut(&mut crate::random::Random) -> Incident| {
            planned.extend((0..count).map(|_| draw(random)));
        };
        some(faults.crashes, &mut |random| {
            Incident::Crash(random.below(nodes) as usize, random.micros(50_000..4_000_000))
        });
        some(faults.freezes, &mut |random| {
            Incident::Freeze(random.below(nodes) as usize, random.micros(50_000..5_000_000))
        });
        some(faults.partitions, &mut |random| {
            Incident::Partition(random.next_u64(), random.micros(50_000..4_000_000))
        });
        some(faults.slow, &mut |random| {
            Incident::Slow(random.below(nodes) as usize, random.micros(200_000..4_000_000))
        });
        some(faults.drains, &mut |random| {
            Incident::Drain(random.below(nodes) as usize)
        });
        some(faults.orders, &mut |random| Incident::Order {
            index: random.below(nodes) as usize,
            move_running: random.chance(500),
            time: random.micros(100_000..2_000_000),
        });
        some(faults.switches, &mut |random| {
            let role = *random.pick(&[Role::Prefill, Role::Decode, Role::Both]);
            Incident::Switch(random.below(nodes) as usize, role)
        });
        some(faults.stalls, &mut |random| {
            Incident::Stall(random.micros(20_000..1_200_000))
        });
        some(faults.breaks, &mut |_| Incident::Break);
        some(faults.rot, &mut |_| Incident::Rot);
        some(faults.unheard, &mut |random| {
            Incident::Unheard(random.below(nodes) as usize)
        });
        some(faults.forgotten, &mut |random| {
            Incident::Forget(random.below(nodes) as usize)
        });
        let busy = self.scenario.busy.as_micros() as u64;
        for incident in planned {
            let at = self.random.micros(0..busy);
            self.after(at, Event::Incident(incident));
        }
    }

    fn quiet_not_before(&mut self, delay: Duration) {
        self.quiet_from = self.quiet_from.max(self.now + delay);
    }

    pub(super) fn befall(&mut self, incident: Incident) {
        self.note(10, 0, format_args!("incident: {incident:?}"));
        match incident {
            Incident::Crash(index, back) => self.crash(index, back),
            Incident::Freeze(index, time) => self.freeze(index, time),
            Incident::Partition(set, time) => self.partition(set, time),
            Incident::Slow(index, time) => {
                self.quiet_not_before(time);
                if let Some(node) = self.nodes[index].node.as_mut() {
                    node.slowness = SLOWNESS;
                }
                self.after(time, Event::Incident(Incident::Recover(index)));
            }
            Incident::Recover(index) => {
                if let Some(node) = self.nodes[index].node.as_mut() {
                    node.slowness = 1;
                }
            }
            Incident::Drain(index) => self.drain(index),
            Incident::Order {
                index,
                move_running,
                time,
            } => {
                // A node that is not connected is not drained.
                if self.order(index, Order::Drain { move_running }) {
                    self.quiet_not_before(time + UNDRAIN_AGAIN);
                    self.after(time, Event::Incident(Incident::Undrain(index)));
                    self.after(time + UNDRAIN_AGAIN, Event::Incident(Incident::Undrain(index)));
                }
            }
            Incident::Switch(index, role) => {
                // Most certificates do not allow it.
                self.order(index, Order::SetRole(role));
            }
            Incident::Undrain(index) => {
                self.order(index, Order::Undrain);
            }
            Incident::Stall(time) => {
                let living = self.network.living();
                if !living.is_empty() {
                    let conn = *self.random.pick(&living);
                    let until = self.now + time;
                    let state = self.network.conn(conn);
                    state.not_before = state.not_before.max(until);
                }
            }
            Incident::Rot => self.rot(),
            Incident::Unheard(index) => {
                if let Some(node) = self.nodes[index].node.as_mut() {
                    node.hears_no_cancel = true;
                }
            }
            Incident::Forget(index) => {
                if let Some(node) = self.nodes[index].node.as_mut() {
                    node.forget_a_job();
                }
            }
            Incident::Break => self.break_a_link(),
        }
    }

    /// A byte changes in the KV of one of the nodes that have any.
    fn rot(&mut self) {
        let first = self.random.below(self.nodes.len() as u64) as usize;
        let Self { nodes, random, .. } = self;
        let (before, after) = nodes.split_at_mut(first);
        let living = after.iter_mut().chain(before).filter_map(|slot| slot.node.as_mut());
        for node in living {
            if node.rot(random) {
                break;
            }
        }
    }

    fn break_a_link(&mut self) {
        let living = self.network.living();
        if living.is_empty() {
            return;
        }
        let conn = *self.random.pick(&living);
        self.network.conn(conn).broken = Some(self.now);
        for side in [Side::Dialler, Side::Dialled] {
            let noticed = self.random.micros(0..IDLE_TIMEOUT.as_micros() as u64);
            self.after(noticed, Event::Notice(conn, side));
        }
        self.quiet_not_before(IDLE_TIMEOUT);
    }

    /// A node dies. Nobody is told: idle timers run out, unless it is back before.
    fn crash(&mut self, index: usize, back: Duration) {
        let Some(node) = self.nodes[index].node.take() else {
            return;
        };
        self.tally.deaths += 1;
        self.bury(&node);
        for (conn, side) in self.network.of(Place::Node(index), node.boot) {
            let state = self.network.conn(conn);
            state.close(side);
            state.broken.get_or_insert(self.now);
            let noticed = IDLE_TIMEOUT.mul_f64(0.5) + self.random.micros(0..IDLE_TIMEOUT.as_micros() as u64 / 2);
            self.after(noticed, Event::Notice(conn, side.other()));
        }
        self.quiet_not_before(back + IDLE_TIMEOUT);
        self.after(back, Event::Return(index));
    }

    /// A node stops. Those at the other ends of its connections give it up if it stops for long; it learns that when it
    /// goes on, before or after it has read what had come until then.
    fn freeze(&mut self, index: usize, time: Duration) {
        if self.nodes[index].frozen_until.is_some_and(|until| until > self.now) {
            return;
        }
        let slot = &mut self.nodes[index];
        let Some(boot) = slot.node.as_ref().map(|node| node.boot) else {
            return;
        };
        let until = self.now + time;
        slot.frozen_until = Some(until);
        self.quiet_not_before(time + IDLE_TIMEOUT);
        if time < IDLE_TIMEOUT {
            return;
        }
        for (conn, side) in self.network.of(Place::Node(index), boot) {
            let noticed = IDLE_TIMEOUT + self.random.micros(0..100_000);
            self.after(noticed, Event::Notice(conn, side.other()));
            // Held back until it goes on. What was held back before comes first.
            let first = self.random.chance(500);
            let learns = if first {
                noticed
            } else {
                until - self.now + self.random.micros(0..3_000)
            };
            self.after(learns, Event::Notice(conn, side));
        }
    }

    fn partition(&mut self, set: u64, time: Duration) {
        let mut places: Vec<(Place, bool)> = (0..self.nodes.len())
            .map(|index| (Place::Node(index), set >> (index % 63) & 1 == 1))
            .collect();
        places.push((HERE, set & COORDINATOR_BIT != 0));
        let until = self.now + time;
        for (position, (a, in_set)) in places.iter().enumerate() {
            for (b, also) in &places[position + 1..] {
                if in_set != also {
                    self.network.cut(*a, *b, until);
                }
            }
        }
        for conn in self.network.living() {
            let state = self.network.conn(conn);
            let (a, b) = (state.end(Side::Dialler).place, state.end(Side::Dialled).place);
            if !self.network.is_cut(self.now, a, b) {
                continue;
            }
            let state = self.network.conn(conn);
            if time < IDLE_TIMEOUT {
                // Everything is sent again until it arrives.
                state.not_before = state.not_before.max(until);
                continue;
            }
            state.broken = Some(self.now);
            for side in [Side::Dialler, Side::Dialled] {
                let noticed = IDLE_TIMEOUT + self.random.micros(0..300_000);
                self.after(noticed, Event::Notice(conn, side));
            }
        }
        self.quiet_not_before(time + IDLE_TIMEOUT);
    }

    /// A node drains: it takes no new jobs, and goes once those that run have ended.
    fn drain(&mut self, index: usize) {
        let now = self.now;
        let Some(node) = self.nodes[index].node.as_mut().filter(|node| !node.leaving) else {
            return;
        };
        node.leaving = true;
        let boot = node.boot;
        self.quiet_not_before(DRAIN_TIMEOUT + LAST_WORDS);
        let leave = Own::Leave { since: now, idle: None };
        self.after(Duration::ZERO, Event::Own(index, boot, leave));
    }

    pub(super) fn leave(&mut self, index: usize, boot: u64, since: Instant, idle: Option<Instant>) {
        let now = self.now;
        let has_jobs = self.node(index, boot).is_some_and(|node| node.has_jobs());
        let idle = if has_jobs { None } else { idle.or(Some(now)) };
        let goes = idle.is_some_and(|idle| now >= idle + LAST_WORDS) || now >= since + DRAIN_TIMEOUT;
        if !goes {
            let leave = Own::Leave { since, idle };
            return self.after(LEAVING_LOOK, Event::Own(index, boot, leave));
        }
        let Some(node) = self.nodes[index].node.take() else {
            return;
        };
        self.tally.deaths += 1;
        self.bury(&node);
        for (conn, side) in self.network.of(Place::Node(index), boot) {
            self.close(conn, side);
        }
        let back = self.random.micros(100_000..2_000_000);
        self.quiet_not_before(back + IDLE_TIMEOUT);
        self.after(back, Event::Return(index));
    }
}
