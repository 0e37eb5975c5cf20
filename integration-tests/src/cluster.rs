//! A coordinator and its nodes as processes on loopback.
//!
//! Each cluster has a directory of its own with certificates and logs, takes free ports, and ends its processes, by
//! process id, when it is dropped.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use runtime::clock::Clock;
use serde_json::Value;
use tempfile::TempDir;

use crate::files::binary;
use crate::ports;
pub use crate::process::{Process, run};
use crate::relay::{Relay, Weather};

/// What a cluster consists of.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// Model file or directory.
    pub model: PathBuf,
    /// Number of prefill nodes.
    pub prefill: usize,
    /// Number of decode nodes.
    pub decode: usize,
    /// Number of nodes whose role can be switched; they begin as both.
    pub both: usize,
    /// Number of coordinators.
    pub coordinators: usize,
    /// Links go through relays, so that [`Cluster::weather`] can be bad.
    pub relayed: bool,
    /// Settings of all processes: `section.field=value`.
    pub settings: Vec<String>,
    /// Further settings of the nodes of a role.
    pub role_settings: Vec<(&'static str, String)>,
    /// How long the cluster may take until it is ready.
    pub ready_within: Duration,
}

impl ClusterSpec {
    /// One prefill and one decode node.
    pub fn pair(model: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            prefill: 1,
            decode: 1,
            both: 0,
            coordinators: 1,
            relayed: false,
            settings: Vec::new(),
            role_settings: Vec::new(),
            ready_within: Duration::from_secs(60),
        }
    }

    /// With one more setting.
    #[must_use]
    pub fn set(mut self, setting: impl Into<String>) -> Self {
        self.settings.push(setting.into());
        self
    }

    /// With one more setting of all nodes of `role` (`prefill`, `decode` or `both`).
    #[must_use]
    pub fn set_for(mut self, role: &'static str, setting: impl Into<String>) -> Self {
        self.role_settings.push((role, setting.into()));
        self
    }
}

/// Ports of a coordinator.
#[derive(Clone, Copy, Debug)]
struct Door {
    http: u16,
    control: u16,
    admin: u16,
}

/// What operators of the tests' clusters send.
pub const ADMIN_TOKEN: &str = "operators-of-a-test-0123456789";

/// A running cluster.
#[derive(Debug)]
pub struct Cluster {
    spec: ClusterSpec,
    dir: TempDir,
    /// One for each coordinator.
    doors: Vec<Door>,
    processes: Vec<Process>,
    /// By node, where links are relayed.
    lines: HashMap<String, Line>,
}

/// The relayed links of a node.
#[derive(Debug)]
struct Line {
    weather: Arc<Weather>,
    /// Where the node listens.
    port: u16,
    /// Towards each coordinator.
    coordinators: Vec<Relay>,
    /// Towards the node.
    own: Relay,
}

impl Cluster {
    /// Starts all processes and waits until `/health` says that the cluster can serve.
    pub async fn start(spec: ClusterSpec) -> Result<Self> {
        let mut cluster = Self::without_nodes(spec)?;
        cluster.lay_lines().await?;
        for i in 0..cluster.spec.coordinators {
            cluster.start_process(&coordinator_name(i), "coordinator", &[])?;
        }
        let counts = [
            ("prefill", cluster.spec.prefill),
            ("decode", cluster.spec.decode),
            ("both", cluster.spec.both),
        ];
        for (role, count) in counts {
            for i in 0..count {
                cluster.start_node(role, i)?;
            }
        }
        cluster.ready().await?;
        Ok(cluster)
    }

    /// Certificates and ports, but no process yet.
    pub fn without_nodes(spec: ClusterSpec) -> Result<Self> {
        let dir = TempDir::new()?;
        let certs = dir.path().join("certs");
        let certs = certs.to_str().context("temporary directory is not UTF-8")?;
        let coordinator = binary("coordinator")?;
        run(&coordinator, &["certs", "init", "--dir", certs])?;
        let issue = |role: &str, node: &str| {
            let arguments = ["certs", "issue", "--dir", certs, "--role", role, "--node", node];
            run(&coordinator, &arguments).map(drop)
        };
        let mut doors = Vec::new();
        for i in 0..spec.coordinators {
            issue("coordinator", &coordinator_name(i))?;
            doors.push(Door {
                http: ports::free_tcp()?,
                control: ports::free_udp()?,
                admin: ports::free_tcp()?,
            });
        }
        for (role, count) in [("prefill", spec.prefill), ("decode", spec.decode), ("both", spec.both)] {
            for i in 0..count {
                issue(role, &format!("{role}-{i}"))?;
            }
        }
        Ok(Self {
            spec,
            dir,
            doors,
            processes: Vec::new(),
            lines: HashMap::new(),
        })
    }

