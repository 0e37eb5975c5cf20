//! Who this process is and whom it trusts: certificate, key, cluster CA; and who a verified peer is.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use config::ClusterConfig;
use protocol::ids::{NodeId, Role};
use rustls::client::Resumption;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::cipher_suite::{
    TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use thiserror::Error;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::authority::SERVER_NAME;
use crate::clock::Clock;

/// Longest node name, in characters.
const MAX_NODE_NAME: usize = 64;
/// Most bytes of an identity file that are read.
const MAX_FILE_BYTES: u64 = 1 << 20;
const URI_SCHEME: &str = "baton://";

/// Why an identity cannot be made, loaded or read from a certificate.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// A configuration field is empty.
    #[error("cluster.{field} is empty: it must be the path of {what} (PEM)")]
    MissingPath {
        /// The field of `[cluster]`.
        field: &'static str,
        /// What the file holds.
        what: &'static str,
    },
    /// A file cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("{what} is not usable: {reason}")]
    Content {
        /// The file or value.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A node name is not allowed.
    #[error("node name {name:?} is not allowed: 1 to {MAX_NODE_NAME} characters of A-Z a-z 0-9 . _ -")]
    NodeName {
        /// The name.
        name: String,
    },
    /// A certificate does not say who it belongs to.
    #[error("certificate names {found}, expected exactly one URI baton://<role>/<node>")]
    NoPeerName {
        /// The URIs in it.
        found: String,
    },
    /// A certificate cannot be made.
    #[error("cannot make a certificate: {0}")]
    Generation(#[from] rcgen::Error),
}

impl IdentityError {
    pub(crate) fn file(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::File {
            action,
            path: path.to_owned(),
            source,
        }
    }

    fn content(what: impl Into<String>, reason: impl fmt::Display) -> Self {
        Self::Content {
            what: what.into(),
            reason: reason.to_string(),
        }
    }
}

/// Who a process is, as its certificate says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// What it does.
    pub role: Role,
    /// Its name.
    pub node: NodeId,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.node)
    }
}

impl Peer {
    /// Checks the node name: 1 to 64 characters of `A-Z a-z 0-9 . _ -`.
    pub fn new(role: Role, node: NodeId) -> Result<Self, IdentityError> {
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if node.0.is_empty() || node.0.len() > MAX_NODE_NAME || !node.0.chars().all(legal) {
            return Err(IdentityError::NodeName { name: node.0 });
        }
        Ok(Self { role, node })
    }

    /// The URI that names it in a certificate.
    pub fn uri(&self) -> String {
        format!("{URI_SCHEME}{}/{}", self.role, self.node)
    }

    /// Reads role and node from the URI of a certificate (DER). Does not verify the certificate.
    pub fn from_certificate(der: &[u8]) -> Result<Self, IdentityError> {
        let (_, certificate) = X509Certificate::from_der(der).map_err(|e| IdentityError::content("certificate", e))?;
        let names = certificate
            .subject_alternative_name()
            .map_err(|e| IdentityError::content("certificate's alternative names", e))?;
        let uris: Vec<&str> = names
            .iter()
            .flat_map(|names| &names.value.general_names)
            .filter_map(|name| {
                if let GeneralName::URI(uri) = name {
                    Some(*uri)
                } else {
                    None
                }
            })
            .collect();
        let wrong = || IdentityError::NoPeerName {
            found: format!("{uris:?}"),
        };
        let [uri] = uris[..] else { return Err(wrong()) };
        let (role, node) = uri
            .strip_prefix(URI_SCHEME)
            .and_then(|rest| rest.split_once('/'))
            .ok_or_else(wrong)?;
        let role = parse_role(role).ok_or_else(wrong)?;
        Self::new(role, NodeId(node.to_owned()))
    }
}

/// The role that a word of [`Role::as_str`] names.
pub fn parse_role(word: &str) -> Option<Role> {
    [Role::Coordinator, Role::Prefill, Role::Decode, Role::Both]
        .into_iter()
        .find(|role| role.as_str() == word)
}

