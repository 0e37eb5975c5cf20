//! Connections as QUIC makes them: reliable, with streams that keep their order and do not wait for each other, until they
//! are lost. A lost connection swallows what is under way, and each end learns of the loss when its idle timer says so.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::random::Random;

/// Name of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnId(pub usize);

/// Where somebody is: the coordinator, or a node by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The coordinator.
    Coordinator,
    /// A node.
    Node(usize),
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Where.
    pub place: Place,
    /// The life of the node there; 0 for the coordinator.
    pub boot: u64,
}

/// Which end: the one that dialled, or the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// It dialled.
    Dialler,
    /// It was dialled.
    Dialled,
}

impl Side {
    /// The other end.
    pub fn other(self) -> Self {
        match self {
            Self::Dialler => Self::Dialled,
            Self::Dialled => Self::Dialler,
        }
    }
}

/// A connection.
#[derive(Debug)]
pub struct Conn {
    ends: [End; 2],
    /// Nothing arrives after this.
    pub broken: Option<Instant>,
    /// The ends that know that it is gone.
    closed: [bool; 2],
    /// Nothing arrives before this.
    pub not_before: Instant,
    /// When the last message of a stream arrives, by stream and side that hears it.
    arrivals: BTreeMap<(u64, Side), Instant>,
}

impl Conn {
    /// An end.
    pub fn end(&self, side: Side) -> End {
        self.ends[side as usize]
    }

    /// True if that end has learnt that the connection is gone.
    pub fn is_closed(&self, side: Side) -> bool {
        self.closed[side as usize]
    }

    /// That end learns it. False if it knew.
    pub fn close(&mut self, side: Side) -> bool {
        !std::mem::replace(&mut self.closed[side as usize], true)
    }

    /// The side on which somebody is.
    pub fn side_of(&self, place: Place, boot: u64) -> Option<Side> {
        let at = |side: &Side| self.end(*side) == End { place, boot };
        [Side::Dialler, Side::Dialled].into_iter().find(at)
    }
}

/// All connections, and which places cannot reach each other.
#[derive(Debug)]
pub struct Network {
    conns: Vec<Conn>,
    cuts: Vec<(Place, Place, Instant)>,
    latency_us: u64,
}

impl Network {
    /// Without connections. A message takes up to `latency_us` microseconds.
    pub fn new(latency_us: u64) -> Self {
        Self {
            conns: Vec::new(),
            cuts: Vec::new(),
            latency_us,
        }
    }

    /// A new connection, usable after a round trip.
    pub fn connect(&mut self, now: Instant, random: &mut Random, ends: [End; 2]) -> ConnId {
        let handshake = self.latency(random) + self.latency(random);
        self.conns.push(Conn {
            ends,
            broken: None,
            closed: [false; 2],
            not_before: now + handshake,
            arrivals: BTreeMap::new(),
        });
        ConnId(self.conns.len() - 1)
    }

    /// A connection.
    pub fn conn(&mut self, id: ConnId) -> &mut Conn {
        &mut self.conns[id.0]
    }

    /// Those that an end has not given up, and which of their ends are at `place`.
    pub fn of(&self, place: Place, boot: u64) -> Vec<(ConnId, Side)> {
        let conns = self.conns.iter().enumerate();
        let mine = conns.filter_map(|(id, conn)| conn.side_of(place, boot).map(|side| (ConnId(id), side)));
        mine.filter(|(id, side)| !self.conns[id.0].is_closed(*side)).collect()
    }

    /// Those that no end has given up and nothing has broken.
    pub fn living(&self) -> Vec<ConnId> {
        let conns = self.conns.iter().enumerate();
        let living = conns.filter(|(_, conn)| conn.broken.is_none() && conn.closed == [false; 2]);
        living.map(|(id, _)| ConnId(id)).collect()
    }

    /// Nothing passes between two places until then.
    pub fn cut(&mut self, a: Place, b: Place, until: Instant) {
        self.cuts.push((a, b, until));
    }

    /// True if nothing passes between two places now.
    pub fn is_cut(&self, now: Instant, a: Place, b: Place) -> bool {
        let between =
            |(x, y, until): &(Place, Place, Instant)| *until > now && ((*x, *y) == (a, b) || (*y, *x) == (a, b));
        self.cuts.iter().any(between)
    }

    /// How long a message takes.
    pub fn latency(&self, random: &mut Random) -> Duration {
        random.micros(self.latency_us / 4..self.latency_us)
    }

    /// When a message arrives that is sent now to `to`; `None` if it never will. Messages of one `stream` arrive in order;
    /// one without a stream may overtake.
    pub fn arrival(
        &mut self,
        now: Instant,
        random: &mut Random,
        id: ConnId,
        to: Side,
        stream: Option<u64>,
    ) -> Option<Instant> {
        let latency = self.latency(random);
        let conn = &mut self.conns[id.0];
        if conn.broken.is_some() || conn.is_closed(to.other()) {
            return None;
        }
        let at = (now + latency).max(conn.not_before);
        let Some(stream) = stream else { return Some(at) };
        let last = conn.arrivals.entry((stream, to)).or_insert(at);
        *last = at.max(*last);
        Some(*last)
    }
}
