//! Runs inputs, one after the other, and looks at what they lead to.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use integration_tests::random::Random;
use runtime::clock::Clock;

use crate::Args;
use crate::corpus::{Corpus, write};
use crate::mutate::mutate;
use crate::targets::Target;

/// Most memory that one input may take at once, in bytes: the largest message is 8 MiB, and inputs have at most 16 KiB.
const MAX_PEAK: u64 = 48 << 20;
/// Most findings of a run.
const MOST_FINDINGS: usize = 10;
/// Time is looked at once in so many inputs.
const BETWEEN_LOOKS: u64 = 64;

/// Where the last panic was, and what it said.
static PANIC: Mutex<String> = Mutex::new(String::new());

/// What an input led to.
enum End {
    Outcome(String),
    Finding(String),
}

fn quiet() {
    std::panic::set_hook(Box::new(|info| {
        let mut place = PANIC.lock().unwrap_or_else(PoisonError::into_inner);
        *place = info.to_string().replace('\n', " ");
    }));
}

fn attempt(target: &dyn Target, input: &[u8]) -> End {
    let mut end = None;
    let memory = allocation_counter::measure(|| {
        end = Some(catch_unwind(AssertUnwindSafe(|| target.run(input))));
    });
    let said = || PANIC.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match end {
        Some(Ok(Ok(_))) if memory.bytes_max > MAX_PEAK => End::Finding(format!(
            "{} bytes of memory at once for {} bytes of input",
            memory.bytes_max,
            input.len()
        )),
        Some(Ok(Ok(outcome))) => End::Outcome(outcome),
        Some(Ok(Err(broken))) => End::Finding(broken),
        Some(Err(_)) | None => End::Finding(format!("panic: {}", said())),
    }
}

/// One input, whose end is told.
#[allow(clippy::print_stdout, reason = "the answer of the program")]
pub(crate) fn single(target: &dyn Target, input: &[u8]) -> Result<bool> {
    quiet();
    let (good, said) = match attempt(target, input) {
        End::Outcome(outcome) => (true, outcome),
        End::Finding(finding) => (false, format!("FINDING: {finding}")),
    };
    println!("{said}");
    Ok(good)
}

/// Fuzzes; false if something was found.
#[allow(clippy::print_stdout, reason = "the answer of the program")]
pub(crate) fn run(target: &dyn Target, args: &Args, current: &Path) -> Result<bool> {
    quiet();
    let seed = args.seed.unwrap_or_default();
    let mut random = Random::new(seed);
    let mut corpus = Corpus::load(target, args)?;
    let current = File::options().write(true).create(true).truncate(true).open(current)?;
    let (start, mut executions, mut findings) = (Clock.now(), 0_u64, Vec::new());
    let mut slowest = Duration::ZERO;
    // The corpus first, as it is.
    let mut waiting: Vec<Vec<u8>> = corpus.inputs.iter().rev().cloned().collect();
    while !executions.is_multiple_of(BETWEEN_LOOKS) || !waiting.is_empty() || Clock.now() - start < args.time() {
        let input = waiting.pop().unwrap_or_else(|| {
            let mut input = mutate(&mut random, &corpus.inputs, &corpus.words);
            if random.below(2) == 0 {
                target.repair(&mut input);
            }
            input
        });
        executions += 1;
        leave(&current, executions, &input)?;
        let before = Clock.now();
        let end = attempt(target, &input);
        slowest = slowest.max(Clock.now() - before);
        match end {
            End::Outcome(outcome) => {
                corpus.learn(&input, &outcome)?;
            }
            End::Finding(finding) => {
                // The same place many times is one finding.
                let place = crate::corpus::shape(&finding);
                if !findings.contains(&place) {
                    let path = write(&args.findings, &format!("{}-{executions}", target.name()), &input)?;
                    println!("FINDING in {}: {finding}; input in {}", target.name(), path.display());
                    findings.push(place);
                }
                if findings.len() >= MOST_FINDINGS {
                    break;
                }
            }
        }
    }
    println!(
        "{}: {executions} executions in {:.0} s, {} outcomes, {} inputs, slowest {:.1} ms, {} findings (seed {seed})",
        target.name(),
        (Clock.now() - start).as_secs_f64(),
        corpus.outcomes(),
        corpus.inputs.len(),
        slowest.as_secs_f64() * 1e3,
        findings.len()
    );
    Ok(findings.is_empty())
}

/// Leaves the input where the supervisor finds it if this process does not survive it: count, length, bytes.
fn leave(current: &File, count: u64, input: &[u8]) -> Result<()> {
    let mut head = count.to_le_bytes().to_vec();
    head.extend_from_slice(&(input.len() as u32).to_le_bytes());
    head.extend_from_slice(input);
    Ok(current.write_all_at(&head, 0)?)
}
