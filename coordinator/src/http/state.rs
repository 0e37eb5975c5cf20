//! What every handler shares: the cluster, the model's text side, limits, metrics.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use actix_web::web::Payload;
use actix_web::{HttpMessage, HttpRequest};
use config::{Config, CoordinatorConfig, LimitsConfig};
use grammar::{Grammars, Vocabulary};
use model_files::TextModel;
use protocol::ids::RequestId;
use runtime::clock::Clock;

use super::backend::Backend;
use super::body::{Body, BodyReader};
use super::caller::Caller;
use super::error::{ApiError, ErrorKind};
use super::idempotency::Attachments;
use super::json::fields::{FieldError, StopLimits};
use super::lengths::Lengths;
use crate::core::queue::Tenant;
use crate::media::policy::Policy;
use crate::metrics::RequestMetrics;
use crate::text::{LongWork, PromptError, PromptTokenizer};

/// The model and the names it goes by.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// The name that clients use.
    pub name: String,
    /// Further names that are accepted.
    pub aliases: Vec<String>,
    /// Names of its adapters; as a model's name, one means the model with the adapter.
    pub adapters: Vec<String>,
    /// What the weights are multiplied in, as configured.
    pub compute: config::Compute,
    /// Tokenizer, end tokens, defaults.
    pub text: TextModel,
}

impl ServedModel {
    /// The configured name, or the one in the model's files.
    pub fn new(model: &config::ModelConfig, text: TextModel) -> Self {
        let name = if model.model_name.is_empty() {
            text.name.clone()
        } else {
            model.model_name.clone()
        };
        Self {
            name,
            aliases: model.model_aliases.clone(),
            adapters: model.named_adapters().map(|(name, _)| name.to_owned()).collect(),
            compute: model.compute,
            text,
        }
    }

    /// True if `name` is one of this model's, as it is or with an adapter.
    pub fn is_called(&self, name: &str) -> bool {
        self.is_base(name) || self.adapter(name).is_some()
    }

    /// The adapter that `name` means, if it is one's name and not the model's.
    pub fn adapter(&self, name: &str) -> Option<String> {
        let found = self.adapters.iter().find(|adapter| *adapter == name);
        found.filter(|_| !self.is_base(name)).cloned()
    }

    /// All names under which it is served, its adapters' included.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let others = self.aliases.iter().chain(&self.adapters).map(String::as_str);
        std::iter::once(self.name.as_str()).chain(others)
    }

    fn is_base(&self, name: &str) -> bool {
        self.name == name || self.aliases.iter().any(|alias| alias == name)
    }
}

/// Bodies up to this many bytes are checked where they are: that takes less than a tenth of a millisecond.
const INLINE_BODY_BYTES: usize = 32_768;

/// Texts up to this many bytes are rendered and tokenised where they are.
const INLINE_TEXT_BYTES: usize = 2_048;

/// The text of `/metrics`; `None` if there are none.
pub type RenderMetrics = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// See the head of the file.
pub struct HttpState {
    /// The cluster.
    pub backend: Arc<dyn Backend>,
    /// The model.
    pub model: ServedModel,
    /// Prompts to tokens.
    pub prompts: PromptTokenizer,
    /// Says whether a grammar can be used.
    pub grammars: Grammars,
    /// What clients may ask for.
    pub limits: LimitsConfig,
    /// The same in tokens, with the model's own limit.
    pub lengths: Lengths,
    /// The front door's own settings.
    pub front: CoordinatorConfig,
    /// Which media a prompt may name.
    pub media: Arc<Policy>,
    /// Request metrics.
    pub metrics: Arc<RequestMetrics>,
    /// All metrics of the process as text, unless they are switched off.
    pub render_metrics: RenderMetrics,
    /// The clock.
    pub clock: Clock,
    /// Seconds since 1970-01-01 UTC when the process began to serve.
    pub started_at: u64,
    /// Where the admin plane listens, once it does.
    pub admin: OnceLock<SocketAddr>,
    /// Calls that clients may send again.
    pub calls: Arc<Attachments>,
    bodies: BodyReader,
    long_work: LongWork,
    high_seed_seen: AtomicBool,
    /// The text of `/openapi.json`, once somebody has asked for it.
    pub(super) document: OnceLock<String>,
}

impl HttpState {
    /// Puts together what the handlers need.
    pub fn new(config: &Config, text: TextModel, backend: Arc<dyn Backend>, render_metrics: RenderMetrics) -> Self {
        let clock = Clock;
        let long_work = LongWork::new(config.coordinator.http_workers);
        let model = ServedModel::new(&config.model, text);
        let grace = Duration::from_millis(config.coordinator.request_head_timeout_ms);
        Self {
            grammars: Grammars::new(Vocabulary::Text(Box::new(model.text.clone()))),
            prompts: PromptTokenizer::new(model.text.tokenizer.clone(), long_work.clone()),
            long_work,
            high_seed_seen: AtomicBool::new(false),
            document: OnceLock::new(),
            admin: OnceLock::new(),
            lengths: Lengths::new(&config.limits, model.text.max_position_embeddings),
            bodies: BodyReader::new(
                config.limits.max_body_bytes,
                config.limits.max_queued_bytes,
                grace,
                clock,
            ),
            metrics: Arc::new(RequestMetrics::new(&model.name, clock)),
            calls: Attachments::new(Duration::from_millis(config.coordinator.reattach_ms), clock),
            media: Arc::new(Policy::new(&config.media)),
            limits: config.limits.clone(),
            front: config.coordinator.clone(),
            backend,
            model,
            render_metrics,
            clock,
            started_at: clock.unix_seconds(),
        }
    }

