//! Watches the worker: an input that kills it, or that it does not come back from, is a finding.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use runtime::clock::Clock;

use crate::Args;
use crate::corpus::write;

/// Address space of the worker, in KiB: whoever asks for more gets nothing, and is ended.
const ADDRESS_SPACE_KIB: u64 = 6 << 20;
/// Exit status of a worker that has found something and told it.
const TOLD: i32 = 1;

/// The worker's last input: which it is, and its bytes.
fn last(current: &Path) -> Option<(u64, Vec<u8>)> {
    let bytes = std::fs::read(current).ok()?;
    let count = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let length = u32::from_le_bytes(bytes.get(8..12)?.try_into().ok()?);
    Some((count, bytes.get(12..12 + length as usize)?.to_vec()))
}

/// Fuzzes in a process of its own; false if something was found.
#[allow(clippy::print_stdout, reason = "the answer of the program")]
pub(crate) fn run(args: &Args) -> Result<bool> {
    let dir = tempfile::tempdir()?;
    let current = dir.path().join("current");
    let seed = args.seed.unwrap_or_else(|| Clock.unix_seconds());
    let mut worker = Command::new("sh")
        .args(["-c", &format!("ulimit -v {ADDRESS_SPACE_KIB}; exec \"$0\" \"$@\"")])
        .arg(std::env::current_exe()?)
        .arg(&args.target)
        .args(["--seconds", &args.seconds.to_string(), "--seed", &seed.to_string()])
        .arg("--findings")
        .arg(&args.findings)
        .args(args.keep.then_some("--keep"))
        .args(
            args.corpus
                .iter()
                .flat_map(|corpus| [OsStr::new("--corpus"), corpus.as_os_str()]),
        )
        .arg("--current")
        .arg(&current)
        .stdin(Stdio::null())
        .spawn()
        .context("cannot start the worker")?;
    let (mut seen, mut since) = (0, Clock.now());
    let hang = Duration::from_secs(args.hang_seconds);
    loop {
        if let Some(status) = worker.try_wait()? {
            return told(args, &current, status);
        }
        pause();
        let count = last(&current).map_or(0, |(count, _)| count);
        if count != seen {
            (seen, since) = (count, Clock.now());
        } else if Clock.now() - since > hang {
            worker.kill()?;
            worker.wait()?;
            return found(args, &current, &format!("no end within {} s", args.hang_seconds));
        }
    }
}

fn told(args: &Args, current: &Path, status: ExitStatus) -> Result<bool> {
    match status.code() {
        Some(0) => Ok(true),
        Some(TOLD) => Ok(false),
        Some(2) => anyhow::bail!("the worker could not do its work"),
        _ => found(args, current, &format!("the process ended with {status}")),
    }
}

#[allow(clippy::print_stdout, reason = "the answer of the program")]
fn found(args: &Args, current: &Path, what: &str) -> Result<bool> {
    let (count, input) = last(current).context("the worker left no input")?;
    let path = write(&args.findings, &format!("{}-{count}", args.target), &input)?;
    println!("FINDING in {}: {what}; input in {}", args.target, path.display());
    Ok(false)
}

#[allow(clippy::disallowed_methods, reason = "a program that watches another one may sleep")]
fn pause() {
    std::thread::sleep(Duration::from_millis(100));
}
