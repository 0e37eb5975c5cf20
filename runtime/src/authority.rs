//! The cluster's certificate authority: creates itself, issues one certificate per process.
//!
//! A certificate carries two names: the DNS name [`SERVER_NAME`], the same for all, which TLS checks, and the URI
//! `baton://<role>/<node>`, which says who the peer is.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use protocol::ids::{NodeId, Role};
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};

use crate::clock::Clock;
use crate::identity::{Identity, IdentityError, Peer};

/// The DNS name in every node certificate, and the TLS server name of every connection.
pub const SERVER_NAME: &str = "baton.internal";
/// File name of the CA certificate.
pub const CA_CERT_FILE: &str = "ca.pem";
/// File name of the CA key (mode 0600).
pub const CA_KEY_FILE: &str = "ca.key";
/// How long a certificate is valid if nothing else is said.
pub const VALIDITY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Certificates are valid from this long before their creation, so that clocks may differ a little.
const CLOCK_SKEW: Duration = Duration::from_secs(24 * 3600);

/// A certificate authority with its key.
pub struct CertificateAuthority {
    issuer: Issuer<'static, KeyPair>,
    ca_pem: String,
    /// How long what it issues is valid.
    validity: Duration,
}

/// A certificate and its key, PEM.
pub struct IssuedCertificate {
    /// Whom it names.
    pub peer: Peer,
    /// The certificate of the CA that signed it.
    pub ca_pem: String,
    /// The certificate.
    pub cert_pem: String,
    /// Its private key.
    pub key_pem: String,
}

/// Where an issued certificate was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuedPaths {
    /// The CA certificate.
    pub ca_cert: PathBuf,
    /// The certificate.
    pub cert: PathBuf,
    /// The key, mode 0600.
    pub key: PathBuf,
}

impl CertificateAuthority {
    /// Makes a new authority in memory.
    pub fn generate() -> Result<Self, IdentityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        set_validity(&mut params, VALIDITY);
        params.distinguished_name.push(DnType::CommonName, "Baton cluster CA");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let ca_pem = params.self_signed(&key)?.pem();
        Ok(Self {
            issuer: Issuer::new(params, key),
            ca_pem,
            validity: VALIDITY,
        })
    }

    /// Makes a new authority and writes `ca.pem` and `ca.key` into `dir`, which is created. Refuses to replace existing
    /// files: all certificates of the cluster depend on them.
    pub fn create(dir: &Path) -> Result<Self, IdentityError> {
        fs::create_dir_all(dir).map_err(|e| IdentityError::file("create directory", dir, e))?;
        let authority = Self::generate()?;
        write_new(&dir.join(CA_KEY_FILE), &authority.issuer.key().serialize_pem(), 0o600)?;
        write_new(&dir.join(CA_CERT_FILE), &authority.ca_pem, 0o644)?;
        Ok(authority)
    }

    /// Loads the authority that [`create`](Self::create) wrote into `dir`.
    pub fn load(dir: &Path) -> Result<Self, IdentityError> {
        let (cert, key) = (dir.join(CA_CERT_FILE), dir.join(CA_KEY_FILE));
        let ca_pem = fs::read_to_string(&cert).map_err(|e| IdentityError::file("read", &cert, e))?;
        let key_pem = fs::read_to_string(&key).map_err(|e| IdentityError::file("read", &key, e))?;
        let issuer = Issuer::from_ca_cert_pem(&ca_pem, KeyPair::from_pem(&key_pem)?)?;
        Ok(Self {
            issuer,
            ca_pem,
            validity: VALIDITY,
        })
    }

    /// What it issues from now on is valid for so long.
    #[must_use]
    pub fn valid_for(mut self, validity: Duration) -> Self {
        self.validity = validity;
        self
    }

    /// The CA certificate, PEM.
    pub fn ca_pem(&self) -> &str {
        &self.ca_pem
    }

    /// Issues a certificate for a node. The name must be 1 to 64 characters of `A-Z a-z 0-9 . _ -`.
    pub fn issue(&self, role: Role, node: &NodeId) -> Result<IssuedCertificate, IdentityError> {
        self.certify(Peer::new(role, node.clone())?, KeyPair::generate()?)
    }

    fn certify(&self, peer: Peer, key: KeyPair) -> Result<IssuedCertificate, IdentityError> {
        let mut params = CertificateParams::default();
        set_validity(&mut params, self.validity);
        params
            .distinguished_name
            .push(DnType::CommonName, format!("Baton {peer}"));
        params.subject_alt_names = vec![
            SanType::DnsName(Ia5String::try_from(SERVER_NAME)?),
            SanType::URI(Ia5String::try_from(peer.uri())?),
        ];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let cert_pem = params.signed_by(&key, &self.issuer)?.pem();
        Ok(IssuedCertificate {
            peer,
            ca_pem: self.ca_pem.clone(),
            cert_pem,
            key_pem: key.serialize_pem(),
        })
    }

    /// Issues a certificate and writes `<node>.pem` and `<node>.key` into `dir`. Refuses to replace existing files.
    pub fn issue_to(&self, dir: &Path, role: Role, node: &NodeId) -> Result<IssuedPaths, IdentityError> {
        let issued = self.issue(role, node)?;
        fs::create_dir_all(dir).map_err(|e| IdentityError::file("create directory", dir, e))?;
        let ca_cert = dir.join(CA_CERT_FILE);
        if !ca_cert.exists() {
            write_new(&ca_cert, &self.ca_pem, 0o644)?;
        }
        let paths = IssuedPaths::of(dir, node);
        write_new(&paths.key, &issued.key_pem, 0o600)?;
        write_new(&paths.cert, &issued.cert_pem, 0o644)?;
        Ok(paths)
    }

    /// Renews the certificate `<node>.pem` in `dir`: the same name and role, with the same key, or with a new one if
    /// `new_key`. Each file is replaced at once and whole, and keeps its owner and mode; a new key comes before its
    /// certificate. A process that uses them notices and goes on.
    ///
    /// # Errors
    /// The certificate is not of this authority (it may have ended), or not for `node`, or not for `role`, if one is given;
    /// its key does not belong to it; a file cannot be read or written. Then nothing has been replaced.
    pub fn renew(
        &self,
        dir: &Path,
        node: &NodeId,
        role: Option<Role>,
        new_key: bool,
    ) -> Result<IssuedPaths, IdentityError> {
        let paths = IssuedPaths::of(dir, node);
        let read = |path: &Path| fs::read_to_string(path).map_err(|e| IdentityError::file("read", path, e));
        let (cert_pem, key_pem) = (read(&paths.cert)?, read(&paths.key)?);
        let wrong = |reason: String| IdentityError::Content {
            what: paths.cert.display().to_string(),
            reason,
        };
        let peer = Identity::once_valid(&self.ca_pem, &cert_pem, &key_pem)?.peer().clone();
        if peer.node != *node {
            return Err(wrong(format!("it is for {peer}, not for {node}")));
        }
        if let Some(role) = role.filter(|role| *role != peer.role) {
            return Err(wrong(format!(
                "it is for {peer}; a {role} certificate is issued, not renewed"
            )));
        }
        let key = if new_key {
            KeyPair::generate()?
        } else {
            KeyPair::from_pem(&key_pem)?
        };
        let issued = self.certify(peer, key)?;
        issued.identity()?;
        if new_key {
            replace(&paths.key, &issued.key_pem)?;
        }
        replace(&paths.cert, &issued.cert_pem)?;
        Ok(paths)
    }
}

