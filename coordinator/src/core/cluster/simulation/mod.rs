//! A small cluster on a virtual clock: the real core, fake nodes, messages that take a random time, and faults: streams
//! that break, nodes that die and come back before or after their loss is noticed, clients that leave.
//!
//! Whatever happens: every request and each of its choices ends exactly once; its tokens are those of an undisturbed run, in order; at the end
//! nothing is booked, and every node has all its blocks.

mod check;
mod node;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::control::{Job, JobEvent, JobUpdate};
use protocol::ids::{RequestId, Role, Ticket};

use self::node::{Node, Out};
use super::{Action, Cluster, Fact};
use crate::core::fixtures::{ByteText, hello, request, settings};
use crate::core::nodes::{LegId, LinkId, PeerName};
use crate::core::request::Note;
use crate::core::stop::StopMatcher;
use crate::core::types::{ClientEvent, ServeRequest};
use crate::origin::origin;

const REQUESTS: u128 = 40;

enum Event {
    Submit(Box<ServeRequest>),
    Cancel(RequestId),
    /// To a node, over a link.
    Start {
        link: LinkId,
        leg: LegId,
        job: Box<Job>,
    },
    Update {
        link: LinkId,
        leg: LegId,
        update: JobUpdate,
    },
    Reset {
        link: LinkId,
        leg: LegId,
    },
    /// To the core, over a link.
    Say {
        link: LinkId,
        leg: LegId,
        event: JobEvent,
    },
    StreamLost {
        link: LinkId,
        leg: LegId,
    },
    Commit {
        from: (LinkId, LegId),
        node: String,
        ticket: Ticket,
    },
    Committed {
        link: LinkId,
        leg: LegId,
        accepted: bool,
    },
    Step(usize),
    Report(usize),
    Die(usize),
    Return(usize),
    /// The coordinator notices that a link is gone.
    Notice(LinkId),
}

/// What may go wrong.
#[derive(Clone, Copy)]
struct Faults {
    /// Of a thousand messages, how many are the last of their stream.
    broken_streams: u64,
    deaths: u64,
    cancels: bool,
}

struct Simulation {
    seed: u64,
    now: Instant,
    start: Instant,
    events: BTreeMap<(Instant, u64), Event>,
    next_event: u64,
    /// When the last message of a stream arrives: the next one comes later.
    arrivals: BTreeMap<(LegId, bool), Instant>,
    cluster: Cluster,
    nodes: Vec<Option<Node>>,
    /// The links, and which node and boot is at the other end.
    links: BTreeMap<LinkId, (usize, u64)>,
    next_link: u64,
    next_boot: u64,
    where_is: BTreeMap<LegId, LinkId>,
    faults: Faults,
    /// The requests, and whether their client leaves.
    planned: Vec<(ServeRequest, bool)>,
    seen: BTreeMap<RequestId, Vec<ClientEvent>>,
    /// How often what happened: a simulation in which nothing goes wrong shows nothing.
    tally: Tally,
}

/// Counts over all seeds of a test.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    answered: usize,
    busy: usize,
    restarted: usize,
    moved: usize,
    late: usize,
    /// Choices that ended by a stop string before the others.
    ended_alone: usize,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, more: Self) {
        self.answered += more.answered;
        self.busy += more.busy;
        self.restarted += more.restarted;
        self.moved += more.moved;
        self.late += more.late;
        self.ended_alone += more.ended_alone;
    }
}

const NODES: [(&str, Role, u32); 4] = [
    ("p0", Role::Prefill, 40),
    ("p1", Role::Prefill, 40),
    ("d0", Role::Decode, 30),
    ("d1", Role::Decode, 30),
];

impl Simulation {
    fn new(seed: u64, faults: Faults) -> Self {
        let mut settings = settings();
        settings.request.queue_timeout = Duration::from_secs(20);
        settings.request.inter_token_timeout = Duration::from_secs(4);
        let now = origin();
        let mut simulation = Self {
            seed: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            now,
            start: now,
            events: BTreeMap::new(),
            next_event: 0,
            arrivals: BTreeMap::new(),
            cluster: Cluster::new(settings, Arc::new(ByteText)),
            nodes: NODES.iter().map(|_| None).collect(),
            links: BTreeMap::new(),
            next_link: 0,
            next_boot: 1,
            where_is: BTreeMap::new(),
            faults,
            planned: Vec::new(),
            seen: BTreeMap::new(),
            tally: Tally::default(),
        };
        for index in 0..NODES.len() {
            simulation.bring_up(index);
            simulation.after(Duration::from_millis(index as u64), Event::Step(index));
            simulation.after(Duration::from_millis(index as u64), Event::Report(index));
        }
        for id in 1..=REQUESTS {
            simulation.plan_request(id);
        }
        for _ in 0..faults.deaths {
            let (at, index) = (simulation.millis(3000), simulation.below(NODES.len() as u64) as usize);
            simulation.after(at, Event::Die(index));
        }
        simulation
    }

    fn random(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random() % bound
    }

    fn millis(&mut self, below: u64) -> Duration {
        Duration::from_micros(self.below(below * 1000))
    }

