//! What arrives, and where it goes: between nodes, and between a node and the coordinator.

use std::time::Duration;

use bytes::Bytes;
use coordinator::core::cluster::Fact;
use protocol::control::JobEvent;

use super::front::{HERE, stream};
use super::{Event, Message, Own, Stream, World};
use crate::network::{ConnId, End, Place, Side};
use crate::node::{KvMessage, Node, Out, PushId, Timer};
use crate::random::Random;
use crate::scenario::REPORT_INTERVAL;

/// Pause of a node before it dials the coordinator again.
const RECONNECT: Duration = Duration::from_millis(200);
/// Longest wait for the other end of a new connection.
const DIAL_TIMEOUT: Duration = Duration::from_millis(1_000);
/// What waking the engine's thread takes, at most, in microseconds.
const WAKING_US: u64 = 60;

impl World {
    /// A node starts, with empty memory.
    pub(super) fn bring_up(&mut self, index: usize) -> anyhow::Result<()> {
        let boot = self.next_boot;
        self.next_boot += 1;
        let random = Random::new(self.random.next_u64(), "node");
        let node = Node::new(&self.scenario, index, boot, random)?;
        self.note(5, boot, format_args!("node {index}: starts as boot {boot}"));
        let slot = &mut self.nodes[index];
        slot.node = Some(node);
        slot.frozen_until = None;
        slot.control = None;
        slot.joined = false;
        slot.waking = false;
        slot.old_report = None;
        self.after(Duration::ZERO, Event::Own(index, boot, Own::Dial));
        let first = self.random.micros(0..200_000);
        self.after(first, Event::Own(index, boot, Own::Report));
        Ok(())
    }

    /// The node at a place, if it is in the life that is meant.
    pub(super) fn node(&mut self, index: usize, boot: u64) -> Option<&mut Node> {
        self.nodes[index].node.as_mut().filter(|node| node.boot == boot)
    }

    /// The node at an end of a connection, and its number.
    fn node_at(&mut self, end: End) -> Option<(usize, &mut Node)> {
        match end.place {
            Place::Coordinator => None,
            Place::Node(index) => self.node(index, end.boot).map(|node| (index, node)),
        }
    }

    /// Sends a message from one end of a connection to the other. Without a stream it may overtake others.
    pub(super) fn send(&mut self, conn: ConnId, from: Side, stream: Option<u64>, message: Message) {
        let arrival = self
            .network
            .arrival(self.now, &mut self.random, conn, from.other(), stream);
        if let Some(at) = arrival {
            self.at(at, Event::Arrive(conn, from.other(), message));
        }
    }

    /// Sends a message that takes up to ten round trips more, and that others overtake.
    fn send_late(&mut self, conn: ConnId, message: Message) {
        let arrival = self
            .network
            .arrival(self.now, &mut self.random, conn, Side::Dialled, None);
        if let Some(at) = arrival {
            let more = self.random.micros(0..20 * self.scenario.latency_us);
            self.at(at + more, Event::Arrive(conn, Side::Dialled, message));
        }
    }

    pub(super) fn own(&mut self, index: usize, boot: u64, own: Own) -> anyhow::Result<()> {
        if self.node(index, boot).is_none() {
            return Ok(());
        }
        let now = self.now;
        match own {
            Own::Dial => self.dial_coordinator(index, boot),
            Own::Report => {
                self.report(index, boot);
                self.after(REPORT_INTERVAL, Event::Own(index, boot, Own::Report));
            }
            Own::Leave { since, idle } => self.leave(index, boot, since, idle),
            Own::Wake => {
                self.nodes[index].waking = false;
                if let Some(node) = self.node(index, boot) {
                    node.wake(now);
                }
            }
            Own::Timer(timer) => {
                if timer == Timer::StepEnd {
                    self.note(6, boot, format_args!("node {index}: a step is over"));
                }
                if let Some(node) = self.node(index, boot) {
                    node.timer(now, timer);
                }
            }
        }
        self.served(index)
    }

    fn dial_coordinator(&mut self, index: usize, boot: u64) {
        let place = Place::Node(index);
        if self.network.is_cut(self.now, place, HERE) {
            let again = DIAL_TIMEOUT + RECONNECT;
            return self.after(again, Event::Own(index, boot, Own::Dial));
        }
        let ends = [End { place, boot }, End { place: HERE, boot: 0 }];
        let conn = self.network.connect(self.now, &mut self.random, ends);
        let slot = &mut self.nodes[index];
        (slot.control, slot.joined) = (Some(conn), false);
        if let Some(node) = &slot.node {
            let hello = Box::new(node.hello());
            self.send(conn, Side::Dialler, Some(0), Message::Hello(hello));
        }
    }

