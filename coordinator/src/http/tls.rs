//! HTTPS for clients: a certificate and its key from files, read again when they change.
//!
//! Whoever renews a certificate replaces the files; the process needs no signal and no restart. New connections get the
//! new certificate, those that are open keep theirs. Files that do not fit together, as while they are being replaced,
//! change nothing.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;
use std::{fs, io};

use rustls::ServerConfig;
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use thiserror::Error;
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

    /// Looks at the files; true if they hold something new that is in use now. The same trouble is told once.
    ///
    /// # Errors
    /// They cannot be read, or what is new in them cannot be used; the certificate in use stays.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let found = read(&self.cert_path, &self.key_path)?;
        let known = |loaded: &Loaded| loaded.seen == found;
        if known(&self.loaded.read().unwrap_or_else(PoisonError::into_inner)) {
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
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        Some(Arc::clone(&loaded.key))
    }
}

/// Reloads the certificate as often as its files change, as long as somebody uses it.
pub async fn follow(certificates: Weak<Certificates>) {
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut unreadable = false;
    loop {
        looks.tick().await;
        let Some(certificates) = certificates.upgrade() else {
            return;
        };
        let looked = tokio::task::spawn_blocking(move || certificates.reload()).await;
        match looked {
            Ok(Ok(true)) => {
                unreadable = false;
                tracing::info!("the certificate of the HTTPS port has been replaced");
            }
            Ok(Ok(false)) => {}
            Ok(Err(error @ TlsError::File { .. })) if unreadable => tracing::debug!(%error, "still unreadable"),
            Ok(Err(error)) => {
                unreadable = matches!(error, TlsError::File { .. });
                tracing::warn!(%error, "the certificate of the HTTPS port stays as it is");
            }
            Err(_) => return,
        }
    }
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
