//! The whole coordinator as one state machine: it dispatches facts to requests, nodes and admission, places what waits,
//! and says what is to be done.

mod audit;
mod blocks;
mod health;
mod interface;
mod orders;
mod place;
mod shown;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::control::{HandoffStats, Hello, Job, JobErrorKind, JobEvent, JobUpdate};
use protocol::ids::{RequestId, Role};

pub use self::interface::{Action, ClusterSettings, Fact, is_last};
pub use self::orders::{Order, OrderError};
pub use self::shown::{Asked, Explained};
use crate::core::admission::{Admission, CallId};
use crate::core::block_audit::BlockAudits;
use crate::core::decisions::Decisions;
use crate::core::ledger::{Detokenizer, Ledger};
use crate::core::nodes::{Leg, LegId, LinkId, Nodes, PeerName};
use crate::core::prefix_index::Matches;
use crate::core::queue::{Turn, WaitingQueue};
use crate::core::recent::Recent;
use crate::core::request::{Cause, Context, Effect, Missing, Request, State};
use crate::core::routing::Router;
use crate::core::stop::StopMatcher;
use crate::core::types::{ClientEvent, ServeError, ServeErrorKind, ServeRequest};

/// The further requests of a call wait as if each of them had come so much after the one before it.
const WITHIN_A_CALL: Duration = Duration::from_millis(20);

struct Entry {
    request: Request,
    /// What it came with.
    call: CallId,
    /// Place in the order of arrival.
    number: u64,
    timer: Instant,
    /// When it came into its state.
    since: Instant,
    /// Known once it has been its turn.
    prefix: Option<Prefix>,
}

/// What nodes have of a prompt.
struct Prefix {
    /// Names of the prompt's full blocks.
    names: Vec<u64>,
    matches: Matches,
    /// Of the index, when `matches` was looked up.
    version: u64,
}

/// See the head of the file.
pub struct Cluster {
    settings: ClusterSettings,
    detokenizer: Arc<dyn Detokenizer>,
    admission: Admission,
    nodes: Nodes,
    router: Router,
    decisions: Decisions,
    recent: Recent,
    requests: BTreeMap<RequestId, Entry>,
    next_number: u64,
    /// Those in `State::Queued`.
    queue: WaitingQueue,
    /// Those in `State::Stranded`, by arrival.
    stranded: BTreeSet<(u64, RequestId)>,
    timers: BTreeSet<(Instant, RequestId)>,
    draining: bool,
    audits: BlockAudits,
    /// Kept for its memory.
    effects: Vec<Effect>,
}

impl Cluster {
    /// A cluster without nodes and requests.
    pub fn new(settings: ClusterSettings, detokenizer: Arc<dyn Detokenizer>) -> Self {
        Self {
            admission: Admission::new(settings.admission),
            nodes: Nodes::new(
                settings.text.clone(),
                settings.prefill_credit,
                settings.steps,
                settings.health,
            ),
            router: Router::new(settings.policy, settings.local_prefill),
            decisions: Decisions::new(settings.decision_records),
            recent: Recent::new(settings.decision_records),
            settings,
            detokenizer,
            requests: BTreeMap::new(),
            next_number: 0,
            queue: WaitingQueue::default(),
            stranded: BTreeSet::new(),
            timers: BTreeSet::new(),
            draining: false,
            audits: BlockAudits::default(),
            effects: Vec::new(),
        }
    }

    /// Takes in the requests of one call, or refuses all of them. Each comes with a matcher built from its stop strings.
    /// After `Ok` each request ends with exactly one `Done` or `Failed`.
    ///
    /// The further requests of a call queue up as if each of them had come one call later and [`WITHIN_A_CALL`] later, so
    /// that a call with many requests and calls behind it take turns.
    pub fn submit(
        &mut self,
        now: Instant,
        call: Vec<(ServeRequest, StopMatcher)>,
        actions: &mut Vec<Action>,
    ) -> Result<(), ServeError> {
        let mut ids = BTreeSet::new();
        for (request, _) in &call {
            self.refusal(now, request)?;
            if !ids.insert(request.id) || self.requests.contains_key(&request.id) {
                let message = "a request with this id is being served";
                return Err(ServeError::new(ServeErrorKind::Internal, message));
            }
        }
        let bytes = call.iter().map(|(request, _)| request.charge()).sum();
        if let Some((first, _)) = call.first() {
            let patience = first.timeout.min(self.settings.request.queue_timeout);
            self.admission.forecast(self.queue.ahead_of(first.tenant), patience)?;
        }
        let id = self.admission.admit(call.len(), bytes)?;
        for (number, (request, matcher)) in (self.next_number..).zip(call) {
            let ledgers = Ledger::of_choices(&request, &matcher, &self.detokenizer);
            let request = Request::new(now, request, ledgers, &self.settings.request);
            self.enter(now, id, number, request);
        }
        self.next_number += 1;
        self.place(now, actions);
        Ok(())
    }

