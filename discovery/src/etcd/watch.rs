//! A watch: one line of JSON for each answer, as they come.

use std::collections::VecDeque;
use std::time::Duration;

use reqwest::Response;

use super::EtcdError;
use super::words::{WatchLine, number};

/// Longest line of a watch.
const MAX_LINE: usize = 1 << 20;

/// What happened to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Written, with this value.
    Put {
        /// The key.
        key: String,
        /// Its value.
        value: String,
    },
    /// Gone.
    Deleted {
        /// The key.
        key: String,
    },
}

/// A running watch. Dropped, it ends.
pub struct Watch {
    response: Response,
    endpoint: String,
    timeout: Duration,
    partial: Vec<u8>,
    changes: VecDeque<Change>,
    revision: i64,
}

impl Watch {
    pub(super) fn new(response: Response, endpoint: String, timeout: Duration) -> Self {
        Self {
            response,
            endpoint,
            timeout,
            partial: Vec::new(),
            changes: VecDeque::new(),
            revision: 0,
        }
    }

    /// The next change; waits for it as long as it takes, so callers bound the wait. Cancel-safe.
    ///
    /// # Errors
    /// The watch has ended: etcd went away, or cancelled it, as when it has compacted the revisions that were asked for.
    pub async fn next(&mut self) -> Result<Change, EtcdError> {
        loop {
            if let Some(change) = self.changes.pop_front() {
                return Ok(change);
            }
            match self.response.chunk().await {
                Ok(Some(chunk)) => self.take(&chunk)?,
                Ok(None) => return Err(self.ended("the watch has ended".to_owned())),
                Err(error) => return Err(self.ended(super::told(&error))),
            }
        }
    }

    /// etcd's latest revision that the watch has told of; 0: none yet.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// The deadline of single calls, for callers that bound their waits by it.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    fn take(&mut self, chunk: &[u8]) -> Result<(), EtcdError> {
        self.partial.extend_from_slice(chunk);
        while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            if !line.trim_ascii().is_empty() {
                self.take_line(&line)?;
            }
        }
        if self.partial.len() > MAX_LINE {
            return Err(self.ended(format!("a line of more than {MAX_LINE} bytes")));
        }
        Ok(())
    }

    fn take_line(&mut self, line: &[u8]) -> Result<(), EtcdError> {
        let line: WatchLine = serde_json::from_slice(line).map_err(|error| self.ended(error.to_string()))?;
        if line.result.canceled {
            return Err(self.ended(format!("cancelled: {}", line.result.cancel_reason)));
        }
        self.revision = self.revision.max(number(&line.result.header.revision));
        for event in &line.result.events {
            let Some((key, value)) = event.kv.texts() else { continue };
            self.changes.push_back(if event.kind == "DELETE" {
                Change::Deleted { key }
            } else {
                Change::Put { key, value }
            });
        }
        Ok(())
    }

    fn ended(&self, reason: String) -> EtcdError {
        EtcdError::Unreachable {
            endpoint: self.endpoint.clone(),
            reason,
        }
    }
}
