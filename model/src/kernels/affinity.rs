//! Pins threads to cores.

use super::KernelError;

/// Keeps the calling thread on one core of the machine.
///
/// # Errors
/// If there is no such core, this process may not use it, or the system cannot pin threads.
#[cfg(target_os = "linux")]
pub fn pin_current_thread(core: usize) -> Result<(), KernelError> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let refused = |reason: String| KernelError::Core { core, reason };
    if core >= CpuSet::MAX_CPU {
        return Err(refused(format!("at most {} can be named", CpuSet::MAX_CPU - 1)));
    }
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).map_err(|e| refused(e.to_string()))
}

/// Keeps the calling thread on one core of the machine.
///
/// # Errors
/// Always: this system cannot pin threads.
#[cfg(not(target_os = "linux"))]
pub fn pin_current_thread(core: usize) -> Result<(), KernelError> {
    Err(KernelError::Core {
        core,
        reason: "threads can be pinned on Linux only".to_owned(),
    })
}
