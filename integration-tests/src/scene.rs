//! A pair of nodes that is looked at from all sides while a test mistreats it, and that must be as good as new afterwards.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use runtime::clock::Clock;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::cluster::{Cluster, ClusterSpec, metric};
use crate::files::tiny_model;
use crate::ports::free_tcp;
use crate::wire::{Answer, Wire, post_bytes, request_bytes};

/// The name of the served model.
pub const MODEL: &str = "tested";
/// What must come true comes true within this time, or never.
const PATIENCE: Duration = Duration::from_secs(10);
const PREFILL: &str = "prefill-0";
const DECODE: &str = "decode-0";

/// See the head of the file. The methods block: none may be called from within a task.
#[derive(Debug)]
pub struct Scene {
    /// The processes.
    pub cluster: Cluster,
    prefill_metrics: u16,
    decode_metrics: u16,
    before: Vec<Value>,
}

/// A scene that several tests of a process use at the same time: started by the first, ended with the last.
#[derive(Debug)]
pub struct Shared(Mutex<Weak<Scene>>);

impl Shared {
    /// Not started yet.
    #[allow(clippy::new_without_default, reason = "made once, as a static")]
    pub const fn new() -> Self {
        Self(Mutex::new(Weak::new()))
    }

    /// The scene; `start` starts it if it does not run.
    pub fn get(&self, start: impl FnOnce() -> Result<Scene>) -> Result<Arc<Scene>> {
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(scene) = shared.upgrade() {
            return Ok(scene);
        }
        let scene = Arc::new(start()?);
        *shared = Arc::downgrade(&scene);
        Ok(scene)
    }
}

/// A copy of the tiny checkpoint for sequences of up to `positions` tokens, without an end token: answers are as long as a
/// test asks for, on every path.
pub fn stretched_tiny_model(positions: usize) -> Result<TempDir> {
    let copy = TempDir::new()?;
    for entry in std::fs::read_dir(tiny_model())? {
        let entry = entry?;
        std::fs::copy(entry.path(), copy.path().join(entry.file_name()))?;
    }
    change_json(&copy.path().join("config.json"), |config| {
        let stretched = config.insert("max_position_embeddings".to_owned(), json!(positions));
        stretched.is_some() && config.remove("eos_token_id").is_some()
    })?;
    change_json(&copy.path().join("tokenizer_config.json"), |config| {
        config.remove("eos_token").is_some()
    })?;
    Ok(copy)
}

/// Changes an object in a file; `change` says whether it found what it changes.
fn change_json(path: &Path, change: impl FnOnce(&mut Map<String, Value>) -> bool) -> Result<()> {
    let mut object: Map<String, Value> = serde_json::from_slice(&std::fs::read(path)?)?;
    ensure!(change(&mut object), "{} is not as expected", path.display());
    Ok(std::fs::write(path, serde_json::to_vec(&object)?)?)
}

/// Lets time pass.
#[allow(
    clippy::disallowed_methods,
    reason = "a test thread that waits for a process may sleep"
)]
pub fn pause(time: Duration) {
    std::thread::sleep(time);
}

fn get(port: u16, path: &str) -> Result<Answer> {
    let mut wire = Wire::connect(port)?;
    wire.send(request_bytes("GET", path, "connection: close\r\n", ""))?;
    wire.answer()
}

impl Scene {
    /// Starts one prefill and one decode node with the tiny checkpoint and `settings` (`section.field=value`).
    pub fn tiny(settings: &[&str]) -> Result<Self> {
        Self::start(&tiny_model(), settings)
    }

    /// The same with another model.
    pub fn start(model: &Path, settings: &[&str]) -> Result<Self> {
        let mut scene = Self::processes(model, settings)?;
        scene.wait_idle()?;
        scene.before = scene.normal_answers()?;
        Ok(scene)
    }

    /// The tiny checkpoint behind settings with which normal requests are refused: only [`Scene::no_complaints`] can be
    /// asked for at the end.
    pub fn unwatched(settings: &[&str]) -> Result<Self> {
        Self::processes(&tiny_model(), settings)
    }