    fn report(&mut self, index: usize, boot: u64) {
        let slot = &mut self.nodes[index];
        let (Some(conn), true) = (slot.control, slot.joined) else {
            return;
        };
        let Some(node) = slot.node.as_mut().filter(|node| node.boot == boot) else {
            return;
        };
        let (report, change) = (node.report(), node.cache_change());
        if let Some(change) = change {
            self.send(conn, Side::Dialler, Some(0), Message::Cache(Box::new(change)));
        }
        let Some(report) = report else { return };
        let faults = self.scenario.faults;
        if !self.random.chance(faults.lost_reports) {
            self.send(conn, Side::Dialler, Some(0), Message::Report(report));
        }
        if self.random.chance(faults.repeated_reports)
            && let Some(old) = self.nodes[index].old_report.replace(report)
        {
            self.send(conn, Side::Dialler, None, Message::Report(old));
        }
    }

    /// Audits a node to which something has happened, and does what it wants.
    pub(super) fn served(&mut self, index: usize) -> anyhow::Result<()> {
        let Some(node) = self.nodes[index].node.as_mut() else {
            return Ok(());
        };
        if let Err(problem) = node.audit() {
            anyhow::bail!("after {:?}: node {index}: {problem}", self.passed());
        }
        let boot = node.boot;
        let out = std::mem::take(&mut node.out);
        for out in out {
            self.want(index, boot, out);
        }
        Ok(())
    }

    fn want(&mut self, index: usize, boot: u64, out: Out) {
        match out {
            Out::Say(leg, event) => self.node_says(index, leg, event),
            Out::Break(leg) => {
                if let Some(conn) = self.nodes[index].control {
                    self.send(conn, Side::Dialler, Some(stream(leg)), Message::Broken(leg));
                }
            }
            Out::Dial(push, address) => self.dial_node(index, boot, push, &address),
            Out::Push(push, message) => self.push(push, message),
            Out::ResetPush(push) => {
                if let Some((on, conn)) = self.stream(push) {
                    self.stream_of.remove(&push);
                    self.send(conn, Side::Dialler, None, Message::ResetPush(on));
                }
            }
            Out::Reply(on, reply) => {
                if let Some(&Stream { conn, .. }) = self.streams.get(&on) {
                    self.send(conn, Side::Dialled, Some(on.0), Message::Reply(on, reply));
                }
            }
            Out::StopPush(on) => {
                if let Some(&Stream { conn, .. }) = self.streams.get(&on) {
                    self.send(conn, Side::Dialled, None, Message::StopPush(on));
                }
            }
            Out::Blocks(answer) => {
                if let Some(conn) = self.nodes[index].control {
                    self.send(conn, Side::Dialler, Some(0), Message::Blocks(answer));
                }
            }
            Out::Timer(after, timer) => self.after(after, Event::Own(index, boot, Own::Timer(timer))),
            Out::Wake => {
                if !std::mem::replace(&mut self.nodes[index].waking, true) {
                    let soon = self.random.micros(0..WAKING_US);
                    self.after(soon, Event::Own(index, boot, Own::Wake));
                }
            }
        }
    }

    fn node_says(&mut self, index: usize, leg: coordinator::core::nodes::LegId, event: JobEvent) {
        let Some(conn) = self.nodes[index].control else { return };
        if self.random.chance(self.scenario.faults.broken_streams) {
            self.send(conn, Side::Dialler, Some(stream(leg)), Message::Broken(leg));
            if let Some(node) = self.nodes[index].node.as_mut() {
                node.reset(leg);
                // What this leads to is done with the rest.
                let more = std::mem::take(&mut node.out);
                let boot = node.boot;
                more.into_iter().for_each(|out| self.want(index, boot, out));
            }
            return;
        }
        self.send(
            conn,
            Side::Dialler,
            Some(stream(leg)),
            Message::Said(leg, Box::new(event)),
        );
    }

    /// A prefill node opens a stream to whoever is at an address.
    fn dial_node(&mut self, index: usize, boot: u64, push: PushId, address: &str) {
        let there = (0..self.nodes.len()).find(|other| self.scenario.node(*other).0 == address);
        let Some(there) = there else {
            self.front.problem = Some(format!("nobody has the address {address}"));
            return;
        };
        let known = self.kv_conns.get(&(boot, there)).copied();
        let known = known.filter(|conn| !self.network.conn(*conn).is_closed(Side::Dialler));
        let conn = known.unwrap_or_else(|| self.connect(index, boot, there));
        let stream = PushId(self.next_stream);
        self.next_stream += 1;
        self.streams.insert(stream, Stream { conn, push });
        self.stream_of.insert(push, stream);
    }

