//! The coordinator of the world: the production core, driven as `coordinator::driver` drives it, and its clients.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coordinator::core::block_audit::AuditReport;
use coordinator::core::cluster::{Action, Cluster, Fact, Order};
use coordinator::core::nodes::{LegId, LinkId, PeerName};
use coordinator::core::request::Note;
use coordinator::core::stop::StopMatcher;
use coordinator::core::types::{ClientEvent, ServeErrorKind};
use protocol::control::Hello;
use protocol::ids::RequestId;

use super::{Event, Message, World};
use crate::network::{ConnId, Place, Side};
use crate::scenario::{IDLE_TIMEOUT, Scenario};
use crate::text::Letters;
use crate::workload::Client;

/// What a client has got of one request.
pub(crate) struct Got {
    /// Its events.
    pub(crate) events: Vec<ClientEvent>,
    /// When it asked.
    asked: Instant,
    /// It has the last one.
    pub(crate) ended: bool,
    /// Time in which the client takes an event, if it is a slow one.
    slow: Option<Duration>,
    first: Option<Instant>,
}

/// See the head of the file.
pub(crate) struct Front {
    pub(crate) cluster: Cluster,
    links: BTreeMap<LinkId, ConnId>,
    by_conn: BTreeMap<ConnId, LinkId>,
    next_link: u64,
    /// Over which connection a job's stream goes.
    legs: BTreeMap<LegId, ConnId>,
    facts: VecDeque<Fact>,
    /// What each request's client has got.
    pub(crate) got: BTreeMap<RequestId, Got>,
    /// Requests that have not ended.
    pub(crate) open: usize,
    /// Calls that have not come in.
    pub(crate) waiting_calls: usize,
    /// When a request ended last.
    pub(super) last_end: Option<Instant>,
    client_buffer: usize,
    /// What the last audit of the blocks has shown.
    pub(crate) last_audit: Option<AuditReport>,
    /// What must not happen.
    pub(super) problem: Option<String>,
}

impl Front {
    pub(super) fn new(scenario: &Scenario) -> Self {
        Self {
            cluster: Cluster::new(scenario.cluster(), Arc::new(Letters)),
            links: BTreeMap::new(),
            by_conn: BTreeMap::new(),
            next_link: 0,
            legs: BTreeMap::new(),
            facts: VecDeque::new(),
            got: BTreeMap::new(),
            open: 0,
            waiting_calls: scenario.size.calls,
            last_end: None,
            client_buffer: scenario.client_buffer,
            last_audit: None,
            problem: None,
        }
    }
}

impl World {
    pub(super) fn coordinator_timeout(&mut self) {
        self.note(1, 0, format_args!("coordinator: deadline"));
        let mut actions = Vec::new();
        self.front.cluster.on_timeout(self.now, &mut actions);
        self.settle(actions);
    }

    /// A call comes in.
    pub(super) fn call(&mut self, index: usize) {
        self.front.waiting_calls -= 1;
        let call = &self.calls[index];
        let slow = match call.client {
            Client::Patient => None,
            Client::Leaves(after) => {
                self.after(after, Event::Cancel(index));
                None
            }
            Client::Slow(time) => Some(time),
        };
        let call = &self.calls[index];
        let requests = call.requests.iter().map(|planned| {
            let request = planned.request.clone();
            let matcher = StopMatcher::new(&request.stop_strings, request.include_stop_str);
            (request, matcher)
        });
        let requests: Vec<_> = requests.collect();
        let ids: Vec<RequestId> = requests.iter().map(|(request, _)| request.id).collect();
        for id in &ids {
            let got = Got {
                asked: self.now,
                events: Vec::new(),
                ended: false,
                slow,
                first: None,
            };
            self.front.got.insert(*id, got);
        }
        self.front.open += ids.len();
        self.note(
            2,
            index as u64,
            format_args!("client: call {index} of requests {ids:?}"),
        );
        let mut actions = Vec::new();
        let admitted = self.front.cluster.submit(self.now, requests, &mut actions);
        if let Err(error) = admitted {
            self.tally.refused += 1;
            for id in ids {
                self.emit(id, ClientEvent::Failed(error.clone()));
            }
        }
        self.settle(actions);
    }

