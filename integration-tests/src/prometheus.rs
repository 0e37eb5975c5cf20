//! A real Prometheus and its promtool, for tests: those on the PATH, or in the folder that `BATON_TEST_PROMETHEUS` names.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use reqwest::{Client, Url};
use runtime::clock::Clock;
use serde_json::Value;
use tempfile::TempDir;

use crate::ports;

/// Prometheus is up within this time.
const UP_WITHIN: Duration = Duration::from_secs(30);

/// Where the two programs are. `None` if they are not here: the caller skips, loudly.
#[derive(Clone, Debug)]
pub struct Programs {
    prometheus: PathBuf,
    promtool: PathBuf,
}

impl Programs {
    /// Looks for them.
    #[allow(
        clippy::disallowed_methods,
        reason = "tests are told by the environment where Prometheus is"
    )]
    pub fn find() -> Option<Self> {
        let named = std::env::var("BATON_TEST_PROMETHEUS").ok();
        let path = std::env::var("PATH").unwrap_or_default();
        let folders = named.iter().map(String::as_str).chain(path.split(':'));
        let found = folders.map(Path::new).find_map(|folder| {
            let (prometheus, promtool) = (folder.join("prometheus"), folder.join("promtool"));
            (prometheus.is_file() && promtool.is_file()).then_some(Self { prometheus, promtool })
        });
        if found.is_none() {
            eprintln!(
                "SKIPPED: no Prometheus here. Install the package prometheus, or set BATON_TEST_PROMETHEUS to the folder of \
                 prometheus and promtool."
            );
        }
        found
    }

    /// Runs promtool in `folder`; what it says, if it is content.
    ///
    /// # Errors
    /// It is not.
    pub fn promtool(&self, folder: &Path, arguments: &[&str], input: Option<&Path>) -> Result<String> {
        let input = match input {
            Some(path) => Stdio::from(File::open(path)?),
            None => Stdio::null(),
        };
        let mut command = Command::new(&self.promtool);
        let output = command.args(arguments).current_dir(folder).stdin(input).output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "promtool {arguments:?}: {}\n{said}",
            output.status
        );
        Ok(said)
    }
}

/// A running Prometheus, which ends when it is dropped.
#[derive(Debug)]
pub struct Prometheus {
    child: Child,
    port: u16,
    client: Client,
    /// Its data and its log.
    dir: TempDir,
}

impl Prometheus {
    /// Starts one that does what the file `config` says, and waits until it answers.
    ///
    /// # Errors
    /// It does not come up.
    pub async fn start(programs: &Programs, config: &Path) -> Result<Self> {
        let dir = TempDir::new()?;
        let port = ports::free_tcp()?;
        let log = File::create(dir.path().join("log"))?;
        let child = Command::new(&programs.prometheus)
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start Prometheus")?;
        let mut started = Self {
            child,
            port,
            client: Client::new(),
            dir,
        };
        let deadline = Clock.now() + UP_WITHIN;
        loop {
            let answer = started.client.get(started.url("/-/ready")).send().await;
            if answer.is_ok_and(|answer| answer.status() == 200) {
                return Ok(started);
            }
            if let Some(status) = started.child.try_wait()? {
                bail!("Prometheus ended with {status}:\n{}", started.log());
            }
            ensure!(Clock.now() < deadline, "Prometheus is not up:\n{}", started.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// The values of an expression now: labels and numbers.
    ///
    /// # Errors
    /// Prometheus does not understand it.
    pub async fn query(&self, expression: &str) -> Result<Vec<(Value, f64)>> {
        let url = Url::parse_with_params(&self.url("/api/v1/query"), [("query", expression)])?;
        let answer: Value = self.client.get(url).send().await?.json().await?;
        ensure!(answer["status"] == "success", "{expression}: {answer}");
        let results = answer["data"]["result"].as_array().context("no result")?;
        let value = |result: &Value| -> Result<(Value, f64)> {
            let number = result["value"][1].as_str().context("no value")?.parse()?;
            Ok((result["metric"].clone(), number))
        };
        results.iter().map(value).collect()
    }

    /// Waits until an expression has a value that `wanted` likes.
    ///
    /// # Errors
    /// None comes.
    pub async fn until(&self, expression: &str, wanted: impl Fn(&[(Value, f64)]) -> bool) -> Result<()> {
        let deadline = Clock.now() + UP_WITHIN;
        loop {
            let values = self.query(expression).await?;
            if wanted(&values) {
                return Ok(());
            }
            ensure!(
                Clock.now() < deadline,
                "{expression} is still {values:?}\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // An error means that it has ended already.
        if self.child.kill().is_ok() {
            let _status = self.child.wait();
        }
    }
}
