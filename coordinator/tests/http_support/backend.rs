//! A cluster that says what a script tells it. Text, stop strings and ends are made by the coordinator's real ledger.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use coordinator::core::ledger::{Ledger, Verdict};
use coordinator::core::stop::StopMatcher;
use coordinator::core::types::{ClientEvent, ClusterStatus, NodeStatus, ServeError, ServeErrorKind, ServeRequest};
use coordinator::http::backend::{Backend, Events, Submission};
use futures_util::stream::{self, Stream, StreamExt};
use model_files::TextTokenizer;
use protocol::control::StepTiming;
use protocol::ids::Role;
use protocol::sampling::{PromptLogprob, SampledToken};
use tokio::time::sleep;

/// What the cluster does with a request.
#[derive(Clone, Debug)]
pub enum Script {
    /// Refuses it.
    Refuse(ServeErrorKind),
    /// Samples these tokens until the request ends; if it does not, says nothing more.
    Tokens(Vec<u32>),
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
            total_blocks: 8,
            free_blocks: 8,
            cached_blocks: 0,
            booked_blocks: 0,
            jobs: 0,
            running: 0,
            waiting: 0,
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
    fn submit(&self, request: ServeRequest) -> Submission {
        self.requests.lock().expect("not poisoned").push(request.clone());
        let script = self.script.lock().expect("not poisoned").clone();
        let live = Live::new(&self.live);
        let text = Arc::new(self.tokenizer.clone());
        Box::pin(async move {
            if let Script::Refuse(kind) = script {
                return Err(ServeError::new(kind, "scripted"));
            }
            let events = play(&request, script, text);
            Ok(Box::pin(Counted { events, _live: live }) as Events)
        })
    }

    fn status(&self) -> Arc<ClusterStatus> {
        Arc::new(self.status.lock().expect("not poisoned").clone())
    }
}

/// Position `k` of every answer has this probability, alternatives and timing.
pub fn sampled(position: u32, token: u32) -> SampledToken {
    let raw_logprob = -0.25 - position as f32;
    SampledToken {
        position,
        token,
        logprob: -0.5 - position as f32,
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

fn play(request: &ServeRequest, script: Script, text: Arc<TextTokenizer>) -> Events {
    let prompt_logprobs = request.prompt_logprobs.map(|_| {
        let count = request.token_ids.len() as u32 - 1;
        let plain = |index| PromptLogprob {
            logprob: -1.0 - index as f32,
            top: Vec::new(),
        };
        (0..count).map(plain).collect()
    });
    let prefill = ClientEvent::Prefill {
        cached_tokens: 3,
        prompt_logprobs,
        queue_us: 1_500,
    };
    let matcher = StopMatcher::new(&request.stop_strings, request.include_stop_str);
    let ledger = Ledger::new(request, matcher, text);
    let pause = matches!(script, Script::Endless(_));
    let (tokens, after): (Box<dyn Iterator<Item = u32> + Send>, After) = match script {
        Script::Refuse(_) => (Box::new(std::iter::empty()), After::Nothing),
        Script::Tokens(tokens) => (Box::new(tokens.into_iter()), After::Silence),
        Script::Cut(tokens) => (Box::new(tokens.into_iter()), After::Nothing),
        Script::Fail(tokens, kind) => (
            Box::new(tokens.into_iter()),
            After::Failed(ServeError::new(kind, "scripted\nfailure")),
        ),
        Script::Endless(token) | Script::Flood(token) => (Box::new(std::iter::repeat(token)), After::Nothing),
    };
    let generated = stream::unfold((ledger, tokens.enumerate(), after, false), move |state| async move {
        let (mut ledger, mut tokens, after, ended) = state;
        if ended {
            return None;
        }
        if pause {
            sleep(Duration::from_millis(1)).await;
        }
        let Some((position, token)) = tokens.next() else {
            return match after {
                After::Nothing => None,
                After::Silence => std::future::pending().await,
                After::Failed(error) => {
                    Some((vec![ClientEvent::Failed(error)], (ledger, tokens, After::Nothing, true)))
                }
            };
        };
        let position = position as u32;
        let Verdict::Accepted { token, completion } = ledger.accept(sampled(position, token), step(position)) else {
            panic!("tokens come in order")
        };
        let ended = completion.is_some();
        let mut events = vec![ClientEvent::Token(token)];
        events.extend(completion.map(ClientEvent::Done));
        Some((events, (ledger, tokens, after, ended)))
    });
    Box::pin(stream::iter([prefill]).chain(generated.flat_map(stream::iter)))
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
