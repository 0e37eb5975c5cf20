//! Certificates that are renewed, while nobody stops for it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use config::ClusterConfig;
use protocol::ids::{NodeId, Role};
use quinn::Connection;
use runtime::authority::{CertificateAuthority, IssuedPaths};
use runtime::identity::Identity;
use runtime::quic::{Alpn, Expect, Link, QuicEndpoint, describe};
use runtime::renewal::Renewal;
use rustls_pki_types::CertificateDer;

use super::{address, any, authority, endpoint, identity, soon};

fn node(name: &str) -> NodeId {
    NodeId(name.to_owned())
}

fn settings(paths: &IssuedPaths) -> ClusterConfig {
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    ClusterConfig {
        ca_cert_path: text(&paths.ca_cert),
        cert_path: text(&paths.cert),
        key_path: text(&paths.key),
        ..ClusterConfig::default()
    }
}

#[test]
fn a_renewed_certificate_is_the_same_name_with_the_same_or_a_new_key() {
    let dir = tempfile::tempdir().expect("a directory");
    let ca = CertificateAuthority::create(dir.path()).expect("created");
    let paths = ca.issue_to(dir.path(), Role::Decode, &node("d0")).expect("issued");
    let read = |path: &Path| fs::read_to_string(path).expect("read");
    let (cert, key) = (read(&paths.cert), read(&paths.key));
    let ca = ca.valid_for(Duration::from_secs(10 * 24 * 3_600));
    assert_eq!(ca.renew(dir.path(), &node("d0"), None, false).expect("renewed"), paths);
    assert_ne!(read(&paths.cert), cert);
    assert_eq!(read(&paths.key), key, "the same key");
    let renewed = Identity::load(&settings(&paths)).expect("usable");
    assert_eq!(renewed.peer().to_string(), "decode d0");
    let days = (renewed.validity().until - renewed.validity().from) / (24 * 3_600);
    assert_eq!(days, 11, "ten days, and one before now");
    ca.renew(dir.path(), &node("d0"), Some(Role::Decode), true)
        .expect("renewed");
    assert_ne!(read(&paths.key), key, "a new key");
    assert!(Identity::load(&settings(&paths)).is_ok());
    let mode = |path: &Path| fs::metadata(path).expect("exists").permissions().mode() & 0o777;
    assert_eq!((mode(&paths.key), mode(&paths.cert)), (0o600, 0o644));
    let names: Vec<_> = fs::read_dir(dir.path())
        .expect("listed")
        .map(|entry| entry.expect("entry").file_name())
        .collect();
    assert_eq!(names.len(), 4, "nothing is left behind: {names:?}");
}

#[test]
fn a_certificate_that_has_ended_is_renewed_but_no_foreign_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let ca = CertificateAuthority::create(dir.path())
        .expect("created")
        .valid_for(Duration::ZERO);
    let paths = ca.issue_to(dir.path(), Role::Prefill, &node("p0")).expect("issued");
    #[allow(clippy::disallowed_methods, reason = "a second later the certificate has ended")]
    std::thread::sleep(Duration::from_millis(1_100));
    let ended = Identity::load(&settings(&paths)).expect_err("ended").to_string();
    assert!(ended.contains("certificate of prefill p0"), "{ended}");
    let ca = CertificateAuthority::load(dir.path()).expect("loads");
    ca.renew(dir.path(), &node("p0"), None, false).expect("renewed");
    assert!(Identity::load(&settings(&paths)).is_ok());

    let before = fs::read(&paths.cert).expect("read");
    let stranger = authority();
    let foreign = stranger
        .renew(dir.path(), &node("p0"), None, false)
        .expect_err("another CA")
        .to_string();
    assert!(foreign.contains("p0"), "{foreign}");
    let role = ca
        .renew(dir.path(), &node("p0"), Some(Role::Decode), false)
        .expect_err("another role");
    assert!(
        role.to_string()
            .contains("it is for prefill p0; a decode certificate is issued"),
        "{role}"
    );
    // A certificate under another's name, as after a copy.
    fs::copy(&paths.cert, dir.path().join("p1.pem")).expect("copied");
    fs::copy(&paths.key, dir.path().join("p1.key")).expect("copied");
    let name = ca
        .renew(dir.path(), &node("p1"), None, false)
        .expect_err("another name")
        .to_string();
    assert!(name.contains("it is for prefill p0, not for p1"), "{name}");
    assert!(ca.renew(dir.path(), &node("p2"), None, false).is_err(), "there is none");
    assert_eq!(fs::read(&paths.cert).expect("read"), before, "nothing was replaced");
}

/// The certificate that the peer of a connection has shown.
fn shown(connection: &Connection) -> Vec<u8> {
    let chain = connection.peer_identity().expect("mutual TLS");
    let chain = chain.downcast::<Vec<CertificateDer<'static>>>().expect("certificates");
    chain[0].to_vec()
}

async fn link(from: &QuicEndpoint, to: &QuicEndpoint) -> (Link, Link) {
    let target = address(to);
    let (dialled, accepted) = tokio::join!(from.connect(&target, Alpn::Kv, any(Role::Decode)), to.accept());
    (dialled.expect("a link"), accepted.expect("a link"))
}

/// Sends a word and gets it back.
async fn echo(dialled: &Link, accepted: &Link) {
    let (mut send, mut receive) = dialled.connection.open_bi().await.expect("a stream");
    send.write_all(b"word").await.expect("sent");
    send.finish().expect("ended");
    let (mut back, mut there) = soon("a stream", accepted.connection.accept_bi())
        .await
        .expect("a stream");
    let word = there.read_to_end(16).await.expect("read");
    back.write_all(&word).await.expect("sent");
    back.finish().expect("ended");
    assert_eq!(soon("the word", receive.read_to_end(16)).await.expect("read"), b"word");
}

