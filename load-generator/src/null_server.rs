//! A server without a model, to measure the generator itself: it answers at once, or sends tokens at a given pace, in all
//! dialects. A word of a prompt is a token.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use runtime::clock::Clock;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};

/// Longest body that is read.
const MAX_BODY_BYTES: usize = 64 << 20;
/// A client has so long for the head of a request.
const HEAD_WITHIN: Duration = Duration::from_secs(30);
/// Most tokens of an answer.
const MAX_TOKENS: u64 = 100_000;

const COMPLETION: &str =
    "data: {\"object\":\"text_completion\",\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":null}]}\n\n";
const END_OF_COMPLETION: &str = "data: {\"object\":\"text_completion\",\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":\"length\"}]}\n\n";
const CHAT: &str = "data: {\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":null}]}\n\n";
const TOKEN: &str = "data: {\"token\":{\"id\":1,\"text\":\"x\"},\"generated_text\":null,\"details\":null}\n\n";

/// How the server behaves.
#[derive(Clone, Copy, Debug, Default)]
pub struct Behaviour {
    /// Time to the first token.
    pub first: Duration,
    /// Time between tokens.
    pub gap: Duration,
    /// Every so many-th request fails with an error event after half of its tokens; 0 for none.
    pub fail_every: u64,
    /// Every so many-th request is cut off after half of its tokens; 0 for none.
    pub cut_every: u64,
}

/// What a request asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Generate,
    GenerateStream,
    Completions,
    Chat,
}

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// A server that runs.
#[derive(Debug)]
pub struct Serving {
    /// Where.
    pub address: SocketAddr,
    requests: Arc<AtomicU64>,
}

impl Serving {
    /// Requests for text that have come so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

/// Binds the port of loopback (0 for a free one) and serves until the runtime ends. The address is bound when this returns.
pub async fn start(port: u16, behaviour: Behaviour) -> std::io::Result<Serving> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    let address = listener.local_addr()?;
    let requests = Arc::new(AtomicU64::new(0));
    tokio::spawn(accept(listener, behaviour, Arc::clone(&requests)));
    Ok(Serving { address, requests })
}

async fn accept(listener: TcpListener, behaviour: Behaviour, number: Arc<AtomicU64>) {
    loop {
        let Ok((connection, _)) = listener.accept().await else {
            // No more files may be open for now.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        tokio::spawn(serve(connection, behaviour, Arc::clone(&number)));
    }
}

async fn serve(connection: TcpStream, behaviour: Behaviour, number: Arc<AtomicU64>) {
    // A token leaves when it is written; where the option is refused it leaves a little later.
    if connection.set_nodelay(true).is_err() {
        return;
    }
    let service = service_fn(move |request| {
        let number = Arc::clone(&number);
        async move { Ok::<_, Infallible>(answer(request, behaviour, &number).await) }
    });
    let http = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .serve_connection(TokioIo::new(connection), service);
    // An error is a client that went away, or the cut that was asked for.
    drop(http.await);
}

async fn answer(request: Request<Incoming>, behaviour: Behaviour, number: &AtomicU64) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let Ok(body) = Limited::new(request.into_body(), MAX_BODY_BYTES).collect().await else {
        return json_answer(StatusCode::BAD_REQUEST, &json!({"error": "the body cannot be read"}));
    };
    let body: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
    let way = match path.as_str() {
        "/generate" => Way::Generate,
        "/generate_stream" => Way::GenerateStream,
        "/v1/completions" => Way::Completions,
        "/v1/chat/completions" => Way::Chat,
        "/v1/models" => return json_answer(StatusCode::OK, &json!({"object": "list", "data": [{"id": "null"}]})),
        "/tokenize" => {
            let count = words(&body["prompt"]);
            return json_answer(StatusCode::OK, &json!({"count": count}));
        }
        _ => return json_answer(StatusCode::NOT_FOUND, &json!({"error": format!("there is no {path}")})),
    };
    let prompt = match way {
        Way::Generate | Way::GenerateStream => words(&body["inputs"]),
        Way::Completions => words(&body["prompt"]),
        Way::Chat => words(&body["messages"][0]["content"]),
    };
    let wanted = match way {
        Way::Generate | Way::GenerateStream => &body["parameters"]["max_new_tokens"],
        Way::Completions | Way::Chat => &body["max_tokens"],
    };
    let tokens = wanted.as_u64().unwrap_or(20).clamp(1, MAX_TOKENS);
    let streamed = way == Way::GenerateStream || body["stream"] == true;
    let number = number.fetch_add(1, Ordering::Relaxed) + 1;
    let is_nth = |every: u64| every > 0 && number.is_multiple_of(every);
    let reply = Reply {
        way,
        prompt,
        tokens,
        start: Clock.now(),
        behaviour,
        fails: is_nth(behaviour.fail_every),
        is_cut: is_nth(behaviour.cut_every),
    };
    if streamed {
        reply.streamed()
    } else {
        reply.whole().await
    }
}