    fn enter(&mut self, now: Instant, call: CallId, number: u64, request: Request) {
        let (id, timer) = (request.request.id, request.deadline());
        let behind = number.saturating_sub(self.next_number);
        self.queue.insert(id, turn(&request, number, behind));
        self.timers.insert((timer, id));
        let entry = Entry {
            request,
            call,
            number,
            timer,
            since: now,
            prefix: None,
        };
        self.requests.insert(id, entry);
    }

    fn refusal(&self, now: Instant, request: &ServeRequest) -> Result<(), ServeError> {
        let refuse = |kind, message: &str| Err(ServeError::new(kind, message));
        if request.token_ids.is_empty() || request.stop.max_tokens == 0 {
            return refuse(
                ServeErrorKind::Internal,
                "a request needs a prompt token and a token to generate",
            );
        }
        if self.draining {
            return refuse(ServeErrorKind::Unavailable, "the server is shutting down");
        }
        self.ways(now, request)
    }

    /// Takes in a fact.
    pub fn on_fact(&mut self, now: Instant, fact: Fact, actions: &mut Vec<Action>) {
        self.look(now, actions);
        match fact {
            Fact::NodeJoined { link, peer, hello } => self.on_joined(now, link, &peer, hello, actions),
            Fact::NodeReport { link, report } => {
                self.nodes.report(link, report);
            }
            Fact::NodeCache { link, change } => self.nodes.cache_changed(link, &change),
            Fact::NodeBlocks { link, answer } => self.on_blocks(now, link, *answer, actions),
            Fact::NodeLost { link } => self.on_lost(now, link, actions),
            Fact::JobEvent { leg, event } => self.on_job_event(now, leg, event, actions),
            Fact::JobLost { leg, reason } => {
                // The stream of a job that is over may end as it likes.
                if let Some(id) = self.nodes.leg(leg).map(|of| of.request) {
                    let cause = Cause::StreamLost(reason);
                    self.change(now, id, Some(leg), actions, |r, ctx| {
                        r.attempt_failed(now, leg, cause, ctx)
                    });
                }
            }
            Fact::Cancel { request, reason } => {
                self.end(now, request, ServeErrorKind::Cancelled, reason, actions);
            }
            Fact::Drain => self.draining = true,
            Fact::Abort => {
                self.draining = true;
                let open: Vec<RequestId> = self.requests.keys().copied().collect();
                for id in open {
                    self.end(
                        now,
                        id,
                        ServeErrorKind::Unavailable,
                        "the server is shutting down",
                        actions,
                    );
                }
            }
        }
        self.place(now, actions);
    }

