//! Threads that share the work of one call after another.
//!
//! A step of a small model has some hundred calls of a few microseconds each. Waking a sleeping thread costs tens of
//! microseconds, so helpers spin for a while after each call before they go to sleep, and the caller spins until the
//! helpers are done. A call costs no allocation and no lock.
#![allow(
    unsafe_code,
    reason = "helpers that live longer than a call borrow the call's closure for its duration"
)]

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

use super::KernelError;
use super::affinity::pin_current_thread;

/// Turns of the spin loop before a helper sleeps: about 100 microseconds on current CPUs.
const SPINS: usize = 4_000;
/// Turns before the caller lets another thread of the system have its core.
const SPINS_BEFORE_YIELD: usize = 10_000;

/// The work of a call: the share of a thread is found by its index.
type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// What the threads share.
struct Shared {
    /// Counts calls; a helper that sees another number than its last has work.
    calls: AtomicUsize,
    /// The call's work. Written by the caller while no helper is at work.
    task: UnsafeCell<Option<&'static Task<'static>>>,
    /// Helpers that are not done with the call.
    busy: AtomicUsize,
    /// A helper's share panicked.
    panicked: AtomicBool,
    /// The helpers are to end.
    closing: AtomicBool,
    /// For every helper: it sleeps, or is about to.
    asleep: Vec<AtomicBool>,
}

// SAFETY: `task` is written only by the caller between calls (`busy` is 0, and `Team::run` takes `&mut`), and read by
// helpers only after they have seen `calls` change, which the caller does after writing.
unsafe impl Sync for Shared {}

/// `threads - 1` helpers and the caller.
pub(super) struct Team {
    shared: Arc<Shared>,
    helpers: Vec<(JoinHandle<()>, Thread)>,
    /// A call is under way.
    running: AtomicBool,
}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Team").field("helpers", &self.helpers.len()).finish()
    }
}

impl Team {
    /// Starts `helpers` threads; helper i is pinned to `cores[i]` where there is one.
    ///
    /// # Errors
    /// If the system gives no thread or refuses a core.
    pub(super) fn new(helpers: usize, cores: &[usize]) -> Result<Self, KernelError> {
        let fail = |reason: String| KernelError::Threads {
            threads: helpers + 1,
            reason,
        };
        let shared = Arc::new(Shared {
            calls: AtomicUsize::new(0),
            task: UnsafeCell::new(None),
            busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut team = Self {
            shared: Arc::clone(&shared),
            helpers: Vec::with_capacity(helpers),
            running: AtomicBool::new(false),
        };
        for i in 0..helpers {
            let (shared, core) = (Arc::clone(&shared), cores.get(i).copied());
            let (pinned, is_pinned) = std::sync::mpsc::sync_channel(1);
            let handle = std::thread::Builder::new()
                .name(format!("kernels-{}", i + 1))
                .spawn(move || {
                    let result = core.map_or(Ok(()), pin_current_thread);
                    let usable = result.is_ok();
                    // Nobody listens only if the start has failed meanwhile.
                    let _gone = pinned.send(result);
                    if usable {
                        shared.help(i);
                    }
                })
                .map_err(|e| fail(e.to_string()))?;
            let thread = handle.thread().clone();
            team.helpers.push((handle, thread));
            is_pinned.recv().map_err(|e| fail(e.to_string()))??;
        }
        Ok(team)
    }

    /// Calls `task(i)` for i in 0..=helpers, each on its own thread, the first on the caller's; returns when all are
    /// done. Calls from several threads at once run one share after the other on their own thread.
    ///
    /// # Panics
    /// If a share panics, after all have ended.
    pub(super) fn run(&self, task: &Task<'_>) {
        if self.running.swap(true, Ordering::Acquire) {
            (0..=self.helpers.len()).for_each(task);
            return;
        }
        let shared = &*self.shared;
        // SAFETY: the lifetime is hidden from the helpers, which use the reference only until they have counted `busy`
        // down; this function does not return, nor unwind, before that. `running` keeps other callers out, and no
        // helper reads while `busy` is 0.
        unsafe {
            let task = std::mem::transmute::<&Task<'_>, &'static Task<'static>>(task);
            *shared.task.get() = Some(task);
        }
        shared.busy.store(self.helpers.len(), Ordering::Relaxed);
        // Sequentially consistent, as the helpers' announcement of sleep is: one of the two sees the other.
        shared.calls.fetch_add(1, Ordering::SeqCst);
        for (asleep, (_, thread)) in shared.asleep.iter().zip(&self.helpers) {
            if asleep.load(Ordering::SeqCst) && asleep.swap(false, Ordering::SeqCst) {
                thread.unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| task(0)));
        let mut spins = 0;
        while shared.busy.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS_BEFORE_YIELD {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        let helper_panicked = shared.panicked.swap(false, Ordering::Relaxed);
        self.running.store(false, Ordering::Release);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!helper_panicked, "a kernel panicked on a helper thread");
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.shared.calls.fetch_add(1, Ordering::SeqCst);
        for (handle, thread) in self.helpers.drain(..) {
            thread.unpark();
            // A helper catches the panics of its shares; there is nothing to report.
            let _ended = handle.join();
        }
    }
}

impl Shared {
    /// The life of helper `index`.
    fn help(&self, index: usize) {
        let mut seen = 0;
        loop {
            seen = self.next_call(index, seen);
            if self.closing.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: `calls` has changed, so the caller has written the task, and it waits for `busy` before it writes
            // again or lets the closure go.
            if let Some(task) = unsafe { *self.task.get() }
                && catch_unwind(AssertUnwindSafe(|| task(index + 1))).is_err()
            {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits until `calls` differs from `seen`: spins, then sleeps.
    fn next_call(&self, index: usize, seen: usize) -> usize {
        for _ in 0..SPINS {
            let calls = self.calls.load(Ordering::Acquire);
            if calls != seen {
                return calls;
            }
            std::hint::spin_loop();
        }
        loop {
            self.asleep[index].store(true, Ordering::SeqCst);
            let calls = self.calls.load(Ordering::SeqCst);
            if calls != seen {
                self.asleep[index].store(false, Ordering::SeqCst);
                return calls;
            }
            std::thread::park();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "helpers fall asleep only while time passes")]
    fn every_share_is_done_once_in_every_call() {
        for helpers in [0, 1, 3] {
            let team = Team::new(helpers, &[]).unwrap();
            let counts: Vec<AtomicUsize> = (0..=helpers).map(|_| AtomicUsize::new(0)).collect();
            for call in 1..=2_000 {
                team.run(&|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == call));
                if call % 500 == 0 {
                    // Long enough for the helpers to fall asleep.
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_goes_on() {
        let team = Team::new(2, &[]).unwrap();
        for bad in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| team.run(&|i| assert!(i != bad, "share {i}"))));
            assert!(result.is_err());
            let done = AtomicUsize::new(0);
            team.run(&|_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 3);
        }
    }

    #[test]
    fn callers_on_several_threads_do_not_wait_for_each_other() {
        let team = Team::new(1, &[]).unwrap();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        team.run(&|_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 3 * 500 * 2);
    }

    #[test]
    fn a_core_that_does_not_exist_is_refused_by_number() {
        let error = Team::new(1, &[1_000]).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("core 1000"), "{error}");
    }
}
