//! A small OpenTelemetry collector: takes spans by OTLP over HTTP and keeps them, or is out of order.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use runtime::clock::Clock;
use tokio::net::{TcpListener, TcpStream};

/// Spans come within this time, or not at all.
const WITHIN: Duration = Duration::from_secs(20);

/// How a collector behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// It keeps what it gets.
    Keeps,
    /// It reads everything and looks at nothing: for measurements.
    Forgets,
    /// It reads requests and never answers.
    Hangs,
    /// It answers 500.
    Fails,
}

/// A span, and whose it is.
#[derive(Clone, Debug)]
pub struct Seen {
    /// `service.name`.
    pub service: String,
    /// `service.instance.id`.
    pub instance: String,
    /// The span.
    pub span: Span,
}

impl Seen {
    /// Its trace's name, in hexadecimal digits.
    pub fn trace(&self) -> String {
        hex(&self.span.trace_id)
    }

    /// An attribute, as text: of a list its elements with commas between them.
    pub fn attribute(&self, key: &str) -> Option<String> {
        let found = self.span.attributes.iter().find(|attribute| attribute.key == key);
        found.and_then(text)
    }

    /// Its length, in nanoseconds.
    pub fn nanos(&self) -> u64 {
        self.span
            .end_time_unix_nano
            .saturating_sub(self.span.start_time_unix_nano)
    }
}

fn text(attribute: &KeyValue) -> Option<String> {
    match attribute.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(number) => Some(number.to_string()),
        Value::BoolValue(yes) => Some(yes.to_string()),
        Value::ArrayValue(list) => {
            let element = |value: &opentelemetry_proto::tonic::common::v1::AnyValue| match &value.value {
                Some(Value::StringValue(text)) => text.clone(),
                other => format!("{other:?}"),
            };
            let elements: Vec<String> = list.values.iter().map(element).collect();
            Some(elements.join(","))
        }
        other => Some(format!("{other:?}")),
    }
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A collector that runs until its runtime ends.
#[derive(Clone, Debug)]
pub struct Collector {
    address: SocketAddr,
    behaviour: Behaviour,
    seen: Arc<Mutex<Vec<Seen>>>,
    requests: Arc<AtomicU64>,
}

impl Collector {
    /// A collector on a port of its own.
    pub async fn start(behaviour: Behaviour) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let collector = Self {
            address: listener.local_addr()?,
            behaviour,
            seen: Arc::default(),
            requests: Arc::default(),
        };
        tokio::spawn(collector.clone().accept(listener));
        Ok(collector)
    }

    /// Setting of processes that send their spans here.
    pub fn setting(&self) -> String {
        format!("telemetry.otlp_endpoint=http://{}", self.address)
    }

    /// Requests that have come so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// The spans of a trace that have come so far.
    pub fn trace(&self, id: &str) -> Vec<Seen> {
        self.seen().iter().filter(|seen| seen.trace() == id).cloned().collect()
    }

    /// Names of all traces of which there are spans.
    pub fn traces(&self) -> Vec<String> {
        let mut all: Vec<String> = self.seen().iter().map(Seen::trace).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The spans of a trace, once `complete` says that they are all there.
    pub async fn wait_for(&self, id: &str, complete: impl Fn(&[Seen]) -> bool) -> Result<Vec<Seen>> {
        let until = Clock.now() + WITHIN;
        loop {
            let spans = self.trace(id);
            if complete(&spans) {
                return Ok(spans);
            }
            if Clock.now() >= until {
                let names: Vec<_> = spans.iter().map(|seen| (&seen.instance, &seen.span.name)).collect();
                bail!("trace {id} is not complete: {names:?}; traces: {:?}", self.traces());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn seen(&self) -> MutexGuard<'_, Vec<Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn accept(self, listener: TcpListener) {
        while let Ok((connection, _)) = listener.accept().await {
            tokio::spawn(self.clone().serve(connection));
        }
    }

    async fn serve(self, connection: TcpStream) {
        let service = service_fn(move |request| {
            let collector = self.clone();
            async move { Ok::<_, Infallible>(collector.answer(request).await) }
        });
        let http = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(connection), service);
        // An error is a client that went away.
        drop(http.await);
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let taken = match self.behaviour {
            Behaviour::Hangs => std::future::pending().await,
            Behaviour::Fails => Err(anyhow::anyhow!("out of order")),
            Behaviour::Forgets => request.into_body().collect().await.map(drop).map_err(Into::into),
            Behaviour::Keeps => self.take(request).await,
        };
        let (status, body) = match taken {
            Ok(()) => (StatusCode::OK, ExportTraceServiceResponse::default().encode_to_vec()),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string().into_bytes()),
        };
        let mut answer = Response::new(Full::new(Bytes::from(body)));
        *answer.status_mut() = status;
        answer
    }

    async fn take(&self, request: Request<Incoming>) -> Result<()> {
        let kind = request
            .headers()
            .get("content-type")
            .cloned()
            .context("no content type")?;
        if request.uri().path() != "/v1/traces" || kind != "application/x-protobuf" {
            bail!("{} of {kind:?}", request.uri());
        }
        let body = request.into_body().collect().await?.to_bytes();
        let export = ExportTraceServiceRequest::decode(body)?;
        for of_process in export.resource_spans {
            let resource = of_process.resource.unwrap_or_default().attributes;
            let named = |key: &str| resource.iter().find(|attribute| attribute.key == key).and_then(text);
            let service = named("service.name").context("no service.name")?;
            let instance = named("service.instance.id").context("no service.instance.id")?;
            let spans = of_process.scope_spans.into_iter().flat_map(|scope| scope.spans);
            for span in spans {
                self.seen().push(Seen {
                    service: service.clone(),
                    instance: instance.clone(),
                    span,
                });
            }
        }
        Ok(())
    }
}
