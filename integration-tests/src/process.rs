//! One process of a cluster: started, watched, signalled, and ended when it is dropped.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use runtime::clock::Clock;

/// One process of a cluster.
#[derive(Debug)]
pub struct Process {
    /// `coordinator`, `prefill-0`, `decode-0`, ...
    pub name: String,
    pub(crate) child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a program whose output goes to `name`.log in `dir`.
    pub fn start(name: &str, binary: &Path, arguments: &[String], dir: &Path) -> Result<Self> {
        let log = dir.join(format!("{name}.log"));
        let output = File::options().create(true).append(true).open(&log)?;
        let child = Command::new(binary)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log,
        })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to this process.
    pub fn signal(&self, signal: i32) {
        #[allow(unsafe_code, reason = "kill(2) has no safe wrapper in std")]
        // SAFETY: plain system call; the child has not been waited for, so the id is still its own.
        let sent = unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
        assert_eq!(sent, 0, "cannot signal {}", self.name);
    }

    /// Waits for the process's end.
    pub fn wait(&mut self, within: Duration) -> Result<ExitStatus> {
        let deadline = Clock.now() + within;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Clock.now() >= deadline {
                bail!("{} did not end within {within:?}", self.name);
            }
            pause(Duration::from_millis(5));
        }
    }

    /// What the process has written so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Resident memory in bytes.
    pub fn resident_bytes(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status
            .lines()
            .find(|l| l.starts_with("VmRSS:"))
            .context("no VmRSS line")?;
        let kib: u64 = line.split_whitespace().nth(1).context("VmRSS has no value")?.parse()?;
        Ok(kib << 10)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it has ended already.
        if self.child.kill().is_ok() {
            let _status = self.child.wait();
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "a test thread that polls a process may sleep")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Runs a program to its end; the error holds what it wrote.
pub fn run(binary: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new(binary).args(arguments).stdin(Stdio::null()).output()?;
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    if !output.status.success() {
        bail!(
            "{} {arguments:?} ended with {}: {text}",
            binary.display(),
            output.status
        );
    }
    Ok(text)
}
