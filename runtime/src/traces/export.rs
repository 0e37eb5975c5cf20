//! The thread that exports: it sends what has been written, in batches.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use config::TelemetryConfig;
use metrics::counter;
use opentelemetry::KeyValue;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::trace::SpanExporter as _;
use tokio::time::{timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{Batch, EXPORT, EXPORTED, Service, Waiting, dropped, otlp};
use crate::clock::Clock;

/// Most spans in a batch, but for those of its last report.
pub(super) const BATCH: usize = 1_024;
/// What the spans' library is called in traces.
const SCOPE: &str = "baton";
/// A span waits at most so long for others.
const EVERY: Duration = Duration::from_millis(500);
/// A collector that goes on failing is told of in the log at most this often.
const TELL_EVERY: Duration = Duration::from_secs(60);
/// Largest answer of a collector that is read, in bytes.
const MAX_ANSWER: usize = 65_536;

/// See the head of the file.
pub(super) struct Exporter {
    /// Makes the HTTP request, tries again, reads the answer. The spans that it is given are none: see [`Client`].
    inner: SpanExporter,
    body: Arc<Mutex<Bytes>>,
    runtime: tokio::runtime::Runtime,
    /// Longest time for a batch.
    deadline: Duration,
    /// Who this process is.
    resource: [KeyValue; 4],
    /// Since when batches fail, and when that was last told.
    failing: Option<Instant>,
}

impl Exporter {
    /// Sends to the configured collector.
    pub(super) fn new(telemetry: &TelemetryConfig, service: &Service) -> Result<Self, String> {
        let deadline = Duration::from_millis(telemetry.trace_export_timeout_ms);
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(deadline)
            .timeout(deadline)
            .build()
            .map_err(|error| error.to_string())?;
        let body = Arc::new(Mutex::new(Bytes::new()));
        let client = Client {
            http,
            body: Arc::clone(&body),
        };
        let inner = SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(format!("{}/v1/traces", telemetry.otlp_endpoint))
            .with_timeout(deadline)
            .build()
            .map_err(|error| error.to_string())?;
        let name = format!("{}-{}", telemetry.service_name, service.role);
        let resource = [
            KeyValue::new("service.name", name),
            KeyValue::new("service.namespace", telemetry.service_name.clone()),
            KeyValue::new("service.instance.id", service.instance.clone()),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        ];
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self {
            inner,
            body,
            runtime,
            deadline,
            resource,
            failing: None,
        })
    }

    /// Exports until `stop`, and then what still waits.
    pub(super) fn run(mut self, waiting: &Waiting, stop: &CancellationToken) {
        while self.runtime.block_on(gathered(waiting, stop)) {
            while let Some(batch) = waiting.take() {
                self.export(batch, self.deadline);
                // Few may become more.
                if waiting.spans() < waiting.enough || stop.is_cancelled() {
                    break;
                }
            }
        }
        let end = Clock.now() + self.deadline;
        while let Some(batch) = waiting.take() {
            self.export(batch, end.saturating_duration_since(Clock.now()));
        }
    }

    fn export(&mut self, batch: Batch, deadline: Duration) {
        let now = Clock.now();
        let Batch { spans, bytes } = batch;
        *lock(&self.body) = Bytes::from(otlp::request(&self.resource, SCOPE, &bytes));
        let exported = self.inner.export(Vec::new());
        let exported = self.runtime.block_on(async { timeout(deadline, exported).await });
        let problem = match exported {
            Ok(Ok(())) => {
                counter!(EXPORTED).increment(spans as u64);
                if self.failing.take().is_some() {
                    tracing::info!("the collector takes spans again");
                }
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} ms", deadline.as_millis()),
        };
        dropped(EXPORT, spans);
        if self.failing.is_none_or(|told| now >= told + TELL_EVERY) {
            self.failing = Some(now);
            tracing::warn!(spans, problem, "the collector does not take spans: they are lost");
        }
    }
}

/// Waits for a span, and then for a while for a batch of them. False once it is time to stop.
async fn gathered(waiting: &Waiting, stop: &CancellationToken) -> bool {
    let gathered = async {
        while waiting.spans() == 0 {
            waiting.changed.notified().await;
        }
        let until = Clock.now() + EVERY;
        while waiting.spans() < waiting.enough {
            if timeout_at(until.into(), waiting.changed.notified()).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        biased;
        () = stop.cancelled() => false,
        () = gathered => true,
    }
}

fn lock(body: &Mutex<Bytes>) -> MutexGuard<'_, Bytes> {
    // It is only ever replaced: a panic leaves no half of it.
    body.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The HTTP client, as the exporter wants one. What it sends is not the body of the request, but the one that was written for it:
/// the exporter has no way to take bytes.
#[derive(Debug)]
struct Client {
    http: reqwest::Client,
    body: Arc<Mutex<Bytes>>,
}

type Answer<'a> = Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'a>>;

impl HttpClient for Client {
    fn send_bytes<'client, 'answer>(&'client self, mut request: Request<Bytes>) -> Answer<'answer>
    where
        'client: 'answer,
        Self: 'answer,
    {
        Box::pin(async move {
            *request.body_mut() = lock(&self.body).clone();
            let mut answer = self.http.execute(request.try_into()?).await?;
            let mut body = Vec::new();
            while let Some(chunk) = answer.chunk().await? {
                if body.len() + chunk.len() > MAX_ANSWER {
                    return Err("the collector's answer is too long".into());
                }
                body.extend_from_slice(&chunk);
            }
            let mut whole = Response::builder().status(answer.status()).body(Bytes::from(body))?;
            *whole.headers_mut() = std::mem::take(answer.headers_mut());
            Ok(whole)
        })
    }
}
