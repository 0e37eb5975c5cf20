//! Logs and metrics of a process: set up once at start.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::time::Duration;

use config::{LogFormat, TelemetryConfig};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::measure::{Kind, Measure};
use crate::shutdown::Shutdown;

/// Buckets of every histogram whose name ends in `_seconds` and that no table has.
const SECONDS_BUCKETS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0,
];
/// What logs an error for every stranger that sends bytes which are no HTTP. That is no error of this process, and nobody
/// may fill its log: told from level debug on.
const STRANGERS: &[&str] = &["actix_http::h1::dispatcher"];
/// Scrapes answered at once.
const MAX_SCRAPES: usize = 8;
/// Longest head of a scrape's request, in bytes.
const MAX_REQUEST_HEAD: usize = 4_096;
/// A scrape that is not over by then is dropped.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why logs or metrics cannot be set up.
#[derive(Debug, Error)]
pub enum TelemetryError {
    /// The level is none.
    #[error("telemetry.log_level = {0:?}: must be off, error, warn, info, debug or trace")]
    Level(String),
    /// Logging has been set up before.
    #[error("logging is already set up: {0}")]
    LoggingInstalled(String),
    /// Metrics have been set up before.
    #[error("metrics are already set up: {0}")]
    MetricsInstalled(String),
    /// The recorder cannot be built.
    #[error("cannot set up metrics: {0}")]
    Build(#[from] BuildError),
    /// Traces cannot be exported.
    #[error("cannot export traces: {reason}")]
    Traces {
        /// What is wrong.
        reason: String,
    },
    /// The metrics port cannot be opened.
    #[error("cannot listen for metrics on TCP {listen}: {source}")]
    Listen {
        /// The configured address.
        listen: String,
        /// What the system says.
        source: io::Error,
    },
}

/// Sets up the process's log: to standard error, in the configured shape, from the configured level on. Colours only for
/// a terminal: in a file they hide the level's word from whoever searches for it.
pub fn init_logging(telemetry: &TelemetryConfig) -> Result<(), TelemetryError> {
    let level: LevelFilter = telemetry
        .log_level
        .parse()
        .map_err(|_| TelemetryError::Level(telemetry.log_level.clone()))?;
    let registry = tracing_subscriber::registry().with(wanted(level));
    let result = match telemetry.log_format {
        LogFormat::Human => {
            let log = fmt::layer().with_ansi(io::stderr().is_terminal());
            registry.with(log.with_writer(io::stderr)).try_init()
        }
        LogFormat::Json => registry.with(json_lines(io::stderr)).try_init(),
    };
    result.map_err(|e| TelemetryError::LoggingInstalled(e.to_string()))
}

/// Writes each event as one line of JSON, its fields beside its message.
fn json_lines<S, W>(writer: W) -> impl Layer<S>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    W: for<'writer> MakeWriter<'writer> + Send + Sync + 'static,
{
    fmt::layer()
        .with_ansi(false)
        .with_writer(writer)
        .json()
        .flatten_event(true)
}

/// What is logged at a configured level.
fn wanted(level: LevelFilter) -> Targets {
    let strangers = if level >= LevelFilter::DEBUG {
        level
    } else {
        LevelFilter::OFF
    };
    Targets::new()
        .with_default(level)
        .with_targets(STRANGERS.iter().map(|target| (*target, strangers)))
}

/// How often samples are folded in when nobody asks for them.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// What `/metrics` says where metrics are switched off.
pub const METRICS_OFF: &str = "metrics are switched off: telemetry.metrics = false";

/// Renders the process's metrics. Clones share the registry.
#[derive(Clone)]
pub struct MetricsHandle(Option<Registry>);

#[derive(Clone)]
struct Registry {
    inner: PrometheusHandle,
    /// TYPE lines that are told otherwise, and how.
    untyped: Arc<[(String, String)]>,
}

impl MetricsHandle {
    /// All metrics in the Prometheus text format; `None` if they are switched off.
    pub fn render(&self) -> Option<String> {
        let registry = self.0.as_ref()?;
        let mut page = registry.inner.render();
        for (line, told) in registry.untyped.iter() {
            if let Some(at) = page.find(line) {
                page.replace_range(at..at + line.len(), told);
            }
        }
        Some(page)
    }

    /// Folds samples in now and then, for ever: nobody may ever scrape, and they would pile up.
    pub async fn fold(self) {
        loop {
            tokio::time::sleep(UPKEEP_INTERVAL).await;
            if let Some(registry) = &self.0 {
                registry.inner.run_upkeep();
            }
        }
    }
}

fn builder(measures: &[Measure]) -> Result<PrometheusBuilder, TelemetryError> {
    let mut builder =
        PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), SECONDS_BUCKETS)?;
    for measure in measures {
        if let Kind::Histogram(buckets) = measure.kind {
            builder = builder.set_buckets_for_metric(Matcher::Full(measure.name.to_owned()), buckets)?;
        }
    }
    Ok(builder)
}