fn words(text: &Value) -> u64 {
    text.as_str().map_or(0, |text| text.split_whitespace().count() as u64)
}

fn json_answer(status: StatusCode, value: &Value) -> Response<Body> {
    let full = Full::new(Bytes::from(value.to_string()));
    let mut answer = Response::new(full.map_err(|never| match never {}).boxed_unsync());
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

/// An answer that is being given.
#[derive(Clone, Copy)]
struct Reply {
    way: Way,
    prompt: u64,
    tokens: u64,
    start: Instant,
    behaviour: Behaviour,
    fails: bool,
    is_cut: bool,
}

impl Reply {
    /// When token `index` is due.
    fn due(&self, index: u64) -> Instant {
        let gaps = self
            .behaviour
            .gap
            .saturating_mul(u32::try_from(index).unwrap_or(u32::MAX));
        self.start + self.behaviour.first + gaps
    }

    async fn until(&self, index: u64) {
        let due = self.due(index);
        if due > Clock.now() {
            tokio::time::sleep_until(tokio::time::Instant::from_std(due)).await;
        }
    }

    async fn whole(self) -> Response<Body> {
        self.until(self.tokens - 1).await;
        if self.fails {
            return json_answer(StatusCode::INTERNAL_SERVER_ERROR, &json!({"error": "asked to fail"}));
        }
        let text = "x".repeat(usize::try_from(self.tokens).unwrap_or(1));
        let answer = match self.way {
            Way::Generate | Way::GenerateStream => json!({"generated_text": text, "details": self.details()}),
            Way::Completions => json!({"choices": [{"index": 0, "text": text}], "usage": self.usage()}),
            Way::Chat => json!({"choices": [{"index": 0, "message": {"content": text}}], "usage": self.usage()}),
        };
        json_answer(StatusCode::OK, &answer)
    }

    fn streamed(self) -> Response<Body> {
        let mut answer = Response::new(BodyExt::boxed_unsync(StreamBody::new(self.frames())));
        answer
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        answer
    }

    /// One frame for each token, and one for the end.
    fn frames(self) -> impl Stream<Item = std::io::Result<Frame<Bytes>>> + Send + Sync {
        unfold(0_u64, move |index| async move {
            let frame = |text: Bytes| Some((Ok(Frame::data(text)), index + 1));
            if index >= self.tokens / 2 && (self.fails || self.is_cut) {
                let failed = json!({"error": {"message": "asked to fail", "type": "test"}});
                if self.is_cut {
                    // While this waits, hyper writes what it has; an error at once would drop it.
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                return match (self.fails, index > self.tokens / 2) {
                    (true, false) => frame(format!("data: {failed}\n\n").into()),
                    (true, true) => None,
                    (false, _) => Some((Err(std::io::Error::other("asked to cut")), index + 1)),
                };
            }
            if index < self.tokens {
                self.until(index).await;
                return frame(self.token(index));
            }
            if index > self.tokens || self.way == Way::GenerateStream {
                return None;
            }
            let object = if self.way == Way::Chat {
                "chat.completion.chunk"
            } else {
                "text_completion"
            };
            let last = json!({"object": object, "choices": [], "usage": self.usage()});
            frame(format!("data: {last}\n\ndata: [DONE]\n\n").into())
        })
    }

    fn token(&self, index: u64) -> Bytes {
        let is_last = index + 1 == self.tokens;
        let fixed = match self.way {
            Way::Completions if is_last => END_OF_COMPLETION,
            Way::Completions => COMPLETION,
            Way::Chat => CHAT,
            Way::Generate | Way::GenerateStream if is_last => {
                let token = json!({"token": {"id": 1, "text": "x"}, "generated_text": "x", "details": self.details()});
                return Bytes::from(format!("data: {token}\n\n"));
            }
            Way::Generate | Way::GenerateStream => TOKEN,
        };
        Bytes::from_static(fixed.as_bytes())
    }

    fn usage(&self) -> Value {
        json!({"prompt_tokens": self.prompt, "completion_tokens": self.tokens, "total_tokens": self.prompt + self.tokens})
    }

    fn details(&self) -> Value {
        json!({"finish_reason": "length", "generated_tokens": self.tokens, "prompt_tokens": self.prompt})
    }
}
