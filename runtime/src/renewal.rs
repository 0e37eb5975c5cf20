//! Certificates of a running process: read again when their files change or on SIGHUP, and watched until their end.
//!
//! Whoever renews a certificate replaces the files. New links show the new certificate, those that exist go on with theirs.
//! Files that do not fit together, as while they are being replaced, change nothing.

use std::sync::{Arc, Weak};
use std::time::Duration;

use config::ClusterConfig;
use metrics::gauge;
use thiserror::Error;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::clock::Clock;
use crate::identity::{Identity, IdentityError, IdentityFiles, Validity};
use crate::measure::Measure;
use crate::quic::{LinkError, QuicEndpoint};

/// Gauge, by `certificate`: until when it is valid, in seconds since 1970.
pub const METRIC_EXPIRY: &str = "baton_certificate_expiry_timestamp_seconds";
/// What this module measures.
pub const MEASURES: &[Measure] = &[Measure::gauge(
    METRIC_EXPIRY,
    &["certificate"],
    "seconds since 1970",
    "Until when a certificate of this process is valid.",
)];
/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(1);
const HOUR: u64 = 3_600;
const DAY: u64 = 24 * HOUR;
/// A certificate's end is near when this or a third of its life is left, whichever is less, in seconds.
const NEAR: u64 = 30 * DAY;

/// What there is to say about a certificate's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// It ends in this many seconds: time to renew it.
    EndsSoon(u64),
    /// It has ended: nobody accepts it any more.
    Ended,
}

/// Decides when to speak of a certificate's end: once a day while it is near, once an hour on the last day and after.
#[derive(Debug, Default)]
pub struct Reminder {
    told: Option<u64>,
}

impl Reminder {
    /// What to say now, if anything; times are seconds since 1970.
    pub fn due(&mut self, validity: Validity, now: u64) -> Option<Notice> {
        let left = validity.until.saturating_sub(now);
        if left > NEAR.min(validity.until.saturating_sub(validity.from) / 3) {
            return None;
        }
        let pause = if left > DAY { DAY } else { HOUR };
        if self.told.is_some_and(|told| now < told.saturating_add(pause)) {
            return None;
        }
        self.told = Some(now);
        Some(if left == 0 {
            Notice::Ended
        } else {
            Notice::EndsSoon(left)
        })
    }
}

/// The end of one certificate, as metric and in the log.
#[derive(Debug)]
pub struct Expiry {
    certificate: &'static str,
    validity: Validity,
    reminder: Reminder,
}

impl Expiry {
    /// Sets the metric, whose label `certificate` is `certificate`, and logs the date.
    pub fn new(certificate: &'static str, validity: Validity) -> Self {
        gauge!(METRIC_EXPIRY, "certificate" => certificate).set(validity.until as f64);
        tracing::info!(certificate, valid_until = validity.until_text(), "certificate in use");
        Self {
            certificate,
            validity,
            reminder: Reminder::default(),
        }
    }

    /// Warns if the end is near; called often.
    pub fn remind(&mut self) {
        let (certificate, valid_until) = (self.certificate, self.validity.until_text());
        match self.reminder.due(self.validity, Clock.unix_seconds()) {
            None => {}
            Some(Notice::EndsSoon(seconds)) => {
                let hours = seconds / HOUR;
                tracing::warn!(certificate, valid_until, hours, "the certificate ends soon: renew it");
            }
            Some(Notice::Ended) => {
                tracing::error!(
                    certificate,
                    valid_until,
                    "the certificate has ended: new links fail until it is renewed"
                );
            }
        }
    }
}

/// Ticks of a watch over files: regular ones, and one for each SIGHUP.
pub struct Looks {
    regular: Interval,
    hangup: Option<Signal>,
}

impl Looks {
    /// Must be called on a tokio runtime. From then on SIGHUP does not end the process.
    pub fn new() -> Self {
        let mut regular = interval(LOOK);
        regular.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let hangup = signal(SignalKind::hangup());
        if let Err(error) = &hangup {
            tracing::warn!(%error, "SIGHUP is not listened to; changed files are found all the same");
        }
        Self {
            regular,
            hangup: hangup.ok(),
        }
    }

    /// The next look; true if it was asked for.
    pub async fn next(&mut self) -> bool {
        let Some(hangup) = &mut self.hangup else {
            self.regular.tick().await;
            return false;
        };
        tokio::select! {
            _ = self.regular.tick() => false,
            _ = hangup.recv() => true,
        }
    }
}

impl Default for Looks {
    fn default() -> Self {
        Self::new()
    }
}

