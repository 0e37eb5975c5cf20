//! Puts processes on cores and raises their priority, with the system's own tools.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Keeps all threads of a process, and those it will start, on one core.
pub(crate) fn to_core(pid: u32, core: usize) -> Result<()> {
    to_cores(pid, &[core])
}

/// Keeps all threads of a process, and those it will start, on some cores.
pub(crate) fn to_cores(pid: u32, cores: &[usize]) -> Result<()> {
    let list = cores.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let output = Command::new("taskset")
        .args(["-a", "-c", "-p", &list, &pid.to_string()])
        .stdin(Stdio::null())
        .output()
        .context("taskset (of util-linux) is needed to put processes on cores")?;
    ensure!(
        output.status.success(),
        "taskset cannot put process {pid} on {list} of the cores: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

/// Lets all threads of a process go before others of the same core. False if that is not allowed.
pub(crate) fn raise(pid: u32) -> Result<bool> {
    let mut allowed = true;
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = entry?.file_name();
        let status = Command::new("renice")
            .args(["-n", "-10", "-p"])
            .arg(thread)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .context("renice (of util-linux) is needed to raise a priority")?;
        allowed &= status.success();
    }
    Ok(allowed)
}