/// From when to when a certificate is valid, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// Not before.
    pub from: u64,
    /// Not after.
    pub until: u64,
}

impl Validity {
    /// Reads it from a certificate (DER). Does not verify the certificate.
    pub fn of_certificate(der: &[u8]) -> Result<Self, IdentityError> {
        let (_, certificate) = X509Certificate::from_der(der).map_err(|e| IdentityError::content("certificate", e))?;
        let validity = certificate.validity();
        let seconds = |time: x509_parser::time::ASN1Time| u64::try_from(time.timestamp()).unwrap_or(0);
        Ok(Self {
            from: seconds(validity.not_before),
            until: seconds(validity.not_after),
        })
    }

    /// The end as a date.
    pub fn until_text(&self) -> String {
        let end = i64::try_from(self.until).ok();
        let time = end.and_then(|end| x509_parser::time::ASN1Time::from_timestamp(end).ok());
        time.and_then(|time| time.to_rfc2822().ok())
            .unwrap_or_else(|| format!("{} s after 1970", self.until))
    }
}

/// The texts of the three files that make an identity.
#[derive(Clone, PartialEq, Eq)]
pub struct IdentityFiles {
    ca: String,
    cert: String,
    key: String,
}

impl IdentityFiles {
    /// Reads the three files that `[cluster]` names.
    pub fn read(cluster: &ClusterConfig) -> Result<Self, IdentityError> {
        let what = [
            "the cluster's CA certificate",
            "this process's certificate",
            "this process's private key",
        ];
        Ok(Self {
            ca: read_configured("ca_cert_path", what[0], &cluster.ca_cert_path)?,
            cert: read_configured("cert_path", what[1], &cluster.cert_path)?,
            key: read_configured("key_path", what[2], &cluster.key_path)?,
        })
    }

    /// The identity that they make together; see [`Identity::from_pem`].
    pub fn identity(&self) -> Result<Identity, IdentityError> {
        Identity::from_pem(&self.ca, &self.cert, &self.key)
    }
}

/// Certificate, key and trusted CA of this process.
pub struct Identity {
    peer: Peer,
    validity: Validity,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.peer)
    }
}

impl Identity {
    /// Loads the three files that `[cluster]` names and checks that they belong together.
    pub fn load(cluster: &ClusterConfig) -> Result<Self, IdentityError> {
        let files = IdentityFiles::read(cluster)?;
        warn_if_readable_by_others(Path::new(&cluster.key_path));
        files.identity()
    }

    /// What [`from_pem`](Self::from_pem) gives, for a certificate that may have ended: only for renewing it.
    pub(crate) fn once_valid(ca_pem: &str, cert_pem: &str, key_pem: &str) -> Result<Self, IdentityError> {
        let identity = Self::unchecked(ca_pem, cert_pem, key_pem)?;
        let Validity { from, until } = identity.validity;
        identity.check_own_certificate(Clock.unix_seconds().clamp(from, until.max(from)))?;
        Ok(identity)
    }

    /// An identity from PEM texts. Errors if the certificate is not signed by the CA, is not valid now, does not belong to
    /// the key or does not name a role and node.
    pub fn from_pem(ca_pem: &str, cert_pem: &str, key_pem: &str) -> Result<Self, IdentityError> {
        let identity = Self::unchecked(ca_pem, cert_pem, key_pem)?;
        identity.check_own_certificate(Clock.unix_seconds())?;
        Ok(identity)
    }