    fn plan_request(&mut self, id: u128) {
        let (prompt, most) = (1 + self.below(40) as usize, 1 + self.below(12) as u32);
        let mut wanted = request(id, prompt, most);
        if self.below(3) == 0 {
            wanted.stop_strings = ["ab".to_owned(), "ccd".to_owned()].into();
            wanted.include_stop_str = self.below(2) == 0;
        }
        match self.below(6) {
            0 => wanted.choices = 2 + self.below(3) as u32,
            1 => {
                wanted.choices = 1 + self.below(3) as u32;
                wanted.beam_width = Some(wanted.choices);
                wanted.stop_strings = [].into();
            }
            2 if self.below(4) == 0 => {
                wanted.choices = 0;
                wanted.stop.max_tokens = 1;
            }
            _ => {}
        }
        let at = self.millis(2000);
        self.after(at, Event::Submit(Box::new(wanted.clone())));
        let leaves = self.faults.cancels && self.below(4) == 0;
        self.planned.push((wanted, leaves));
        if leaves {
            let gone = at + self.millis(300);
            self.after(gone, Event::Cancel(RequestId(id)));
        }
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.events.insert((self.now + delay, self.next_event), event);
        self.next_event += 1;
    }

    /// Sends a message over a leg's stream: in order, after a random time.
    fn send(&mut self, leg: LegId, to_core: bool, event: Event) {
        let at = self.now + self.millis(8);
        let last = self.arrivals.entry((leg, to_core)).or_insert(at);
        *last = at.max(*last);
        let delay = *last - self.now;
        self.after(delay, event);
    }

    fn bring_up(&mut self, index: usize) {
        let (name, role, blocks) = NODES[index];
        let (boot, link) = (self.next_boot, LinkId(self.next_link));
        self.next_boot += 1;
        self.next_link += 1;
        self.nodes[index] = Some(Node::new(name, boot, blocks));
        self.links.insert(link, (index, boot));
        let hello = hello(role, name, boot, blocks);
        self.fact(Fact::NodeJoined {
            link,
            peer: PeerName {
                role,
                node: hello.node.clone(),
            },
            hello,
        });
    }

    fn fact(&mut self, fact: Fact) {
        let mut actions = Vec::new();
        self.cluster.on_fact(self.now, fact, &mut actions);
        self.carry_out(actions);
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        self.cluster.assert_consistent();
        for action in actions {
            match action {
                Action::StartJob { leg, link, job } => {
                    self.where_is.insert(leg, link);
                    self.send(leg, false, Event::Start { link, leg, job });
                }
                Action::UpdateJob { leg, update } => {
                    self.tally.ended_alone += 1;
                    let link = self.where_is[&leg];
                    self.send(leg, false, Event::Update { link, leg, update });
                }
                Action::ResetJob { leg } => {
                    let link = self.where_is[&leg];
                    self.send(leg, false, Event::Reset { link, leg });
                }
                Action::Emit { request, event } => self.seen.entry(request).or_default().push(event),
                Action::Close { link, .. } => {
                    self.links.remove(&link);
                }
                Action::Refuse { reason, .. } => panic!("{reason}"),
                Action::Note { note, .. } => match note {
                    Note::Restarted(_) => self.tally.restarted += 1,
                    Note::Migrated(_) => self.tally.moved += 1,
                    Note::Disagreement { position } => panic!("two tokens for position {position}"),
                    Note::Stranded(_)
                    | Note::GivenUp(_)
                    | Note::HandedOff(_)
                    | Note::Wasted
                    | Note::Rejected(_)
                    | Note::Ignored(_) => {}
                },
                Action::Late { .. } => self.tally.late += 1,
                Action::Welcome { .. } | Action::Tell { .. } => {}
            }
        }
    }

    /// The live node at the other end of a link.
    fn at(&mut self, link: LinkId) -> Option<&mut Node> {
        let (index, boot) = *self.links.get(&link)?;
        self.nodes[index].as_mut().filter(|node| node.boot == boot)
    }

    fn said(&mut self, link: LinkId, out: Vec<Out>) {
        for out in out {
            match out {
                Out::Event(leg, event) => {
                    let broken = self.below(1000) < self.faults.broken_streams;
                    if broken {
                        if let Some(node) = self.at(link) {
                            node.reset(leg);
                        }
                        self.send(leg, true, Event::StreamLost { link, leg });
                    } else {
                        self.send(leg, true, Event::Say { link, leg, event });
                    }
                }
                Out::Commit { from, target } => {
                    let delay = self.millis(20);
                    let from = (link, from);
                    self.after(
                        delay,
                        Event::Commit {
                            from,
                            node: target.node.0,
                            ticket: target.ticket,
                        },
                    );
                }
            }
        }
    }

