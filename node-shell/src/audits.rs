//! A coordinator's questions whose a node's blocks are, and the answers.

use std::sync::Arc;
use std::time::Duration;

use protocol::blocks::BlockAudit;
use protocol::ids::NodeId;
use runtime::clock::Clock;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::handle::{EngineHandle, SubmitError};
use crate::job_list::JobList;

/// Questions of one coordinator that may wait for the engine. Those that come beside them are not answered.
const MAX_OPEN: usize = 8;
/// Nobody waits longer for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before an engine is asked again whose queue was full.
const AGAIN: Duration = Duration::from_millis(20);

/// The questions of one coordinator. Dropped, they are not answered any more.
pub(crate) struct Audits {
    engine: EngineHandle,
    jobs: Arc<JobList>,
    asker: NodeId,
    open: JoinSet<Option<BlockAudit>>,
}

impl Audits {
    pub(crate) fn new(engine: &EngineHandle, jobs: &Arc<JobList>, asker: &NodeId) -> Self {
        Self {
            engine: engine.clone(),
            jobs: Arc::clone(jobs),
            asker: asker.clone(),
            open: JoinSet::new(),
        }
    }

    /// The coordinator asks.
    pub(crate) fn ask(&mut self, number: u64) {
        if self.open.len() >= MAX_OPEN {
            tracing::warn!(coordinator = %self.asker, number, "audits are asked for faster than the engine can answer");
            return;
        }
        let (engine, jobs, asker) = (self.engine.clone(), Arc::clone(&self.jobs), self.asker.clone());
        self.open
            .spawn(async move { answer(&engine, &jobs, number, &asker).await });
    }

    /// The next answer; `None` for a question to which there is none. Waits for ever while nothing is asked. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<BlockAudit> {
        match self.open.join_next().await {
            Some(answered) => answered.unwrap_or_else(|error| {
                tracing::error!(%error, "an audit has failed");
                None
            }),
            None => std::future::pending().await,
        }
    }
}

async fn answer(engine: &EngineHandle, jobs: &JobList, number: u64, asker: &NodeId) -> Option<BlockAudit> {
    let asked = async {
        loop {
            match engine.ownership().await {
                Err(SubmitError::QueueFull) => sleep(AGAIN).await,
                other => return other,
            }
        }
    };
    match timeout(ANSWER_TIMEOUT, asked).await {
        Ok(Ok(ownership)) => Some(ownership.answer(number, Clock.now(), asker, jobs.all())),
        Ok(Err(error)) => {
            tracing::warn!(%error, number, "an audit is not answered");
            None
        }
        Err(_) => {
            tracing::warn!(number, "an audit is not answered: the engine takes no command");
            None
        }
    }
}
