//! A cluster that says what a script tells it. Text, stop strings and ends are made by the coordinator's real ledger.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use coordinator::core::ledger::{Detokenizer, Ledger, Verdict};
use coordinator::core::phases::PhaseTimes;
use coordinator::core::stop::StopMatcher;
use coordinator::core::types::{
    ClientEvent, ClusterStatus, NodeStatus, Rates, ServeError, ServeErrorKind, ServeRequest,
};
use coordinator::http::backend::{Backend, Events, Submission};
use futures_util::stream::{self, Stream, StreamExt};
use model_files::TextTokenizer;
use protocol::control::{StepTiming, WorkDone};
use protocol::ids::Role;
use protocol::sampling::{PromptLogprob, SampledToken};
use runtime::clock::Clock;
use tokio::time::sleep;

/// What the cluster does with a request.
#[derive(Clone, Debug)]
pub enum Script {
    /// Refuses it.
    Refuse(ServeErrorKind),
    /// Samples these tokens for each choice until it ends; if it does not, says nothing more.
    Tokens(Vec<u32>),
    /// Samples the j-th list for the j-th choice of the call, counted over all its prompts.
    Choices(Vec<Vec<u32>>),
    /// Samples these tokens, then fails.
    Fail(Vec<u32>, ServeErrorKind),
    /// Samples these tokens, then its events end.
    Cut(Vec<u32>),
    /// Samples the token for ever, one a millisecond.
    Endless(u32),
    /// Samples the token for ever, as fast as somebody takes it.
    Flood(u32),
}

/// See the head of the file.
pub struct Scripted {
    script: Mutex<Script>,
    requests: Mutex<Vec<ServeRequest>>,
    calls: AtomicUsize,
    status: Mutex<ClusterStatus>,
    live: Arc<AtomicUsize>,
    tokenizer: TextTokenizer,
}

impl Scripted {
    pub fn new(tokenizer: TextTokenizer) -> Self {
        let node = |node: &str, role| NodeStatus {
            node: node.to_owned(),
            role,
            draining: false,
            stalled: false,
            breaker: "closed",
            total_blocks: 8,
            free_blocks: 8,
            cached_blocks: 0,
            booked_blocks: 0,
            jobs: 0,
            running: 0,
            waiting: 0,
            preempted: 0,
            oldest_wait: Duration::ZERO,
            queued_tokens: 0,
            owned_blocks: 0,
            reservations: 0,
            steps: 0,
            done: WorkDone::default(),
            rates: Rates::default(),
            max_seq_len: 256,
            pool_tokens: 128,
            weights_hash: 0xabc,
        };
        let nodes = vec![node("p0", Role::Prefill), node("d0", Role::Decode)];
        Self {
            script: Mutex::new(Script::Tokens(
                [super::model::bytes("hello"), vec![super::model::EOS]].concat(),
            )),
            requests: Mutex::new(Vec::new()),
            calls: AtomicUsize::new(0),
            status: Mutex::new(ClusterStatus {
                nodes,
                ..ClusterStatus::default()
            }),
            live: Arc::default(),
            tokenizer,
        }
    }

    /// What it does from now on.
    pub fn play(&self, script: Script) {
        *self.script.lock().expect("not poisoned") = script;
    }

    /// Changes what it says about itself.
    pub fn status_is(&self, change: impl FnOnce(&mut ClusterStatus)) {
        change(&mut self.status.lock().expect("not poisoned"));
    }

    /// The last request it got.
    pub fn last(&self) -> ServeRequest {
        self.requests
            .lock()
            .expect("not poisoned")
            .last()
            .expect("a request came")
            .clone()
    }

    /// All requests it got.
    pub fn all(&self) -> Vec<ServeRequest> {
        self.requests.lock().expect("not poisoned").clone()
    }

    /// How many calls they came in.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// How many requests it got.
    pub fn count(&self) -> usize {
        self.requests.lock().expect("not poisoned").len()
    }

    /// Waits until exactly `count` requests are being worked on. Panics if that does not happen.
    pub fn wait_for_live(&self, count: usize) {
        for _ in 0..1_000 {
            if self.live.load(Ordering::SeqCst) == count {
                return;
            }
            #[allow(clippy::disallowed_methods, reason = "a test that waits for the server")]
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!(
            "{} requests are live, expected {count}",
            self.live.load(Ordering::SeqCst)
        );
    }
}

impl Backend for Scripted {
    fn submit(&self, requests: Vec<ServeRequest>) -> Submission {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.requests.lock().expect("not poisoned").extend(requests.clone());
        let script = self.script.lock().expect("not poisoned").clone();
        let live: Vec<Live> = requests.iter().map(|_| Live::new(&self.live)).collect();
        let text: Arc<dyn Detokenizer> = Arc::new(self.tokenizer.clone());
        Box::pin(async move {
            if let Script::Refuse(kind) = script {
                return Err(ServeError::new(kind, "scripted"));
            }
            let played = requests.iter().zip(live).enumerate().map(|(number, (request, live))| {
                let events = play(request, number, script.clone(), &text);
                Box::pin(Counted { events, _live: live }) as Events
            });
            Ok(played.collect())
        })
    }

