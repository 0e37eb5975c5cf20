//! Placing what waits: first requests that lost their decode node, by arrival, then new ones, in turn. Nothing overtakes the
//! head of the queue, so a large request gets its blocks in the end.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use protocol::control::Job;
use protocol::ids::{RequestId, Role};

use super::{Action, Cluster, Entry, Prefix};
use crate::core::decisions::{Decision, Record, Way};
use crate::core::nodes::{Held, LinkId, Shape, Wanted, Work};
use crate::core::prefix_index::Matches;
use crate::core::request::{Request, RequestLimits};
use crate::core::routing::Options;
use crate::core::types::{ClusterStatus, ServeErrorKind, ServeRequest};

/// Roles a request needs, and what it needs there.
pub(super) struct Needs {
    all: [(Role, Shape); 2],
    used: usize,
}

impl Needs {
    pub(super) fn as_slice(&self) -> &[(Role, Shape)] {
        &self.all[..self.used]
    }
}

/// What `request` needs before its first tokens. Those need a place, too.
pub(super) fn needs(request: &ServeRequest) -> Needs {
    let prompt = request.token_ids.len();
    let prefill = Shape {
        prompt,
        held: Held::alike(1, 1),
        most_tokens: prompt + 1,
    };
    let decode = Shape {
        prompt,
        held: Held::alike(request.choices as usize, 1),
        most_tokens: prompt + request.stop.max_tokens as usize,
    };
    let used = if request.needs_decode() { 2 } else { 1 };
    Needs {
        all: [(Role::Prefill, prefill), (Role::Decode, decode)],
        used,
    }
}

/// For a request whose prompt has not been looked up.
static NOTHING_CACHED: Matches = Matches::NONE;

impl Entry {
    fn cached(&self) -> &Matches {
        self.prefix.as_ref().map_or(&NOTHING_CACHED, |prefix| &prefix.matches)
    }
}

impl Cluster {
    /// Places as much as there is room for.
    pub(super) fn place(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let stranded: Vec<_> = self.stranded.iter().copied().collect();
        for place in stranded {
            self.place_stranded(now, place, actions);
        }
        while let Some(id) = self.queue.first()
            && self.place_queued(now, id, actions)
        {}
    }

    fn place_stranded(&mut self, now: Instant, place: (u64, RequestId), actions: &mut Vec<Action>) {
        self.look_up_prefix(place.1);
        let Some(entry) = self.requests.get(&place.1) else {
            return;
        };
        let (request, cached) = (&entry.request, entry.cached());
        let prompt = request.request.token_ids.len();
        let most_tokens = prompt + request.request.stop.max_tokens as usize;
        let shape = Shape {
            prompt,
            held: request.held(),
            most_tokens,
        };
        let options = self.nodes.options(
            now,
            &Wanted {
                prefill: None,
                decode: Some(&shape),
                most_steps: request.steps_left(),
                cached,
                avoid: request.avoid(),
            },
        );
        let Some(chosen) = self.router.decode(&options) else {
            return;
        };
        self.stranded.remove(&place);
        let (link, work) = (options.decode[chosen].node.link, options.decode[chosen].work);
        let leg = self.nodes.book(link, place.1, &shape, work);
        let job = self.go(now, place, |request, limits| {
            Job::Decode(request.resume(now, leg, limits))
        });
        self.record(now, place.1, Way::Resume, (None, Some(chosen)), options);
        self.start_job(leg, job, actions);
    }

    /// False if the request at the head of the queue has to wait.
    fn place_queued(&mut self, now: Instant, id: RequestId, actions: &mut Vec<Action>) -> bool {
        self.look_up_prefix(id);
        let Some(entry) = self.requests.get(&id) else {
            return false;
        };
        let place = (entry.number, id);
        let (request, cached) = (&entry.request, entry.cached());
        let needs = needs(&request.request);
        for (role, shape) in needs.as_slice() {
            if let Some(message) = self.nodes.too_large(*role, shape) {
                self.end(now, place.1, ServeErrorKind::TooLong, &message, actions);
                return true;
            }
        }
        let [(_, prefill_shape), (_, decode_shape)] = &needs.all;
        let needs_decode = request.needs_decode();
        let options = self.nodes.options(
            now,
            &Wanted {
                prefill: Some(prefill_shape),
                decode: needs_decode.then_some(decode_shape),
                most_steps: request.steps_left(),
                cached,
                avoid: request.avoid(),
            },
        );
        if !needs_decode {
            let Some(chosen) = self.router.prefill(&options) else {
                return false;
            };
            self.serve(id);
            let prefill = &options.prefill[chosen];
            let leg = self.nodes.book(prefill.node.link, id, prefill_shape, prefill.work);
            let job = self.go(now, place, |request, limits| {
                Job::Prefill(request.prefill_alone(now, leg, limits))
            });
            self.record(now, id, Way::PromptOnly, (Some(chosen), None), options);
            self.start_job(leg, job, actions);
            return true;
        }
        // Those who have lost their decode node come first.
        if !self.stranded.is_empty() {
            return false;
        }
        let Some((prefill, decode)) = self.router.pair(&options) else {
            return false;
        };
        self.serve(id);
        let numbers = (Some(prefill), Some(decode));
        let (prefill, decode) = (&options.prefill[prefill], &options.decode[decode]);
        let prefill_leg = self.nodes.book(prefill.node.link, id, prefill_shape, prefill.work);
        let leg = self.nodes.book(decode.node.link, id, decode_shape, Work::default());
        let job = self.go(now, place, |request, limits| {
            Job::Decode(request.reserve(now, leg, prefill_leg, limits))
        });
        self.record(now, id, Way::Handoff, numbers, options);
        self.start_job(leg, job, actions);
        true
    }