#[tokio::test]
async fn new_links_show_the_new_certificate_and_running_ones_go_on() {
    let ca = authority();
    let (prefill_identity, decode_identity) = (identity(&ca, Role::Prefill, "p0"), identity(&ca, Role::Decode, "d0"));
    let prefill = endpoint(Arc::clone(&prefill_identity)).await;
    let decode = endpoint(Arc::clone(&decode_identity)).await;
    let (old_dialled, old_accepted) = link(&prefill, &decode).await;
    assert_eq!(shown(&old_dialled.connection), decode_identity.certificate());

    let (new_prefill, new_decode) = (identity(&ca, Role::Prefill, "p0"), identity(&ca, Role::Decode, "d0"));
    prefill.replace_identity(&new_prefill).expect("replaced");
    decode.replace_identity(&new_decode).expect("replaced");
    echo(&old_dialled, &old_accepted).await;
    let (dialled, accepted) = link(&prefill, &decode).await;
    assert_eq!(shown(&dialled.connection), new_decode.certificate());
    assert_eq!(shown(&accepted.connection), new_prefill.certificate());
    echo(&dialled, &accepted).await;
    echo(&old_dialled, &old_accepted).await;

    for (role, name) in [(Role::Decode, "d1"), (Role::Prefill, "d0"), (Role::Both, "d0")] {
        let other = decode
            .replace_identity(&identity(&ca, role, name))
            .expect_err("somebody else");
        assert!(other.to_string().contains("this process is decode d0"), "{other}");
    }
    let (dialled, _accepted) = link(&prefill, &decode).await;
    assert_eq!(shown(&dialled.connection), new_decode.certificate());
}

#[tokio::test]
async fn changed_files_are_found_and_halves_of_a_change_are_not_used() {
    let dir = tempfile::tempdir().expect("a directory");
    let ca = CertificateAuthority::create(dir.path()).expect("created");
    let paths = ca.issue_to(dir.path(), Role::Decode, &node("d0")).expect("issued");
    let cluster = settings(&paths);
    let first = Arc::new(Identity::load(&cluster).expect("loads"));
    let decode = endpoint(Arc::clone(&first)).await;
    let prefill = endpoint(identity(&ca, Role::Prefill, "p0")).await;
    let mut renewal = Renewal::new(cluster.clone());
    assert!(renewal.look(&decode, false).expect("nothing new").is_none());

    // A new key whose certificate is still to come.
    let coming = ca.issue(Role::Decode, &node("d0")).expect("issued");
    fs::write(&paths.key, &coming.key_pem).expect("written");
    assert!(
        renewal
            .look(&decode, false)
            .expect("not told at the first look")
            .is_none()
    );
    let told = renewal
        .look(&decode, false)
        .expect_err("told at the second")
        .to_string();
    assert!(told.contains("certificate and key"), "{told}");
    assert!(renewal.look(&decode, false).expect("told once").is_none());
    let (dialled, _accepted) = link(&prefill, &decode).await;
    assert_eq!(shown(&dialled.connection), first.certificate(), "the old one stays");
    fs::write(&paths.cert, &coming.cert_pem).expect("written");
    let second = renewal.look(&decode, false).expect("usable").expect("new");
    let (dialled, _accepted) = link(&prefill, &decode).await;
    assert_eq!(shown(&dialled.connection), second.certificate());

    // Whoever asks is told at once.
    let other = ca.issue(Role::Decode, &node("d9")).expect("issued");
    fs::write(&paths.key, &other.key_pem).expect("written");
    fs::write(&paths.cert, &other.cert_pem).expect("written");
    let told = renewal.look(&decode, true).expect_err("told").to_string();
    assert!(told.contains("for decode d9, this process is decode d0"), "{told}");
    fs::remove_file(&paths.cert).expect("removed");
    assert!(
        renewal
            .look(&decode, false)
            .expect("a missing file is no certificate")
            .is_none()
    );
    assert!(renewal.look(&decode, true).is_err(), "said to whoever asks");
}

#[tokio::test]
async fn a_certificate_for_both_acts_as_either_and_never_as_coordinator() {
    let ca = authority();
    let (one, other) = (
        endpoint(identity(&ca, Role::Both, "n0")).await,
        endpoint(identity(&ca, Role::Both, "n1")).await,
    );
    let (dialled, accepted) = link(&one, &other).await;
    assert_eq!(
        (dialled.peer.to_string(), accepted.peer.to_string()),
        ("both n1".to_owned(), "both n0".to_owned())
    );
    let coordinator = endpoint(identity(&ca, Role::Coordinator, "c0")).await;
    let target = address(&coordinator);
    let (joined, seen) = tokio::join!(
        one.connect(&target, Alpn::Control, any(Role::Coordinator)),
        coordinator.accept()
    );
    assert_eq!(joined.expect("a link").peer.role, Role::Coordinator);
    assert_eq!(seen.expect("a link").peer.role, Role::Both);
    let decode = endpoint(identity(&ca, Role::Decode, "d0")).await;
    // Decode may not push to it, nor may it pass for a coordinator.
    let refused = decode
        .connect(&address(&one), Alpn::Kv, any(Role::Prefill))
        .await
        .expect("TLS is content");
    let reason = describe(&soon("the refusal", refused.connection.closed()).await);
    assert!(
        reason.contains("expected prefill or both on baton-kv/1, found decode d0"),
        "{reason}"
    );
    let expect = Expect {
        role: Role::Coordinator,
        node: None,
    };
    let error = decode
        .connect(&address(&one), Alpn::Kv, expect)
        .await
        .expect_err("no coordinator")
        .to_string();
    assert!(error.contains("is both n0, expected any coordinator"), "{error}");
}