    fn status(&self) -> Arc<ClusterStatus> {
        Arc::new(self.status.lock().expect("not poisoned").clone())
    }
}

/// Position `k` of the first choice of a prompt has this probability, alternatives and timing.
pub fn sampled(position: u32, token: u32) -> SampledToken {
    sampled_by(0, position, token)
}

/// The same of any choice: the later ones are a little more probable.
pub fn sampled_by(choice: u32, position: u32, token: u32) -> SampledToken {
    let more = choice as f32 / 8.0;
    let raw_logprob = -0.25 - position as f32 + more;
    SampledToken {
        position,
        token,
        logprob: -0.5 - position as f32 + more,
        raw_logprob,
        top_logprobs: vec![
            (token, raw_logprob),
            (u32::from(b'?'), -7.5),
            (u32::from(b'!'), f32::NEG_INFINITY),
        ],
    }
}

/// Timing of the step of position `k`.
pub fn step(position: u32) -> StepTiming {
    StepTiming {
        batch_size: position + 1,
        queue_us: u64::from(position) * 10 + 7,
        compute_us: 5,
    }
}

/// The log-probability of each prompt token from the second on, and what comes with it.
pub fn prompt_logprob(index: u32, top: u8) -> PromptLogprob {
    let alternatives = [(u32::from(b'?'), -0.5), (u32::from(b'!'), -6.5)];
    PromptLogprob {
        logprob: -1.0 - index as f32,
        top: alternatives.into_iter().take(usize::from(top)).collect(),
    }
}

fn play(request: &ServeRequest, number: usize, script: Script, text: &Arc<dyn Detokenizer>) -> Events {
    let prompt_logprobs = request.prompt_logprobs.map(|top| {
        let count = request.token_ids.len() as u32 - 1;
        (0..count).map(|index| prompt_logprob(index, top)).collect()
    });
    let prefill = ClientEvent::Prefill {
        cached_tokens: 3,
        prompt_logprobs,
        queue_us: 1_500,
    };
    let matcher = StopMatcher::new(&request.stop_strings, request.include_stop_str);
    let ledgers = Ledger::of_choices(request, &matcher, text);
    let pause = matches!(script, Script::Endless(_));
    let (tokens, after) = tokens_of(script, number * ledgers.len());
    let playing = Playing {
        open: (0..).zip(ledgers).collect(),
        position: 0,
        tokens,
        after,
        ended: false,
    };
    let generated = stream::unfold(playing, move |mut playing| async move {
        if playing.ended {
            return None;
        }
        if pause {
            sleep(Duration::from_millis(1)).await;
        }
        let events = playing.step().await?;
        Some((events, playing))
    });
    Box::pin(stream::iter([prefill]).chain(generated.flat_map(stream::iter)))
}

/// The token of a choice of the call at a position, if there is one; and what follows the last one.
type TokenOf = Box<dyn Fn(usize, usize) -> Option<u32> + Send>;

fn tokens_of(script: Script, first_choice: usize) -> (TokenOf, After) {
    let same = |tokens: Vec<u32>| -> TokenOf { Box::new(move |_, position| tokens.get(position).copied()) };
    match script {
        Script::Refuse(_) => (same(Vec::new()), After::Nothing),
        Script::Tokens(tokens) => (same(tokens), After::Silence),
        Script::Choices(lists) => {
            let of = move |choice: usize, position: usize| {
                let list: &Vec<u32> = &lists[(first_choice + choice) % lists.len()];
                list.get(position).copied()
            };
            (Box::new(of), After::Silence)
        }
        Script::Cut(tokens) => (same(tokens), After::Nothing),
        Script::Fail(tokens, kind) => (same(tokens), After::Failed(ServeError::new(kind, "scripted\nfailure"))),
        Script::Endless(token) | Script::Flood(token) => (Box::new(move |_, _| Some(token)), After::Nothing),
    }
}

/// A request that is being played: the choices that are open take turns.
struct Playing {
    open: Vec<(u32, Ledger)>,
    position: u32,
    tokens: TokenOf,
    after: After,
    ended: bool,
}

impl Playing {
    async fn step(&mut self) -> Option<Vec<ClientEvent>> {
        let mut events = Vec::new();
        let (position, tokens) = (self.position, &self.tokens);
        self.position += 1;
        let mut silent = false;
        self.open.retain_mut(|(choice, ledger)| {
            let Some(token) = tokens(*choice as usize, position as usize) else {
                silent = true;
                return true;
            };
            let accepted = ledger.accept(sampled_by(*choice, position, token), step(position));
            let Verdict::Accepted { token, completion } = accepted else {
                panic!("tokens come in order")
            };
            let choice = *choice;
            events.push(ClientEvent::Token { choice, token });
            let goes_on = completion.is_none();
            events.extend(completion.map(|completion| ClientEvent::Ended { choice, completion }));
            goes_on
        });
        if self.open.is_empty() {
            self.ended = true;
            events.push(ClientEvent::Done {
                submitted: Clock.now(),
                phases: PhaseTimes::default(),
            });
            return Some(events);
        }
        if silent && events.is_empty() {
            match std::mem::replace(&mut self.after, After::Nothing) {
                After::Nothing => return None,
                After::Silence => std::future::pending().await,
                After::Failed(error) => {
                    self.ended = true;
                    events.push(ClientEvent::Failed(error));
                }
            }
        }
        Some(events)
    }
}

enum After {
    Nothing,
    Silence,
    Failed(ServeError),
}

/// Counts the requests whose events somebody still waits for.
struct Live(Arc<AtomicUsize>);

impl Live {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Counted {
    events: Events,
    _live: Live,
}

impl Stream for Counted {
    type Item = ClientEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<ClientEvent>> {
        self.events.as_mut().poll_next(cx)
    }
}
