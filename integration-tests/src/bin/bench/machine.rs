//! What the machine is, and who else uses it.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::Result;
use integration_tests::cpu_time;
use model::kernels::CpuLevel;
use runtime::clock::Clock;
use serde_json::{Value, json};

/// Sizes of the caches of the first core, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caches {
    pub(crate) l2: usize,
    pub(crate) l3: usize,
}

impl Caches {
    /// What the system says; 1 MiB and 32 MiB where it says nothing.
    pub(crate) fn read() -> Self {
        let mut found = Self {
            l2: 1 << 20,
            l3: 32 << 20,
        };
        for index in 0..8 {
            let file = |name: &str| {
                let text = fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{name}"));
                text.ok().map(|text| text.trim().to_owned())
            };
            let size = file("size").and_then(|size| size.strip_suffix('K')?.parse::<usize>().ok());
            match (file("level").as_deref(), size) {
                (Some("2"), Some(kib)) => found.l2 = kib << 10,
                (Some("3"), Some(kib)) => found.l3 = kib << 10,
                _ => {}
            }
        }
        found
    }
}

/// CPU time of everybody and of this process at a moment.
pub(crate) struct Usage {
    at: Instant,
    all: f64,
    own: Duration,
}

impl Usage {
    pub(crate) fn now() -> Result<Self> {
        Ok(Self {
            at: Clock.now(),
            all: cpu_time::of_the_machine()?,
            own: cpu_time::of_this_process(),
        })
    }

    /// CPU time of other processes since then, as a share of what all cores could give. `children` is the time of
    /// processes that are no others.
    pub(crate) fn others_since(&self, children: Duration) -> Result<f64> {
        let now = Self::now()?;
        let own = (now.own - self.own + children).as_secs_f64();
        let whole = (now.at - self.at).as_secs_f64() * cores() as f64;
        Ok(((now.all - self.all - own) / whole).max(0.0))
    }
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The machine for a report.
pub(crate) fn describe(others_cpu: f64) -> Value {
    let caches = Caches::read();
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpuinfo.lines().find_map(|line| {
        line.strip_prefix("model name")?
            .split_once(':')
            .map(|(_, name)| name.trim())
    });
    json!({
        "cpu": name.unwrap_or("unknown"),
        "cores": cores(),
        "level": CpuLevel::detect().as_str(),
        "l2_bytes": caches.l2,
        "l3_bytes": caches.l3,
        "others_cpu": others_cpu,
    })
}
