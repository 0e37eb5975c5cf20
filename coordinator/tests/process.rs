//! The coordinator's process: why it does not start, that it serves, and how it ends.

mod fake_node;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use config::ClusterConfig;
use fake_node::{Node, dial, hello, introduce};
use model_files::ModelFiles;
use protocol::control::JobEvent;
use protocol::ids::Role;
use runtime::identity::Identity;
use tempfile::TempDir;

const BINARY: &str = env!("CARGO_BIN_EXE_coordinator");

/// A folder with certificates for c0, p0 and d0, and a model's text side.
struct Site {
    dir: TempDir,
    /// What `certs issue` said about each node.
    issued: BTreeMap<String, String>,
}

impl Site {
    fn new() -> Self {
        let dir = TempDir::new().expect("a folder");
        let mut site = Self {
            dir,
            issued: BTreeMap::new(),
        };
        site.certs(&["init"]);
        for (role, node) in [("coordinator", "c0"), ("prefill", "p0"), ("decode", "d0")] {
            let said = site.certs(&["issue", "--role", role, "--node", node]);
            site.issued.insert(node.to_owned(), said);
        }
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama-text");
        fs::create_dir(site.model()).expect("a folder");
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
            fs::copy(fixtures.join(name), site.model().join(name)).expect("copied");
        }
        // The text side looks at no weights.
        fs::write(site.model().join("model.safetensors"), b"").expect("written");
        site
    }

    fn model(&self) -> PathBuf {
        self.dir.path().join("model")
    }

    fn certs(&self, words: &[&str]) -> String {
        let mut command = Command::new(BINARY);
        command.arg("certs").args(words).arg("--dir").arg(self.dir.path());
        let output = command.output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// The settings that `certs issue` said belong under `[cluster]`.
    fn cluster(&self, node: &str) -> ClusterConfig {
        let said = |key: &str| {
            let line = self.issued[node]
                .lines()
                .find_map(|line| line.strip_prefix(&format!("{key} = ")));
            line.expect("said").trim_matches('"').to_owned()
        };
        ClusterConfig {
            ca_cert_path: said("ca_cert_path"),
            cert_path: said("cert_path"),
            key_path: said("key_path"),
            ..ClusterConfig::default()
        }
    }

    /// The coordinator with `node`'s certificate, this model and free ports; `more` settings win.
    fn command(&self, node: &str, more: &[&str]) -> Command {
        let cluster = self.cluster(node);
        let mut settings = vec![
            format!("cluster.ca_cert_path={}", cluster.ca_cert_path),
            format!("cluster.cert_path={}", cluster.cert_path),
            format!("cluster.key_path={}", cluster.key_path),
            format!("model.path={}", self.model().display()),
            "coordinator.http_port=0".to_owned(),
            "coordinator.listen=127.0.0.1:0".to_owned(),
            "telemetry.log_format=json".to_owned(),
            // The nodes of these tests hand over.
            "coordinator.local_prefill=never".to_owned(),
        ];
        settings.extend(more.iter().map(|setting| (*setting).to_owned()));
        let mut command = Command::new(BINARY);
        for setting in settings {
            command.arg("--set").arg(setting);
        }
        command
            .stderr(Stdio::piped())
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }

    /// What it says when it does not start.
    fn refusal(&self, node: &str, more: &[&str]) -> String {
        let output: Output = self.command(node, more).output().expect("it runs");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        let said: Vec<&str> = stderr.lines().filter(|line| !line.starts_with('{')).collect();
        assert_eq!(said.len(), 1, "one line: {stderr}");
        said[0].to_owned()
    }

    fn start(&self, more: &[&str]) -> Process {
        let mut child = self.command("c0", more).spawn().expect("it runs");
        let mut log = BufReader::new(child.stderr.take().expect("piped"));
        let ready = loop {
            let mut line = String::new();
            assert_ne!(
                log.read_line(&mut line).expect("UTF-8"),
                0,
                "it ended instead of getting ready"
            );
            let line: serde_json::Value = serde_json::from_str(&line).expect("a JSON line");
            if line["message"] == "ready" {
                break line;
            }
        };
        let address = |key: &str| ready[key].as_str().expect("an address").to_owned();
        Process {
            http: address("http"),
            control: address("control"),
            child,
            log,
        }
    }

    /// Node `name` joins `process`.
    async fn join(&self, process: &Process, role: Role, name: &str) -> Node {
        let identity = Identity::load(&self.cluster(name)).expect("an identity");
        let text = ModelFiles::open(self.model())
            .expect("a model")
            .text()
            .expect("a text model");
        let mut hello = hello(role, name, 1);
        hello.model.tokenizer_hash = text.tokenizer_hash;
        hello.model.vocab_size = text.vocab_size as u32;
        let (endpoint, link) = dial(identity, &process.control).await;
        introduce(endpoint, link, hello).await.expect("welcome")
    }
}

