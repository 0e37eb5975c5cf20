//! The fuzzers, for a minute each (`BATON_FUZZ_SECONDS` says otherwise), and whether they find what is planted.

use std::path::Path;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};
use integration_tests::files::{binary, root};

const TARGETS: [&str; 6] = ["http", "control", "kv", "gguf", "safetensors", "config"];
/// So many run at once.
const AT_ONCE: usize = 3;

#[allow(
    clippy::disallowed_methods,
    reason = "tests are told by the environment how long to fuzz"
)]
fn seconds() -> String {
    std::env::var("BATON_FUZZ_SECONDS").unwrap_or_else(|_| "60".to_owned())
}

/// Runs the fuzzer; whether it was content, and what it said.
fn fuzz(target: &str, findings: &Path, more: &[&str]) -> Result<(bool, String)> {
    let output = Command::new(binary("fuzz")?)
        .arg(target)
        .arg("--findings")
        .arg(findings)
        .args(more)
        .output()?;
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    ensure!(
        matches!(output.status.code(), Some(0 | 1)),
        "{target}: {}: {said}",
        output.status
    );
    Ok((output.status.success(), said))
}

#[test]
fn nothing_is_found() -> Result<()> {
    let findings = root().join("target/fuzz-findings");
    let seconds = seconds();
    for some in TARGETS.chunks(AT_ONCE) {
        let ended: Vec<Result<(bool, String)>> = thread::scope(|scope| {
            let running: Vec<_> = some
                .iter()
                .map(|target| scope.spawn(|| fuzz(target, &findings, &["--seconds", &seconds])))
                .collect();
            running
                .into_iter()
                .map(|thread| {
                    thread
                        .join()
                        .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread failed")))
                })
                .collect()
        });
        for (target, ended) in some.iter().zip(ended) {
            let (content, said) = ended?;
            eprint!("{said}");
            ensure!(content, "{target}: {said}");
            let executions: u64 = said
                .split_once(": ")
                .and_then(|(_, rest)| rest.split_once(" executions"))
                .and_then(|(count, _)| count.parse().ok())
                .with_context(|| format!("no count in {said}"))?;
            ensure!(executions > 500, "{target} hardly ran: {said}");
        }
    }
    Ok(())
}

#[test]
fn what_is_planted_is_found_and_can_be_repeated() -> Result<()> {
    let dir = tempfile::tempdir()?;
    // By mutation: a panic, a broken promise, too much memory.
    let (content, said) = fuzz("planted", dir.path(), &["--seconds", "5", "--seed", "1"])?;
    ensure!(!content, "nothing found: {said}");
    for what in ["panic: ", "planted promise", "bytes of memory at once"] {
        ensure!(said.contains(what), "not found: {what}\n{said}");
    }
    let line = said
        .lines()
        .find(|line| line.contains("panic: "))
        .context("a finding")?;
    let (_, input) = line.split_once("input in ").context("its input")?;
    let (content, again) = fuzz("planted", dir.path(), &["--input", input])?;
    ensure!(!content && again.contains("FINDING: panic"), "{again}");

    // What the process does not survive is found from outside.
    for (input, what, more) in [
        ("k 1000000", "the process ended with", "60"),
        ("h 1000000", "no end within 2 s", "2"),
    ] {
        let corpus = dir.path().join("corpus");
        std::fs::create_dir_all(&corpus)?;
        std::fs::write(corpus.join("input"), input)?;
        let corpus = corpus.to_str().context("UTF-8")?;
        let (content, said) = fuzz(
            "planted",
            dir.path(),
            &["--seconds", "5", "--corpus", corpus, "--hang-seconds", more],
        )?;
        ensure!(!content && said.contains(what), "{input}: {said}");
        let (_, path) = said.trim_end().split_once("input in ").context("its input")?;
        ensure!(std::fs::read_to_string(path)? == input, "{said}");
    }
    Ok(())
}