    /// Keeps what was decided about a request that goes to the nodes with these numbers in `options`.
    fn record(
        &mut self,
        now: Instant,
        id: RequestId,
        way: Way,
        (prefill, decode): (Option<usize>, Option<usize>),
        candidates: Options,
    ) {
        let Some(request) = self.requests.get(&id).map(|entry| &entry.request) else {
            return;
        };
        let decision = Decision {
            request: String::new(),
            attempt: request.attempt(),
            age_ms: 0,
            policy: self.router.policy().as_str(),
            prompt_tokens: request.request.token_ids.len(),
            way,
            prefill: prefill.map(|number| candidates.prefill[number].node.name.clone()),
            decode: decode.map(|number| candidates.decode[number].node.name.clone()),
            remote_us: candidates.remote_us(),
            local_us: candidates.local_us(),
            candidates,
        };
        let at = now;
        self.decisions.push(Record {
            request: id,
            at,
            decision,
        });
    }

    /// What is kept of the decisions about a request, by attempt.
    pub fn decisions(&self, now: Instant, request: RequestId) -> Vec<Decision> {
        self.decisions.of(now, request)
    }

    /// Finds out what nodes have of a request's prompt, unless that is known.
    fn look_up_prefix(&mut self, id: RequestId) {
        let Some(entry) = self.requests.get_mut(&id) else {
            return;
        };
        let index = self.nodes.prefixes();
        let version = index.version();
        if entry.prefix.as_ref().is_some_and(|prefix| prefix.version == version) {
            return;
        }
        let known = entry.prefix.take().map(|prefix| prefix.names);
        let names = known.filter(|names| !names.is_empty()).unwrap_or_else(|| {
            let request = &entry.request.request;
            self.nodes.block_names(&request.token_ids, request.adapter.as_deref())
        });
        let matches = index.matches(&names);
        entry.prefix = Some(Prefix {
            names,
            matches,
            version,
        });
    }

    /// Takes a request out of the queue, if it is there.
    pub(super) fn unqueue(&mut self, id: RequestId) {
        if self.queue.remove(id) {
            self.left_the_queue(id);
        }
    }

    /// Takes a request out of the queue because nodes work on it now.
    fn serve(&mut self, id: RequestId) {
        if self.queue.serve(id) {
            self.left_the_queue(id);
        }
    }

    fn left_the_queue(&mut self, id: RequestId) {
        if let Some(entry) = self.requests.get(&id) {
            self.admission.dequeue(entry.call, entry.request.request.charge());
        }
    }

    /// Lets a request go for which nodes have just been booked, and sets its timer.
    fn go(
        &mut self,
        now: Instant,
        place: (u64, RequestId),
        step: impl FnOnce(&mut Request, &RequestLimits) -> Job,
    ) -> Job {
        let entry = self
            .requests
            .get_mut(&place.1)
            .expect("nodes are booked for an open request only");
        let job = step(&mut entry.request, &self.settings.request);
        self.timers.remove(&(entry.timer, place.1));
        entry.timer = entry.request.deadline();
        entry.since = now;
        self.timers.insert((entry.timer, place.1));
        job
    }

    /// Snapshot for health checks and metrics.
    pub fn status(&self) -> ClusterStatus {
        ClusterStatus {
            nodes: self.nodes.status(),
            queued: self.queue.len(),
            queued_bytes: self.admission.queued_bytes(),
            running: self.requests.len() - self.queue.len(),
            draining: self.draining,
        }
    }

    /// For each state with requests in it: its word, how many there are, and how long the oldest has been in it.
    pub fn states(&self, now: Instant) -> Vec<(&'static str, usize, Duration)> {
        let mut states = BTreeMap::new();
        for entry in self.requests.values() {
            let (count, oldest) = states
                .entry(entry.request.state().as_str())
                .or_insert((0, Duration::ZERO));
            *count += 1;
            *oldest = now.saturating_duration_since(entry.since).max(*oldest);
        }
        states
            .into_iter()
            .map(|(state, (count, oldest))| (state, count, oldest))
            .collect()
    }

    /// Requests that have not ended.
    pub fn open_requests(&self) -> usize {
        self.requests.len()
    }

    /// The node at the other end of a link, for logs.
    pub fn node_name(&self, link: LinkId) -> Option<&str> {
        self.nodes.hello(link).map(|hello| hello.node.0.as_str())
    }
}
