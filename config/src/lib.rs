//! Typed configuration: parsed once, checked once, handed out by section. The only reader of the environment.
//!
//! Life of a setting:
//! 1. `sections.rs` states it: name, default, one line with its unit, legal values.
//! 2. The file given by `--config` may set it, then `BATON_SECTION__FIELD`, then `--set section.field=value`.
//! 3. Each value is checked where it is read, so that an error names the line, variable or argument.
//! 4. Values that contradict each other are found when all are known.
//! 5. A room receives its own section, never the whole.

mod adapters;
mod args;
mod check;
mod error;
mod field;
mod foreign;
mod hub;
mod load;
mod operator;
mod reference;
mod sections;
mod suggest;
mod types;
mod value;

use serde::{Deserialize, Serialize};

pub(crate) use adapters::adapter;
pub use args::ConfigArgs;
pub use error::{ConfigError, Origin, Setting};
pub use field::{Field, Kind, Section, Text};
pub use hub::{HubReference, is_commit};
pub use load::{Sources, load, load_from};
pub use operator::{AdminTarget, OperatorArgs, OperatorError};
pub use reference::reference;
pub use sections::{
    AdminConfig, ClusterConfig, CoordinatorConfig, DiscoveryConfig, EngineConfig, LimitsConfig, MediaConfig,
    ModelConfig, NodeConfig, TelemetryConfig, TransferConfig,
};
pub use types::{
    BestOf, Compute, DiscoveryMethod, KvDtypeConfig, LocalPrefillConfig, LogFormat, LogRequests, LogprobsConfig,
    NodeRoleConfig, Quantize, RoutingConfig, Secret, cores,
};
pub use value::is_dial_address;

/// The whole configuration of a process. All three kinds of process read the same file and use what concerns them.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Membership and links.
    pub cluster: ClusterConfig,
    /// The model that is served.
    pub model: ModelConfig,
    /// Batching and the KV pool.
    pub engine: EngineConfig,
    /// What clients may ask for.
    pub limits: LimitsConfig,
    /// The front door.
    pub coordinator: CoordinatorConfig,
    /// Operators.
    pub admin: AdminConfig,
    /// Media that prompts name.
    pub media: MediaConfig,
    /// A prefill or decode node.
    pub node: NodeConfig,
    /// How nodes find the coordinators.
    pub discovery: DiscoveryConfig,
    /// Moving KV blocks.
    pub transfer: TransferConfig,
    /// Logs.
    pub telemetry: TelemetryConfig,
}

/// All sections, in file order.
pub const SECTIONS: &[Section] = &[
    ClusterConfig::SECTION,
    ModelConfig::SECTION,
    EngineConfig::SECTION,
    LimitsConfig::SECTION,
    CoordinatorConfig::SECTION,
    AdminConfig::SECTION,
    MediaConfig::SECTION,
    NodeConfig::SECTION,
    DiscoveryConfig::SECTION,
    TransferConfig::SECTION,
    TelemetryConfig::SECTION,
];

impl Config {
    /// The whole configuration as a file that `--config` reads, secrets hidden.
    ///
    /// # Errors
    /// None in practice: every field has a TOML form.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        toml::to_string(self).map_err(|error| ConfigError::Internal {
            reason: error.to_string(),
        })
    }
}
