//! How nodes find the coordinators, and coordinators make themselves found: a list, names that resolve to them, or etcd.
//!
//! What decides is in [`core`]; the rest asks resolvers and etcd and carries decisions out. Whatever fails, coordinators that
//! are known stay known: a name server or etcd that is away disturbs nothing that is served.
//!
//! Life of a coordinator's address on a node:
//! 1. [`Found`] has it: a name resolves to it, or a coordinator has registered it in etcd;
//! 2. [`core::directory::Directory`] has it dialled;
//! 3. it vanishes: the link goes on as long as it holds, and is not dialled again after that.

pub mod core;
pub mod etcd;
mod find;
mod register;

use runtime::measure::Measure;
use thiserror::Error;

pub use find::{Found, Resolve, SystemResolver, find};
pub use register::{Registration, register};

/// Why discovery cannot begin.
#[derive(Debug, Error)]
pub enum DiscoveryError {
    /// The settings of etcd cannot be used.
    #[error(transparent)]
    Etcd(#[from] etcd::EtcdError),
}

const FAILURES: Measure = Measure::counter(register::METRIC_FAILURES, &[], "calls", "Calls to etcd that failed.");

/// What a node measures here.
pub const FINDING: &[Measure] = &[
    Measure::gauge(find::METRIC_KNOWN, &[], "coordinators", "Coordinators that are known."),
    FAILURES,
];

/// What a coordinator measures here.
pub const REGISTERING: &[Measure] = &[
    Measure::gauge(
        register::METRIC_REGISTERED,
        &[],
        "1 or 0",
        "Whether this process is registered in etcd.",
    ),
    FAILURES,
];