/// Makes the process's metrics registry, which the `metrics` crate's macros then write to. Once per process. `measures` are the
/// metrics that it will have, with their descriptions and buckets. Without `telemetry.metrics` there is none, and the macros do nothing.
pub fn install_metrics(telemetry: &TelemetryConfig, measures: &[Measure]) -> Result<MetricsHandle, TelemetryError> {
    if !telemetry.metrics {
        return Ok(MetricsHandle(None));
    }
    let recorder = builder(measures)?.build_recorder();
    let inner = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(|e| TelemetryError::MetricsInstalled(e.to_string()))?;
    measures.iter().for_each(Measure::describe);
    crate::traces::announce();
    let untyped = measures.iter().filter(|measure| measure.kind == Kind::Untyped);
    let lines =
        untyped.map(|Measure { name, .. }| (format!("# TYPE {name} counter\n"), format!("# TYPE {name} untyped\n")));
    Ok(MetricsHandle(Some(Registry {
        inner,
        untyped: lines.collect(),
    })))
}

/// Answers `GET /metrics` on TCP `listen` (`host:port`) until shutdown. Returns once the port is open, with the bound
/// address; serving goes on in the background.
pub async fn serve_metrics(
    listen: &str,
    handle: MetricsHandle,
    shutdown: Shutdown,
) -> Result<std::net::SocketAddr, TelemetryError> {
    let failed = |source| TelemetryError::Listen {
        listen: listen.to_owned(),
        source,
    };
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    tokio::spawn(async move {
        tokio::select! {
            // The last scrape shows the drain: the port closes when the process is forced or ends.
            () = shutdown.wait_forced() => {}
            () = serve(listener, handle.clone()) => {}
            () = handle.fold() => {}
        }
    });
    Ok(address)
}

async fn serve(listener: TcpListener, handle: MetricsHandle) {
    let slots = Arc::new(Semaphore::new(MAX_SCRAPES));
    loop {
        // Further connections wait in the listen queue of the system, which is bounded.
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a metrics connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let handle = handle.clone();
        tokio::spawn(async move {
            match timeout(SCRAPE_TIMEOUT, answer(stream, &handle)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "metrics connection failed"),
                Err(_) => tracing::debug!("metrics connection not finished in time"),
            }
            drop(slot);
        });
    }
}

async fn answer(mut stream: TcpStream, handle: &MetricsHandle) -> io::Result<()> {
    let mut head = Vec::with_capacity(512);
    let (status, body) = loop {
        if head.windows(4).any(|window| window == b"\r\n\r\n") {
            break respond(&head, handle);
        }
        if head.len() >= MAX_REQUEST_HEAD {
            break (
                "431 Request Header Fields Too Large",
                "request head too long\n".to_owned(),
            );
        }
        let mut chunk = [0; 512];
        match stream.read(&mut chunk).await? {
            0 => return Ok(()),
            n => head.extend_from_slice(&chunk[..n]),
        }
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\ncontent-length: {length}\r\n\
         connection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}

fn respond(head: &[u8], handle: &MetricsHandle) -> (&'static str, String) {
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    match (method, path) {
        (b"GET", b"/metrics") => match handle.render() {
            Some(page) => ("200 OK", page),
            None => ("404 Not Found", format!("{METRICS_OFF}\n")),
        },
        (_, b"/metrics") => ("405 Method Not Allowed", "only GET is served here\n".to_owned()),
        _ => ("404 Not Found", "only /metrics is served here\n".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use tracing::Level;

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Write::write(&mut *self.0.lock().expect("no test panicked"), bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_event_is_one_line_of_json_whatever_is_in_it() {
        let written = Written::default();
        let writer = written.clone();
        let lines = tracing_subscriber::registry().with(json_lines(move || writer.clone()));
        tracing::subscriber::with_default(lines, || {
            let (none, some): (Option<&str>, Option<&str>) = (None, Some("id"));
            tracing::info!(text = "a\n\"b\"\u{1}", none, some, "one\r\ntwo");
        });
        let text = String::from_utf8(written.0.lock().expect("no test panicked").clone()).expect("JSON is UTF-8");
        assert_eq!((text.matches('\n').count(), text.ends_with('\n')), (1, true), "{text}");
        assert!(text.contains(r#""text":"a\n\"b\"\u0001""#), "{text}");
        assert!(text.contains(r#""message":"one\r\ntwo""#), "{text}");
        assert!(text.contains(r#""some":"id""#) && !text.contains("none"), "{text}");
    }

    #[test]
    fn strangers_cannot_fill_the_log() {
        let stranger = "actix_http::h1::dispatcher";
        assert!(!wanted(LevelFilter::INFO).would_enable(stranger, &Level::ERROR));
        assert!(wanted(LevelFilter::INFO).would_enable("actix_http", &Level::ERROR));
        assert!(wanted(LevelFilter::INFO).would_enable("coordinator::driver", &Level::INFO));
        assert!(!wanted(LevelFilter::INFO).would_enable("coordinator::driver", &Level::DEBUG));
        assert!(wanted(LevelFilter::DEBUG).would_enable(stranger, &Level::ERROR));
    }
}
