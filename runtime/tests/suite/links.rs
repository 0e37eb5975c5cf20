use std::time::Duration;

use config::{ClusterConfig, TransferConfig};
use protocol::ids::{NodeId, Role};
use quinn::ConnectionError;
use runtime::quic::{Alpn, Expect, LinkError, QuicEndpoint, code, describe};

use super::{address, any, authority, endpoint, endpoint_with, identity, pair, pair_with, soon, until};

#[tokio::test]
async fn both_ends_know_who_the_other_is() {
    let pair = pair().await;
    assert_eq!(pair.dialled.peer.to_string(), "decode d0");
    assert_eq!(pair.accepted.peer.to_string(), "prefill p0");
    assert_eq!((pair.dialled.alpn, pair.accepted.alpn), (Alpn::Kv, Alpn::Kv));
    until("the count", || pair.decode.accept_stats().accepted == 1).await;
}

#[tokio::test]
async fn a_link_carries_datagrams_of_the_configured_size_in_both_profiles() {
    let local = TransferConfig {
        datagram_bytes: 65_000,
        gso: false,
        ..TransferConfig::default()
    };
    for transfer in [local, TransferConfig::default()] {
        let wanted = transfer.datagram_bytes;
        let pair = pair_with(ClusterConfig::default(), transfer).await;
        for link in [&pair.dialled, &pair.accepted] {
            // The search stops within 20 bytes of the bound.
            until("the datagram size", || {
                link.connection.stats().path.current_mtu > wanted - 20
            })
            .await;
            assert!(link.connection.stats().path.current_mtu <= wanted);
        }
    }
}

#[tokio::test]
async fn the_dialling_side_refuses_another_role_or_name() {
    let ca = authority();
    let prefill = endpoint(identity(&ca, Role::Prefill, "p0")).await;
    let decode = endpoint(identity(&ca, Role::Decode, "d1")).await;
    let named = Expect {
        role: Role::Decode,
        node: Some(NodeId("d0".to_owned())),
    };
    let error = prefill
        .connect(&address(&decode), Alpn::Kv, named)
        .await
        .expect_err("another node");
    assert!(matches!(error, LinkError::WrongPeer { .. }), "{error}");
    assert!(
        error.to_string().contains("is decode d1, expected decode d0"),
        "{error}"
    );
    let error = prefill
        .connect(&address(&decode), Alpn::Kv, any(Role::Coordinator))
        .await
        .expect_err("another role");
    assert!(
        error.to_string().contains("is decode d1, expected any coordinator"),
        "{error}"
    );
}

#[tokio::test]
async fn the_listening_side_refuses_another_role_and_says_so() {
    let ca = authority();
    let coordinator = endpoint(identity(&ca, Role::Coordinator, "c0")).await;
    let decode = endpoint(identity(&ca, Role::Decode, "d0")).await;
    let link = coordinator
        .connect(&address(&decode), Alpn::Kv, any(Role::Decode))
        .await
        .expect("TLS is content");
    let reason = describe(&soon("the refusal", link.connection.closed()).await);
    assert!(
        reason.contains("expected prefill or both on baton-kv/1, found coordinator c0"),
        "{reason}"
    );
    assert_eq!(decode.accept_stats().wrong_peer, 1);
    assert_eq!(decode.accept_stats().accepted, 0);
}

#[tokio::test]
async fn a_plane_that_is_not_offered_is_refused_in_the_handshake() {
    let ca = authority();
    let prefill = endpoint(identity(&ca, Role::Prefill, "p0")).await;
    let decode = endpoint(identity(&ca, Role::Decode, "d0")).await;
    let error = prefill
        .connect(&address(&decode), Alpn::Control, any(Role::Decode))
        .await
        .expect_err("no such plane");
    assert!(matches!(error, LinkError::Handshake { .. }), "{error}");
    assert!(error.to_string().contains("baton-ctl/1"), "{error}");
    until("the count", || decode.accept_stats().failed == 1).await;
}

#[tokio::test]
async fn dialling_nobody_ends_in_an_error() {
    let prefill = endpoint(identity(&authority(), Role::Prefill, "p0")).await;
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let target = silent.local_addr().expect("bound").to_string();
    let error = soon("the deadline", prefill.connect(&target, Alpn::Kv, any(Role::Decode)))
        .await
        .expect_err("nobody");
    assert!(error.to_string().contains(&target), "{error}");
    let error = prefill
        .connect("no-port", Alpn::Kv, any(Role::Decode))
        .await
        .expect_err("no address");
    assert!(matches!(error, LinkError::Address { .. }), "{error}");
}

