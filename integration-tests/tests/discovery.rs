//! Nodes find coordinators by name and in a real etcd server, with real processes; etcd comes, hangs, dies and forgets.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use config::DiscoveryConfig;
use discovery::etcd::{Change, Etcd};
use integration_tests::ask::Ask;
use integration_tests::cluster::{Cluster, run};
use integration_tests::etcd::{EtcdServer, program};
use integration_tests::files::binary;
use integration_tests::load::Known;
use integration_tests::ports;
use integration_tests::random::Random;
use integration_tests::relay::{Relay, Weather};
use integration_tests::trial::{WORKERS, pause, spec};
use integration_tests::vitals::{Vitals, logged};
use reqwest::Client;
use runtime::clock::Clock;

/// What must come, comes within this time.
const SOON: Duration = Duration::from_secs(20);
const PREFIX: &str = "/baton-test";

fn client(url: &str) -> DiscoveryConfig {
    DiscoveryConfig {
        etcd_endpoints: vec![url.to_owned()],
        etcd_prefix: PREFIX.to_owned(),
        ..DiscoveryConfig::default()
    }
}

/// The coordinators that are registered: key to address.
async fn registered(etcd: &Etcd) -> Result<BTreeMap<String, String>> {
    Ok(etcd.list(&format!("{PREFIX}/coordinators/")).await?.values)
}

async fn until_registered(etcd: &Etcd, count: usize) -> Result<BTreeMap<String, String>> {
    let deadline = Clock.now() + SOON;
    loop {
        let now = registered(etcd).await?;
        if now.len() == count {
            return Ok(now);
        }
        ensure!(
            Clock.now() < deadline,
            "{count} coordinators wanted, registered: {now:?}"
        );
        pause(20).await;
    }
}

/// A second coordinator beside a cluster's own.
struct Second {
    url: String,
    address: String,
}

const SECOND: &str = "coordinator-1";

fn start_second(cluster: &mut Cluster) -> Result<Second> {
    let certs = cluster.dir().join("certs");
    let certs = certs.to_str().context("UTF-8")?;
    let words = [
        "certs",
        "issue",
        "--dir",
        certs,
        "--role",
        "coordinator",
        "--node",
        SECOND,
    ];
    run(&binary("coordinator")?, &words)?;
    let (http, control) = (ports::free_tcp()?, ports::free_udp()?);
    let address = format!("127.0.0.1:{control}");
    let settings = [
        format!("coordinator.http_port={http}"),
        format!("coordinator.listen={address}"),
    ];
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    cluster.start_process(SECOND, "coordinator", &settings)?;
    Ok(Second {
        url: format!("http://127.0.0.1:{http}"),
        address,
    })
}

/// Waits until a coordinator can serve.
async fn healthy(client: &Client, url: &str) -> Result<()> {
    let deadline = Clock.now() + SOON;
    loop {
        let answer = client.get(format!("{url}/health")).send().await;
        if answer.is_ok_and(|answer| answer.status() == 200) {
            return Ok(());
        }
        ensure!(Clock.now() < deadline, "{url} is not healthy");
        pause(20).await;
    }
}

