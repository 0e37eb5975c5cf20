//! The thread that exports: it makes spans of reports, and sends them in batches.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use config::TelemetryConfig;
use metrics::counter;
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanExporter as _;
use tokio::sync::mpsc;
use tokio::time::{sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::span::WallTime;
use super::{EXPORTED, Report, Service, Span, dropped};
use crate::clock::Clock;

/// Most spans in a batch, but for those of its last report.
const BATCH: usize = 1_024;
/// A span waits at most so long for others.
const EVERY: Duration = Duration::from_millis(500);
/// A collector that goes on failing is told of in the log at most this often.
const TELL_EVERY: Duration = Duration::from_secs(60);
/// Largest answer of a collector that is read, in bytes.
const MAX_ANSWER: usize = 65_536;

/// See the head of the file.
pub(super) struct Exporter {
    inner: SpanExporter,
    runtime: tokio::runtime::Runtime,
    /// Longest time for a batch.
    deadline: Duration,
    scope: InstrumentationScope,
    wall: WallTime,
    /// Since when batches fail, and when that was last told.
    failing: Option<Instant>,
}

impl Exporter {
    /// Sends to the configured collector.
    pub(super) fn new(telemetry: &TelemetryConfig, service: &Service) -> Result<Self, String> {
        let deadline = Duration::from_millis(telemetry.trace_export_timeout_ms);
        let client = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(deadline)
            .timeout(deadline)
            .build()
            .map_err(|error| error.to_string())?;
        let mut inner = SpanExporter::builder()
            .with_http()
            .with_http_client(Client(client))
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(format!("{}/v1/traces", telemetry.otlp_endpoint))
            .with_timeout(deadline)
            .build()
            .map_err(|error| error.to_string())?;
        let name = format!("{}-{}", telemetry.service_name, service.role);
        let attributes = [
            KeyValue::new("service.name", name),
            KeyValue::new("service.namespace", telemetry.service_name.clone()),
            KeyValue::new("service.instance.id", service.instance.clone()),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        ];
        inner.set_resource(&Resource::builder_empty().with_attributes(attributes).build());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self {
            inner,
            runtime,
            deadline,
            scope: InstrumentationScope::builder("baton").build(),
            wall: WallTime::new(Clock.now(), Clock.wall_time()),
            failing: None,
        })
    }

    /// Exports until `stop`, and then what still waits.
    pub(super) fn run(mut self, mut reports: mpsc::Receiver<Report>, waiting: &AtomicUsize, stop: &CancellationToken) {
        let mut batch = Vec::new();
        while self.runtime.block_on(gather(&mut reports, &mut batch, waiting, stop)) {
            self.export(&mut batch, self.deadline);
        }
        let end = Clock.now() + self.deadline;
        loop {
            while batch.len() < BATCH
                && let Ok(report) = reports.try_recv()
            {
                make(report, &mut batch, waiting);
            }
            if batch.is_empty() {
                return;
            }
            self.export(&mut batch, end.saturating_duration_since(Clock.now()));
        }
    }

    fn export(&mut self, batch: &mut Vec<Span>, deadline: Duration) {
        let now = Clock.now();
        self.wall.follow(now, Clock.wall_time());
        let spans = batch.len();
        let data = batch.drain(..).map(|span| span.into_data(&self.wall, &self.scope));
        let exported = self.inner.export(data.collect());
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
        dropped("export", spans);
        if self.failing.is_none_or(|told| now >= told + TELL_EVERY) {
            self.failing = Some(now);
            tracing::warn!(spans, problem, "the collector does not take spans: they are lost");
        }
    }
}

/// Waits for spans and for a while for more of them. False once there will be no more.
async fn gather(
    reports: &mut mpsc::Receiver<Report>,
    batch: &mut Vec<Span>,
    waiting: &AtomicUsize,
    stop: &CancellationToken,
) -> bool {
    let first = tokio::select! {
        biased;
        () = stop.cancelled() => return false,
        report = reports.recv() => report,
    };
    let Some(first) = first else { return false };
    make(first, batch, waiting);
    let until = Clock.now() + EVERY;
    while batch.len() < BATCH {
        let more = tokio::select! {
            biased;
            () = stop.cancelled() => return false,
            more = reports.recv() => more,
            () = sleep_until(until.into()) => None,
        };
        match more {
            Some(report) => make(report, batch, waiting),
            None => return true,
        }
    }
    true
}

fn make(report: Report, batch: &mut Vec<Span>, waiting: &AtomicUsize) {
    waiting.fetch_sub(report.spans, Ordering::Relaxed);
    (report.make)(batch);
}

/// The HTTP client, as the exporter wants one.
#[derive(Debug)]
struct Client(reqwest::Client);

type Answer<'a> = Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'a>>;

impl HttpClient for Client {
    fn send_bytes<'client, 'answer>(&'client self, request: Request<Bytes>) -> Answer<'answer>
    where
        'client: 'answer,
        Self: 'answer,
    {
        Box::pin(async move {
            let mut answer = self.0.execute(request.try_into()?).await?;
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