    fn processes(model: &Path, settings: &[&str]) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut spec = ClusterSpec::pair(model).set(format!("model.model_name={MODEL}"));
        spec.settings
            .extend(settings.iter().map(|setting| (*setting).to_owned()));
        let (prefill_metrics, decode_metrics) = (free_tcp()?, free_tcp()?);
        let mut cluster = Cluster::without_nodes(spec)?;
        cluster.start_coordinator()?;
        for (name, program, port) in [
            (PREFILL, "prefill-node", prefill_metrics),
            (DECODE, "decode-node", decode_metrics),
        ] {
            cluster.start_process(name, program, &[&format!("node.metrics_listen=127.0.0.1:{port}")])?;
        }
        runtime.block_on(cluster.ready())?;
        Ok(Self {
            cluster,
            prefill_metrics,
            decode_metrics,
            before: Vec::new(),
        })
    }

    /// A new connection to the coordinator.
    pub fn wire(&self) -> Result<Wire> {
        Wire::connect(self.cluster.http_port())
    }

    /// Sends bytes over a new connection and reads one answer.
    pub fn exchange(&self, bytes: impl AsRef<[u8]>) -> Result<Answer> {
        let mut wire = self.wire()?;
        wire.send(bytes)?;
        wire.answer()
    }

    /// Posts a body as it is.
    pub fn post_raw(&self, path: &str, body: impl AsRef<[u8]>) -> Result<Answer> {
        self.exchange(post_bytes(path, body))
    }

    /// Posts JSON.
    pub fn post(&self, path: &str, body: &Value) -> Result<Answer> {
        self.post_raw(path, body.to_string())
    }

    /// Gets a path.
    pub fn get(&self, path: &str) -> Result<Answer> {
        get(self.cluster.http_port(), path)
    }

    /// Posts to `/v1/completions`, with the model's name.
    pub fn complete(&self, mut body: Value) -> Result<Answer> {
        body["model"] = json!(MODEL);
        self.post("/v1/completions", &body)
    }

    /// A series of the coordinator's metrics page; 0 if it does not exist yet.
    pub fn metric(&self, name: &str, labels: &[&str]) -> Result<f64> {
        Ok(metric(&self.get("/metrics")?.text(), name, labels).unwrap_or(0.0))
    }

    /// Rows (tokens) that prefill and decode node have computed since they started.
    pub fn rows(&self) -> Result<[f64; 2]> {
        let rows =
            |port| anyhow::Ok(metric(&get(port, "/metrics")?.text(), "baton_engine_rows_total", &[]).unwrap_or(0.0));
        Ok([rows(self.prefill_metrics)?, rows(self.decode_metrics)?])
    }

    /// Requests that the coordinator holds: queued and running.
    pub fn held(&self) -> Result<f64> {
        let page = self.get("/metrics")?.text();
        let value = |name| metric(&page, name, &[]).with_context(|| format!("no {name} in\n{page}"));
        Ok(value("baton_num_requests_waiting")? + value("baton_num_requests_running")?)
    }

    /// Waits until `condition` holds.
    pub fn until(&self, what: &str, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
        let deadline = Clock.now() + PATIENCE;
        while !condition()? {
            if Clock.now() >= deadline {
                let page = self.get("/metrics")?.text();
                let state = page
                    .lines()
                    .filter(|line| line.starts_with("baton_") && !line.contains("_bucket"));
                let state = state.collect::<Vec<_>>().join("\n");
                bail!("{what}: not within {PATIENCE:?}\n{state}\n{}", self.cluster.logs());
            }
            pause(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Starts the decode node again after it has been ended.
    pub fn start_decode(&mut self) -> Result<()> {
        let listen = format!("node.metrics_listen=127.0.0.1:{}", self.decode_metrics);
        self.cluster.start_process(DECODE, "decode-node", &[&listen])
    }

    /// Waits until no request is held and, by their own reports, nobody owns a block of either node.
    pub fn wait_idle(&self) -> Result<()> {
        self.until("the cluster is idle", || {
            let page = self.get("/metrics")?.text();
            let blocks = |node: &str, kind: &str| {
                metric(
                    &page,
                    "baton_node_blocks",
                    &[&format!("node=\"{node}\""), &format!("kind=\"{kind}\"")],
                )
            };
            let free = [PREFILL, DECODE].iter().all(|node| {
                let total = blocks(node, "total").unwrap_or(0.0);
                let unowned = blocks(node, "free").unwrap_or(0.0) + blocks(node, "cached").unwrap_or(0.0);
                total > 0.0 && unowned == total && blocks(node, "booked") == Some(0.0)
            });
            Ok(free && self.held()? == 0.0)
        })
    }

    /// Waits until all that was held is gone: no request, nothing that the nodes compute, no block that is owned. What
    /// was asked of the nodes must last far longer than this waits.
    pub fn wait_quiet(&self, what: &str) -> Result<()> {
        self.until(what, || Ok(self.held()? == 0.0))?;
        self.until(what, || {
            let rows = self.rows()?;
            pause(Duration::from_millis(100));
            Ok(self.rows()? == rows)
        })?;
        // The last reports of the nodes are younger than the last request now.
        self.wait_idle()
    }

    /// The answers to two normal requests, without what differs between equal requests.
    fn normal_answers(&self) -> Result<Vec<Value>> {
        let parameters = json!({ "max_new_tokens": 8, "seed": 7, "decoder_input_details": true });
        let generated = self
            .post("/generate", &json!({ "inputs": "as before", "parameters": parameters }))?
            .ok()?;
        let body = json!({ "prompt": "as before", "max_tokens": 8, "seed": 7, "logprobs": 2 });
        let completed = self.complete(body)?.ok()?["choices"].clone();
        Ok(vec![generated, completed])
    }

    /// The end of a test that has the cluster for itself: see [`Scene::is_well`], and nothing is held any more.
    pub fn close(self) -> Result<()> {
        self.is_well()?;
        self.wait_idle()
    }

    /// Checks that the cluster answers as it did before, and that no process has panicked or complained.
    pub fn is_well(&self) -> Result<()> {
        ensure!(
            self.normal_answers()? == self.before,
            "normal requests are answered differently now"
        );
        self.no_complaints()
    }

    /// Checks that no process has panicked or logged an error: what clients do is no error of ours.
    pub fn no_complaints(&self) -> Result<()> {
        let logs = self.cluster.logs();
        ensure!(!logs.contains('\x1b'), "the logs have colours in a file");
        let bad = ["panicked", " ERROR "];
        let is_bad = |line: &&str| bad.iter().any(|word| line.contains(word));
        let lines: Vec<&str> = logs.lines().filter(is_bad).collect();
        ensure!(lines.is_empty(), "the processes complain:\n{}", lines.join("\n"));
        Ok(())
    }
}
