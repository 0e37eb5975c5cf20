//! A small cluster on a virtual clock: the real core, fake nodes, messages that take a random time, and faults: streams
//! that break, nodes that die and come back before or after their loss is noticed, clients that leave.
//!
//! Whatever happens: every request ends exactly once; its tokens are those of an undisturbed run, in order; at the end
//! nothing is booked, and every node has all its blocks.

mod node;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::control::{Job, JobEvent};
use protocol::ids::{RequestId, Role, Ticket};

use self::node::{Node, Out, token};
use super::{Action, Cluster, Fact};
use crate::core::fixtures::{ByteText, EOS, hello, request, settings};
use crate::core::nodes::{LegId, LinkId, PeerName};
use crate::core::request::Note;
use crate::core::stop::StopMatcher;
use crate::core::types::{ClientEvent, Finish, ServeErrorKind, ServeRequest};

const REQUESTS: u128 = 40;

enum Event {
    Submit(Box<ServeRequest>),
    Cancel(RequestId),
    /// To a node, over a link.
    Start { link: LinkId, leg: LegId, job: Job },
    Reset { link: LinkId, leg: LegId },
    /// To the core, over a link.
    Say { link: LinkId, leg: LegId, event: JobEvent },
    StreamLost { link: LinkId, leg: LegId },
    Commit { from: (LinkId, LegId), node: String, ticket: Ticket },
    Committed { link: LinkId, leg: LegId, accepted: bool },
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
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, more: Self) {
        self.answered += more.answered;
        self.busy += more.busy;
        self.restarted += more.restarted;
        self.moved += more.moved;
        self.late += more.late;
    }
}

const NODES: [(&str, Role, u32); 4] =
    [("p0", Role::Prefill, 40), ("p1", Role::Prefill, 40), ("d0", Role::Decode, 30), ("d1", Role::Decode, 30)];

