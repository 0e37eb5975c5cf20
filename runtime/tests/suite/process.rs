use std::process::Command;

use config::{LogFormat, TelemetryConfig};
use runtime::clock::Clock;
use runtime::measure::{Kind, Measure};
use runtime::shutdown::Shutdown;
use runtime::telemetry::{TelemetryError, init_logging, install_metrics, serve_metrics};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::soon;

#[tokio::test]
async fn a_first_signal_requests_and_a_second_forces() {
    let shutdown = Shutdown::on_signals().expect("handlers");
    let token = shutdown.token();
    assert!(!shutdown.is_requested());
    let kill = |signal: &str| {
        let status = Command::new("kill")
            .args([signal, &std::process::id().to_string()])
            .status()
            .expect("kill runs");
        assert!(status.success());
    };
    kill("-TERM");
    soon("the request", shutdown.wait()).await;
    soon("the token", token.cancelled()).await;
    assert!(shutdown.is_requested() && !shutdown.is_forced());
    kill("-INT");
    soon("the force", shutdown.wait_forced()).await;
    assert!(shutdown.is_forced());
}

#[tokio::test]
async fn forcing_requests_too_and_clones_share() {
    let shutdown = Shutdown::new();
    let clone = shutdown.clone();
    shutdown.force();
    clone.wait().await;
    assert!(clone.is_requested() && clone.is_forced());
}

#[test]
fn the_clock_goes_forward() {
    let before = Clock.now();
    assert!(Clock.now() >= before);
    assert!(Clock.unix_seconds() > 1_600_000_000);
}

async fn ask(address: std::net::SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connects");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("answered");
    answer
}

#[tokio::test]
async fn metrics_are_served_and_everything_else_is_refused() {
    const MEASURES: &[Measure] = &[
        Measure::counter("baton_test_total", &["kind"], "tests", "Tests that ran."),
        Measure::counter("baton_never_total", &[], "tests", "Tests that never ran."),
        Measure::histogram(
            "baton_test_fine_seconds",
            &[0.02, 0.021],
            "seconds",
            "How long tests ran.",
        ),
        Measure::new(
            Kind::Untyped,
            "others_test_count",
            &[],
            "tests",
            "Tests by another server's name.",
        ),
    ];
    let telemetry = TelemetryConfig::default();
    let handle = install_metrics(&telemetry, MEASURES).expect("first");
    let again = install_metrics(&telemetry, &[]);
    assert!(matches!(again, Err(TelemetryError::MetricsInstalled(_))));
    metrics::counter!("baton_test_total", "kind" => "a").increment(3);
    metrics::histogram!("baton_test_seconds").record(0.02);
    metrics::histogram!("baton_test_fine_seconds").record(0.0205);
    let shutdown = Shutdown::new();
    let address = serve_metrics("127.0.0.1:0", handle.clone(), shutdown.clone())
        .await
        .expect("a port");
    let answer = soon("the answer", ask(address, "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("baton_test_total{kind=\"a\"} 3"), "{answer}");
    assert!(answer.contains("baton_test_seconds_bucket{le=\"0.025\"} 1"), "{answer}");
    for told in [
        "# HELP baton_test_total Tests that ran.\n# TYPE baton_test_total counter\n",
        "\nbaton_never_total 0\n",
        "\nbaton_test_fine_seconds_bucket{le=\"0.02\"} 0\nbaton_test_fine_seconds_bucket{le=\"0.021\"} 1\n",
        "# TYPE others_test_count untyped\nothers_test_count 0\n",
    ] {
        assert!(answer.contains(told), "{told:?} is not in:\n{answer}");
    }
    let answer = soon("the answer", ask(address, "POST /metrics HTTP/1.1\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 405 "), "{answer}");
    let answer = soon("the answer", ask(address, "GET /admin HTTP/1.1\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
    let answer = soon("the answer", ask(address, &"x".repeat(4_096))).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    let taken = serve_metrics(&address.to_string(), handle, shutdown.clone())
        .await
        .expect_err("taken")
        .to_string();
    assert!(taken.contains(&address.to_string()), "{taken}");
    let off = TelemetryConfig {
        metrics: false,
        ..TelemetryConfig::default()
    };
    let off = install_metrics(&off, MEASURES).expect("nothing is installed");
    let off = serve_metrics("127.0.0.1:0", off, shutdown.clone())
        .await
        .expect("a port");
    let answer = soon("the answer", ask(off, "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
    assert!(
        answer.ends_with("metrics are switched off: telemetry.metrics = false\n"),
        "{answer}"
    );
    shutdown.force();
    soon("the end", async { while TcpStream::connect(address).await.is_ok() {} }).await;
}

#[test]
fn an_unknown_log_level_is_named() {
    let telemetry = TelemetryConfig {
        log_level: "loud".to_owned(),
        log_format: LogFormat::Json,
        ..TelemetryConfig::default()
    };
    let error = init_logging(&telemetry).expect_err("no such level").to_string();
    assert!(error.contains("loud") && error.contains("debug"), "{error}");
    let telemetry = TelemetryConfig {
        log_level: "error".to_owned(),
        log_format: LogFormat::Json,
        ..TelemetryConfig::default()
    };
    init_logging(&telemetry).expect("first");
    assert!(matches!(
        init_logging(&telemetry),
        Err(TelemetryError::LoggingInstalled(_))
    ));
}