    /// Names of all nodes.
    pub fn node_names(&self) -> Vec<String> {
        let counts = [
            ("prefill", self.spec.prefill),
            ("decode", self.spec.decode),
            ("both", self.spec.both),
        ];
        let of = |(role, count): (&str, usize)| (0..count).map(|i| format!("{role}-{i}")).collect::<Vec<_>>();
        counts.into_iter().flat_map(of).collect()
    }

    async fn lay_lines(&mut self) -> Result<()> {
        if !self.spec.relayed {
            return Ok(());
        }
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        for (number, node) in (1_u64..).zip(self.node_names()) {
            let (weather, port) = (Arc::new(Weather::default()), ports::free_udp()?);
            let mut coordinators = Vec::new();
            for (i, door) in (1_u64..).zip(&self.doors) {
                let seed = 100 * number + i;
                coordinators.push(Relay::start(loopback(door.control), Arc::clone(&weather), seed).await?);
            }
            let own = Relay::start(loopback(port), Arc::clone(&weather), 100 * number).await?;
            let line = Line {
                weather,
                port,
                coordinators,
                own,
            };
            self.lines.insert(node, line);
        }
        Ok(())
    }

    /// What the network does to the packets from a node to coordinators and back, and to those that others send it.
    pub fn weather(&self, node: &str) -> Result<&Weather> {
        let line = self.lines.get(node).with_context(|| format!("no relays of {node}"))?;
        Ok(&line.weather)
    }

    /// The cluster's directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// `http://host:port` of the first coordinator.
    pub fn url(&self) -> String {
        self.url_of(0)
    }

    /// `http://host:port` of a coordinator.
    pub fn url_of(&self, coordinator: usize) -> String {
        format!("http://127.0.0.1:{}", self.doors[coordinator].http)
    }

    /// TCP port of the first coordinator's HTTP server.
    pub fn http_port(&self) -> u16 {
        self.doors[0].http
    }

    /// UDP port of the first coordinator's control plane.
    pub fn control_port(&self) -> u16 {
        self.doors[0].control
    }