struct Process {
    http: String,
    control: String,
    child: Child,
    log: BufReader<ChildStderr>,
}

impl Process {
    fn connect(&self, head_and_body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.http).expect("it listens");
        stream.write_all(head_and_body.as_bytes()).expect("sent");
        stream
    }

    fn generate(&self, body: &str) -> TcpStream {
        let length = body.len();
        self.connect(&format!(
            "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        ))
    }

    fn terminate(&self) {
        self.signal("-TERM");
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill")
            .arg(signal)
            .arg(self.child.id().to_string())
            .status();
        assert!(status.expect("it runs").success());
    }

    /// Waits until it says this.
    fn wait_for(&mut self, message: &str, asked: bool) -> serde_json::Value {
        loop {
            let mut line = String::new();
            let length = self.log.read_line(&mut line).expect("UTF-8");
            assert_ne!(length, 0, "it ended without saying: {message}");
            let line: serde_json::Value = serde_json::from_str(&line).expect("a JSON line");
            if line["message"] == message && line["asked"] == asked {
                return line;
            }
        }
    }

    /// Waits for the end; its exit code.
    fn end(mut self) -> Option<i32> {
        let code = self.child.wait().expect("it ends").code();
        let mut rest = String::new();
        self.log.read_to_string(&mut rest).expect("UTF-8");
        assert!(rest.contains("\"stopped\""), "an orderly end: {rest}");
        code
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Only where a test has failed does it still run.
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            self.child.kill().expect("killed");
            self.child.wait().expect("it ends");
        }
    }
}

fn read(mut stream: TcpStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    answer
}

#[test]
fn it_refuses_to_start_with_one_line_that_says_why() {
    let site = Site::new();
    let missing = site.refusal("c0", &["cluster.cert_path=/nowhere/c0.crt"]);
    assert!(
        missing.starts_with("coordinator: ") && missing.contains("/nowhere/c0.crt"),
        "{missing}"
    );
    let role = site.refusal("p0", &[]);
    assert!(role.contains("must name a coordinator"), "{role}");
    let model = site.refusal("c0", &["model.path=/nowhere/model.gguf"]);
    assert!(model.contains("/nowhere/model.gguf"), "{model}");
    let unset = site.refusal("c0", &["model.path="]);
    assert!(unset.contains("model.path is not set"), "{unset}");
    let unknown = site.refusal("c0", &["coordinator.http_prot=1"]);
    assert!(unknown.contains("http_port"), "a suggestion: {unknown}");

    let tcp = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = tcp.local_addr().expect("bound").port();
    let taken = site.refusal("c0", &[&format!("coordinator.http_port={port}")]);
    assert!(
        taken.contains(&format!("cannot listen for HTTP on 127.0.0.1:{port}")),
        "{taken}"
    );
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let address = udp.local_addr().expect("bound");
    let taken = site.refusal("c0", &[&format!("coordinator.listen={address}")]);
    assert!(
        taken.contains(&format!("coordinator.listen: cannot listen on UDP {address}")),
        "{taken}"
    );
}