    fn unchecked(ca_pem: &str, cert_pem: &str, key_pem: &str) -> Result<Self, IdentityError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates("CA certificate", ca_pem)? {
            roots
                .add(certificate)
                .map_err(|e| IdentityError::content("CA certificate", e))?;
        }
        let chain = certificates("certificate", cert_pem)?;
        let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes())
            .map_err(|e| IdentityError::content("private key", format!("not a PEM private key: {e}")))?;
        let peer = Peer::from_certificate(&chain[0])?;
        Ok(Self {
            validity: Validity::of_certificate(&chain[0])?,
            peer,
            chain,
            key,
            roots: Arc::new(roots),
            provider: Arc::new(provider()),
        })
    }

    /// Who this process is.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// How long its certificate is valid.
    pub fn validity(&self) -> Validity {
        self.validity
    }

    /// The certificate itself (DER).
    pub fn certificate(&self) -> &[u8] {
        &self.chain[0]
    }

    /// TLS of the dialling side: offers `alpn` alone, presents this certificate, trusts only the cluster's CA.
    pub fn client_tls(&self, alpn: &[u8]) -> Result<ClientConfig, IdentityError> {
        let mut tls = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|builder| {
                builder
                    .with_root_certificates(Arc::clone(&self.roots))
                    .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
            })
            .map_err(|e| IdentityError::content("certificate and key", e))?;
        tls.alpn_protocols = vec![alpn.to_vec()];
        // Every link shows a certificate: no session is resumed, no early data is sent.
        tls.resumption = Resumption::disabled();
        tls.enable_early_data = false;
        Ok(tls)
    }

    /// TLS of the listening side: accepts `alpns`, demands a certificate of the cluster's CA.
    pub fn server_tls(&self, alpns: Vec<Vec<u8>>) -> Result<ServerConfig, IdentityError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&self.roots), Arc::clone(&self.provider))
            .build()
            .map_err(|e| IdentityError::content("CA certificate", e))?;
        let mut tls = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|builder| {
                builder
                    .with_client_cert_verifier(verifier)
                    .with_single_cert(self.chain.clone(), self.key.clone_key())
            })
            .map_err(|e| IdentityError::content("certificate and key", e))?;
        tls.alpn_protocols = alpns;
        tls.send_tls13_tickets = 0;
        tls.max_early_data_size = 0;
        Ok(tls)
    }

    /// Finds at start what every peer would find at the first handshake.
    fn check_own_certificate(&self, now: u64) -> Result<(), IdentityError> {
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::clone(&self.roots), Arc::clone(&self.provider))
            .build()
            .map_err(|e| IdentityError::content("CA certificate", e))?;
        let name = ServerName::try_from(SERVER_NAME).map_err(|e| IdentityError::content(SERVER_NAME, e))?;
        let now = UnixTime::since_unix_epoch(std::time::Duration::from_secs(now));
        verifier
            .verify_server_cert(&self.chain[0], &self.chain[1..], &name, &[], now)
            .map_err(|e| IdentityError::content(format!("certificate of {}", self.peer), e))?;
        self.client_tls(protocol::ALPN_CONTROL).map(drop)
    }
}

/// ring, with AES-128-GCM first: the cheapest cipher where the CPU has AES instructions.
fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![
            TLS13_AES_128_GCM_SHA256,
            TLS13_AES_256_GCM_SHA384,
            TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..rustls::crypto::ring::default_provider()
    }
}

fn certificates(what: &str, pem: &str) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let all: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|e| IdentityError::content(what, format!("not PEM: {e}")))?;
    if all.is_empty() {
        return Err(IdentityError::content(what, "no CERTIFICATE section in the PEM text"));
    }
    Ok(all)
}

fn read_configured(field: &'static str, what: &'static str, path: &str) -> Result<String, IdentityError> {
    if path.is_empty() {
        return Err(IdentityError::MissingPath { field, what });
    }
    let path = Path::new(path);
    let size = fs::metadata(path)
        .map_err(|e| IdentityError::file("read", path, e))?
        .len();
    if size > MAX_FILE_BYTES {
        let reason = format!("{size} bytes, at most {MAX_FILE_BYTES} are read");
        return Err(IdentityError::content(
            format!("cluster.{field} {}", path.display()),
            reason,
        ));
    }
    fs::read_to_string(path).map_err(|e| IdentityError::file("read", path, e))
}

fn warn_if_readable_by_others(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    if let Ok(metadata) = fs::metadata(path)
        && metadata.permissions().mode() & 0o077 != 0
    {
        let mode = format!("{:o}", metadata.permissions().mode() & 0o777);
        tracing::warn!(path = %path.display(), mode, "private key is readable by others: mode 0600 is right");
    }
}