impl IssuedPaths {
    fn of(dir: &Path, node: &NodeId) -> Self {
        Self {
            ca_cert: dir.join(CA_CERT_FILE),
            cert: dir.join(format!("{node}.pem")),
            key: dir.join(format!("{node}.key")),
        }
    }
}

impl IssuedCertificate {
    /// The identity that this certificate gives, without a detour over files.
    pub fn identity(&self) -> Result<Identity, IdentityError> {
        Identity::from_pem(&self.ca_pem, &self.cert_pem, &self.key_pem)
    }
}

fn set_validity(params: &mut CertificateParams, validity: Duration) {
    let now = Clock.wall_time();
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + validity).into();
}

/// Replaces a file at once and whole, by a new one with the same owner and mode.
fn replace(path: &Path, text: &str) -> Result<(), IdentityError> {
    let failed = |e| IdentityError::file("replace", path, e);
    let old = fs::metadata(path).map_err(failed)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    // What an interrupted renewal left behind.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        Ok(()) | Err(_) => {}
    }
    write_new(&new, text, 0o600)?;
    let made = fs::metadata(&new).map_err(failed)?;
    if (made.uid(), made.gid()) != (old.uid(), old.gid()) {
        chown(&new, Some(old.uid()), Some(old.gid())).map_err(failed)?;
    }
    fs::set_permissions(&new, fs::Permissions::from_mode(old.mode() & 0o777)).map_err(failed)?;
    fs::rename(&new, path).map_err(failed)?;
    let parent = path.parent().unwrap_or(Path::new("."));
    fs::File::open(parent).and_then(|dir| dir.sync_all()).map_err(failed)
}

fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), IdentityError> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .map_err(|e| IdentityError::file("create", path, e))?;
    file.write_all(text.as_bytes())
        .map_err(|e| IdentityError::file("write", path, e))?;
    file.sync_all().map_err(|e| IdentityError::file("write", path, e))
}