/// Why new files are not used.
#[derive(Debug, Error)]
pub enum RenewalError {
    /// They are no identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// They are not this process's.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// The files of an identity, and what has been made of them.
pub struct Renewal {
    cluster: ClusterConfig,
    /// What was judged last, usable or not.
    judged: Option<IdentityFiles>,
    /// What did not fit together at the last look: it may be half of a change.
    suspect: Option<IdentityFiles>,
}

impl Renewal {
    /// Watches the files that `cluster` names; those that are there now are in use.
    pub fn new(cluster: ClusterConfig) -> Self {
        let judged = IdentityFiles::read(&cluster).ok();
        Self {
            cluster,
            judged,
            suspect: None,
        }
    }

    /// Looks at the files, and gives `endpoint` the identity that is new in them; `None`: there is none. What cannot be used
    /// is told once, and only if it is the same at two looks, or if `at_once`.
    ///
    /// # Errors
    /// What is new cannot be used; everything stays as it was.
    pub fn look(&mut self, endpoint: &QuicEndpoint, at_once: bool) -> Result<Option<Identity>, RenewalError> {
        let files = match IdentityFiles::read(&self.cluster) {
            Ok(files) => files,
            Err(error) if at_once => return Err(error.into()),
            // A file that is being replaced by hand may be missing for a moment; a missing one is no new certificate.
            Err(_) => return Ok(None),
        };
        if self.judged.as_ref() == Some(&files) {
            self.suspect = None;
            return Ok(None);
        }
        let used = files.identity().map_err(RenewalError::from).and_then(|identity| {
            endpoint.replace_identity(&identity)?;
            Ok(identity)
        });
        if used.is_err() && !at_once && self.suspect.as_ref() != Some(&files) {
            self.suspect = Some(files);
            return Ok(None);
        }
        self.suspect = None;
        self.judged = Some(files);
        used.map(Some)
    }
}

/// Keeps an endpoint's certificate new as long as the endpoint is used, and says when it ends. `validity` is that of the
/// certificate in use.
pub async fn follow(endpoint: Weak<QuicEndpoint>, cluster: ClusterConfig, validity: Validity) {
    let mut looks = Looks::new();
    let mut expiry = Expiry::new("cluster", validity);
    let mut renewal = Renewal::new(cluster);
    loop {
        let asked = looks.next().await;
        let Some(endpoint) = endpoint.upgrade() else { return };
        let looked = tokio::task::spawn_blocking(move || {
            let looked = renewal.look(&endpoint, asked);
            (renewal, looked)
        });
        let Ok((back, looked)) = looked.await else { return };
        renewal = back;
        match looked {
            Ok(Some(identity)) => {
                tracing::info!(peer = %identity.peer(), "the certificate has been replaced: new links show it");
                expiry = Expiry::new("cluster", identity.validity());
            }
            Ok(None) if asked => tracing::info!("SIGHUP: the cluster's certificate files are what they were"),
            Ok(None) => {}
            Err(error) => tracing::error!(%error, "the new certificate cannot be used: the old one stays"),
        }
        expiry.remind();
    }
}

/// Starts [`follow`] for an endpoint whose identity came from the files of `cluster`.
pub fn watch(endpoint: &Arc<QuicEndpoint>, cluster: &ClusterConfig, validity: Validity) {
    tokio::spawn(follow(Arc::downgrade(endpoint), cluster.clone(), validity));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_when_it_is_near_and_not_too_often() {
        let validity = Validity {
            from: 0,
            until: 365 * DAY,
        };
        let mut reminder = Reminder::default();
        let mut said = Vec::new();
        for hour in 0..366 * 24 {
            if let Some(notice) = reminder.due(validity, hour * HOUR) {
                said.push((hour, notice));
            }
        }
        let first = 335 * 24;
        assert_eq!(said[0], (first, Notice::EndsSoon(NEAR)));
        assert_eq!(said[1].0, first + 24, "once a day");
        let last_day = said.iter().filter(|(hour, _)| (364 * 24..365 * 24).contains(hour));
        assert_eq!(last_day.count(), 24, "every hour");
        assert_eq!(said.last().map(|(_, notice)| *notice), Some(Notice::Ended));
    }

    #[test]
    fn a_short_life_is_no_reason_to_warn_from_the_start() {
        let validity = Validity { from: 0, until: DAY };
        let mut reminder = Reminder::default();
        assert_eq!(reminder.due(validity, HOUR), None);
        assert_eq!(reminder.due(validity, 16 * HOUR), Some(Notice::EndsSoon(8 * HOUR)));
        assert_eq!(reminder.due(validity, 16 * HOUR + 1), None);
        assert_eq!(reminder.due(validity, DAY), Some(Notice::Ended));
    }
}
