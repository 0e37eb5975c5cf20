//! CPU time of threads and of the machine: what wall-clock times cannot say while other programs run.

use std::time::Duration;

use anyhow::{Context, Result};

/// CPU time of the calling thread so far.
pub fn of_this_thread() -> Duration {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// CPU time of all threads of this process so far.
pub fn of_this_process() -> Duration {
    read(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    #[allow(unsafe_code, reason = "std has no clock of CPU time")]
    // SAFETY: the pointer is to a timespec of our own. It cannot fail for these two clocks.
    let _ok = unsafe { libc::clock_gettime(clock, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// CPU time that all processes together have had since the machine started, in seconds, as the kernel counts it.
pub fn of_the_machine() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("/proc/stat is empty")?;
    // user nice system idle iowait irq softirq steal: all but idle and iowait, in hundredths of a second.
    let ticks: Vec<f64> = line.split_whitespace().skip(1).map_while(|n| n.parse().ok()).collect();
    let busy = [0, 1, 2, 5, 6].iter().filter_map(|&i| ticks.get(i)).sum::<f64>();
    Ok(busy / 100.0)
}

/// CPU time of the child processes that have ended and were waited for.
pub fn of_children() -> Duration {
    // SAFETY: all fields are numbers, for which zero is a value.
    #[allow(unsafe_code, reason = "std has no rusage")]
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let _ok = libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let time = |t: libc::timeval| Duration::new(t.tv_sec.unsigned_abs(), 1_000 * t.tv_usec.unsigned_abs() as u32);
    time(usage.ru_utime) + time(usage.ru_stime)
}
