//! Placing what waits: first requests that lost their decode node, by arrival, then new ones, in turn. Nothing overtakes the
//! head of the queue, so a large request gets its blocks in the end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::control::Job;
use protocol::ids::{RequestId, Role};

use super::{Action, Cluster, Entry, Prefix};
use crate::core::decisions::{Decision, Record, Way};
use crate::core::nodes::{Held, LinkId, Shape, Wanted, Work};
use crate::core::prefix_index::Matches;
use crate::core::request::{Request, RequestLimits};
use crate::core::routing::{self, LocalPrefill, Options, Placed};
use crate::core::types::{ClusterStatus, ServeError, ServeErrorKind, ServeRequest, Watched};

/// Roles a request needs, and what it needs there.
pub(super) struct Needs {
    all: [(Role, Shape); 2],
    used: usize,
}

/// What `request` needs before its first tokens. Those need a place, too.
pub(super) fn needs(request: &ServeRequest) -> Needs {
    let prompt = request.token_ids.len();
    let prefill = Shape {
        prompt,
        held: Held::alike(1, 1),
        most_tokens: prompt + 1,
    };
    let decode = match request.choices {
        // A prompt alone.
        0 => prefill.clone(),
        choices => Shape {
            prompt,
            held: Held::alike(choices as usize, 1),
            most_tokens: prompt + request.stop.max_tokens as usize,
        },
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
        let (local, needs_decode) = (self.may_be_local(), request.needs_decode());
        let too_large = |(role, shape): &(Role, Shape)| self.nodes.too_large(*role, shape);
        let [prefill_need, decode_need] = &needs.all;
        let message = match (too_large(prefill_need), too_large(decode_need)) {
            (Some(_), None) if local => None,
            (None, Some(_)) if !needs_decode => None,
            (prefill, decode) => prefill.or(decode),
        };
        if let Some(message) = message {
            self.end(now, place.1, ServeErrorKind::TooLong, &message, actions);
            return true;
        }
        let [(_, prefill_shape), (_, decode_shape)] = &needs.all;
        let options = self.nodes.options(
            now,
            &Wanted {
                prefill: Some(prefill_shape),
                decode: (needs_decode || local).then_some(decode_shape),
                most_steps: request.steps_left(),
                cached,
                avoid: request.avoid(),
            },
        );
        // Those who have lost their decode node come first.
        if needs_decode && (options.decode.is_empty() || !self.stranded.is_empty()) {
            return false;
        }
        let asked = routing::Needs {
            decode: needs_decode,
            prefill_serves: self.nodes.is_serving(now, Role::Prefill),
        };
        let Some(placed) = self.router.place(&options, &asked) else {
            return false;
        };
        let shapes = (prefill_shape.clone(), decode_shape.clone());
        self.serve(id);
        self.dispatch(now, (place, placed), options, &shapes, actions);
        true
    }

    /// Sends a request where it has been placed.
    fn dispatch(
        &mut self,
        now: Instant,
        (place, placed): ((u64, RequestId), Placed),
        options: Options,
        (prefill_shape, decode_shape): &(Shape, Shape),
        actions: &mut Vec<Action>,
    ) {
        let id = place.1;
        let (leg, job, way, numbers) = match placed {
            Placed::Prefill(number) => {
                let prefill = &options.prefill[number];
                let leg = self.nodes.book(prefill.node.link, id, prefill_shape, prefill.work);
                let job = self.go(now, place, |request, limits| {
                    Job::Prefill(request.prefill_alone(now, leg, limits))
                });
                (leg, job, Way::PromptOnly, (Some(number), None))
            }
            Placed::Local(number) => {
                let decode = &options.decode[number];
                let leg = self.nodes.book(decode.node.link, id, decode_shape, decode.work);
                let job = self.go(now, place, |request, limits| {
                    Job::Decode(request.compute_locally(now, leg, limits))
                });
                (leg, job, Way::Local, (None, Some(number)))
            }
            Placed::Pair(first, second) => {
                let (prefill, decode) = (&options.prefill[first], &options.decode[second]);
                let prefill_leg = self.nodes.book(prefill.node.link, id, prefill_shape, prefill.work);
                let leg = self.nodes.book(decode.node.link, id, decode_shape, Work::default());
                let job = self.go(now, place, |request, limits| {
                    Job::Decode(request.reserve(now, leg, prefill_leg, limits))
                });
                (leg, job, Way::Handoff, (Some(first), Some(second)))
            }
        };
        self.record(now, id, way, numbers, options);
        self.start_job(leg, job, actions);
    }

    /// True if decode nodes may do all of a request.
    pub(super) fn may_be_local(&self) -> bool {
        self.router.local() != LocalPrefill::Never
    }

    /// An error if there is no way for a new request, and none is to be expected.
    pub(super) fn ways(&self, now: Instant, request: &ServeRequest) -> Result<(), ServeError> {
        let Needs {
            all: [prefill, decode],
            used,
        } = needs(request);
        let local = self.may_be_local();
        if let Err(error) = self.way(now, &prefill)
            && !(local && self.way(now, &decode).is_ok())
        {
            return Err(error);
        }
        if used == 2 { self.way(now, &decode) } else { Ok(()) }
    }

    fn way(&self, now: Instant, (role, shape): &(Role, Shape)) -> Result<(), ServeError> {
        // A node that was here a moment ago may come back; one that never was is not waited for.
        let recently = |seen| now.saturating_duration_since(seen) < self.settings.request.queue_timeout;
        if !self.nodes.is_present(*role) && !self.nodes.last_seen(*role).is_some_and(recently) {
            let message = format!("no {role} node is connected");
            return Err(ServeError::new(ServeErrorKind::Unavailable, message));
        }
        match self.nodes.too_large(*role, shape) {
            Some(message) => Err(ServeError::new(ServeErrorKind::TooLong, message)),
            None => Ok(()),
        }
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
        let Some(request) = self.requests.get_mut(&id).map(|entry| &mut entry.request) else {
            return;
        };
        let prefill = prefill.map(|number| Arc::clone(&candidates.prefill[number].node.name));
        let decode = decode.map(|number| Arc::clone(&candidates.decode[number].node.name));
        request.placed(prefill.clone(), decode.clone());
        let decision = Decision {
            request: String::new(),
            attempt: request.attempt(),
            age_ms: 0,
            policy: self.router.policy().as_str(),
            local_prefill: self.router.local().as_str(),
            prompt_tokens: request.request.token_ids.len(),
            way,
            prefill,
            decode,
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
        let matches = index.matches(&names, self.nodes.kept().told());
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
        entry.request.settle(now);
        self.timers.insert((entry.timer, place.1));
        job
    }

    /// Snapshot for health checks and metrics. What it takes several looks to know ([`crate::core::rates`]) is not in it.
    pub fn status(&self) -> ClusterStatus {
        ClusterStatus {
            nodes: self.nodes.status(),
            pools: Vec::new(),
            watched: Watched::default(),
            queued: self.queue.len(),
            queued_bytes: self.admission.queued_bytes(),
            running: self.requests.len() - self.queue.len(),
            draining: self.draining,
            local_prefill: self.may_be_local(),
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