/// A cluster whose nodes look into etcd, and know no coordinator otherwise.
async fn begin(etcd: &EtcdServer) -> Result<(Cluster, Client, Arc<Known>)> {
    let spec = spec(1, 1)
        .set("discovery.method=etcd")
        .set(format!("discovery.etcd_endpoints={}", etcd.url()))
        .set(format!("discovery.etcd_prefix={PREFIX}"))
        .set("discovery.refresh_ms=1000")
        .set("discovery.etcd_lease_ms=2000")
        .set("discovery.etcd_timeout_ms=500")
        .set("node.coordinators=127.0.0.1:1");
    integration_tests::trial::begin_with(spec, 41, 60, (20, 120)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn coordinators_come_and_go_in_etcd() -> Result<()> {
    let Some(program) = program() else { return Ok(()) };
    let server = EtcdServer::start(program)?;
    let etcd = Etcd::new(&client(&server.url()))?;
    let (mut cluster, client, known) = begin(&server).await?;
    let first = format!("127.0.0.1:{}", cluster.control_port());
    let key = format!("{PREFIX}/coordinators/coordinator@{first}");
    ensure!(registered(&etcd).await? == BTreeMap::from([(key.clone(), first.clone())]));

    let second = start_second(&mut cluster)?;
    let all = until_registered(&etcd, 2).await?;
    ensure!(all.values().any(|address| *address == second.address), "{all:?}");
    healthy(&client, &second.url).await?;
    known.check(&client, &second.url, 0).await?;

    // kill -9: the lease ends, the key vanishes, the nodes stop dialling; the other one serves on.
    let load = known.load(&client, &second.url, WORKERS);
    cluster.kill("coordinator")?;
    let killed = Clock.now();
    ensure!(
        registered(&etcd).await?.contains_key(&key),
        "the lease outlives the process"
    );
    let left = until_registered(&etcd, 1).await?;
    eprintln!("gone from etcd {:?} after kill -9", Clock.now() - killed);
    ensure!(!left.contains_key(&key), "{left:?}");
    for node in ["prefill-0", "decode-0"] {
        logged(&mut cluster, node, &["not there any more", &first]).await?;
    }
    load.stop().await?.all_exact()?;

    // It comes back at the same address, and is found again.
    cluster.start_coordinator()?;
    cluster.ready().await?;
    known.check(&client, &cluster.url(), 1).await?;

    // SIGTERM: taken out at once, not after the lease's time.
    let told = Clock.now();
    let status = tokio::task::block_in_place(|| cluster.terminate(SECOND, SOON))?;
    ensure!(status.success(), "{status}");
    let left = registered(&etcd).await?;
    ensure!(
        left.keys().eq([&key]),
        "{left:?} {:?} after SIGTERM",
        Clock.now() - told
    );
    known.check(&client, &cluster.url(), 2).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_may_hang_die_and_forget_while_requests_are_served() -> Result<()> {
    let Some(program) = program() else { return Ok(()) };
    let mut server = EtcdServer::start(program)?;
    let etcd = Etcd::new(&client(&server.url()))?;
    let (mut cluster, client, known) = begin(&server).await?;
    until_registered(&etcd, 1).await?;
    let load = known.load(&client, &cluster.url(), WORKERS);
    // Longer than the lease and than every deadline.
    server.signal(libc::SIGSTOP)?;
    pause(3_500).await;
    server.signal(libc::SIGCONT)?;
    until_registered(&etcd, 1).await?;
    server.kill()?;
    pause(3_000).await;
    server.up()?;
    until_registered(&etcd, 1).await?;
    // It comes back without what it knew: the coordinator registers anew.
    server.kill()?;
    server.wipe()?;
    server.up()?;
    until_registered(&etcd, 1).await?;
    load.stop().await?.all_exact()?;
    let log = cluster.process("decode-0")?.log();
    ensure!(
        !log.contains("not there any more"),
        "the node kept its coordinator:\n{log}"
    );
    ensure!(log.matches("joined").count() == 1, "one link all the time:\n{log}");

    // What has been through all that still finds a coordinator that is new.
    let second = start_second(&mut cluster)?;
    healthy(&client, &second.url).await?;
    known.check(&client, &second.url, 0).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_resolved_and_all_their_addresses_dialled() -> Result<()> {
    let mut cluster = Cluster::without_nodes(spec(1, 1))?;
    let port = cluster.control_port();
    let by_name = [
        "discovery.method=dns".to_owned(),
        format!("discovery.dns_names=localhost:{port},not-there.invalid:7600"),
        "discovery.refresh_ms=200".to_owned(),
        "node.coordinators=127.0.0.1:1".to_owned(),
    ];
    let by_name: Vec<&str> = by_name.iter().map(String::as_str).collect();
    // The nodes come first, and dial until somebody is there.
    cluster.start_process("prefill-0", "prefill-node", &by_name)?;
    cluster.start_process("decode-0", "decode-node", &by_name)?;
    logged(
        &mut cluster,
        "decode-0",
        &["no answer about coordinators", "not-there.invalid"],
    )
    .await?;
    cluster.start_coordinator()?;
    cluster.ready().await?;
    let log = cluster.process("decode-0")?.log();
    ensure!(log.contains(&format!("\"127.0.0.1:{port}\"")), "{log}");
    Ok(())
}

/// TLS files of a server on loopback, and of a client.
struct TlsFiles {
    dir: tempfile::TempDir,
}

impl TlsFiles {
    fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate()?;
        std::fs::write(dir.path().join("ca.pem"), params.self_signed(&key)?.pem())?;
        let authority = rcgen::Issuer::new(params, key);
        for name in ["server", "client"] {
            let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()])?;
            // With users, etcd's JSON interface refuses certificates with a CommonName.
            params.distinguished_name = rcgen::DistinguishedName::new();
            // etcd's interface calls etcd itself, and shows the server's certificate.
            params.extended_key_usages = vec![
                rcgen::ExtendedKeyUsagePurpose::ServerAuth,
                rcgen::ExtendedKeyUsagePurpose::ClientAuth,
            ];
            let key = rcgen::KeyPair::generate()?;
            std::fs::write(
                dir.path().join(format!("{name}.pem")),
                params.signed_by(&key, &authority)?.pem(),
            )?;
            std::fs::write(dir.path().join(format!("{name}.key")), key.serialize_pem())?;
        }
        Ok(Self { dir })
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }
}

/// A user `root` with a password, and authentication on.
async fn enable_users(config: &DiscoveryConfig, ca: &str) -> Result<()> {
    let ca = reqwest::Certificate::from_pem(&std::fs::read(ca)?)?;
    let identity = [
        std::fs::read(&config.etcd_cert_path)?,
        std::fs::read(&config.etcd_key_path)?,
    ]
    .concat();
    let http = Client::builder()
        .add_root_certificate(ca)
        .identity(reqwest::Identity::from_pem(&identity)?)
        .build()?;
    for (path, body) in [
        ("user/add", r#"{"name":"root","password":"sesame"}"#),
        ("user/grant", r#"{"user":"root","role":"root"}"#),
        ("enable", "{}"),
    ] {
        let url = format!("{}/v3/auth/{path}", config.etcd_endpoints[0]);
        let answer = http.post(url).body(body).send().await?;
        ensure!(answer.status() == 200, "{path}: {}", answer.text().await?);
    }
    Ok(())
}

fn secure(program: PathBuf, files: &TlsFiles) -> Result<EtcdServer> {
    let (ca, cert, key) = (files.path("ca.pem"), files.path("server.pem"), files.path("server.key"));
    let arguments = [
        "--client-cert-auth",
        "--trusted-ca-file",
        &ca,
        "--cert-file",
        &cert,
        "--key-file",
        &key,
    ];
    EtcdServer::new(program, "https", &arguments)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_asked_over_tls_with_a_certificate_and_a_password() -> Result<()> {
    let Some(program) = program() else { return Ok(()) };
    let files = TlsFiles::new()?;
    let mut server = secure(program, &files)?;
    server.up()?;
    let password = files.path("password");
    std::fs::write(&password, "sesame\n")?;
    let mut config = DiscoveryConfig {
        etcd_ca_cert_path: files.path("ca.pem"),
        etcd_cert_path: files.path("client.pem"),
        etcd_key_path: files.path("client.key"),
        ..client(&server.url())
    };
    enable_users(&config, &files.path("ca.pem")).await?;
    let anonymous = Etcd::new(&config)?
        .list(PREFIX)
        .await
        .err()
        .context("no user")?
        .to_string();
    ensure!(anonymous.contains("user name is empty"), "{anonymous}");

    config.etcd_user = "root".to_owned();
    config.etcd_password_path = password.clone();
    let etcd = Etcd::new(&config)?;
    let lease = etcd.grant(5).await?;
    ensure!(lease.ttl == 5, "{lease:?}");
    let listing = etcd.list(PREFIX).await?;
    let mut watch = etcd.watch(PREFIX, listing.revision + 1).await?;
    let (key, value) = (format!("{PREFIX}/x"), "1.2.3.4:5".to_owned());
    etcd.put(&key, &value, lease.id).await?;
    let put = tokio::time::timeout(SOON, watch.next()).await??;
    ensure!(
        put == Change::Put {
            key: key.clone(),
            value: value.clone()
        },
        "{put:?}"
    );
    // Tokens live in the server's memory: after a restart the old one is stale, and a new one is fetched.
    server.kill()?;
    server.up()?;
    let deadline = Clock.now() + SOON;
    let listing = loop {
        match etcd.list(PREFIX).await {
            Ok(listing) => break listing,
            Err(error) => ensure!(Clock.now() < deadline, "{error}"),
        }
        pause(50).await;
    };
    ensure!(listing.values == BTreeMap::from([(key, value)]), "{listing:?}");
    etcd.revoke(lease.id).await?;
    ensure!(etcd.list(PREFIX).await?.values.is_empty());
    ensure!(etcd.keep_alive(lease.id).await?.ttl == 0, "the lease is gone");

    std::fs::write(&password, "wrong")?;
    let wrong = Etcd::new(&config)?
        .list(PREFIX)
        .await
        .err()
        .context("a wrong password")?
        .to_string();
    ensure!(wrong.contains("authentication failed"), "{wrong}");
    config.etcd_cert_path.clear();
    config.etcd_key_path.clear();
    ensure!(
        Etcd::new(&config)?.list(PREFIX).await.is_err(),
        "no certificate was shown"
    );
    config.etcd_ca_cert_path = "/nonexistent".to_owned();
    let missing = Etcd::new(&config).err().context("no such file")?.to_string();
    ensure!(missing.contains("discovery.etcd_ca_cert_path"), "{missing}");
    Ok(())
}

#[tokio::test]
async fn another_endpoint_is_asked_when_one_does_not_answer() -> Result<()> {
    let Some(program) = program() else { return Ok(()) };
    let server = EtcdServer::start(program)?;
    // One that never answers, and one where nobody is.
    let silent = std::net::TcpListener::bind("127.0.0.1:0")?;
    let silent_address: SocketAddr = silent.local_addr()?;
    let config = DiscoveryConfig {
        etcd_endpoints: vec![
            format!("http://{silent_address}"),
            "http://127.0.0.1:1".to_owned(),
            server.url(),
        ],
        etcd_timeout_ms: 200,
        ..client(&server.url())
    };
    let etcd = Etcd::new(&config)?;
    let before = Clock.now();
    ensure!(etcd.list(PREFIX).await.is_err() && etcd.list(PREFIX).await.is_err());
    ensure!(
        Clock.now() - before < Duration::from_secs(5),
        "every call has a deadline"
    );
    // It may still be busy with its own start; then the others are asked in between.
    let deadline = Clock.now() + SOON;
    while let Err(error) = etcd.list(PREFIX).await {
        ensure!(Clock.now() < deadline, "{error}");
    }
    Ok(())
}

/// Waits until the first coordinator has so many nodes.
async fn until_joined(cluster: &Cluster, nodes: usize) -> Result<()> {
    let deadline = Clock.now() + SOON;
    loop {
        let there = Vitals::of(cluster).await?.nodes;
        if there.len() == nodes {
            return Ok(());
        }
        ensure!(Clock.now() < deadline, "{nodes} nodes wanted: {there:?}");
        pause(20).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_with_two_addresses_is_linked_by_one_of_them() -> Result<()> {
    let mut cluster = Cluster::without_nodes(spec(1, 1))?;
    cluster.start_coordinator()?;
    let target = SocketAddr::from((Ipv4Addr::LOCALHOST, cluster.control_port()));
    let weathers: [Arc<Weather>; 2] = Default::default();
    let mut ways = Vec::new();
    for (seed, weather) in (0..).zip(&weathers) {
        ways.push(Relay::start(target, Arc::clone(weather), seed).await?);
    }
    let list = format!("node.coordinators=[\"{}\",\"{}\"]", ways[0].address, ways[1].address);
    cluster.start_process("prefill-0", "prefill-node", &[&list])?;
    cluster.start_process("decode-0", "decode-node", &[&list])?;
    for node in ["prefill-0", "decode-0"] {
        logged(&mut cluster, node, &["linked by another one"]).await?;
    }
    cluster.ready().await?;
    let (client, url) = (Client::new(), cluster.url());
    let asks = Ask::mixed(&mut Random::new(91), 8, 60, (20, 100));
    let known = Arc::new(Known::learn(&client, &url, asks).await?);
    let load = known.load(&client, &url, WORKERS);
    pause(2_500).await;
    let tally = load.stop().await?;
    eprintln!("two addresses: {tally}");
    tally.all_exact()?;
    for node in ["prefill-0", "decode-0"] {
        let log = cluster.process(node)?.log();
        let joined = log.lines().filter(|line| line.contains("joined")).count();
        ensure!(joined == 2, "{node} joined {joined} times:\n{log}");
    }
    // One of the two ways is the one that is used: without it nodes take the other, and without the other nothing happens.
    for weather in &weathers {
        weather.cut(true);
        pause(2_500).await;
        until_joined(&cluster, 2).await?;
        known.check(&client, &url, 0).await?;
        weather.cut(false);
    }
    Ok(())
}