#[tokio::test]
async fn a_peer_that_vanishes_without_a_word_is_seen() {
    let ca = authority();
    let decode = endpoint(identity(&ca, Role::Decode, "d0")).await;
    let target = address(&decode);
    let prefill = identity(&ca, Role::Prefill, "p0");
    // The dialling side lives on a runtime of its own, which then stops in the middle of everything.
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("runtime");
        let kept = runtime.block_on(async {
            let endpoint = endpoint(prefill).await;
            let link = endpoint
                .connect(&target, Alpn::Kv, any(Role::Decode))
                .await
                .expect("a link");
            (endpoint, link)
        });
        let ready: Result<(), tokio::sync::oneshot::error::RecvError> = receiver.blocking_recv();
        ready.expect("told to stop");
        runtime.shutdown_background();
        kept
    });
    let link = soon("accept", decode.accept()).await.expect("a link");
    // Longer than the idle timeout: keep-alives hold an idle link.
    tokio::time::sleep(Duration::from_millis(2_000)).await;
    assert_eq!(link.connection.close_reason(), None);
    sender.send(()).expect("thread waits");
    let reason = soon("the loss", link.connection.closed()).await;
    assert_eq!(reason, ConnectionError::TimedOut);
    drop(thread.join().expect("no panic"));
}

#[tokio::test]
async fn close_tells_the_peer_why_and_ends_accept() {
    let pair = pair().await;
    pair.decode.close("the node drains").await;
    let reason = soon("the close", pair.dialled.connection.closed()).await;
    assert!(describe(&reason).contains("the node drains"), "{reason:?}");
    assert!(soon("the end", pair.decode.accept()).await.is_none());
    pair.prefill.close("done").await;
}

#[tokio::test]
async fn settings_that_stall_a_link_are_refused_with_the_rule() {
    let ca = authority();
    let bind = async |transfer: TransferConfig| {
        let identity = identity(&ca, Role::Decode, "d0");
        QuicEndpoint::bind(identity, "127.0.0.1:0", &ClusterConfig::default(), &transfer)
            .await
            .map(drop)
    };
    let gso = TransferConfig {
        datagram_bytes: 8_952,
        gso: true,
        ..TransferConfig::default()
    };
    let error = bind(gso).await.expect_err("GSO").to_string();
    assert!(
        error.contains("transfer.gso = true") && error.contains("8952"),
        "{error}"
    );
    let window = TransferConfig {
        datagram_bytes: 65_000,
        gso: false,
        initial_window_bytes: 100_000,
        ..TransferConfig::default()
    };
    let error = bind(window).await.expect_err("window").to_string();
    assert!(
        error.contains("transfer.initial_window_bytes = 100000") && error.contains("130000"),
        "{error}"
    );
    assert!(
        bind(TransferConfig {
            datagram_bytes: 6_000,
            ..TransferConfig::default()
        })
        .await
        .is_ok()
    );
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let ca = authority();
    let first = endpoint(identity(&ca, Role::Decode, "d0")).await;
    let taken = address(&first);
    let cluster = ClusterConfig::default();
    let error = QuicEndpoint::bind(
        identity(&ca, Role::Decode, "d1"),
        &taken,
        &cluster,
        &TransferConfig::default(),
    )
    .await
    .map(drop)
    .expect_err("taken");
    assert!(error.to_string().contains(&taken), "{error}");
}

#[tokio::test]
async fn links_that_nobody_takes_are_given_up() {
    let ca = authority();
    let cluster = ClusterConfig {
        connect_timeout_ms: 300,
        ..ClusterConfig::default()
    };
    let decode = endpoint_with(identity(&ca, Role::Decode, "d0"), cluster, TransferConfig::default()).await;
    let prefill = endpoint(identity(&ca, Role::Prefill, "p0")).await;
    let mut links = Vec::new();
    for _ in 0..65 {
        links.push(
            prefill
                .connect(&address(&decode), Alpn::Kv, any(Role::Decode))
                .await
                .expect("a link"),
        );
    }
    until("the refusal", || decode.accept_stats().not_taken == 1).await;
    let last = links.pop().expect("65 links");
    let reason = soon("the close", last.connection.closed()).await;
    assert!(
        matches!(&reason, ConnectionError::ApplicationClosed(close) if close.error_code == code::BUSY),
        "{reason:?}"
    );
    until("no pending handshakes", || decode.accept_stats().pending == 0).await;
}
