//! Membership of one coordinator: dial, introduce the node, report its load, take jobs; again after every loss.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use protocol::codec::MAX_CONTROL_BYTES;
use protocol::control::{CoordinatorMessage, Hello, JobErrorKind, LoadReport, NodeMessage};
use protocol::ids::Role;
use runtime::framing::{FramingError, MessageReader, MessageWriter};
use runtime::quic::{Alpn, Expect, Link, LinkError, QuicEndpoint};
use runtime::shutdown::Shutdown;
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::task::TaskTracker;

use crate::handle::{EngineHandle, EngineLoad};
use crate::job::JobStream;
use crate::process::NodeRole;
use crate::stats;

/// A report is sent at least every this many intervals, changed or not, so that a lost coordinator is noticed.
const QUIET_INTERVALS: u32 = 20;
/// Longest time a coordinator may take to send a job after opening its stream.
const JOB_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a session with a coordinator ended.
#[derive(Debug, Error)]
enum SessionEnd {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Framing(#[from] FramingError),
    #[error("refused by the coordinator: {0}")]
    Refused(String),
    #[error("the coordinator did not answer within {0} ms")]
    Silent(u64),
    #[error("the coordinator closed the membership stream")]
    Closed,
    #[error("the node has drained")]
    Drained,
}

/// What all memberships of a node share.
pub(crate) struct Member<R> {
    pub(crate) endpoint: Arc<QuicEndpoint>,
    pub(crate) hello: Hello,
    pub(crate) engine: EngineHandle,
    pub(crate) role: Arc<R>,
    pub(crate) jobs: TaskTracker,
    pub(crate) slots: Arc<Semaphore>,
    pub(crate) shutdown: Shutdown,
    pub(crate) settings: config::NodeConfig,
    pub(crate) welcome_timeout: Duration,
    pub(crate) sessions: AtomicU64,
}

impl<R: NodeRole> Member<R> {
    /// Serves one coordinator until the node has drained.
    pub(crate) async fn serve(self: Arc<Self>, coordinator: String) {
        let shortest = Duration::from_millis(self.settings.reconnect_min_ms);
        let longest = Duration::from_millis(self.settings.reconnect_max_ms).max(shortest);
        let mut wait = shortest;
        loop {
            let before = self.sessions.load(Ordering::Relaxed);
            let end = self.session(&coordinator).await;
            if self.sessions.load(Ordering::Relaxed) != before {
                wait = shortest;
            }
            match &end {
                SessionEnd::Drained => return,
                SessionEnd::Refused(reason) => {
                    tracing::error!(%coordinator, %reason, "the coordinator refuses this node");
                    wait = longest;
                }
                other => {
                    tracing::warn!(%coordinator, reason = %other, retry_ms = wait.as_millis() as u64, "no coordinator")
                }
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.shutdown.wait() => return,
            }
            wait = (wait * 2).min(longest);
        }
    }

    async fn session(&self, coordinator: &str) -> SessionEnd {
        match self.join(coordinator).await {
            Ok((link, writer, reader)) => {
                self.sessions.fetch_add(1, Ordering::Relaxed);
                tracing::info!(%coordinator, peer = %link.peer, "joined");
                self.member(link, writer, reader).await
            }
            Err(end) => end,
        }
    }

    async fn join(&self, coordinator: &str) -> Result<(Link, MessageWriter, MessageReader), SessionEnd> {
        let expect = Expect {
            role: Role::Coordinator,
            node: None,
        };
        let link = self.endpoint.connect(coordinator, Alpn::Control, expect).await?;
        let hello = async {
            let (send, recv) = link.connection.open_bi().await.map_err(FramingError::from)?;
            let mut writer = MessageWriter::new(send, MAX_CONTROL_BYTES);
            let mut reader = MessageReader::new(recv, MAX_CONTROL_BYTES);
            writer.write(&NodeMessage::Hello(self.hello.clone())).await?;
            match reader.next().await? {
                Some(CoordinatorMessage::Welcome) => Ok((writer, reader)),
                Some(CoordinatorMessage::Refused { reason }) => Err(SessionEnd::Refused(reason)),
                None => Err(SessionEnd::Closed),
            }
        };
        let silent = SessionEnd::Silent(self.welcome_timeout.as_millis() as u64);
        let (writer, reader) = timeout(self.welcome_timeout, hello).await.map_err(|_| silent)??;
        Ok((link, writer, reader))
    }

