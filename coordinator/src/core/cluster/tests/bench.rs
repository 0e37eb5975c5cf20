//! A cluster on a hand-held clock, with its actions collected.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::control::{HandoffStats, Job, JobError, JobErrorKind, JobEvent, LoadReport, PromptComputed, StepTiming};
use protocol::ids::{RequestId, Role, Ticket};

use crate::core::cluster::{Action, Cluster, ClusterSettings, Fact, Order, OrderError};
use crate::core::fixtures::{ByteText, hello, request, sampled, settings};
use crate::core::nodes::{LegId, LinkId, PeerName};
use crate::core::stop::StopMatcher;
use crate::core::types::{ClientEvent, Completion, ServeError, ServeErrorKind, ServeRequest};
use crate::origin::origin;

/// Names of the situations that [`at`] makes: all states, some of them twice.
pub(super) const STATES: &[&str] = &[
    "queued",
    "reserving",
    "prefilling",
    "prefilling, committed",
    "prefilling alone",
    "transferring",
    "transferring, handed off",
    "decoding, prefill open",
    "decoding",
    "stranded",
    "resuming",
];

pub(super) struct Bench {
    pub(super) cluster: Cluster,
    pub(super) now: Instant,
    links: BTreeMap<String, LinkId>,
    next_link: u64,
    reports: u64,
    jobs: BTreeMap<LegId, (LinkId, Job)>,
    open: BTreeMap<LegId, ()>,
    events: BTreeMap<u128, Vec<ClientEvent>>,
}

impl Default for Bench {
    fn default() -> Self {
        Self::new(settings())
    }
}

impl Bench {
    /// Without nodes.
    pub(super) fn new(settings: ClusterSettings) -> Self {
        Self {
            cluster: Cluster::new(settings, Arc::new(ByteText)),
            now: origin(),
            links: BTreeMap::new(),
            next_link: 0,
            reports: 0,
            jobs: BTreeMap::new(),
            open: BTreeMap::new(),
            events: BTreeMap::new(),
        }
    }
}

/// Request 1 (6 prompt tokens, 4 to generate; or 1 where it is alone) in the named situation, with nodes p0 and d0;
/// d1 is there where the request has moved.
pub(super) fn at(state: &str) -> Bench {
    at_with(state, |_| {})
}

/// The same, with the request changed before it is submitted.
pub(super) fn at_with(state: &str, change: impl FnOnce(&mut ServeRequest)) -> Bench {
    let mut bench = Bench::with_nodes();
    if state == "queued" {
        bench.report("d0", 0, false);
    }
    let mut first = request(1, 6, if state == "prefilling alone" { 1 } else { 4 });
    change(&mut first);
    bench.submit(first);
    if ["queued", "reserving", "prefilling alone"].contains(&state) {
        return bench;
    }
    let decode = bench.started("d0");
    bench.granted(decode, 3);
    let prefill = bench.started("p0");
    if state == "prefilling, committed" {
        bench.event(decode, JobEvent::Committed);
    }
    if state.starts_with("prefilling") {
        return bench;
    }
    bench.first_token(prefill, 65);
    if state == "transferring, handed off" {
        bench.event(prefill, JobEvent::HandedOff(HandoffStats::default()));
    }
    if state.starts_with("transferring") {
        return bench;
    }
    bench.event(decode, JobEvent::Committed);
    bench.token(decode, 1, 66);
    if state == "decoding, prefill open" {
        return bench;
    }
    bench.event(prefill, JobEvent::HandedOff(HandoffStats::default()));
    if state == "decoding" {
        return bench;
    }
    bench.lose("d0");
    if state == "stranded" {
        return bench;
    }
    bench.join_decode("d1");
    assert_eq!(state, "resuming", "a state of the list");
    bench
}

