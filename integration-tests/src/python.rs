//! Scripts with the clients that others have written. They run in the environments that scripts/test makes: one for each file
//! of integration-tests/clients/environments, and one for Node.

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

/// The environment of Node's packages.
const NODE: &str = "node";

/// The folder of an environment. Errors, saying what to do, if it has not been made.
#[allow(
    clippy::disallowed_methods,
    reason = "tests are told by the environment where the clients are"
)]
fn folder(environment: &str) -> Result<PathBuf> {
    let default = root().join(".baton/clients");
    let path = std::env::var_os("BATON_TEST_CLIENTS")
        .map_or(default, PathBuf::from)
        .join(environment);
    ensure!(
        path.is_dir(),
        "{} does not exist: run scripts/test --only clients, which makes it",
        path.display()
    );
    Ok(path)
}

/// How a script of an environment is run: program, what comes before the script, what comes after the reference.
fn runner(environment: &str) -> Result<(PathBuf, &'static [&'static str], Option<PathBuf>)> {
    let folder = folder(environment)?;
    Ok(if environment == NODE {
        (PathBuf::from("node"), &[], Some(folder))
    } else {
        (folder.join("bin/python"), &["-B", "-W", "ignore"], None)
    })
}

impl Script {
    /// Starts a script of integration-tests/clients in one of the environments. `reference` becomes a file in `dir` that the
    /// script reads.
    pub fn start(environment: &str, name: &str, dir: &std::path::Path, reference: &Value) -> Result<Self> {
        let path = dir.join(format!("{name}.reference.json"));
        std::fs::write(&path, reference.to_string())?;
        let (program, before, after) = runner(environment)?;
        let mut child = Command::new(&program)
            .args(before)
            .arg(root().join("integration-tests/clients").join(name))
            .arg(&path)
            .args(after)
            .env("PYTHONIOENCODING", "utf-8")
            .env("NO_PROXY", "127.0.0.1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
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