    /// When [`Cluster::on_timeout`] is due.
    pub fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        let waits = !self.queue.is_empty() || !self.stranded.is_empty();
        let pause = waits.then(|| self.nodes.next_pause_end(now)).flatten();
        let timer = self.timers.first().map(|(at, _)| *at);
        let looks = [self.nodes.next_look(), self.audits.next_look()];
        looks.into_iter().chain([timer, pause]).flatten().min()
    }

    /// Acts on every deadline that has passed.
    pub fn on_timeout(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.look(now, actions);
        self.look_at_audits(now, actions);
        while let Some(&(at, id)) = self.timers.first()
            && at <= now
        {
            let missing = self.missing(id);
            let leg = self
                .requests
                .get(&id)
                .and_then(|entry| entry.request.state().decode_leg());
            self.change(now, id, leg, actions, |request, ctx| {
                request.on_deadline(now, missing, ctx)
            });
        }
        self.place(now, actions);
    }

    fn on_joined(&mut self, now: Instant, link: LinkId, peer: &PeerName, hello: Hello, actions: &mut Vec<Action>) {
        if let Err(reason) = self.nodes.check(peer, &hello) {
            return actions.push(Action::Refuse { link, reason });
        }
        // The newest connection of a node is the node: what ran over an older one is lost with it.
        if let Some(old) = self.nodes.link_of(&hello.node) {
            self.on_lost(now, old, actions);
            actions.push(Action::Close {
                link: old,
                reason: "the node has connected again",
            });
        }
        self.nodes.join(link, peer.role, hello);
        actions.push(Action::Welcome { link });
    }

    fn on_lost(&mut self, now: Instant, link: LinkId, actions: &mut Vec<Action>) {
        let name = self.nodes.hello(link).map(|hello| hello.node.clone());
        self.audits.lost(link);
        self.end_audits(actions);
        for leg in self.nodes.leave(now, link) {
            // An earlier leg of the list may have ended this one.
            let Some(of) = self.nodes.end(leg) else { continue };
            reset(leg, &of, actions);
            self.change(now, of.request, None, actions, |r, ctx| {
                r.attempt_failed(now, leg, Cause::NodeLost, ctx);
                // It may be there again at once, with nothing to do.
                r.shun(name.as_ref());
            });
        }
    }

    fn on_job_event(&mut self, now: Instant, leg: LegId, event: JobEvent, actions: &mut Vec<Action>) {
        let Some(of) = self.nodes.leg(leg).cloned() else {
            // A node that says that its job is over says nothing new.
            if !is_last(&event) {
                actions.push(Action::Late {
                    token: matches!(event, JobEvent::Token { .. }),
                });
            }
            return;
        };
        self.judge(now, leg, &of, &event);
        if is_last(&event) {
            self.release(leg, actions);
        }
        if let JobEvent::HandedOff(stats) = &event {
            self.learn_transfer(&of, stats);
        }
        match &event {
            JobEvent::Busy { free_blocks, .. } => self.nodes.busy(now, of.link, Some(*free_blocks)),
            JobEvent::Failed(error) => match error.kind {
                JobErrorKind::Overloaded => self.nodes.busy(now, of.link, None),
                JobErrorKind::Draining => self.nodes.draining(of.link),
                JobErrorKind::Invalid
                | JobErrorKind::TransferFailed
                | JobErrorKind::DeadlineExceeded
                | JobErrorKind::Internal => {}
            },
            JobEvent::Granted { .. }
            | JobEvent::Computed(_)
            | JobEvent::HandedOff(_)
            | JobEvent::Committed
            | JobEvent::Token { .. }
            | JobEvent::Beams(_)
            | JobEvent::Finished => {}
        }
        self.change_from(now, of.request, Some(of.link), actions, |r, ctx| {
            r.on_event(now, leg, event, ctx)
        });
    }

    /// A prefill leg, which is over, handed its KV to the decode leg of the same request.
    fn learn_transfer(&mut self, prefill: &Leg, stats: &HandoffStats) {
        let request = self.requests.get(&prefill.request);
        let decode = request.and_then(|entry| entry.request.state().decode_leg());
        if let Some(decode) = decode.and_then(|leg| self.nodes.leg(leg)).map(|leg| leg.link) {
            self.nodes.handed_off(prefill.link, decode, stats);
        }
    }

    fn end(&mut self, now: Instant, id: RequestId, kind: ServeErrorKind, why: &str, actions: &mut Vec<Action>) {
        self.change(now, id, None, actions, |request, ctx| request.fail(kind, why, ctx.out));
    }

    /// What a request that waits is waiting for.
    fn missing(&self, id: RequestId) -> Missing {
        let Some(entry) = self.requests.get(&id) else {
            return Missing::Node;
        };
        let prefill = entry.request.state() == &State::Stranded
            || self.nodes.is_present(Role::Prefill)
            || (self.may_be_local() && self.nodes.is_present(Role::Decode));
        let decode = !entry.request.needs_decode() || self.nodes.is_present(Role::Decode);
        if prefill && decode {
            Missing::Room {
                retry_after_s: self.admission.retry_after_s(),
            }
        } else {
            Missing::Node
        }
    }

    fn change(
        &mut self,
        now: Instant,
        id: RequestId,
        leg: Option<LegId>,
        actions: &mut Vec<Action>,
        transition: impl FnOnce(&mut Request, &mut Context<'_>),
    ) {
        let link = leg.and_then(|leg| self.nodes.leg(leg)).map(|leg| leg.link);
        self.change_from(now, id, link, actions, transition);
    }

    /// Runs one transition of a request and carries out what it wants.
    fn change_from(
        &mut self,
        now: Instant,
        id: RequestId,
        link: Option<LinkId>,
        actions: &mut Vec<Action>,
        transition: impl FnOnce(&mut Request, &mut Context<'_>),
    ) {
        let Some(entry) = self.requests.get_mut(&id) else {
            return;
        };
        let place = (entry.number, id);
        let call = entry.call;
        let before = entry.request.state().as_str();
        let mut out = std::mem::take(&mut self.effects);
        let node = link.and_then(|link| self.nodes.hello(link));
        transition(
            &mut entry.request,
            &mut Context {
                limits: &self.settings.request,
                out: &mut out,
                node,
            },
        );
        entry.request.settle(now);
        if entry.request.state().as_str() != before {
            entry.since = now;
        }
        let finished = *entry.request.state() == State::Finished;
        let deadline = entry.request.deadline();
        if finished || deadline != entry.timer {
            self.timers.remove(&(entry.timer, id));
            if !finished {
                self.timers.insert((deadline, id));
            }
            entry.timer = deadline;
        }
        if finished {
            self.unqueue(id);
            self.stranded.remove(&place);
        }
        let mut failed = None;
        for effect in out.drain(..) {
            if let Effect::Emit(ClientEvent::Failed(error)) = &effect {
                failed = Some(error.clone());
            }
            self.carry_out(place, effect, actions);
        }
        self.effects = out;
        if finished {
            self.ended(now, id, failed, actions);
            self.admission.end(now, call);
        }
    }

    fn requeue(&mut self, place: (u64, RequestId)) {
        if let Some(entry) = self.requests.get(&place.1) {
            self.admission.enqueue(entry.call, entry.request.request.charge());
            // Its key has paid for it: what happened to it is not the key's doing.
            let turn = Turn {
                size: 0,
                ..turn(&entry.request, place.0, 0)
            };
            self.queue.insert(place.1, turn);
        }
    }

    fn start_job(&mut self, leg: LegId, job: Job, actions: &mut Vec<Action>) {
        if let Some(link) = self.nodes.send(leg) {
            let job = Box::new(job);
            actions.push(Action::StartJob { leg, link, job });
        }
    }

    fn release(&mut self, leg: LegId, actions: &mut Vec<Action>) {
        if let Some(ended) = self.nodes.end(leg) {
            reset(leg, &ended, actions);
        }
    }

    fn carry_out(&mut self, place: (u64, RequestId), effect: Effect, actions: &mut Vec<Action>) {
        let request = place.1;
        match effect {
            Effect::Emit(event) => actions.push(Action::Emit { request, event }),
            Effect::SendPrefill(leg, job) => {
                self.start_job(leg, Job::Prefill(*job), actions);
            }
            Effect::Release(leg) => self.release(leg, actions),
            Effect::Computed(leg) => self.nodes.computed(leg),
            Effect::Blame(leg) => self.nodes.failed(leg),
            Effect::Taken(leg) => self.nodes.accepted(leg),
            Effect::Grow(leg, tokens) => self.nodes.grow(leg, tokens),
            Effect::Shrink { leg, prompt, tokens } => self.nodes.shrink(leg, prompt, tokens),
            Effect::EndChoice(leg, choice) => actions.push(Action::UpdateJob {
                leg,
                update: JobUpdate::EndChoice { choice },
            }),
            Effect::Requeue => self.requeue(place),
            Effect::AwaitDecode => {
                self.stranded.insert(place);
            }
            Effect::Note(note) => {
                let entry = self.requests.get(&request);
                let about = entry.map(|entry| Arc::clone(&entry.request.request.about.context));
                let context = about.unwrap_or_default();
                actions.push(Action::Note { request, context, note });
            }
        }
    }
}

/// When it is a request's turn, which `behind` others of its call come before.
fn turn(request: &Request, number: u64, behind: u64) -> Turn {
    let delay = u32::try_from(behind).map_or(Duration::MAX, |behind| WITHIN_A_CALL.saturating_mul(behind));
    Turn {
        tenant: request.request.tenant,
        due: request
            .expires()
            .checked_add(delay)
            .unwrap_or_else(|| request.expires()),
        number,
        size: request.request.size(),
    }
}

fn reset(leg: LegId, ended: &Leg, actions: &mut Vec<Action>) {
    if ended.sent {
        actions.push(Action::ResetJob { leg });
    }
}
