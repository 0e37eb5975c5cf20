//! Certificates are renewed under running processes, with real ones: nobody restarts, nothing served is disturbed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::cluster::{Cluster, metric, run};
use integration_tests::files::binary;
use integration_tests::ports;
use integration_tests::trial::{WORKERS, begin_with, pause, spec};
use integration_tests::vitals::logged;
use runtime::clock::Clock;

const EXPIRY: &str = "baton_certificate_expiry_timestamp_seconds";
const CLUSTER: &str = "certificate=\"cluster\"";
const DAY: f64 = 24.0 * 3_600.0;

fn renew(cluster: &Cluster, name: &str, more: &[&str]) -> Result<String> {
    let certs = cluster.dir().join("certs");
    let mut words = vec![
        "certs",
        "renew",
        "--node",
        name,
        "--dir",
        certs.to_str().context("UTF-8")?,
    ];
    words.extend(more);
    run(&binary("coordinator")?, &words)
}

/// Days until a certificate ends, by a metrics page.
fn days_left(page: &str) -> Result<f64> {
    let end = metric(page, EXPIRY, &[CLUSTER]).with_context(|| format!("no {EXPIRY} in {page}"))?;
    Ok((end - Clock.unix_seconds() as f64) / DAY)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_renewed_while_requests_are_served() -> Result<()> {
    let (mut cluster, client, known) = begin_with(spec(1, 1), 51, 60, (20, 120)).await?;
    ensure!(days_left(&cluster.metrics().await?)? > 3_600.0, "ten years at first");
    let load = known.load(&client, &cluster.url(), WORKERS);
    // With the same key, and with a new one.
    for (name, more) in [
        ("coordinator", &["--days", "5"][..]),
        ("prefill-0", &["--new-key"]),
        ("decode-0", &[]),
    ] {
        renew(&cluster, name, more)?;
        logged(&mut cluster, name, &["the certificate has been replaced"]).await?;
    }
    let left = days_left(&cluster.metrics().await?)?;
    ensure!((4.9..=5.0).contains(&left), "{left} days");
    // A third of its life is left only later: no reason to warn yet.
    let log = cluster.process("coordinator")?.log();
    ensure!(!log.contains("ends soon"), "{log}");
    pause(500).await;
    load.stop().await?.all_exact()?;

    // New links with all of them: a node that starts meets the others, which have not been restarted.
    tokio::task::block_in_place(|| cluster.kill("decode-0"))?;
    cluster.start_node("decode", 0)?;
    cluster.ready().await?;
    known.check(&client, &cluster.url(), 0).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sighup_reads_the_files_and_says_what_is_wrong_with_them() -> Result<()> {
    let (mut cluster, client, known) = begin_with(spec(1, 1), 52, 20, (5, 20)).await?;
    for name in ["coordinator", "prefill-0"] {
        cluster.process(name)?.signal(libc::SIGHUP);
        logged(&mut cluster, name, &["SIGHUP", "are what they were"]).await?;
    }
    // Another node's files in the place of this one's.
    let certs = cluster.dir().join("certs");
    for kind in ["pem", "key"] {
        std::fs::copy(
            certs.join(format!("prefill-0.{kind}")),
            certs.join(format!("decode-0.{kind}")),
        )?;
    }
    cluster.process("decode-0")?.signal(libc::SIGHUP);
    let words = [
        "cannot be used",
        "for prefill prefill-0, this process is decode decode-0",
    ];
    logged(&mut cluster, "decode-0", &words).await?;
    known.check(&client, &cluster.url(), 0).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_acts_in_its_role_only() -> Result<()> {
    let mut cluster = Cluster::without_nodes(spec(1, 1))?;
    cluster.start_coordinator()?;
    let certs = cluster.dir().join("certs");
    let folder = certs.to_str().context("UTF-8")?;
    let issue = ["certs", "issue", "--dir", folder, "--role", "both", "--node", "either"];
    run(&binary("coordinator")?, &issue)?;
    let path = |name: &str, kind: &str| certs.join(format!("{name}.{kind}")).display().to_string();
    let with = |name: &str| {
        [
            format!("cluster.cert_path={}", path(name, "pem")),
            format!("cluster.key_path={}", path(name, "key")),
            "node.id=".to_owned(),
            format!("coordinator.http_port={}", ports::free_tcp().unwrap_or_default()),
            "coordinator.listen=127.0.0.1:0".to_owned(),
        ]
    };
    for (program, certificate, words) in [
        ("prefill-node", "decode-0", "this process is prefill"),
        ("decode-node", "prefill-0", "this process is decode"),
        ("decode-node", "coordinator", "this process is decode"),
        ("coordinator", "decode-0", "must name a coordinator"),
        ("coordinator", "either", "must name a coordinator"),
    ] {
        let settings = with(certificate);
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        cluster.start_process("impostor", program, &settings)?;
        let impostor = cluster.process("impostor")?;
        let status = tokio::task::block_in_place(|| impostor.wait(Duration::from_secs(20)))?;
        let log = impostor.log();
        ensure!(
            status.code() == Some(1) && log.contains(words),
            "{program} as {certificate}: {log}"
        );
    }
    // One for both is let in as either. (The last impostor's place is taken.)
    for (program, name) in [("prefill-node", "impostor"), ("decode-node", "second")] {
        let issue = ["certs", "issue", "--dir", folder, "--role", "both", "--node", name];
        run(&binary("coordinator")?, &issue)?;
        let settings = with(name);
        let settings: Vec<&str> = settings[..3].iter().map(String::as_str).collect();
        cluster.start_process(name, program, &settings)?;
    }
    cluster.ready().await
}