/// One of each.
pub(super) fn every_event() -> Vec<JobEvent> {
    let first = |position| PromptComputed {
        tokens: vec![sampled(position, 65)],
        step: StepTiming::default(),
        cached_tokens: 0,
        prompt_logprobs: None,
    };
    let failed = |kind| {
        JobEvent::Failed(JobError {
            kind,
            message: String::new(),
        })
    };
    vec![
        JobEvent::Granted {
            ticket: Ticket(1),
            have_blocks: Default::default(),
        },
        JobEvent::Busy {
            needed_blocks: 9,
            free_blocks: 0,
        },
        JobEvent::Computed(first(0)),
        JobEvent::Computed(first(3)),
        JobEvent::HandedOff(HandoffStats::default()),
        JobEvent::Committed,
        JobEvent::Token {
            choice: 0,
            token: sampled(1, 66),
            step: StepTiming::default(),
        },
        JobEvent::Token {
            choice: 0,
            token: sampled(7, 66),
            step: StepTiming::default(),
        },
        JobEvent::Beams(Vec::new()),
        JobEvent::Finished,
        failed(JobErrorKind::Overloaded),
        failed(JobErrorKind::Draining),
        failed(JobErrorKind::Invalid),
        failed(JobErrorKind::TransferFailed),
        failed(JobErrorKind::DeadlineExceeded),
        failed(JobErrorKind::Internal),
    ]
}

impl Bench {
    /// One node of each role, p0 and d0, with 100 blocks.
    pub(super) fn with_nodes() -> Self {
        let mut bench = Self::default();
        bench.join_prefill("p0");
        bench.join_decode("d0");
        bench
    }

    pub(super) fn join_prefill(&mut self, node: &str) {
        self.join(Role::Prefill, node, 1);
    }

    pub(super) fn join_decode(&mut self, node: &str) {
        self.join(Role::Decode, node, 1);
    }

    pub(super) fn join(&mut self, role: Role, node: &str, boot: u64) -> Vec<Action> {
        let hello = hello(role, node, boot, 100);
        self.join_as(
            PeerName {
                role,
                node: hello.node.clone(),
            },
            hello,
        )
    }

    pub(super) fn join_as(&mut self, peer: PeerName, hello: protocol::control::Hello) -> Vec<Action> {
        let link = LinkId(self.next_link);
        self.next_link += 1;
        let name = hello.node.0.clone();
        let actions = self.fact(Fact::NodeJoined { link, peer, hello });
        if actions.contains(&Action::Welcome { link }) {
            self.links.insert(name, link);
        }
        actions
    }

    pub(super) fn lose(&mut self, node: &str) -> Vec<Action> {
        let link = self.links.remove(node).expect("the node is connected");
        self.fact(Fact::NodeLost { link })
    }

    pub(super) fn link(&self, node: &str) -> LinkId {
        self.links[node]
    }

    pub(super) fn report(&mut self, node: &str, free_blocks: u32, draining: bool) {
        self.reports += 1;
        let report = LoadReport {
            sequence: self.reports,
            free_blocks,
            draining,
            ..LoadReport::default()
        };
        self.fact(Fact::NodeReport {
            link: self.links[node],
            report,
        });
    }

    pub(super) fn submit(&mut self, request: ServeRequest) {
        self.try_submit(request).expect("admitted");
    }

    pub(super) fn try_submit(&mut self, request: ServeRequest) -> Result<(), ServeError> {
        let matcher = StopMatcher::new(&request.stop_strings, request.include_stop_str);
        let mut actions = Vec::new();
        let admitted = self.cluster.submit(self.now, vec![(request, matcher)], &mut actions);
        self.collect(&actions);
        admitted
    }

    /// Submits several requests as one call.
    pub(super) fn submit_call(&mut self, requests: Vec<ServeRequest>) -> Result<(), ServeError> {
        let with_matcher = |request: ServeRequest| {
            let matcher = StopMatcher::new(&request.stop_strings, request.include_stop_str);
            (request, matcher)
        };
        let mut actions = Vec::new();
        let call = requests.into_iter().map(with_matcher).collect();
        let admitted = self.cluster.submit(self.now, call, &mut actions);
        self.collect(&actions);
        admitted
    }