    fn connect(&mut self, index: usize, boot: u64, there: usize) -> ConnId {
        let (from, to) = (Place::Node(index), Place::Node(there));
        let other = self.nodes[there].node.as_ref().map(|node| node.boot);
        let reaches = other.is_some() && !self.network.is_cut(self.now, from, to);
        let ends = [
            End { place: from, boot },
            End {
                place: to,
                boot: other.unwrap_or(0),
            },
        ];
        let conn = self.network.connect(self.now, &mut self.random, ends);
        if !reaches {
            self.network.conn(conn).broken = Some(self.now);
            self.after(DIAL_TIMEOUT, Event::Notice(conn, Side::Dialler));
        }
        self.kv_conns.insert((boot, there), conn);
        conn
    }

    fn stream(&self, push: PushId) -> Option<(PushId, ConnId)> {
        let stream = *self.stream_of.get(&push)?;
        self.streams.get(&stream).map(|of| (stream, of.conn))
    }

    /// A prefill node says something on the stream of a handoff. Frames may be damaged, or come twice.
    fn push(&mut self, push: PushId, message: KvMessage) {
        let Some((stream, conn)) = self.stream(push) else {
            return;
        };
        let faults = self.scenario.faults;
        let mut message = message;
        if let KvMessage::Frame(header, payload) = &mut message {
            if self.random.chance(faults.repeated_frames) {
                let again = Box::new(KvMessage::Frame(*header, payload.clone()));
                self.send(conn, Side::Dialler, None, Message::Push(stream, again));
            }
            if self.random.chance(faults.damaged_frames) && !payload.is_empty() {
                let mut bytes = payload.to_vec();
                let at = self.random.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.random.below(8);
                *payload = Bytes::from(bytes);
            }
        }
        let late = matches!(message, KvMessage::Frame(..)) && self.random.chance(faults.late_frames);
        let message = Message::Push(stream, Box::new(message));
        if late {
            self.send_late(conn, message);
        } else {
            self.send(conn, Side::Dialler, Some(stream.0), message);
        }
    }

    pub(super) fn arrive(&mut self, conn: ConnId, to: Side, message: Message) -> anyhow::Result<()> {
        let now = self.now;
        let state = self.network.conn(conn);
        if state.is_closed(to) || state.broken.is_some_and(|at| at < now) {
            return Ok(());
        }
        let end = state.end(to);
        match end.place {
            Place::Coordinator => {
                self.coordinator_hears(conn, message);
                Ok(())
            }
            Place::Node(index) => {
                self.note(
                    7,
                    end.boot << 8 ^ message.which(),
                    format_args!("node {index}: {message}"),
                );
                self.node_hears(end, message);
                self.served(index)
            }
        }
    }

    fn coordinator_hears(&mut self, conn: ConnId, message: Message) {
        self.note(8, message.which(), format_args!("coordinator hears: {message}"));
        if let Message::Hello(hello) = message {
            return self.hello(conn, *hello);
        }
        let Some(link) = self.link_on(conn) else { return };
        match message {
            Message::Report(report) => self.fact(Fact::NodeReport { link, report }),
            Message::Cache(change) => self.fact(Fact::NodeCache { link, change: *change }),
            Message::Blocks(answer) => self.fact(Fact::NodeBlocks { link, answer }),
            Message::Said(leg, event) => self.fact(Fact::JobEvent { leg, event: *event }),
            Message::Broken(leg) => self.fact(Fact::JobLost {
                leg,
                reason: "reset by the node".to_owned(),
            }),
            _ => self.front.problem = Some(format!("the coordinator hears what is not for it: {message}")),
        }
    }

    fn node_hears(&mut self, end: End, message: Message) {
        let now = self.now;
        let stray = self.random.chance(self.scenario.faults.stray_frames);
        let (Message::Reply(stream, _) | Message::StopPush(stream)) = &message else {
            let Some((index, node)) = self.node_at(end) else { return };
            match message {
                Message::Welcome => {
                    node.joined();
                    self.nodes[index].joined = true;
                    self.nodes[index].old_report = None;
                }
                Message::Order(order) => node.obey(&order),
                Message::Start(leg, job) => node.start(now, leg, *job),
                Message::Update(leg, update) => node.update(leg, update),
                Message::Reset(leg) => node.reset(leg),
                Message::ResetPush(stream) => node.receive_lost(stream),
                Message::Push(stream, message) => {
                    if stray
                        && let KvMessage::Frame(header, payload) = &*message
                        && let Some(other) = node.other_receive(stream)
                    {
                        node.receive_frame(other, header, payload);
                    }
                    node.push_message(stream, *message);
                }
                _ => self.front.problem = Some(format!("node {index} hears what is not for it: {message}")),
            }
            return;
        };
        // Of a stream that its push has given up nothing is heard.
        let Some(of) = self.streams.get(stream).copied() else {
            return;
        };
        if self.stream_of.get(&of.push) != Some(stream) {
            return;
        }
        let Some((_, node)) = self.node_at(end) else { return };
        match message {
            Message::Reply(_, reply) => node.push_reply(of.push, reply),
            _ => node.push_stopped(of.push),
        }
    }