    async fn member(&self, link: Link, mut writer: MessageWriter, mut reader: MessageReader) -> SessionEnd {
        let mut ticks = interval(Duration::from_millis(self.settings.load_report_interval_ms.max(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut reports = Reports::new(self.hello.role);
        let mut draining = false;
        loop {
            tokio::select! {
                stream = link.connection.accept_bi() => match stream {
                    Ok((send, recv)) => self.take_job(send, recv),
                    Err(error) => return FramingError::from(error).into(),
                },
                _ = ticks.tick() => {}
                () = self.shutdown.wait(), if !draining => draining = true,
                message = reader.next::<CoordinatorMessage>() => match message {
                    Ok(Some(CoordinatorMessage::Refused { reason })) => return SessionEnd::Refused(reason),
                    Ok(Some(CoordinatorMessage::Welcome)) => {}
                    Ok(None) => return SessionEnd::Closed,
                    Err(error) => return error.into(),
                },
                // Only closed, and empty, once the node has drained.
                () = self.jobs.wait() => return SessionEnd::Drained,
            }
            if let Some(report) = reports.next(self.engine.load(), draining)
                && let Err(error) = writer.write(&NodeMessage::Load(report)).await
            {
                return error.into();
            }
        }
    }

    fn take_job(&self, send: quinn::SendStream, recv: quinn::RecvStream) {
        stats::job();
        let slot = Arc::clone(&self.slots).try_acquire_owned();
        let draining = self.shutdown.is_requested();
        let role = Arc::clone(&self.role);
        let work = async move {
            let (job, stream) = match timeout(JOB_READ_TIMEOUT, JobStream::accept(send, recv)).await {
                Ok(Ok(Some(accepted))) => accepted,
                Ok(Ok(None)) => return,
                Ok(Err(error)) => return tracing::debug!(%error, "a job did not arrive"),
                Err(_) => return tracing::debug!("a job did not arrive in time"),
            };
            let ended = match (draining, slot) {
                (true, _) => stream.fail(JobErrorKind::Draining, "the node is draining").await,
                (false, Err(_)) => {
                    stream
                        .fail(JobErrorKind::Overloaded, "node.max_jobs jobs are held already")
                        .await
                }
                (false, Ok(_slot)) => role.handle(job, stream).await,
            };
            if let Err(gone) = ended {
                tracing::debug!(%gone, "job ended early");
            }
        };
        // The handle is not needed: the tracker waits for the task.
        drop(self.jobs.spawn(work));
    }
}

/// Decides when a load report is due.
struct Reports {
    role: Role,
    sent: u64,
    last: Option<(EngineLoad, bool)>,
    quiet: u32,
}

impl Reports {
    fn new(role: Role) -> Self {
        Self {
            role,
            sent: 0,
            last: None,
            quiet: 0,
        }
    }

    fn next(&mut self, load: EngineLoad, draining: bool) -> Option<LoadReport> {
        self.quiet += 1;
        if self.last == Some((load, draining)) && self.quiet < QUIET_INTERVALS {
            return None;
        }
        self.quiet = 0;
        self.last = Some((load, draining));
        self.sent += 1;
        Some(LoadReport {
            sequence: self.sent,
            steps: load.steps,
            free_blocks: load.free_blocks,
            cached_blocks: load.cached_blocks,
            owned_blocks: load.owned_blocks,
            running: load.running,
            waiting: load.waiting,
            reservations: load.reservations,
            draining,
            role: self.role,
            pending: load.pending,
            queued_tokens: load.queued_tokens,
            step_times: load.step_times,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_reported_at_once_and_silence_is_broken_now_and_then() {
        let mut reports = Reports::new(Role::Decode);
        let idle = EngineLoad {
            free_blocks: 8,
            ..EngineLoad::default()
        };
        assert_eq!(reports.next(idle, false).map(|r| r.sequence), Some(1));
        assert_eq!(reports.next(idle, false), None);
        let busy = EngineLoad { free_blocks: 7, ..idle };
        assert_eq!(
            reports.next(busy, false).map(|r| (r.sequence, r.free_blocks)),
            Some((2, 7))
        );
        let draining = reports.next(busy, true).expect("a change");
        assert!(draining.draining && draining.role == Role::Decode);
        let silent = (0..QUIET_INTERVALS - 1)
            .filter(|_| reports.next(busy, true).is_some())
            .count();
        assert_eq!(silent, 0);
        assert!(reports.next(busy, true).is_some());
    }
}
