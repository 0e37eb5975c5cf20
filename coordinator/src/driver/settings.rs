//! From the configuration's sections to the core's settings.

use std::time::Duration;

use config::{Config, CoordinatorConfig, LocalPrefillConfig, RoutingConfig};

use crate::core::admission::AdmissionLimits;
use crate::core::cluster::ClusterSettings;
use crate::core::nodes::{BreakerLimits, HealthLimits, PrefillCredit, StepLimits, TextIdentity};
use crate::core::request::RequestLimits;
use crate::core::routing::{LocalPrefill, Policy};

/// New attempts before the first token, after failed ones.
const MAX_RESTARTS: u32 = 2;
/// Moves to another decode node after the first token.
const MAX_MIGRATIONS: u32 = 2;
/// A prefill node computes one step while the next one waits: it is never idle, and never has a queue.
const PREFILL_STEPS_AHEAD: usize = 2;

/// Everything the core needs from the configuration; `text` from the coordinator's own tokenizer.
pub fn cluster(config: &Config, text: TextIdentity) -> ClusterSettings {
    ClusterSettings {
        request: request(&config.coordinator),
        admission: AdmissionLimits {
            max_concurrent_requests: config.limits.max_concurrent_requests,
            max_queued_requests: config.limits.max_queued_requests,
            max_queued_bytes: config.limits.max_queued_bytes,
        },
        text,
        prefill_credit: PrefillCredit {
            window_tokens: PREFILL_STEPS_AHEAD * config.engine.max_batch_tokens,
            sharing_jobs: config.engine.max_batch_tokens / config.engine.prefill_chunk_tokens,
        },
        local_prefill: match config.coordinator.local_prefill {
            LocalPrefillConfig::Auto => LocalPrefill::Auto,
            LocalPrefillConfig::Never => LocalPrefill::Never,
            LocalPrefillConfig::Always => LocalPrefill::Always,
        },
        policy: match config.coordinator.routing {
            RoutingConfig::PrefixAffinity => Policy::PrefixAffinity,
            RoutingConfig::LeastLoaded => Policy::LeastLoaded,
            RoutingConfig::RoundRobin => Policy::RoundRobin,
        },
        health: HealthLimits {
            stall: Duration::from_millis(config.coordinator.node_stall_ms),
            breaker: BreakerLimits {
                failures: config.coordinator.breaker_failures,
                open: Duration::from_millis(config.coordinator.breaker_open_ms),
            },
        },
        decision_records: config.coordinator.decision_records,
        steps: StepLimits {
            chunk_tokens: config.engine.prefill_chunk_tokens.min(config.engine.max_batch_tokens),
            mixed_tokens: config.engine.mixed_prefill_tokens,
            mixed_us: config.engine.mixed_prefill_ms * 1000,
        },
    }
}

fn request(front: &CoordinatorConfig) -> RequestLimits {
    let millis = Duration::from_millis;
    RequestLimits {
        queue_timeout: millis(front.queue_timeout_ms),
        reserve_timeout: millis(front.reserve_timeout_ms),
        prefill_timeout: millis(front.prefill_timeout_ms),
        handoff_timeout: millis(front.handoff_timeout_ms),
        inter_token_timeout: millis(front.inter_token_timeout_ms),
        max_restarts: MAX_RESTARTS,
        max_migrations: MAX_MIGRATIONS,
    }
}
