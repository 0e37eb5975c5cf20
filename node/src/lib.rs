//! One process that composes both role libraries over one engine, so that its role can be switched while it runs.
//!
//! Jobs say which side they are for; whether the node takes them now is decided before they get here
//! (`node_shell::duty`). So switching a role is nothing but taking other jobs from then on: weights, KV pool, prefix cache and
//! links stay, and jobs that run are finished.

use decode_node::role::DecodeRole;
use node_shell::job::{JobGone, JobStream};
use node_shell::process::{MovedBytes, NodeContext, NodeRole};
use prefill_node::role::PrefillRole;
use protocol::control::Job;
use runtime::measure::Measure;
use runtime::quic::Link;

/// Both roles.
pub struct BothRoles {
    prefill: PrefillRole,
    decode: DecodeRole,
}

impl BothRoles {
    /// The roles over a node's engine, pool and UDP port.
    ///
    /// # Errors
    /// The transfer settings do not fit the KV layout.
    pub fn new(context: NodeContext) -> Result<Self, String> {
        Ok(Self {
            prefill: PrefillRole::new(context.clone())?,
            decode: DecodeRole::new(context)?,
        })
    }
}

impl NodeRole for BothRoles {
    async fn handle(&self, job: Job, stream: JobStream) -> Result<(), JobGone> {
        match job {
            Job::Prefill(_) => self.prefill.handle(job, stream).await,
            Job::Decode(_) => self.decode.handle(job, stream).await,
        }
    }

    async fn serve_kv(&self, link: Link) {
        self.decode.serve_kv(link).await;
    }

    fn measures() -> Vec<Measure> {
        [PrefillRole::measures(), DecodeRole::measures()].concat()
    }

    fn moved(&self) -> MovedBytes {
        MovedBytes {
            sent_bytes: self.prefill.moved().sent_bytes,
            received_bytes: self.decode.moved().received_bytes,
        }
    }
}
