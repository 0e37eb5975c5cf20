//! Runs seeds, or one seed aloud.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Parser;
use runtime::clock::Clock;
use simulator::scenario::Size;
use simulator::world::Tally;

/// The cluster on a virtual clock: runs seeds until one fails, or all have passed.
#[derive(Debug, Parser)]
struct Arguments {
    /// The seeds, as FIRST..END.
    #[arg(long, default_value = "0..1000", value_parser = range)]
    seeds: Range<u64>,
    /// One seed alone.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Print every event.
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Seeds that run at once.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Prefill nodes.
    #[arg(long, default_value_t = Size::default().prefill)]
    prefill: usize,
    /// Decode nodes.
    #[arg(long, default_value_t = Size::default().decode)]
    decode: usize,
    /// Calls of clients in each seed.
    #[arg(long, default_value_t = Size::default().calls)]
    calls: usize,
    /// Trials of late frames after an abort instead: small clusters, in each of which frames came too late.
    #[arg(long)]
    late_frames: bool,
    /// Failing seeds after which no further one is begun.
    #[arg(long, default_value_t = 10)]
    failures: usize,
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let (first, end) = text
        .split_once("..")
        .ok_or("seeds are given as FIRST..END, for example 0..1000")?;
    let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is not a number"));
    Ok(number(first)?..number(end)?)
}

/// What all threads know.
struct Shared {
    next: AtomicU64,
    end: u64,
    total: Mutex<Tally>,
    failed: Mutex<Vec<(u64, String)>>,
    /// Seeds in which frames came after the end of their handoff.
    with_late: AtomicU64,
}

#[allow(
    clippy::print_stdout,
    reason = "a command-line program reports on its standard output"
)]
fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let size = Size {
        prefill: arguments.prefill,
        decode: arguments.decode,
        calls: arguments.calls,
    };
    let seeds = match arguments.seed {
        Some(seed) => seed..seed + 1,
        None => arguments.seeds.clone(),
    };
    let started = Clock.now();
    let shared = Shared {
        next: AtomicU64::new(seeds.start),
        end: seeds.end,
        total: Mutex::default(),
        failed: Mutex::default(),
        with_late: AtomicU64::new(0),
    };
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.max(1) {
            scope.spawn(|| work(&shared, size, &arguments));
        }
    });
    let took = Clock.now().saturating_duration_since(started).as_secs_f64();
    let failed = lock(&shared.failed).clone();
    let total = *lock(&shared.total);
    let count = shared
        .next
        .load(Ordering::Relaxed)
        .min(seeds.end)
        .saturating_sub(seeds.start);
    println!("{total:#?}");
    println!(
        "{count} seeds, {} failed, {} with late frames; {:.1} simulated hours in {took:.1} s; {:.0} seeds/s",
        failed.len(),
        shared.with_late.load(Ordering::Relaxed),
        total.virtual_us as f64 / 3.6e9,
        count as f64 / took,
    );
    for (seed, problem) in &failed {
        println!("seed {seed}: {problem}");
    }
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn work(shared: &Shared, size: Size, arguments: &Arguments) {
    loop {
        let seed = shared.next.fetch_add(1, Ordering::Relaxed);
        if seed >= shared.end || lock(&shared.failed).len() >= arguments.failures {
            return;
        }
        let ran = catch_unwind(AssertUnwindSafe(|| {
            if arguments.late_frames {
                simulator::run_late_frames(seed, arguments.trace)
            } else {
                simulator::run(seed, size, arguments.trace)
            }
        }));
        match ran {
            Ok(Ok(outcome)) => {
                if outcome.tally.frames_late > 0 {
                    shared.with_late.fetch_add(1, Ordering::Relaxed);
                }
                lock(&shared.total).add(&outcome.tally);
            }
            Ok(Err(error)) => lock(&shared.failed).push((seed, format!("{error:#}"))),
            Err(panic) => {
                let words = panic.downcast_ref::<String>().cloned();
                let words = words.or_else(|| panic.downcast_ref::<&str>().map(|&words| words.to_owned()));
                let problem = format!("panic: {}", words.unwrap_or_default());
                lock(&shared.failed).push((seed, problem));
            }
        }
    }
}