    fn handle(&mut self, event: Event) {
        let mut out = Vec::new();
        match event {
            Event::Submit(request) => self.submit(*request),
            Event::Cancel(request) => self.fact(Fact::Cancel {
                request,
                reason: "the client is gone",
            }),
            Event::Start { link, leg, job } => {
                if let Some(node) = self.at(link) {
                    node.start(leg, *job, &mut out);
                    self.said(link, out);
                }
            }
            Event::Update { link, leg, update } => {
                if let Some(node) = self.at(link) {
                    node.update(leg, update);
                }
            }
            Event::Reset { link, leg } => {
                if let Some(node) = self.at(link) {
                    node.reset(leg);
                }
            }
            Event::Say { link, leg, event } => {
                if self.links.contains_key(&link) {
                    self.tally.busy += usize::from(matches!(event, JobEvent::Busy { .. }));
                    self.fact(Fact::JobEvent { leg, event });
                }
            }
            Event::StreamLost { link, leg } => {
                if self.links.contains_key(&link) {
                    self.fact(Fact::JobLost {
                        leg,
                        reason: "reset".to_owned(),
                    });
                }
            }
            Event::Commit {
                from: (link, leg),
                node,
                ticket,
            } => {
                let accepted = self.commit(&node, ticket);
                let delay = self.millis(5);
                self.after(delay, Event::Committed { link, leg, accepted });
            }
            Event::Committed { link, leg, accepted } => {
                if let Some(node) = self.at(link) {
                    node.committed(leg, accepted, &mut out);
                    self.said(link, out);
                }
            }
            Event::Step(index) => self.step(index),
            Event::Report(index) => self.report(index),
            Event::Die(index) => self.die(index),
            Event::Return(index) => {
                if self.nodes[index].is_none() {
                    self.bring_up(index);
                }
            }
            Event::Notice(link) => {
                if self.links.remove(&link).is_some() {
                    self.fact(Fact::NodeLost { link });
                }
            }
        }
    }

    fn submit(&mut self, request: ServeRequest) {
        let id = request.id;
        let matcher = StopMatcher::new(&request.stop_strings, request.include_stop_str);
        let mut actions = Vec::new();
        let admitted = self.cluster.submit(self.now, vec![(request, matcher)], &mut actions);
        self.carry_out(actions);
        if let Err(error) = admitted {
            self.seen.entry(id).or_default().push(ClientEvent::Failed(error));
        }
    }

    /// A commit arrives at a node; true if it takes it.
    fn commit(&mut self, node: &str, ticket: Ticket) -> bool {
        let mut out = Vec::new();
        let Some(holder) = self.nodes.iter_mut().flatten().find(|n| n.name == node) else {
            return false;
        };
        let (accepted, boot) = (holder.commit(ticket, &mut out), holder.boot);
        let at = self.links.iter().find(|(_, (_, b))| *b == boot).map(|(link, _)| *link);
        if let Some(at) = at {
            self.said(at, out);
        }
        accepted
    }

    fn link_of(&self, index: usize) -> Option<LinkId> {
        let boot = self.nodes[index].as_ref()?.boot;
        self.links
            .iter()
            .find(|(_, at)| **at == (index, boot))
            .map(|(link, _)| *link)
    }

    fn step(&mut self, index: usize) {
        let mut out = Vec::new();
        if let (Some(link), Some(node)) = (self.link_of(index), self.nodes[index].as_mut()) {
            node.step(&mut out);
            self.said(link, out);
        }
        self.after(Duration::from_millis(5), Event::Step(index));
    }

    fn report(&mut self, index: usize) {
        if let (Some(link), Some(node)) = (self.link_of(index), self.nodes[index].as_mut()) {
            let report = node.report();
            self.fact(Fact::NodeReport { link, report });
        }
        self.after(Duration::from_millis(50), Event::Report(index));
    }

    fn die(&mut self, index: usize) {
        let Some(link) = self.link_of(index) else { return };
        self.nodes[index] = None;
        let (noticed, back) = (self.millis(1500), self.millis(2500));
        self.after(noticed, Event::Notice(link));
        self.after(back, Event::Return(index));
    }

    /// Runs until all requests have ended and all messages have arrived.
    fn run(&mut self) {
        let end = self.start + Duration::from_secs(600);
        let mut quiet_since = None;
        while self.now < end {
            let timer = self.cluster.poll_timeout(self.now);
            let next = *self.events.first_key_value().expect("nodes step for ever").0;
            if let Some(at) = timer.filter(|at| *at <= next.0) {
                self.now = self.now.max(at);
                let mut actions = Vec::new();
                self.cluster.on_timeout(self.now, &mut actions);
                self.carry_out(actions);
                continue;
            }
            self.now = next.0;
            let event = self.events.remove(&next).expect("just looked at");
            self.handle(event);
            let over = self.seen.values().filter(|events| ends(events) > 0).count() as u128 == REQUESTS;
            if !over {
                quiet_since = None;
            } else if self.now - *quiet_since.get_or_insert(self.now) > Duration::from_secs(5) {
                return;
            }
        }
        let open: Vec<_> = self
            .seen
            .iter()
            .filter(|(_, events)| ends(events) == 0)
            .map(|(id, _)| id)
            .collect();
        panic!("not all requests have ended after ten minutes: {open:?}");
    }
}

fn ends(events: &[ClientEvent]) -> usize {
    events.iter().filter(|event| event.is_last()).count()
}
