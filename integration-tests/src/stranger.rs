//! Those who try to get into the cluster without the right to: connections with whatever certificate, and noise.

use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use quinn::crypto::rustls::QuicClientConfig;
use runtime::authority::SERVER_NAME;
use runtime::quic::describe;
use rustls::crypto::ring::default_provider;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::time::timeout;

use crate::random::Random;

/// A stranger is turned away within this time.
const TURNED_AWAY_WITHIN: Duration = Duration::from_secs(5);

/// A stranger's papers.
#[derive(Clone, Debug)]
pub struct Stranger {
    /// The CA it trusts: the cluster's, or it would not even talk.
    pub ca: PathBuf,
    /// Certificate and key it shows, if any.
    pub shows: Option<(PathBuf, PathBuf)>,
}

impl Stranger {
    /// One that shows the certificate `name` of a folder of certificates.
    pub fn showing(ca_dir: &Path, cert_dir: &Path, name: &str) -> Self {
        let shows = (
            cert_dir.join(format!("{name}.pem")),
            cert_dir.join(format!("{name}.key")),
        );
        Self {
            ca: ca_dir.join("ca.pem"),
            shows: Some(shows),
        }
    }

    fn tls(&self, alpn: &[u8]) -> Result<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&self.ca).with_context(|| format!("{}", self.ca.display()))?)?;
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots);
        let mut tls = match &self.shows {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                let chain = vec![CertificateDer::from_pem_file(cert)?];
                builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(key)?)?
            }
        };
        tls.alpn_protocols = vec![alpn.to_vec()];
        Ok(tls)
    }

    /// Dials, opens a stream and writes on it. Says how it was turned away; an error if it was not.
    pub async fn knock(&self, address: SocketAddr, alpn: &[u8]) -> Result<String> {
        let endpoint = quinn::Endpoint::client("127.0.0.1:0".parse()?)?;
        let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(self.tls(alpn)?)?));
        let connecting = endpoint.connect_with(config, address, SERVER_NAME)?;
        let connection = match timeout(TURNED_AWAY_WITHIN, connecting).await {
            Err(_) => return Ok("no answer".to_owned()),
            Ok(Err(error)) => return Ok(describe(&error)),
            Ok(Ok(connection)) => connection,
        };
        // TLS lets the dialling side finish first: what counts is whether it can get anything through.
        let read = async {
            let (mut send, mut recv) = connection.open_bi().await?;
            send.write_all(&[0; 64]).await?;
            anyhow::Ok(recv.read(&mut [0; 64]).await?)
        };
        if let Ok(Ok(answer)) = timeout(TURNED_AWAY_WITHIN, read).await {
            bail!("a stranger was answered with {answer:?}");
        }
        match timeout(TURNED_AWAY_WITHIN, connection.closed()).await {
            Ok(reason) => Ok(describe(&reason)),
            Err(_) => bail!("a stranger was not turned away"),
        }
    }
}

/// Sends `count` datagrams of random bytes. Every fourth looks like the beginning of a QUIC handshake, every eighth like a
/// packet of a running connection. What the system refuses to send is left out.
pub fn noise(address: SocketAddr, count: usize, seed: u64) -> Result<usize> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    let mut random = Random::new(seed);
    let mut sent = 0;
    for i in 0..count {
        let length = match i % 4 {
            0 => random.between(1_200, 1_452),
            _ => random.between(1, 1_452),
        } as usize;
        let mut bytes: Vec<u8> = (0..length.div_ceil(8))
            .flat_map(|_| random.bits().to_le_bytes())
            .take(length)
            .collect();
        if i % 4 == 0 && length > 6 {
            // Long header, Initial, version 1, connection id of 8 bytes.
            bytes[..6].copy_from_slice(&[0xc3, 0, 0, 0, 1, 8]);
        } else if i % 8 == 1 {
            bytes[0] = 0x40 | (bytes[0] & 0x3f);
        }
        sent += usize::from(socket.send_to(&bytes, address).is_ok());
    }
    Ok(sent)
}