    /// Reads a request's body.
    ///
    /// # Errors
    /// See [`BodyReader::read`].
    pub async fn read_body(&self, request: &HttpRequest, payload: Payload) -> Result<Body, ApiError> {
        self.bodies.read(request.headers(), payload).await
    }

    /// Checks a body: here, or as long work if it is a large one.
    ///
    /// # Errors
    /// Those of `check`, or the process stops.
    pub async fn check_body<T: Send + 'static>(
        &self,
        body: &Body,
        check: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if body.bytes.len() <= INLINE_BODY_BYTES {
            return check(&body.bytes);
        }
        let bytes = body.bytes.clone();
        self.long_work.run(move || check(&bytes)).await.map_err(stopped)?
    }

    /// Does work that grows with a text of `bytes` bytes: here, or as long work if it is a long one.
    ///
    /// # Errors
    /// The process stops.
    pub async fn work_on<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes <= INLINE_TEXT_BYTES {
            Ok(work())
        } else {
            self.long_work.run(work).await.map_err(stopped)
        }
    }

    /// True if a request for `model` is served: always, if any name is taken.
    pub fn serves(&self, model: &str) -> bool {
        self.front.any_model_name || self.model.is_called(model)
    }

    /// Threads for what takes long.
    pub(super) fn long_work(&self) -> &LongWork {
        &self.long_work
    }

    /// The tokens of a prompt that came in `field`.
    ///
    /// # Errors
    /// The tokenizer refuses it, or the process stops.
    pub async fn encode(&self, field: &str, text: Arc<str>) -> Result<Vec<u32>, ApiError> {
        self.prompts.encode(text).await.map_err(|error| match error {
            PromptError::Refused(_) => FieldError::rule(field, format!("cannot be tokenised: {error}")).into(),
            PromptError::Stopped => stopped(error),
        })
    }

    /// A name for a new request.
    ///
    /// # Errors
    /// The operating system gives no random bytes.
    pub fn draw_id(&self) -> Result<RequestId, ApiError> {
        draw().map(|bytes| RequestId(u128::from_le_bytes(bytes)))
    }

    /// The name that the envelope gave a request, or a new one.
    ///
    /// # Errors
    /// The operating system gives no random bytes.
    pub fn id_of(&self, request: &HttpRequest) -> Result<RequestId, ApiError> {
        let named = request.extensions().get::<RequestId>().copied();
        named.map_or_else(|| self.draw_id(), Ok)
    }

    /// Who calls.
    ///
    /// # Errors
    /// A header that says so is wrong.
    pub fn caller(&self, request: &HttpRequest, body: &Body) -> Result<Caller, ApiError> {
        let tenant = request.extensions().get::<Tenant>().copied().unwrap_or_default();
        Caller::new(tenant, request.headers(), (request.path(), &body.bytes), &self.limits)
    }

    /// Seed number `index` of a call that brings none; never 0.
    ///
    /// # Errors
    /// The operating system gives no random bytes.
    pub fn seed(&self, caller: &Caller, index: u64) -> Result<u64, ApiError> {
        caller.named_seed(index).map_or_else(|| self.draw_seed(), Ok)
    }

    /// A random seed; never 0.
    ///
    /// # Errors
    /// The operating system gives no random bytes.
    fn draw_seed(&self) -> Result<u64, ApiError> {
        draw().map(|bytes| u64::from_le_bytes(bytes).max(1))
    }

    /// Says once that a client uses a seed close to the maximum, as the API demands; it is used as it is.
    pub fn warn_of_high_seed(&self, seed: u64) {
        if !self.high_seed_seen.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                seed,
                "a client sends seeds close to the maximum; they work like any other"
            );
        }
    }

    /// Smallest seed that a client may send.
    pub fn least_seed(&self) -> u64 {
        u64::from(!self.front.allow_seed_zero)
    }

    /// `top_k` of a sampled request that brings none; 0 = off.
    pub fn default_top_k(&self) -> u32 {
        self.model
            .text
            .generation_defaults
            .top_k
            .unwrap_or(self.front.default_top_k)
    }

    /// Longest silence in an event stream.
    pub fn silence(&self) -> Duration {
        Duration::from_millis(self.front.stream_keep_alive_ms)
    }

    /// Bounds of the stop strings on the TGI paths.
    pub fn tgi_stop_limits(&self) -> StopLimits {
        StopLimits {
            strings: self.limits.max_stop_strings,
            chars: self.limits.max_stop_string_chars,
            total_chars: self.limits.max_stop_total_chars,
        }
    }

    /// Bounds of the stop strings on the `/v1` paths: only their total length counts.
    pub fn openai_stop_limits(&self) -> StopLimits {
        StopLimits {
            strings: usize::MAX,
            chars: usize::MAX,
            total_chars: self.limits.max_stop_total_chars,
        }
    }
}

/// The process stops.
pub(super) fn stopped(error: PromptError) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, error.to_string())
}

fn draw<const N: usize>() -> Result<[u8; N], ApiError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|_| ApiError::new(ErrorKind::Generation, "the system gives no random numbers"))?;
    Ok(bytes)
}
