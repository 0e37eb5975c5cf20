//! What both node roles share: the engine thread, the membership of coordinators, job streams, start and clean end.
//!
//! Life of a node process:
//! 1. [`cli`] reads the configuration and loads the model;
//! 2. [`process::Node::start`] opens the UDP port and starts the one [`engine_thread`];
//! 3. `membership` dials every coordinator, says `Hello`, reports the load, and takes jobs;
//! 4. each job is one task of the role ([`process::NodeRole`]): it submits sequences through a [`handle::EngineHandle`]
//!    and answers on its [`job::JobStream`];
//! 5. whatever a job holds of the engine is given back when its owner is dropped, so a cancelled job leaks nothing;
//! 6. SIGTERM: no new jobs, the running ones finish, the process ends.

mod audits;
mod cache_feed;
pub mod cli;
pub mod duty;
pub mod engine_thread;
pub mod grammars;
pub mod handle;
pub mod job;
pub mod job_list;
pub mod job_trace;
mod loading;
mod membership;
pub mod memory;
pub mod process;
mod queue;
pub mod stats;
