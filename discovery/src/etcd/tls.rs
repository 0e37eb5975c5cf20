//! TLS to etcd, from the files that the settings name.

use std::sync::Arc;

use config::DiscoveryConfig;
use rustls::crypto::ring;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::EtcdError;

fn wrong(field: &'static str, path: &str, reason: impl ToString) -> EtcdError {
    EtcdError::Setting {
        field,
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

fn certificates(field: &'static str, path: &str) -> Result<Vec<CertificateDer<'static>>, EtcdError> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let all = all.map_err(|error| wrong(field, path, error))?;
    if all.is_empty() {
        return Err(wrong(field, path, "no CERTIFICATE section in it"));
    }
    Ok(all)
}

/// Trusts the configured authority alone; shows the configured certificate, if there is one.
pub(super) fn client(config: &DiscoveryConfig) -> Result<ClientConfig, EtcdError> {
    let mut roots = RootCertStore::empty();
    let authority = &config.etcd_ca_cert_path;
    if !authority.is_empty() {
        for certificate in certificates("etcd_ca_cert_path", authority)? {
            roots
                .add(certificate)
                .map_err(|error| wrong("etcd_ca_cert_path", authority, error))?;
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| EtcdError::Client(error.to_string()))?
        .with_root_certificates(roots);
    let (cert, key) = (&config.etcd_cert_path, &config.etcd_key_path);
    if cert.is_empty() {
        return Ok(builder.with_no_client_auth());
    }
    let chain = certificates("etcd_cert_path", cert)?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| wrong("etcd_key_path", key, error))?;
    builder
        .with_client_auth_cert(chain, private)
        .map_err(|error| wrong("etcd_cert_path", cert, error))
}