    pub(super) fn order(&mut self, node: &str, order: Order) -> Result<Vec<Action>, OrderError> {
        let mut actions = Vec::new();
        let given = self.cluster.order(self.now, node, order, &mut actions);
        self.collect(&actions);
        given.map(|()| actions)
    }

    pub(super) fn fact(&mut self, fact: Fact) -> Vec<Action> {
        let mut actions = Vec::new();
        self.cluster.on_fact(self.now, fact, &mut actions);
        self.collect(&actions);
        actions
    }

    /// Lets time pass, stopping at every deadline.
    pub(super) fn advance(&mut self, by: Duration) {
        let until = self.now + by;
        while let Some(at) = self.cluster.poll_timeout(self.now).filter(|at| *at <= until) {
            self.now = self.now.max(at);
            let mut actions = Vec::new();
            self.cluster.on_timeout(self.now, &mut actions);
            self.collect(&actions);
        }
        self.now = until;
    }

    fn collect(&mut self, actions: &[Action]) {
        self.cluster.assert_consistent();
        for action in actions {
            match action {
                Action::StartJob { leg, link, job } => {
                    self.jobs.insert(*leg, (*link, (**job).clone()));
                    self.open.insert(*leg, ());
                }
                Action::ResetJob { leg } => {
                    self.open.remove(leg);
                }
                Action::Emit { request, event } => {
                    self.events.entry(request.0).or_default().push(event.clone());
                    assert!(
                        self.ends(request.0) == 0 || self.events(request.0).last() == Some(event),
                        "nothing follows the end"
                    );
                }
                Action::UpdateJob { leg, .. } => {
                    assert!(self.open.contains_key(leg), "an update of a job that is over")
                }
                Action::Welcome { .. }
                | Action::Tell { .. }
                | Action::Refuse { .. }
                | Action::Close { .. }
                | Action::Note { .. }
                | Action::Ended(_)
                | Action::Audited { .. }
                | Action::Late { .. } => {}
            }
        }
    }

    pub(super) fn cancel(&mut self, request: u128) -> Vec<Action> {
        self.fact(Fact::Cancel {
            request: RequestId(request),
            reason: "the client is gone",
        })
    }

    pub(super) fn event(&mut self, leg: LegId, event: JobEvent) -> Vec<Action> {
        self.fact(Fact::JobEvent { leg, event })
    }

    pub(super) fn granted(&mut self, leg: LegId, ticket: u64) {
        self.event(
            leg,
            JobEvent::Granted {
                ticket: Ticket(ticket),
                have_blocks: Default::default(),
            },
        );
    }

    pub(super) fn first_token(&mut self, leg: LegId, token: u32) -> Vec<Action> {
        self.first_tokens(leg, &[token])
    }

    /// The prompt is computed; the first token of each choice.
    pub(super) fn first_tokens(&mut self, leg: LegId, tokens: &[u32]) -> Vec<Action> {
        let first = PromptComputed {
            tokens: tokens.iter().map(|token| sampled(0, *token)).collect(),
            step: StepTiming::default(),
            cached_tokens: 2,
            prompt_logprobs: None,
        };
        self.event(leg, JobEvent::Computed(first))
    }

    pub(super) fn token(&mut self, leg: LegId, position: u32, token: u32) -> Vec<Action> {
        self.token_of(leg, 0, position, token)
    }

    pub(super) fn token_of(&mut self, leg: LegId, choice: u32, position: u32, token: u32) -> Vec<Action> {
        self.event(
            leg,
            JobEvent::Token {
                choice,
                token: sampled(position, token),
                step: StepTiming::default(),
            },
        )
    }

    pub(super) fn failed(&mut self, leg: LegId, kind: JobErrorKind) -> Vec<Action> {
        self.event(
            leg,
            JobEvent::Failed(JobError {
                kind,
                message: String::new(),
            }),
        )
    }

    /// The only open job on a node.
    pub(super) fn started(&self, node: &str) -> LegId {
        let on = self.on(node);
        assert_eq!(on.len(), 1, "open jobs on {node}");
        on[0]
    }