    /// The client of a call leaves.
    pub(super) fn cancel(&mut self, index: usize) {
        self.note(3, index as u64, format_args!("client: call {index} is given up"));
        for request in 0..self.calls[index].requests.len() {
            let request = self.calls[index].requests[request].request.id;
            self.fact(Fact::Cancel {
                request,
                reason: "the client is gone",
            });
        }
    }

    /// An operator gives an order. False if it cannot be given now.
    pub(super) fn order(&mut self, index: usize, order: Order) -> bool {
        let (name, _) = self.scenario.node(index);
        let mut actions = Vec::new();
        let given = self.front.cluster.order(self.now, &name, order, &mut actions);
        self.settle(actions);
        given.is_ok()
    }

    /// The coordinator learns something.
    pub(super) fn fact(&mut self, fact: Fact) {
        self.front.facts.push_back(fact);
        self.settle(Vec::new());
    }

    /// Feeds the core and carries out its actions until neither leads to the other any more.
    pub(super) fn settle(&mut self, mut actions: Vec<Action>) {
        loop {
            self.front.cluster.assert_consistent();
            for action in actions.drain(..) {
                self.carry_out(action);
            }
            let Some(fact) = self.front.facts.pop_front() else {
                break;
            };
            self.front.cluster.on_fact(self.now, fact, &mut actions);
        }
    }

    fn carry_out(&mut self, action: Action) {
        if self.trace.is_aloud() {
            self.note(4, 0, format_args!("coordinator: {action:?}"));
        }
        match action {
            Action::Welcome { link } => {
                let conn = self.front.links[&link];
                self.send(conn, Side::Dialled, Some(0), Message::Welcome);
            }
            Action::Refuse { link, reason } => {
                self.front.problem = Some(format!("{link:?} is refused: {reason}"));
            }
            Action::Close { link, .. } => {
                if let Some(conn) = self.front.links.remove(&link) {
                    self.close(conn, Side::Dialled);
                }
            }
            Action::Tell { link, message } => {
                if let Some(&conn) = self.front.links.get(&link) {
                    self.send(conn, Side::Dialled, Some(0), Message::Order(message));
                }
            }
            Action::StartJob { leg, link, job } => match self.front.links.get(&link) {
                Some(&conn) => {
                    self.front.legs.insert(leg, conn);
                    self.send(conn, Side::Dialled, Some(stream(leg)), Message::Start(leg, job));
                }
                None => self.front.facts.push_back(Fact::JobLost {
                    leg,
                    reason: "the link is closed".to_owned(),
                }),
            },
            Action::UpdateJob { leg, update } => {
                self.tally.ended_alone += 1;
                if let Some(&conn) = self.front.legs.get(&leg) {
                    self.send(conn, Side::Dialled, Some(stream(leg)), Message::Update(leg, update));
                }
            }
            Action::ResetJob { leg } => {
                if let Some(conn) = self.front.legs.remove(&leg) {
                    // A reset does not wait for what was written before it, but for the opening of its stream.
                    self.send(conn, Side::Dialled, Some(stream(leg)), Message::Reset(leg));
                }
            }
            Action::Emit { request, event } => self.emit(request, event),
            Action::Note { request, note, .. } => self.noted(request, &note),
            Action::Ended(_) => {}
            Action::Audited { report, .. } => self.audited(*report),
            Action::Late { .. } => self.tally.late += 1,
        }
    }

    fn noted(&mut self, request: RequestId, note: &Note) {
        match note {
            Note::Restarted(_) => self.tally.restarted += 1,
            Note::Migrated(_) => self.tally.moved += 1,
            Note::Wasted => self.tally.wasted += 1,
            Note::Disagreement { position } => {
                self.front.problem = Some(format!("two tokens for position {position} of request {request}"));
            }
            Note::Rejected(error) => self.front.problem = Some(format!("request {request} is refused: {error:?}")),
            Note::HandedOff(_) => self.tally.handed_off += 1,
            Note::Stranded(_) | Note::GivenUp(_) | Note::Ignored(_) => {}
        }
    }