impl Simulation {
    #[allow(clippy::disallowed_methods, reason = "any instant serves as origin")]
    fn new(seed: u64, faults: Faults) -> Self {
        let mut settings = settings();
        settings.request.queue_timeout = Duration::from_secs(20);
        settings.request.inter_token_timeout = Duration::from_secs(4);
        let now = Instant::now();
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
            wanted.stop_strings = vec!["ab".to_owned(), "ccd".to_owned()];
            wanted.include_stop_str = self.below(2) == 0;
        }
        let at = self.millis(2000);
        self.after(at, Event::Submit(Box::new(wanted)));
        if self.faults.cancels && self.below(4) == 0 {
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
        self.fact(Fact::NodeJoined { link, peer: PeerName { role, node: hello.node.clone() }, hello });
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
                Action::Welcome { .. } => {}
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
                    self.after(delay, Event::Commit { from, node: target.node.0, ticket: target.ticket });
                }
            }
        }
    }

    fn handle(&mut self, event: Event) {
        let mut out = Vec::new();
        match event {
            Event::Submit(request) => {
                let (id, matcher) =
                    (request.id, StopMatcher::new(&request.stop_strings, request.include_stop_str));
                let mut actions = Vec::new();
                let admitted = self.cluster.submit(self.now, *request, matcher, &mut actions);
                self.carry_out(actions);
                if let Err(error) = admitted {
                    self.seen.entry(id).or_default().push(ClientEvent::Failed(error));
                }
            }
            Event::Cancel(request) => self.fact(Fact::Cancel { request, reason: "the client is gone" }),
            Event::Start { link, leg, job } => {
                if let Some(node) = self.at(link) {
                    node.start(leg, job, &mut out);
                    self.said(link, out);
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
                    self.fact(Fact::JobLost { leg, reason: "reset".to_owned() });
                }
            }
            Event::Commit { from: (link, leg), node, ticket } => {
                let holder = self.nodes.iter_mut().flatten().find(|n| n.name == node);
                let (accepted, boot) =
                    holder.map_or((false, 0), |node| (node.commit(ticket, &mut out), node.boot));
                let at = self.links.iter().find(|(_, (_, b))| *b == boot).map(|(link, _)| *link);
                if let Some(at) = at {
                    self.said(at, out);
                }
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

    fn link_of(&self, index: usize) -> Option<LinkId> {
        let boot = self.nodes[index].as_ref()?.boot;
        self.links.iter().find(|(_, at)| **at == (index, boot)).map(|(link, _)| *link)
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
        let open: Vec<_> = self.seen.iter().filter(|(_, events)| ends(events) == 0).map(|(id, _)| id).collect();
        panic!("not all requests have ended after ten minutes: {open:?}");
    }
}

fn ends(events: &[ClientEvent]) -> usize {
    events.iter().filter(|e| matches!(e, ClientEvent::Done(_) | ClientEvent::Failed(_))).count()
}

/// Visible text and finish of an undisturbed run: text up to the end token or limit, cut at the first stop string.
fn expected(request: &ServeRequest) -> (Vec<u32>, String, Finish) {
    let mut tokens = Vec::new();
    let mut text = String::new();
    for position in 0..request.stop.max_tokens {
        let token = token(request.id, position);
        tokens.push(token);
        if token == EOS {
            return (tokens, text, Finish::Eos);
        }
        text.push(char::from(token as u8));
        let found = request.stop_strings.iter().find(|stop| text.ends_with(stop.as_str()));
        if let Some(stop) = found {
            let keep = if request.include_stop_str { text.len() } else { text.len() - stop.len() };
            text.truncate(keep);
            return (tokens, text, Finish::StopString(stop.clone()));
        }
    }
    (tokens, text, Finish::Length)
}

/// Runs one seed.
fn check(seed: u64, faults: Faults) -> Tally {
    let mut simulation = Simulation::new(seed, faults);
    let planned: Vec<(ServeRequest, bool)> = (1..=REQUESTS)
        .map(|id| {
            let of = |event: &Event| match event {
                Event::Submit(request) if request.id.0 == id => Some((**request).clone()),
                _ => None,
            };
            let cancelled = simulation.events.values().any(|e| matches!(e, Event::Cancel(of) if of.0 == id));
            (simulation.events.values().find_map(of).expect("planned"), cancelled)
        })
        .collect();
    simulation.run();
    for (request, cancelled) in planned {
        let events = &simulation.seen[&request.id];
        assert_eq!(ends(events), 1, "seed {seed}: {events:?}");
        assert!(ends(&events[events.len() - 1..]) == 1, "seed {seed}: the end is the last event");
        let (tokens, text, finish) = expected(&request);
        let got: Vec<u32> = events
            .iter()
            .filter_map(|e| if let ClientEvent::Token(token) = e { Some(token.sampled.token) } else { None })
            .collect();
        assert!(tokens.starts_with(&got), "seed {seed}: {got:?} of {tokens:?}");
        let mut shown: String = events
            .iter()
            .filter_map(|e| if let ClientEvent::Token(token) = e { Some(token.visible.as_str()) } else { None })
            .collect();
        match events.last().expect("an end") {
            ClientEvent::Done(end) => {
                shown.push_str(&end.tail);
                assert_eq!((got, shown, &end.finish), (tokens, text, &finish), "seed {seed}");
                simulation.tally.answered += 1;
            }
            ClientEvent::Failed(error) => {
                let undisturbed = faults.deaths == 0 && faults.broken_streams == 0;
                let fine = if cancelled { error.kind == ServeErrorKind::Cancelled } else { false };
                assert!(fine || !undisturbed, "seed {seed}: {error:?}");
                assert_ne!(error.kind, ServeErrorKind::Internal, "seed {seed}: {error:?}");
            }
            ClientEvent::Prefill { .. } | ClientEvent::Token(_) => unreachable!("checked above"),
        }
    }
    assert_eq!(simulation.cluster.open_requests(), 0);
    for status in simulation.cluster.status().nodes {
        assert_eq!((status.booked_blocks, status.jobs), (0, 0), "seed {seed}: {}", status.node);
    }
    for node in simulation.nodes.iter().flatten() {
        assert!(node.is_idle(), "seed {seed}: {} holds {} blocks", node.name, node.total - node.free);
    }
    simulation.tally
}

fn check_all(seeds: std::ops::Range<u64>, faults: Faults) -> Tally {
    let mut tally = Tally::default();
    seeds.for_each(|seed| tally += check(seed, faults));
    tally
}

#[test]
fn without_faults_every_request_is_answered() {
    let tally = check_all(0..40, Faults { broken_streams: 0, deaths: 0, cancels: false });
    assert_eq!(tally.answered, 40 * REQUESTS as usize);
    assert_eq!((tally.restarted, tally.moved), (0, 0), "{tally:?}");
}

#[test]
fn cancels_leave_nothing_behind() {
    let tally = check_all(100..140, Faults { broken_streams: 0, deaths: 0, cancels: true });
    assert!(tally.late > 0, "{tally:?}");
}

#[test]
fn broken_streams_and_dying_nodes_cost_only_the_requests_they_hit_too_often() {
    let tally = check_all(200..300, Faults { broken_streams: 10, deaths: 3, cancels: false });
    assert!(tally.answered * 100 >= REQUESTS as usize * 100 * 99, "{tally:?}");
    assert!(tally.restarted > 100 && tally.moved > 100, "{tally:?}");
}

#[test]
fn everything_at_once() {
    let tally = check_all(300..400, Faults { broken_streams: 40, deaths: 8, cancels: true });
    assert!(tally.restarted > 100 && tally.moved > 100 && tally.busy > 0, "{tally:?}");
}
