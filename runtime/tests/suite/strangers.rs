//! Promise: nobody without a certificate of the cluster's CA opens a stream, and nobody delays those who have one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use config::{ClusterConfig, TransferConfig};
use protocol::ids::{NodeId, Role};
use quinn::Endpoint;
use quinn::crypto::rustls::QuicClientConfig;
use runtime::authority::{CertificateAuthority, SERVER_NAME};
use runtime::quic::{Alpn, LinkError, QuicEndpoint};
use rustls::DigitallySignedStruct;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio::net::UdpSocket;

use super::{address, any, authority, endpoint, endpoint_with, identity, soon, until};

/// A stranger's TLS: takes any server, shows the certificate it was given, if any.
#[derive(Debug)]
struct Gullible;

impl ServerCertVerifier for Gullible {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        rustls::crypto::ring::default_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

fn stranger(certificate: Option<&CertificateAuthority>) -> Endpoint {
    let builder = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Gullible));
    let mut tls = match certificate {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let issued = authority
                .issue(Role::Prefill, &NodeId("p0".to_owned()))
                .expect("issued");
            let chain = vec![CertificateDer::from_pem_slice(issued.cert_pem.as_bytes()).expect("PEM")];
            let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).expect("PEM");
            builder.with_client_auth_cert(chain, key).expect("fits")
        }
    };
    tls.alpn_protocols = vec![Alpn::Kv.as_bytes().to_vec()];
    let mut endpoint = Endpoint::client("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let config = QuicClientConfig::try_from(tls).expect("a suite");
    endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(config)));
    endpoint
}

/// The decode node still serves its own.
async fn serves(ca: &CertificateAuthority, decode: &QuicEndpoint) {
    let prefill = endpoint(identity(ca, Role::Prefill, "p9")).await;
    let link = soon("dial", prefill.connect(&address(decode), Alpn::Kv, any(Role::Decode)))
        .await
        .expect("a link");
    assert_eq!(
        soon("accept", decode.accept()).await.expect("a link").peer.to_string(),
        "prefill p9"
    );
    drop(link);
}

#[tokio::test]
async fn without_a_certificate_or_with_that_of_another_ca_no_stream_opens() {
    let (ca, other) = (authority(), authority());
    let decode = endpoint(identity(&ca, Role::Decode, "d0")).await;
    for (n, certificate) in [None, Some(&other)].into_iter().enumerate() {
        let stranger = stranger(certificate);
        let target = decode.local_addr().expect("bound");
        // TLS lets the dialling side believe it is done before its certificate has been looked at.
        let exchange = async {
            let connection = stranger.connect(target, SERVER_NAME).expect("dials").await?;
            let (mut send, mut receive) = connection.open_bi().await?;
            send.write_all(b"let me in").await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(receive.read_to_end(100).await?)
        };
        let error = soon("the refusal", exchange).await.expect_err("refused").to_string();
        assert!(!error.is_empty());
        until("the count", || decode.accept_stats().failed == n as u64 + 1).await;
    }
    assert_eq!(decode.accept_stats().accepted, 0);
    serves(&ca, &decode).await;
}

#[tokio::test]
async fn a_node_does_not_talk_to_a_server_of_another_ca() {
    let prefill = endpoint(identity(&authority(), Role::Prefill, "p0")).await;
    let foreign = endpoint(identity(&authority(), Role::Decode, "d0")).await;
    let error = prefill
        .connect(&address(&foreign), Alpn::Kv, any(Role::Decode))
        .await
        .expect_err("another CA");
    assert!(matches!(error, LinkError::Handshake { .. }), "{error}");
    let expected = "expected a certificate of this cluster's CA";
    assert!(error.to_string().contains(expected), "{error}");
}

#[tokio::test]
async fn garbage_datagrams_change_nothing() {
    let ca = authority();
    let decode = endpoint(identity(&ca, Role::Decode, "d0")).await;
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
    let target = decode.local_addr().expect("bound");
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for n in 0..3_000_u32 {
        let mut datagram = vec![0_u8; (n % 1_450) as usize];
        for byte in &mut datagram {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *byte = state as u8;
        }
        // Every second one claims to be the first packet of a QUIC 1 connection.
        if n % 2 == 0 && datagram.len() > 6 {
            datagram[..5].copy_from_slice(&[0xc3, 0, 0, 0, 1]);
            datagram[5] = 8;
        }
        socket.send_to(&datagram, target).await.expect("sent");
    }
    serves(&ca, &decode).await;
    let stats = decode.accept_stats();
    assert_eq!((stats.accepted, stats.wrong_peer), (1, 0), "{stats:?}");
}

/// Passes datagrams on to `target` and drops every answer.
async fn one_way_relay(target: SocketAddr) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
    let address = socket.local_addr().expect("bound");
    tokio::spawn(async move {
        let mut buffer = [0; 2_048];
        while let Ok((n, from)) = socket.recv_from(&mut buffer).await {
            if from != target && socket.send_to(&buffer[..n], target).await.is_err() {
                return;
            }
        }
    });
    address
}

#[tokio::test]
async fn handshakes_that_never_complete_are_bounded_and_expire() {
    let ca = authority();
    let cluster = ClusterConfig {
        connect_timeout_ms: 1_000,
        ..ClusterConfig::default()
    };
    let decode = endpoint_with(identity(&ca, Role::Decode, "d0"), cluster, TransferConfig::default()).await;
    let relay = one_way_relay(decode.local_addr().expect("bound")).await;
    let stranger = stranger(None);
    let mut half_open = Vec::new();
    for _ in 0..400 {
        half_open.push(stranger.connect(relay, SERVER_NAME).expect("dials"));
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
    until("pressure", || decode.accept_stats().retried > 0).await;
    assert!(decode.accept_stats().pending <= 256);
    serves(&ca, &decode).await;
    drop(half_open);
    stranger.close(0u32.into(), b"");
    until("expiry", || decode.accept_stats().pending == 0).await;
    let stats = decode.accept_stats();
    assert!(stats.timed_out > 0 && stats.accepted == 1, "{stats:?}");
    serves(&ca, &decode).await;
}
