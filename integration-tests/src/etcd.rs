//! A real etcd server, for tests. It is the one on the PATH, or the one that the variable `BATON_TEST_ETCD` names.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use runtime::clock::Clock;
use tempfile::TempDir;

use crate::ports;

/// etcd is up within this time.
const UP_WITHIN: Duration = Duration::from_secs(20);

/// Where etcd is. `None` if there is none: the caller skips, loudly.
#[allow(
    clippy::disallowed_methods,
    reason = "tests are told by the environment where etcd is"
)]
pub fn program() -> Option<PathBuf> {
    let named = std::env::var("BATON_TEST_ETCD").ok().map(PathBuf::from);
    let path = std::env::var("PATH").unwrap_or_default();
    let found = named.or_else(|| {
        let folders = path.split(':').map(|folder| Path::new(folder).join("etcd"));
        folders.into_iter().find(|program| program.is_file())
    });
    if found.is_none() {
        eprintln!("SKIPPED: no etcd here. Install the package etcd-server, or set BATON_TEST_ETCD to the program.");
    }
    found
}

/// A running server with a data directory of its own.
#[derive(Debug)]
pub struct EtcdServer {
    program: PathBuf,
    dir: TempDir,
    port: u16,
    peer_port: u16,
    /// Further arguments; `https` if they make it serve TLS.
    arguments: Vec<String>,
    scheme: &'static str,
    child: Option<Child>,
}

impl EtcdServer {
    /// A server on loopback, not started yet.
    pub fn new(program: PathBuf, scheme: &'static str, arguments: &[&str]) -> Result<Self> {
        Ok(Self {
            program,
            dir: TempDir::new()?,
            port: ports::free_tcp()?,
            peer_port: ports::free_tcp()?,
            arguments: arguments.iter().map(|word| (*word).to_owned()).collect(),
            scheme,
            child: None,
        })
    }

    /// A server on loopback without TLS, started.
    pub fn start(program: PathBuf) -> Result<Self> {
        let mut server = Self::new(program, "http", &[])?;
        server.up()?;
        Ok(server)
    }

    /// `http://host:port`, or `https`.
    pub fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.port)
    }

    /// Starts it, with the data it had, and waits until it listens.
    pub fn up(&mut self) -> Result<()> {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.path().join("log"))?;
        let peer = format!("http://127.0.0.1:{}", self.peer_port);
        let child = Command::new(&self.program)
            .args(["--name", "test", "--logger", "zap", "--data-dir"])
            .arg(self.dir.path().join("data"))
            .args([
                "--listen-client-urls",
                &self.url(),
                "--advertise-client-urls",
                &self.url(),
            ])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("test={peer}")])
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        self.child = Some(child);
        let deadline = Clock.now() + UP_WITHIN;
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if Clock.now() > deadline {
                bail!("etcd does not listen:\n{}", self.log());
            }
            pause();
        }
        Ok(())
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) -> Result<()> {
        let child = self.child.as_ref().context("etcd does not run")?;
        #[allow(unsafe_code, reason = "kill(2) has no safe wrapper in std")]
        // SAFETY: plain system call; the child has not been waited for, so the id is still its own.
        let sent = unsafe { libc::kill(child.id() as libc::pid_t, signal) };
        anyhow::ensure!(sent == 0, "cannot signal etcd");
        Ok(())
    }

    /// Ends it at once (SIGKILL).
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Forgets everything it has stored; while it does not run.
    pub fn wipe(&self) -> Result<()> {
        Ok(std::fs::remove_dir_all(self.dir.path().join("data"))?)
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("etcd was not ended: {error}");
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "a test thread that polls a process may sleep")]
fn pause() {
    std::thread::sleep(Duration::from_millis(20));
}
