//! HTTPS for clients, and certificates that are replaced while it runs.

mod http_support;

use std::fs;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http_support::backend::Script;
use http_support::client::{connect, get, post_bytes};
use http_support::{Front, config, start_with, try_listen};
use rustls::crypto::ring;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use rustls_pki_types::{CertificateDer, ServerName};

/// Writes a new certificate and its key; returns it as the one to trust.
fn issue(folder: &Path) -> CertificateDer<'static> {
    let issued = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    fs::write(folder.join("cert.pem"), issued.cert.pem()).expect("written");
    fs::write(folder.join("key.pem"), issued.signing_key.serialize_pem()).expect("written");
    issued.cert.der().clone()
}

fn front(folder: &Path) -> Front {
    let path = |name: &str| folder.join(name).to_str().expect("UTF-8").to_owned();
    start_with(|config| {
        config.coordinator.tls_cert_path = path("cert.pem");
        config.coordinator.tls_key_path = path("key.pem");
    })
}

/// Sends a request over TLS and reads until the end; `None` if the server's certificate is not `trusted`.
fn exchange(address: SocketAddr, trusted: &CertificateDer<'static>, request: &[u8]) -> Option<String> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).expect("a certificate");
    let client = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    let session = ClientConnection::new(Arc::new(client), name).expect("a session");
    let mut stream = StreamOwned::new(session, connect(address));
    stream.write_all(request).ok()?;
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => Some(String::from_utf8(answer).expect("text")),
        // A server that closes without saying goodbye has still answered.
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            Some(String::from_utf8(answer).expect("text"))
        }
        Err(_) => None,
    }
}

const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

/// Waits until a new connection shows a certificate that is, or is not, `trusted`.
fn wait(address: SocketAddr, trusted: &CertificateDer<'static>, shown: bool) {
    for _ in 0..100 {
        if exchange(address, trusted, HEALTH).is_some() == shown {
            return;
        }
        #[allow(clippy::disallowed_methods, reason = "a test that waits for the server")]
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("the certificate is not the one that was expected");
}

#[test]
fn clients_are_served_over_tls_whole_and_streamed() {
    let folder = tempfile::tempdir().expect("a folder");
    let trusted = issue(folder.path());
    let front = front(folder.path());
    let health = exchange(front.address, &trusted, HEALTH).expect("trusted");
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");
    let answer = exchange(front.address, &trusted, &post_bytes("/generate", b"{\"inputs\":\"a\"}")).expect("trusted");
    assert!(answer.ends_with("{\"generated_text\":\"hello\"}"), "{answer}");
    let stream = post_bytes("/generate_stream", b"{\"inputs\":\"a\"}");
    let events = exchange(front.address, &trusted, &stream).expect("trusted");
    assert_eq!(events.matches("data: ").count(), 6, "{events}");
    let stranger = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    assert_eq!(exchange(front.address, stranger.cert.der(), HEALTH), None);
}

#[test]
fn a_client_that_leaves_is_noticed_under_tls() {
    let folder = tempfile::tempdir().expect("a folder");
    let trusted = issue(folder.path());
    let front = front(folder.path());
    front.backend.play(Script::Endless(97));
    let mut roots = RootCertStore::empty();
    roots.add(trusted).expect("a certificate");
    let client = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    let session = ClientConnection::new(Arc::new(client), name).expect("a session");
    let mut stream = StreamOwned::new(session, connect(front.address));
    let body = b"{\"inputs\":\"a\",\"parameters\":{\"max_new_tokens\":2000000}}";
    stream.write_all(&post_bytes("/generate", body)).expect("sent");
    front.backend.wait_for_live(1);
    drop(stream);
    front.backend.wait_for_live(0);
}

#[test]
fn replaced_files_are_used_and_broken_ones_are_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = issue(folder.path());
    let front = front(folder.path());
    wait(front.address, &first, true);
    let second = issue(folder.path());
    wait(front.address, &second, true);
    assert_eq!(exchange(front.address, &first, HEALTH), None, "the first one is gone");

    // Half of a replacement: the key does not fit.
    let third = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    fs::write(folder.path().join("cert.pem"), third.cert.pem()).expect("written");
    #[allow(
        clippy::disallowed_methods,
        reason = "a test that gives the server time to make a mistake"
    )]
    std::thread::sleep(Duration::from_millis(2_500));
    assert!(
        exchange(front.address, &second, HEALTH).is_some(),
        "the second one stays"
    );
    fs::write(folder.path().join("key.pem"), third.signing_key.serialize_pem()).expect("written");
    wait(front.address, third.cert.der(), true);
}

#[test]
fn files_that_cannot_be_used_are_named_at_the_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let _trusted = issue(folder.path());
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let refused = |cert: &str, key: &str| {
        let mut config = config();
        config.coordinator.tls_cert_path = path(cert);
        config.coordinator.tls_key_path = path(key);
        try_listen(&config).expect_err("refused")
    };
    let missing = refused("none.pem", "key.pem");
    assert!(
        missing.starts_with("coordinator.tls_cert_path: cannot read"),
        "{missing}"
    );
    let swapped = refused("key.pem", "cert.pem");
    assert!(
        swapped.contains("tls_cert_path") && swapped.contains("no usable certificate"),
        "{swapped}"
    );
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    fs::write(folder.path().join("other.pem"), other.signing_key.serialize_pem()).expect("written");
    let unfit = refused("cert.pem", "other.pem");
    assert!(unfit.contains("tls_key_path"), "{unfit}");
    assert_eq!(
        get(start_with(|_| {}).address, "/health").status,
        200,
        "without the fields it is plain HTTP"
    );
}