    fn emit(&mut self, request: RequestId, event: ClientEvent) {
        let Some(got) = self.front.got.get_mut(&request) else {
            self.front.problem = Some(format!("an event for {request}, which nobody asked: {event:?}"));
            return;
        };
        if got.ended {
            self.front.problem = Some(format!("request {request} goes on behind its end: {event:?}"));
            return;
        }
        if event.is_last() {
            got.ended = true;
            self.front.open -= 1;
            self.front.last_end = Some(self.now);
            let took = (self.now - got.asked).as_micros() as u64;
            self.tally.longest_us = self.tally.longest_us.max(took);
        } else if let Some(time) = got.slow {
            let first = *got.first.get_or_insert(self.now);
            let taken = (self.now - first).as_micros() / time.as_micros().max(1);
            if got.events.len() as u128 >= taken + self.front.client_buffer as u128 {
                let reason = "the client does not keep up with its events";
                self.front.facts.push_back(Fact::Cancel { request, reason });
            }
        }
        got.events.push(event);
        if let Some(ClientEvent::Failed(error)) = got.events.last() {
            let tally = &mut self.tally;
            match error.kind {
                ServeErrorKind::Cancelled => tally.cancelled += 1,
                ServeErrorKind::Overloaded { .. } => tally.overloaded += 1,
                ServeErrorKind::Unavailable => tally.unavailable += 1,
                ServeErrorKind::Timeout => tally.timeout += 1,
                ServeErrorKind::NodeLost | ServeErrorKind::TransferFailed => tally.lost += 1,
                ServeErrorKind::TooLong | ServeErrorKind::Internal => {}
            }
        }
    }

    /// A node introduces itself over a new connection.
    pub(super) fn hello(&mut self, conn: ConnId, hello: Hello) {
        let link = LinkId(self.front.next_link);
        self.front.next_link += 1;
        self.front.links.insert(link, conn);
        self.front.by_conn.insert(conn, link);
        let Place::Node(index) = self.network.conn(conn).end(Side::Dialler).place else {
            return;
        };
        let peer = PeerName {
            role: self.scenario.certified(index),
            node: hello.node.clone(),
        };
        self.fact(Fact::NodeJoined { link, peer, hello });
    }

    /// The link of a connection, if the coordinator uses it.
    pub(super) fn link_on(&self, conn: ConnId) -> Option<LinkId> {
        let link = self.front.by_conn.get(&conn)?;
        self.front.links.contains_key(link).then_some(*link)
    }

    /// The coordinator learns that a connection is gone.
    pub(super) fn link_lost(&mut self, conn: ConnId) {
        if let Some(link) = self.link_on(conn) {
            self.tally.links_lost += 1;
            self.front.links.remove(&link);
            self.fact(Fact::NodeLost { link });
        }
    }

    /// One end closes a connection. The other learns it as soon as that can reach it, or by its idle timer.
    pub(super) fn close(&mut self, conn: ConnId, side: Side) {
        let ends = [Side::Dialler, Side::Dialled].map(|side| self.network.conn(conn).end(side).place);
        let reaches = !self.network.is_cut(self.now, ends[0], ends[1]);
        let latency = self.network.latency(&mut self.random);
        let conn_state = self.network.conn(conn);
        let whole = conn_state.broken.is_none();
        conn_state.close(side);
        conn_state.broken.get_or_insert(self.now + latency);
        let delay = if reaches && whole { latency } else { IDLE_TIMEOUT };
        self.after(delay, Event::Notice(conn, side.other()));
    }
}

/// The stream of a job on its connection; 0 is the membership's.
pub(super) fn stream(leg: LegId) -> u64 {
    leg.0 + 1
}

/// The coordinator.
pub(super) const HERE: Place = Place::Coordinator;
