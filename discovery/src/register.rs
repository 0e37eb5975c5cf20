//! A coordinator makes itself found in etcd, as long as it lives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use config::DiscoveryConfig;
use metrics::{counter, gauge};
use runtime::clock::Clock;
use runtime::shutdown::Shutdown;

use crate::DiscoveryError;
use crate::core::lease::{LeaseKeeper, Need};
use crate::etcd::{Etcd, EtcdError};

/// Gauge: 1 while this process is registered in etcd.
pub(crate) const METRIC_REGISTERED: &str = "baton_discovery_registered";
/// Counter: calls to etcd that failed.
pub(crate) const METRIC_FAILURES: &str = "baton_discovery_failures_total";

/// What is registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The key.
    pub key: String,
    /// The address that nodes dial.
    pub address: String,
}

impl Registration {
    /// A coordinator's: its name, and its address, which tells replicas apart that share a name.
    pub fn coordinator(config: &DiscoveryConfig, name: &str, address: &str) -> Self {
        Self {
            key: format!("{}{name}@{address}", coordinators(config)),
            address: address.to_owned(),
        }
    }
}

/// What the keys of all coordinators begin with.
pub(crate) fn coordinators(config: &DiscoveryConfig) -> String {
    format!("{}/coordinators/", config.etcd_prefix.trim_end_matches('/'))
}

/// Registers in the background until shutdown, then takes the registration back. It may take as long as etcd needs to come
/// up: a coordinator serves without it.
///
/// # Errors
/// The settings of etcd cannot be used.
pub fn register(
    config: &DiscoveryConfig,
    registration: Registration,
    shutdown: Shutdown,
) -> Result<tokio::task::JoinHandle<()>, DiscoveryError> {
    let etcd = Arc::new(Etcd::new(config)?);
    let lease = Duration::from_millis(config.etcd_lease_ms);
    Ok(tokio::spawn(keep(etcd, registration, lease, shutdown)))
}

async fn keep(etcd: Arc<Etcd>, registration: Registration, lease: Duration, shutdown: Shutdown) {
    let start = Clock.now();
    let mut keeper = LeaseKeeper::new(lease / 3);
    let mut troubled = false;
    gauge!(METRIC_REGISTERED).set(0.0);
    loop {
        let step = async {
            match keeper.need(since(start)) {
                Need::Wait(until) => {
                    tokio::time::sleep(until.saturating_sub(since(start))).await;
                    Ok(())
                }
                need => carry_out(&etcd, &registration, lease, &mut keeper, need, start).await,
            }
        };
        let done = tokio::select! {
            done = step => done,
            () = shutdown.wait() => break,
        };
        let registered = keeper.is_registered();
        gauge!(METRIC_REGISTERED).set(f64::from(u8::from(registered)));
        match done {
            Ok(()) if troubled && registered => {
                troubled = false;
                tracing::info!(key = registration.key, "registered in etcd again");
            }
            Ok(()) => {}
            Err(error) => {
                counter!(METRIC_FAILURES).increment(1);
                keeper.failed(since(start));
                if troubled {
                    tracing::debug!(%error, registered, "etcd still does not help");
                } else {
                    tracing::warn!(%error, registered, "etcd does not help; nodes that know this coordinator go on");
                }
                troubled = true;
            }
        }
    }
    gauge!(METRIC_REGISTERED).set(0.0);
    if let Some(lease) = keeper.lease() {
        match etcd.revoke(lease).await {
            Ok(()) => tracing::info!(key = registration.key, "taken out of etcd"),
            Err(error) => tracing::warn!(%error, "not taken out of etcd; the lease will end"),
        }
    }
}

fn since(start: Instant) -> Duration {
    Clock.now().saturating_duration_since(start)
}

async fn carry_out(
    etcd: &Etcd,
    registration: &Registration,
    lease: Duration,
    keeper: &mut LeaseKeeper,
    need: Need,
    start: Instant,
) -> Result<(), EtcdError> {
    let asked = since(start);
    match need {
        Need::Wait(_) => {}
        Need::Grant => {
            let granted = etcd.grant(lease.as_secs()).await?;
            keeper.granted(granted.id, Duration::from_secs(granted.ttl), asked);
        }
        Need::Put(id) => match etcd.put(&registration.key, &registration.address, id).await {
            Ok(()) => {
                keeper.registered(lease, since(start));
                let Registration { key, address } = registration;
                tracing::info!(key, address, "registered in etcd");
            }
            Err(error) => {
                if matches!(&error, EtcdError::Refused { message, .. } if message.contains("lease not found")) {
                    keeper.gone();
                }
                return Err(error);
            }
        },
        Need::KeepAlive(id) => {
            let kept = etcd.keep_alive(id).await?;
            if kept.ttl == 0 {
                tracing::warn!("etcd has forgotten the lease; it is asked for a new one");
            }
            keeper.renewed(Duration::from_secs(kept.ttl), asked);
        }
    }
    Ok(())
}