    /// An end of a connection learns that it is gone, and what ran over it is lost there.
    pub(super) fn notice(&mut self, conn: ConnId, side: Side) -> anyhow::Result<()> {
        let now = self.now;
        let state = self.network.conn(conn);
        if !state.close(side) {
            return Ok(());
        }
        state.broken.get_or_insert(now);
        let end = state.end(side);
        self.note(
            9,
            conn.0 as u64,
            format_args!("{:?}: connection {} is gone", end.place, conn.0),
        );
        let Place::Node(index) = end.place else {
            self.link_lost(conn);
            return Ok(());
        };
        let streams = self.streams.iter().filter(|(_, of)| of.conn == conn);
        let streams: Vec<(PushId, PushId)> = streams.map(|(stream, of)| (*stream, of.push)).collect();
        let is_control = self.nodes[index].control == Some(conn);
        let current: Vec<bool> = streams
            .iter()
            .map(|(stream, push)| self.stream_of.get(push) == Some(stream))
            .collect();
        let Some((_, node)) = self.node_at(end) else {
            return Ok(());
        };
        if is_control {
            node.link_lost();
        }
        for ((stream, push), current) in streams.iter().zip(current) {
            match side {
                Side::Dialler if current => node.push_lost(*push),
                Side::Dialler => {}
                Side::Dialled => node.receive_lost(*stream),
            }
        }
        if is_control {
            self.nodes[index].control = None;
            self.nodes[index].joined = false;
            self.after(RECONNECT, Event::Own(index, end.boot, Own::Dial));
        }
        self.served(index)
    }
}

impl Message {
    /// What tells it from others, for the trace.
    fn which(&self) -> u64 {
        match self {
            Self::Hello(hello) => hello.boot,
            Self::Welcome | Self::Order(_) => 1,
            Self::Report(report) => 2 ^ report.steps << 8 ^ u64::from(report.free_blocks) << 32,
            Self::Cache(change) => 15 ^ change.sequence << 8 ^ (change.added.len() as u64) << 32,
            Self::Blocks(answer) => 16 ^ answer.number << 8 ^ u64::from(answer.owned_blocks) << 40,
            Self::Start(leg, _) => 3 ^ leg.0 << 8,
            Self::Update(leg, _) => 4 ^ leg.0 << 8,
            Self::Reset(leg) => 5 ^ leg.0 << 8,
            Self::Said(leg, event) => match &**event {
                JobEvent::Token { choice, token, .. } => {
                    6 ^ leg.0 << 8 ^ u64::from(token.token) << 24 ^ u64::from(*choice) << 40
                }
                _ => 7 ^ leg.0 << 8,
            },
            Self::Broken(leg) => 8 ^ leg.0 << 8,
            Self::Push(stream, message) => match &**message {
                KvMessage::Frame(header, _) => 9 ^ stream.0 << 8 ^ header.checksum,
                KvMessage::Open(_) => 10 ^ stream.0 << 8,
                KvMessage::Commit(commit) => 11 ^ stream.0 << 8 ^ commit.digest,
            },
            Self::ResetPush(stream) => 12 ^ stream.0 << 8,
            Self::Reply(stream, _) => 13 ^ stream.0 << 8,
            Self::StopPush(stream) => 14 ^ stream.0 << 8,
        }
    }
}

impl std::fmt::Display for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Hello(hello) => write!(f, "hello of {} boot {}", hello.node, hello.boot),
            Self::Order(order) => write!(f, "{order:?}"),
            Self::Welcome => f.write_str("welcome"),
            Self::Report(report) => write!(f, "{report:?}"),
            Self::Cache(change) => write!(f, "{change:?}"),
            Self::Blocks(answer) => write!(f, "{answer:?}"),
            Self::Start(leg, job) => write!(f, "job {}: {job:?}", leg.0),
            Self::Update(leg, update) => write!(f, "job {}: {update:?}", leg.0),
            Self::Reset(leg) => write!(f, "job {} is reset", leg.0),
            Self::Said(leg, event) => write!(f, "job {}: {event:?}", leg.0),
            Self::Broken(leg) => write!(f, "the stream of job {} has broken", leg.0),
            Self::Push(stream, message) => match &**message {
                KvMessage::Frame(header, _) => write!(f, "handoff {}: {header:?}", stream.0),
                other => write!(f, "handoff {}: {other:?}", stream.0),
            },
            Self::ResetPush(stream) => write!(f, "handoff {} is reset by its sender", stream.0),
            Self::Reply(stream, reply) => write!(f, "handoff {}: {reply:?}", stream.0),
            Self::StopPush(stream) => write!(f, "handoff {} is reset by its receiver", stream.0),
        }
    }
}
