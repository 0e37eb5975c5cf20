//! HTTPS for clients: a certificate and its key from files, read again when they change.
//!
//! Whoever renews a certificate replaces the files; the process needs no restart, and no signal: it looks at them every
//! second, and at once when it gets a SIGHUP, which is what tools that renew certificates send. New connections get the new
//! certificate, those that are open keep theirs. Files that do not fit together, as while they are being replaced, change
//! nothing.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;
use std::{fs, io};

use runtime::identity::Validity;
use runtime::renewal::Expiry;
use rustls::ServerConfig;
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use thiserror::Error;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// Why there is no HTTPS.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("coordinator.{field}: cannot read {}: {source}", path.display())]
    File {
        /// The configuration field that names it.
        field: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("coordinator.{field}: {} holds no usable {what}: {reason}", path.display())]
    Content {
        /// The configuration field that names it.
        field: &'static str,
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// What is wrong.
        reason: String,
    },
}

/// What was in the files.
#[derive(PartialEq, Eq)]
struct Contents {
    cert: Vec<u8>,
    key: Vec<u8>,
}

struct Loaded {
    /// What new connections get.
    key: Arc<CertifiedKey>,
    /// What was last looked at, usable or not.
    seen: Contents,
}

/// The certificate of the moment.
pub struct Certificates {
    cert_path: PathBuf,
    key_path: PathBuf,
    provider: Arc<CryptoProvider>,
    loaded: RwLock<Loaded>,
}

impl std::fmt::Debug for Certificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Certificates")
            .field("cert_path", &self.cert_path)
            .finish_non_exhaustive()
    }
}

impl Certificates {
    /// Reads both files: PEM, the certificate followed by those that vouch for it.
    ///
    /// # Errors
    /// A file is not there, or the two do not fit together.
    pub fn load(cert_path: impl Into<PathBuf>, key_path: impl Into<PathBuf>) -> Result<Self, TlsError> {
        let (cert_path, key_path) = (cert_path.into(), key_path.into());
        let provider = Arc::new(ring::default_provider());
        let seen = read(&cert_path, &key_path)?;
        let key = usable(&seen, &cert_path, &key_path, &provider)?;
        Ok(Self {
            loaded: RwLock::new(Loaded { key, seen }),
            cert_path,
            key_path,
            provider,
        })
    }

    /// The settings of a server that shows the certificate of the moment.
    ///
    /// # Errors
    /// The TLS library supports no protocol version.
    pub fn server_config(self: &Arc<Self>) -> Result<ServerConfig, rustls::Error> {
        let builder = ServerConfig::builder_with_provider(Arc::clone(&self.provider));
        Ok(builder
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::<Self>::clone(self)))
    }

    fn in_use(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.loaded.read().unwrap_or_else(PoisonError::into_inner).key)
    }

    /// Looks at the files; true if what they hold has been taken into use now. What has been seen before is looked at again
    /// only if somebody has `asked` for it: the same trouble is told once.
    ///
    /// # Errors
    /// They cannot be read, or what they hold cannot be used; the certificate in use stays.
    pub fn reload(&self, asked: bool) -> Result<bool, TlsError> {
        let found = read(&self.cert_path, &self.key_path)?;
        let known = |loaded: &Loaded| loaded.seen == found;
        if !asked && known(&self.loaded.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(false);
        }
        let key = usable(&found, &self.cert_path, &self.key_path, &self.provider);
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        loaded.seen = found;
        loaded.key = key?;
        Ok(true)
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.in_use())
    }
}

/// Reloads the certificate whenever its files change, and on every SIGHUP, as long as somebody uses it. The signal is
/// listened to from the call on.
pub fn follow(certificates: Weak<Certificates>) -> impl Future<Output = ()> {
    let mut hangups = signal(SignalKind::hangup())
        .inspect_err(|error| tracing::warn!(%error, "SIGHUP cannot be listened to"))
        .ok();
    async move {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut unreadable = false;
        let mut expiry = None;
        loop {
            let asked = tokio::select! {
                _ = looks.tick() => false,
                () = hangup(&mut hangups) => true,
            };
            let Some(certificates) = certificates.upgrade() else {
                return;
            };
            let shown = Arc::clone(&certificates);
            let Ok(looked) = tokio::task::spawn_blocking(move || certificates.reload(asked)).await else {
                return;
            };
            unreadable = tell(looked, asked, unreadable);
            remind(&mut expiry, &shown.in_use());
        }
    }
}

/// Keeps the metric and the warnings about the end of the certificate in use.
fn remind(known: &mut Option<(Arc<CertifiedKey>, Expiry)>, in_use: &Arc<CertifiedKey>) {
    let same = known.as_ref().is_some_and(|(key, _)| Arc::ptr_eq(key, in_use));
    if !same {
        let end = in_use
            .cert
            .first()
            .map(|certificate| Validity::of_certificate(certificate));
        *known = match end {
            Some(Ok(validity)) => Some((Arc::clone(in_use), Expiry::new("https", validity))),
            // TLS serves it; only its end is not known.
            Some(Err(_)) | None => None,
        };
    }
    if let Some((_, expiry)) = known {
        expiry.remind();
    }
}

/// Tells what came of a look at the files. True if they were `unreadable`, which is told once.
fn tell(looked: Result<bool, TlsError>, asked: bool, unreadable: bool) -> bool {
    match looked {
        Ok(false) => unreadable,
        Ok(true) => {
            tracing::info!(asked, "the certificate of the HTTPS port has been read");
            false
        }
        Err(error @ TlsError::File { .. }) if unreadable && !asked => {
            tracing::debug!(%error, "still unreadable");
            true
        }
        Err(error) => {
            tracing::warn!(asked, %error, "the certificate of the HTTPS port stays as it is");
            matches!(error, TlsError::File { .. })
        }
    }
}

/// The next SIGHUP; never, if none can be listened to.
async fn hangup(hangups: &mut Option<Signal>) {
    if let Some(hangups) = hangups
        && hangups.recv().await.is_some()
    {
        return;
    }
    std::future::pending().await
}

fn read(cert_path: &Path, key_path: &Path) -> Result<Contents, TlsError> {
    let read = |field: &'static str, path: &Path| {
        fs::read(path).map_err(|source| TlsError::File {
            field,
            path: path.to_owned(),
            source,
        })
    };
    Ok(Contents {
        cert: read("tls_cert_path", cert_path)?,
        key: read("tls_key_path", key_path)?,
    })
}

fn usable(
    contents: &Contents,
    cert_path: &Path,
    key_path: &Path,
    provider: &CryptoProvider,
) -> Result<Arc<CertifiedKey>, TlsError> {
    let wrong = |field, path: &Path, what, reason: String| TlsError::Content {
        field,
        path: path.to_owned(),
        what,
        reason,
    };
    let wrong_cert = |reason| wrong("tls_cert_path", cert_path, "certificate", reason);
    let wrong_key = |reason| wrong("tls_key_path", key_path, "private key of the certificate", reason);
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&contents.cert)
        .collect::<Result<_, _>>()
        .map_err(|error| wrong_cert(error.to_string()))?;
    if chain.is_empty() {
        return Err(wrong_cert("there is none in it".to_owned()));
    }
    let key = PrivateKeyDer::from_pem_slice(&contents.key).map_err(|error| wrong_key(error.to_string()))?;
    let key = CertifiedKey::from_der(chain, key, provider).map_err(|error| wrong_key(error.to_string()))?;
    Ok(Arc::new(key))
}