#[test]
fn certificates_are_made_once() {
    let site = Site::new();
    let issued = site.certs(&["issue", "--role", "decode", "--node", "d7"]);
    let path = site.dir.path().join("d7.key");
    assert!(issued.contains(&format!("key_path = {path:?}")), "{issued}");
    let again = Command::new(BINARY)
        .args(["certs", "issue", "--role", "decode", "--node", "d7", "--dir"])
        .arg(site.dir.path())
        .output()
        .expect("it runs");
    assert_eq!(again.status.code(), Some(1));
    let wrong = Command::new(BINARY)
        .args(["certs", "issue", "--role", "cook", "--node", "d8", "--dir"])
        .arg(site.dir.path())
        .output()
        .expect("it runs");
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("must be coordinator, prefill, decode or both"));
}

#[test]
fn an_idle_coordinator_ends_on_a_signal() {
    let site = Site::new();
    let process = site.start(&[]);
    let health = read(process.connect("GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));
    assert!(health.starts_with("HTTP/1.1 503"), "no nodes: {health}");
    process.terminate();
    assert_eq!(process.end(), Some(0));
}

#[test]
fn a_hangup_makes_it_read_its_https_certificate() {
    let site = Site::new();
    let file = |name: &str| site.dir.path().join(name);
    let issue = || {
        let issued = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        fs::write(file("https.crt"), issued.cert.pem()).expect("written");
        fs::write(file("https.key"), issued.signing_key.serialize_pem()).expect("written");
    };
    issue();
    let setting = |name: &str, path: PathBuf| format!("coordinator.{name}={}", path.display());
    let settings = [
        setting("tls_cert_path", file("https.crt")),
        setting("tls_key_path", file("https.key")),
    ];
    let mut process = site.start(&settings.each_ref().map(String::as_str));
    // Without a change it reads them, too: whoever asks wants to know.
    for _ in 0..2 {
        process.signal("-HUP");
        process.wait_for("the certificate of the HTTPS port has been read", true);
    }
    fs::write(file("https.key"), "no key").expect("written");
    for _ in 0..2 {
        process.signal("-HUP");
        let line = process.wait_for("the certificate of the HTTPS port stays as it is", true);
        let error = line["error"].as_str().expect("a reason");
        assert!(error.starts_with("coordinator.tls_key_path"), "{error}");
    }
    issue();
    process.signal("-HUP");
    process.wait_for("the certificate of the HTTPS port has been read", true);
    process.terminate();
    assert_eq!(process.end(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_request_is_finished_before_the_end() {
    let site = Site::new();
    let process = site.start(&[]);
    let prefill = site.join(&process, Role::Prefill, "p0").await;
    let decode = site.join(&process, Role::Decode, "d0").await;
    let client = process.generate(r#"{"inputs": "hello", "parameters": {"max_new_tokens": 3}}"#);
    let (_, mut d) = decode.decode().await;
    d.grant().await;
    let (_, mut p) = prefill.prefill().await;
    process.terminate();
    p.first_token('a').await;
    d.say(JobEvent::Committed).await;
    d.token(1, 'b').await;
    d.token(2, 'c').await;
    let answer = tokio::task::block_in_place(|| read(client));
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("generated_text"),
        "{answer}"
    );
    assert_eq!(tokio::task::block_in_place(|| process.end()), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_does_not_end_is_ended_with_an_error() {
    let site = Site::new();
    let process = site.start(&["coordinator.drain_timeout_ms=300"]);
    let _prefill = site.join(&process, Role::Prefill, "p0").await;
    let decode = site.join(&process, Role::Decode, "d0").await;
    let client = process.generate(r#"{"inputs": "hello", "parameters": {"max_new_tokens": 3}}"#);
    let (_, d) = decode.decode().await;
    process.terminate();
    let answer = tokio::task::block_in_place(|| read(client));
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    d.cancelled().await;
    assert_eq!(tokio::task::block_in_place(|| process.end()), Some(0));
}