    /// The newest open job on a node.
    pub(super) fn last_started(&self, node: &str) -> LegId {
        *self.on(node).last().expect("an open job")
    }

    pub(super) fn on(&self, node: &str) -> Vec<LegId> {
        let Some(link) = self.links.get(node) else {
            return Vec::new();
        };
        self.open
            .keys()
            .copied()
            .filter(|leg| self.jobs[leg].0 == *link)
            .collect()
    }

    pub(super) fn open_legs(&self) -> Vec<LegId> {
        self.open.keys().copied().collect()
    }

    pub(super) fn job(&self, leg: LegId) -> &Job {
        &self.jobs[&leg].1
    }

    /// How many jobs a node has ever got.
    pub(super) fn jobs_sent(&self, node: &str) -> usize {
        let link = self.links[node];
        self.jobs.values().filter(|(to, _)| *to == link).count()
    }

    /// The request that a job belongs to.
    pub(super) fn request_of(&self, leg: LegId) -> u128 {
        match self.job(leg) {
            Job::Prefill(job) => job.request.0,
            Job::Decode(job) => job.request.0,
        }
    }

    pub(super) fn state(&self, request: u128) -> &'static str {
        self.cluster
            .requests
            .get(&RequestId(request))
            .map_or("gone", |entry| entry.request.state().as_str())
    }

    pub(super) fn events(&self, request: u128) -> &[ClientEvent] {
        self.events.get(&request).map_or(&[], Vec::as_slice)
    }

    pub(super) fn ends(&self, request: u128) -> usize {
        self.events(request).iter().filter(|event| event.is_last()).count()
    }

    pub(super) fn text(&self, request: u128) -> String {
        self.text_of(request, 0)
    }

    pub(super) fn text_of(&self, request: u128, wanted: u32) -> String {
        let mut text = String::new();
        for event in self.events(request) {
            match event {
                ClientEvent::Token { choice, token } if *choice == wanted => text.push_str(&token.visible),
                ClientEvent::Ended { choice, completion } if *choice == wanted => text.push_str(&completion.tail),
                ClientEvent::Prefill { .. }
                | ClientEvent::Token { .. }
                | ClientEvent::Ended { .. }
                | ClientEvent::Served(_)
                | ClientEvent::Done { .. }
                | ClientEvent::Failed(_) => {}
            }
        }
        text
    }

    /// How the only choice of a request that is done has ended.
    pub(super) fn completion(&self, request: u128) -> Completion {
        match self.events(request) {
            [
                ..,
                ClientEvent::Ended { choice: 0, completion },
                ClientEvent::Done { .. },
            ] => completion.clone(),
            other => panic!("not done: {other:?}"),
        }
    }

    /// How each choice has ended, in the order of the ends.
    pub(super) fn completions(&self, request: u128) -> Vec<(u32, Completion)> {
        let ended = |event: &ClientEvent| {
            let ClientEvent::Ended { choice, completion } = event else {
                return None;
            };
            Some((*choice, completion.clone()))
        };
        self.events(request).iter().filter_map(ended).collect()
    }

    pub(super) fn failure(&self, request: u128) -> ServeErrorKind {
        match self.events(request).last() {
            Some(ClientEvent::Failed(error)) => error.kind,
            other => panic!("not failed: {other:?}"),
        }
    }

    pub(super) fn booked(&self, node: &str) -> u32 {
        let nodes = self.cluster.status().nodes;
        nodes
            .iter()
            .find(|status| status.node == node)
            .map_or(0, |status| status.booked_blocks)
    }

    /// Nothing is open, nothing is booked, no timer runs.
    pub(super) fn assert_idle(&self) {
        assert_eq!(self.cluster.open_requests(), 0);
        assert_eq!(self.cluster.poll_timeout(self.now), None);
        assert_eq!(self.open_legs(), [], "open jobs");
        for node in self.cluster.status().nodes {
            assert_eq!((node.booked_blocks, node.jobs), (0, 0), "{}", node.node);
        }
    }
}
