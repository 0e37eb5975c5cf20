//! Orderly end of a process: SIGTERM or SIGINT requests it, a second signal forces it.
//!
//! ```text
//! running --request()/signal--> requested (drain) --force()/second signal--> forced (stop at once)
//! ```

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// The shutdown state of the process. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    requested: CancellationToken,
    forced: CancellationToken,
}

impl Shutdown {
    /// A shutdown that only [`request`](Self::request) and [`force`](Self::force) trigger.
    pub fn new() -> Self {
        Self::default()
    }

    /// A shutdown that SIGTERM and SIGINT request; the second signal forces it. Must be called on a tokio runtime, once per
    /// process, before work begins.
    pub fn on_signals() -> io::Result<Self> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let shutdown = Self::new();
        let seen = shutdown.clone();
        tokio::spawn(async move {
            while !seen.is_forced() {
                let name = tokio::select! {
                    _ = terminate.recv() => "SIGTERM",
                    _ = interrupt.recv() => "SIGINT",
                };
                if seen.is_requested() {
                    tracing::warn!(signal = name, "second signal: stopping at once");
                    seen.force();
                } else {
                    tracing::info!(signal = name, "shutdown requested: draining");
                    seen.request();
                }
            }
        });
        Ok(shutdown)
    }

    /// Requests the shutdown: no new work, finish what runs.
    pub fn request(&self) {
        self.requested.cancel();
    }

    /// Forces the shutdown: stop without waiting for what runs. Requests it too.
    pub fn force(&self) {
        self.requested.cancel();
        self.forced.cancel();
    }

    /// True once the shutdown has been requested.
    pub fn is_requested(&self) -> bool {
        self.requested.is_cancelled()
    }

    /// True once the shutdown has been forced.
    pub fn is_forced(&self) -> bool {
        self.forced.is_cancelled()
    }

    /// Waits until the shutdown is requested; at once if it has been. Cancel-safe.
    pub async fn wait(&self) {
        self.requested.cancelled().await;
    }

    /// Waits until the shutdown is forced; at once if it has been. Cancel-safe.
    pub async fn wait_forced(&self) {
        self.forced.cancelled().await;
    }

    /// A token that is cancelled when the shutdown is requested, for interfaces that take one.
    pub fn token(&self) -> CancellationToken {
        self.requested.child_token()
    }
}
