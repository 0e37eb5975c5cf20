//! Scripts with the clients that others have written. They run in the virtual environment that scripts/test makes.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::files::root;

/// A script that runs, or has run. Dropped, it is ended.
#[derive(Debug)]
pub struct Script {
    name: String,
    child: Child,
    output: BufReader<std::process::ChildStdout>,
    seen: String,
}

/// The interpreter with the client packages. Errors, saying what to do, if there is none.
#[allow(
    clippy::disallowed_methods,
    reason = "tests are told by the environment where the interpreter is"
)]
fn interpreter() -> Result<PathBuf> {
    let default = root().join(".baton/venv-clients/bin/python");
    let path = std::env::var_os("BATON_TEST_PYTHON").map_or(default, PathBuf::from);
    ensure!(
        path.is_file(),
        "{} does not exist: run scripts/test --only clients, which makes it",
        path.display()
    );
    Ok(path)
}

impl Script {
    /// Starts a script of integration-tests/clients. `reference` becomes a file in `dir` that the script reads.
    pub fn start(name: &str, dir: &std::path::Path, reference: &Value) -> Result<Self> {
        let path = dir.join(format!("{name}.reference.json"));
        std::fs::write(&path, reference.to_string())?;
        let interpreter = interpreter()?;
        let mut child = Command::new(&interpreter)
            .args(["-B", "-W", "ignore"])
            .arg(root().join("integration-tests/clients").join(name))
            .arg(&path)
            .env("PYTHONIOENCODING", "utf-8")
            .env("NO_PROXY", "127.0.0.1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .with_context(|| format!("cannot start {}", interpreter.display()))?;
        let output = child.stdout.take().context("the script has no output")?;
        Ok(Self {
            name: name.to_owned(),
            child,
            output: BufReader::new(output),
            seen: String::new(),
        })
    }

    /// Waits until the script writes this line.
    pub fn wait_for(&mut self, wanted: &str) -> Result<()> {
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line)? == 0 {
                bail!("{} ended without {wanted:?}:\n{}", self.name, self.seen);
            }
            self.seen.push_str(&line);
            if line.trim_end() == wanted {
                return Ok(());
            }
        }
    }

    /// Waits for the script's end; all of its cases must have passed. Returns how many there were.
    pub fn finish(mut self) -> Result<u32> {
        std::io::Read::read_to_string(&mut self.output, &mut self.seen)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "{} ended with {status}:\n{}", self.name, self.seen);
        let last = self.seen.lines().last().unwrap_or_default();
        let passed = last
            .strip_suffix(" passed, 0 failed")
            .and_then(|count| count.parse().ok());
        passed.with_context(|| format!("{} does not say how many cases passed:\n{}", self.name, self.seen))
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        // An error means that it has ended already.
        if self.child.kill().is_ok() {
            let _status = self.child.wait();
        }
    }
}