    /// `http://host:port` of the first coordinator's admin plane.
    pub fn admin_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.doors[0].admin)
    }

    /// Asks the admin plane of a coordinator; status and answer.
    pub async fn admin(&self, coordinator: usize, method: &str, path: &str, body: &str) -> Result<(u16, Value)> {
        let url = format!("http://127.0.0.1:{}{path}", self.doors[coordinator].admin);
        let client = reqwest::Client::new();
        let request = client
            .request(method.parse()?, url)
            .bearer_auth(ADMIN_TOKEN)
            .body(body.to_owned());
        let answer = request.send().await?;
        Ok((answer.status().as_u16(), answer.json().await?))
    }

    /// Arguments of a process of this cluster.
    pub fn arguments(&self, name: &str) -> Vec<String> {
        let certs = self.dir.path().join("certs");
        let coordinators: Vec<String> = match self.lines.get(name) {
            Some(line) => line
                .coordinators
                .iter()
                .map(|relay| format!("\"{}\"", relay.address))
                .collect(),
            None => self
                .doors
                .iter()
                .map(|door| format!("\"127.0.0.1:{}\"", door.control))
                .collect(),
        };
        let mut settings = vec![
            format!("cluster.ca_cert_path={}", certs.join("ca.pem").display()),
            format!("cluster.cert_path={}", certs.join(format!("{name}.pem")).display()),
            format!("cluster.key_path={}", certs.join(format!("{name}.key")).display()),
            format!("model.path={}", self.spec.model.display()),
            format!("node.coordinators=[{}]", coordinators.join(",")),
            "transfer.datagram_bytes=65000".to_owned(),
            "transfer.gso=false".to_owned(),
            // Tests' prompts are short and their nodes idle: decode nodes would compute most of them. A test of that says so.
            "coordinator.local_prefill=never".to_owned(),
        ];
        match (0..self.doors.len()).find(|i| coordinator_name(*i) == name) {
            Some(i) => {
                let door = self.doors[i];
                settings.push(format!("coordinator.http_port={}", door.http));
                settings.push(format!("coordinator.listen=127.0.0.1:{}", door.control));
                settings.push(format!("admin.listen=127.0.0.1:{}", door.admin));
                settings.push(format!("admin.tokens=[\"{ADMIN_TOKEN}\"]"));
            }
            None => settings.push(format!("node.id={name}")),
        }
        if let Some(line) = self.lines.get(name) {
            settings.push(format!("node.listen=127.0.0.1:{}", line.port));
            settings.push(format!("node.advertise={}", line.own.address));
        }
        settings.extend(self.spec.settings.iter().cloned());
        let of_role = self
            .spec
            .role_settings
            .iter()
            .filter(|(role, _)| name.starts_with(role));
        settings.extend(of_role.map(|(_, setting)| setting.clone()));
        settings
            .into_iter()
            .flat_map(|setting| ["--set".to_owned(), setting])
            .collect()
    }

    /// Starts the coordinator.
    pub fn start_coordinator(&mut self) -> Result<()> {
        self.start_process("coordinator", "coordinator", &[])
    }

    /// Starts node `i` of a role (`prefill`, `decode` or `both`), for the first time or again.
    pub fn start_node(&mut self, role: &str, i: usize) -> Result<()> {
        let program = match role {
            "both" => "node".to_owned(),
            fixed => format!("{fixed}-node"),
        };
        self.start_process(&format!("{role}-{i}"), &program, &[])
    }

    /// Starts a process of this cluster with further settings.
    pub fn start_process(&mut self, name: &str, program: &str, settings: &[&str]) -> Result<()> {
        let mut arguments = self.arguments(name);
        arguments.extend(
            settings
                .iter()
                .flat_map(|setting| ["--set".to_owned(), (*setting).to_owned()]),
        );
        let process = Process::start(name, &binary(program)?, &arguments, self.dir.path())?;
        self.processes.retain(|p| p.name != name);
        self.processes.push(process);
        Ok(())
    }

    /// A process by name.
    pub fn process(&mut self, name: &str) -> Result<&mut Process> {
        self.processes
            .iter_mut()
            .find(|p| p.name == name)
            .with_context(|| format!("no process {name}"))
    }

    /// Ends a process at once (SIGKILL).
    pub fn kill(&mut self, name: &str) -> Result<()> {
        let process = self.process(name)?;
        process.signal(libc::SIGKILL);
        process.wait(Duration::from_secs(10))?;
        self.processes.retain(|p| p.name != name);
        Ok(())
    }

    /// Asks a process to end (SIGTERM) and waits for it.
    pub fn terminate(&mut self, name: &str, within: Duration) -> Result<ExitStatus> {
        let process = self.process(name)?;
        process.signal(libc::SIGTERM);
        let status = process.wait(within)?;
        self.processes.retain(|p| p.name != name);
        Ok(status)
    }

    /// Waits until `/health` says that the cluster can serve. Errors with the logs if a process ends before.
    pub async fn ready(&mut self) -> Result<()> {
        let deadline = Clock.now() + self.spec.ready_within;
        let client = reqwest::Client::new();
        let mut waiting: Vec<_> = (0..self.doors.len())
            .map(|i| format!("{}/health", self.url_of(i)))
            .collect();
        loop {
            for process in &mut self.processes {
                if let Some(status) = process.child.try_wait()? {
                    bail!("{} ended with {status}:\n{}", process.name, process.log());
                }
            }
            let Some(health) = waiting.last() else {
                return Ok(());
            };
            if let Ok(answer) = client.get(health).send().await
                && answer.status() == 200
            {
                waiting.pop();
                continue;
            }
            if Clock.now() >= deadline {
                bail!("not ready within {:?}:\n{}", self.spec.ready_within, self.logs());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The logs of all processes.
    pub fn logs(&self) -> String {
        self.processes
            .iter()
            .map(|p| format!("--- {}\n{}\n", p.name, p.log()))
            .collect()
    }

    /// The coordinator's metrics page.
    pub async fn metrics(&self) -> Result<String> {
        Ok(reqwest::get(format!("{}/metrics", self.url()))
            .await?
            .error_for_status()?
            .text()
            .await?)
    }
}

/// Name of a coordinator's process.
fn coordinator_name(i: usize) -> String {
    match i {
        0 => "coordinator".to_owned(),
        more => format!("coordinator-{more}"),
    }
}

/// The value of a series in a metrics page: the sample whose name is `name` and whose labels contain every one of `labels`
/// (as `key="value"`).
pub fn metric(page: &str, name: &str, labels: &[&str]) -> Option<f64> {
    page.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        let series_name = series.split('{').next()?;
        (series_name == name && labels.iter().all(|label| series.contains(label))).then(|| value.parse().ok())?
    })
}

/// The sum over all series of that name.
pub fn metric_sum(page: &str, name: &str) -> f64 {
    let series = page.lines().filter(|line| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
    });
    series
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
        .sum()
}
