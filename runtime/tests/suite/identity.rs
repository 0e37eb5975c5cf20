use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use config::ClusterConfig;
use protocol::ids::{NodeId, Role};
use runtime::authority::{CertificateAuthority, SERVER_NAME};
use runtime::identity::{Identity, IdentityError, Peer, parse_role};

use super::authority;

fn node(name: &str) -> NodeId {
    NodeId(name.to_owned())
}

#[test]
fn an_issued_certificate_loads_from_its_files_and_names_role_and_node() {
    let dir = tempfile::tempdir().expect("a directory");
    CertificateAuthority::create(dir.path()).expect("created");
    let reloaded = CertificateAuthority::load(dir.path()).expect("loads");
    let nodes = dir.path().join("nodes");
    let paths = reloaded
        .issue_to(&nodes, Role::Decode, &node("d-1.west_2"))
        .expect("issued");
    for key in [&paths.key, &dir.path().join("ca.key")] {
        assert_eq!(
            fs::metadata(key).expect("exists").permissions().mode() & 0o777,
            0o600,
            "{key:?}"
        );
    }
    let text = |path: &std::path::Path| path.to_str().expect("UTF-8").to_owned();
    let cluster = ClusterConfig {
        ca_cert_path: text(&paths.ca_cert),
        cert_path: text(&paths.cert),
        key_path: text(&paths.key),
        ..ClusterConfig::default()
    };
    let identity = Identity::load(&cluster).expect("loads");
    assert_eq!(
        identity.peer(),
        &Peer::new(Role::Decode, node("d-1.west_2")).expect("legal")
    );
}

#[test]
fn existing_keys_are_never_replaced() {
    let dir = tempfile::tempdir().expect("a directory");
    let ca = CertificateAuthority::create(dir.path()).expect("created");
    let before = fs::read(dir.path().join("ca.key")).expect("read");
    let again = CertificateAuthority::create(dir.path())
        .err()
        .expect("refused")
        .to_string();
    assert!(again.contains("ca.key"), "{again}");
    assert_eq!(fs::read(dir.path().join("ca.key")).expect("read"), before);
    ca.issue_to(dir.path(), Role::Prefill, &node("p0")).expect("issued");
    let again = ca
        .issue_to(dir.path(), Role::Prefill, &node("p0"))
        .expect_err("refused")
        .to_string();
    assert!(again.contains("p0.key"), "{again}");
}

#[test]
fn node_names_that_could_confuse_a_path_or_a_uri_are_refused() {
    let ca = authority();
    for name in ["", "a/b", "a b", "../x", "é", "a\n", &"x".repeat(65)] {
        let error = ca.issue(Role::Prefill, &node(name)).err().expect("refused");
        assert!(matches!(error, IdentityError::NodeName { .. }), "{name:?}: {error}");
    }
    assert!(ca.issue(Role::Prefill, &node(&"x".repeat(64))).is_ok());
}

#[test]
fn an_identity_of_mixed_parts_is_refused_at_start() {
    let (ca, other) = (authority(), authority());
    let mine = ca.issue(Role::Prefill, &node("p0")).expect("issued");
    let theirs = other.issue(Role::Prefill, &node("p0")).expect("issued");
    assert!(Identity::from_pem(&mine.ca_pem, &mine.cert_pem, &mine.key_pem).is_ok());
    let foreign = Identity::from_pem(&theirs.ca_pem, &mine.cert_pem, &mine.key_pem).expect_err("wrong CA");
    assert!(foreign.to_string().contains("certificate of prefill p0"), "{foreign}");
    let key = Identity::from_pem(&mine.ca_pem, &mine.cert_pem, &theirs.key_pem).expect_err("wrong key");
    assert!(key.to_string().contains("certificate and key"), "{key}");
    // The CA's own certificate names no node.
    let nameless = Identity::from_pem(&mine.ca_pem, &mine.ca_pem, &mine.key_pem).expect_err("no name");
    assert!(nameless.to_string().contains("baton://<role>/<node>"), "{nameless}");
    let empty = Identity::from_pem("", &mine.cert_pem, &mine.key_pem).expect_err("no CA");
    assert!(empty.to_string().contains("no CERTIFICATE section"), "{empty}");
}

#[test]
fn missing_files_are_named_by_their_configuration_field() {
    let error = Identity::load(&ClusterConfig::default())
        .expect_err("nothing configured")
        .to_string();
    assert!(error.contains("cluster.ca_cert_path is empty"), "{error}");
    let cluster = ClusterConfig {
        ca_cert_path: "/nonexistent/ca.pem".to_owned(),
        ..ClusterConfig::default()
    };
    let error = Identity::load(&cluster).expect_err("no such file").to_string();
    assert!(error.contains("/nonexistent/ca.pem"), "{error}");
}

#[test]
fn links_use_tls_1_3_with_aes_128_gcm() {
    let ca = authority();
    let identity = |role, name| {
        ca.issue(role, &node(name))
            .expect("issued")
            .identity()
            .expect("an identity")
    };
    let alpn = protocol::ALPN_KV;
    let client = identity(Role::Prefill, "p0").client_tls(alpn).expect("TLS");
    let server = identity(Role::Decode, "d0")
        .server_tls(vec![alpn.to_vec()])
        .expect("TLS");
    let name = SERVER_NAME.try_into().expect("a name");
    let mut client = rustls::ClientConnection::new(Arc::new(client), name).expect("a client");
    let mut server = rustls::ServerConnection::new(Arc::new(server)).expect("a server");
    let mut wire = Vec::new();
    while client.is_handshaking() || server.is_handshaking() {
        client.write_tls(&mut wire).expect("written");
        server.read_tls(&mut wire.as_slice()).expect("read");
        server.process_new_packets().expect("content");
        wire.clear();
        server.write_tls(&mut wire).expect("written");
        client.read_tls(&mut wire.as_slice()).expect("read");
        client.process_new_packets().expect("content");
        wire.clear();
    }
    for suite in [client.negotiated_cipher_suite(), server.negotiated_cipher_suite()] {
        assert_eq!(
            suite.expect("agreed").suite(),
            rustls::CipherSuite::TLS13_AES_128_GCM_SHA256
        );
    }
    assert_eq!(client.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
    assert_eq!(server.alpn_protocol(), Some(alpn));
}

#[test]
fn role_words_and_roles_are_one_to_one() {
    for role in [Role::Coordinator, Role::Prefill, Role::Decode, Role::Both] {
        assert_eq!(parse_role(role.as_str()), Some(role));
    }
    assert_eq!(parse_role("Decode"), None);
}
