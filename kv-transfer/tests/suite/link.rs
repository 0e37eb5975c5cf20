//! Both ends over QUIC on loopback, as two processes would.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use config::{ClusterConfig, TransferConfig};
use kv_transfer::error::TransferError;
use kv_transfer::pusher::{Push, Pusher};
use kv_transfer::receiver::Receiver;
use protocol::control::HandoffTarget;
use protocol::ids::{NodeId, Role, Ticket};
use protocol::moved::HaveBlocks;
use protocol::transfer::PushOpen;
use runtime::authority::CertificateAuthority;
use runtime::quic::QuicEndpoint;

use super::node::{Node, Options};
use super::{
    EXTENT, FINGERPRINT, LAYOUT, NUM_TOKENS, TICKET, computed, far, first_tokens, open, payload, push_all, refused,
    soon, until,
};

/// A prefill and a decode node with their endpoints.
struct Cluster {
    pusher: Pusher,
    prefill: Arc<QuicEndpoint>,
    decode: Arc<QuicEndpoint>,
    node: Node,
}

async fn endpoint(ca: &CertificateAuthority, role: Role, name: &str, transfer: &TransferConfig) -> Arc<QuicEndpoint> {
    let identity = ca
        .issue(role, &NodeId(name.to_owned()))
        .expect("issued")
        .identity()
        .expect("an identity");
    let cluster = ClusterConfig {
        connect_timeout_ms: 1_000,
        ..ClusterConfig::default()
    };
    let bound = QuicEndpoint::bind(Arc::new(identity), "127.0.0.1:0", &cluster, transfer).await;
    Arc::new(bound.expect("a port"))
}

/// Serves every link of the KV plane until the endpoint closes.
fn serve(decode: &Arc<QuicEndpoint>, receiver: Receiver) {
    let decode = Arc::clone(decode);
    tokio::spawn(async move {
        while let Some(link) = decode.accept().await {
            let receiver = receiver.clone();
            tokio::spawn(async move { receiver.serve(link).await });
        }
    });
}

impl Cluster {
    async fn new(node: Node, transfer: TransferConfig) -> Self {
        let ca = CertificateAuthority::generate().expect("an authority");
        let prefill = endpoint(&ca, Role::Prefill, "p0", &transfer).await;
        let decode = endpoint(&ca, Role::Decode, "d0", &transfer).await;
        serve(&decode, Receiver::new(node.table(), FINGERPRINT, LAYOUT, &transfer));
        let pusher = Pusher::new(Arc::clone(&prefill), LAYOUT, &transfer).expect("settings");
        Self {
            pusher,
            prefill,
            decode,
            node,
        }
    }

    async fn plain(node: Node) -> Self {
        Self::new(node, super::transfer()).await
    }

    fn target(&self, ticket: Ticket) -> HandoffTarget {
        let address = self.decode.local_addr().expect("bound").to_string();
        HandoffTarget {
            node: NodeId("d0".to_owned()),
            address,
            ticket,
            have_blocks: HaveBlocks::all(EXTENT.first_block),
        }
    }

    fn push(&self) -> Push {
        self.pusher
            .open(&self.target(TICKET), open(), EXTENT, far())
            .expect("starts")
    }
}

#[tokio::test]
async fn handoffs_cross_in_both_profiles() {
    let local = TransferConfig {
        datagram_bytes: 65_000,
        gso: false,
        ..super::transfer()
    };
    for transfer in [super::transfer(), local] {
        let cluster = Cluster::new(Node::new(), transfer).await;
        let push = cluster.push();
        push_all(&push, EXTENT).await.expect("taken");
        let stats = soon("the commit", push.commit(NUM_TOKENS, first_tokens()))
            .await
            .expect("committed");
        assert_eq!((stats.bytes, stats.resent), (50 * 256, 0));
        cluster.node.assert_exact();
        assert_eq!((cluster.node.commits().len(), cluster.node.aborted()), (1, 0));
        until("empty staging", || cluster.pusher.staged_bytes() == 0).await;
    }
}

#[tokio::test]
async fn handoffs_to_one_node_share_a_connection_and_run_together() {
    let tickets: Vec<Ticket> = (1..=16).map(Ticket).collect();
    let node = Node::with(Options {
        tickets: tickets.clone(),
        ..Options::default()
    });
    let cluster = Cluster::plain(node).await;
    let mut pushes = Vec::new();
    for ticket in &tickets {
        let open = PushOpen {
            ticket: *ticket,
            ..open()
        };
        pushes.push(
            cluster
                .pusher
                .open(&cluster.target(*ticket), open, EXTENT, far())
                .expect("starts"),
        );
    }
    // All 16 in step, piece by piece.
    for part in computed(EXTENT, 3) {
        for push in &pushes {
            push.staging().push(part, payload(&LAYOUT, part)).await.expect("taken");
        }
    }
    for push in pushes {
        soon("the commit", push.commit(NUM_TOKENS, first_tokens()))
            .await
            .expect("committed");
    }
    assert_eq!((cluster.node.commits().len(), cluster.node.aborted()), (16, 0));
    cluster.node.assert_exact();
    assert_eq!(cluster.decode.accept_stats().accepted, 1);
}

#[tokio::test]
async fn dropping_the_push_resets_the_stream_and_aborts_once() {
    let cluster = Cluster::plain(Node::new()).await;
    for _ in 0..20 {
        let before = (cluster.node.opened(), cluster.node.aborted());
        let push = cluster.push();
        push_all(&push, EXTENT).await.expect("taken");
        until("the opening", || cluster.node.opened() == before.0 + 1).await;
        drop(push);
        until("the abort", || cluster.node.aborted() == before.1 + 1).await;
    }
    // The connection lives on, and so does the ticket.
    let push = cluster.push();
    push_all(&push, EXTENT).await.expect("taken");
    soon("the commit", push.commit(NUM_TOKENS, first_tokens()))
        .await
        .expect("committed");
    assert_eq!(
        (
            cluster.node.opened(),
            cluster.node.aborted(),
            cluster.node.commits().len()
        ),
        (21, 20, 1)
    );
    assert_eq!(cluster.decode.accept_stats().accepted, 1);
    cluster.node.assert_exact();
}

#[tokio::test]
async fn a_revoked_reservation_resets_the_stream() {
    let cluster = Cluster::plain(Node::new()).await;
    let mut push = cluster.push();
    let part = computed(EXTENT, 3)[0];
    push.staging().try_push(part, payload(&LAYOUT, part)).expect("room");
    until("a write", || cluster.node.writes() == 1).await;
    cluster.node.revoke();
    assert_eq!(soon("the news", push.failed()).await, TransferError::Revoked);
    assert_eq!((cluster.node.aborted(), cluster.node.commits().len()), (1, 0));
}

#[tokio::test]
async fn a_refusal_in_the_middle_of_a_flood_still_tells_its_reason() {
    // The writer fails while the sender has more to send (12,800 bytes) than the window holds.
    let transfer = TransferConfig {
        window_bytes: 3_000,
        frame_bytes: 1_000,
        ..super::transfer()
    };
    for fail_from in [0, 2, 5] {
        let cluster = Cluster::new(
            Node::with(Options {
                fail_from,
                ..Options::default()
            }),
            transfer.clone(),
        )
        .await;
        let mut push = cluster.push();
        let pushed = push_all(&push, EXTENT).await;
        let error = soon("the refusal", push.failed()).await;
        assert!(refused(&error).contains("the pool is on fire"), "{error} ({pushed:?})");
        until("the abort", || cluster.node.aborted() == 1).await;
    }
}

#[tokio::test]
async fn a_closed_connection_fails_the_push_and_the_next_one_dials_again() {
    let cluster = Cluster::plain(Node::new()).await;
    let mut push = cluster.push();
    until("the opening", || cluster.node.opened() == 1).await;
    cluster.decode.close("the node stops").await;
    let error = soon("the loss", push.failed()).await;
    assert!(
        matches!(&error, TransferError::Lost { reason } if reason.contains("the node stops")),
        "{error}"
    );
    until("the abort", || cluster.node.aborted() == 1).await;
    let mut push = cluster.push();
    assert!(matches!(
        soon("no link", push.failed()).await,
        TransferError::Link { .. }
    ));
}

#[tokio::test]
async fn a_prefill_node_that_vanishes_frees_the_reservation() {
    let transfer = super::transfer();
    let ca = CertificateAuthority::generate().expect("an authority");
    let decode = endpoint(&ca, Role::Decode, "d0", &transfer).await;
    let node = Node::new();
    serve(&decode, Receiver::new(node.table(), FINGERPRINT, LAYOUT, &transfer));
    let address = decode.local_addr().expect("bound").to_string();
    let target = HandoffTarget {
        node: NodeId("d0".to_owned()),
        address,
        ticket: TICKET,
        have_blocks: HaveBlocks::all(2),
    };
    // A process of its own: its runtime stops dead in the middle of a handoff.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("runtime");
    let kept = runtime.spawn(async move {
        let prefill = endpoint(&ca, Role::Prefill, "p0", &transfer).await;
        let pusher = Pusher::new(prefill, LAYOUT, &transfer).expect("settings");
        let push = pusher.open(&target, open(), EXTENT, far()).expect("starts");
        let part = computed(EXTENT, 3)[0];
        push.staging().try_push(part, payload(&LAYOUT, part)).expect("room");
        (pusher, push)
    });
    let kept = soon("the push", kept).await.expect("no panic");
    until("a write", || node.writes() == 1).await;
    runtime.shutdown_background();
    until("the abort", || node.aborted() == 1).await;
    node.assert_clean();
    drop(kept);
}

#[tokio::test]
async fn a_handoff_to_a_restarted_node_finds_it() {
    let transfer = super::transfer();
    let ca = Arc::new(CertificateAuthority::generate().expect("an authority"));
    let prefill = endpoint(&ca, Role::Prefill, "p0", &transfer).await;
    let pusher = Pusher::new(prefill, LAYOUT, &transfer).expect("settings");
    // The first life of the decode node ends without a word.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("runtime");
    let first = Node::new();
    let (table, authority, settings) = (first.table(), Arc::clone(&ca), transfer.clone());
    let begun = runtime.spawn(async move {
        let decode = endpoint(&authority, Role::Decode, "d0", &settings).await;
        serve(&decode, Receiver::new(table, FINGERPRINT, LAYOUT, &settings));
        decode.local_addr().expect("bound")
    });
    let address = soon("the first life", begun).await.expect("no panic").to_string();
    pusher
        .warm(NodeId("d0".to_owned()), address.clone())
        .await
        .expect("dialled");
    runtime.shutdown_background();
    // The second one has the same name and port.
    let second = Node::new();
    let identity = ca
        .issue(Role::Decode, &NodeId("d0".to_owned()))
        .expect("issued")
        .identity()
        .expect("an identity");
    let identity = Arc::new(identity);
    let cluster = ClusterConfig::default();
    let decode = soon("the port", async {
        loop {
            let bound = QuicEndpoint::bind(Arc::clone(&identity), &address, &cluster, &transfer).await;
            match bound {
                Ok(endpoint) => return Arc::new(endpoint),
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    })
    .await;
    serve(&decode, Receiver::new(second.table(), FINGERPRINT, LAYOUT, &transfer));
    let target = HandoffTarget {
        node: NodeId("d0".to_owned()),
        address,
        ticket: TICKET,
        have_blocks: HaveBlocks::all(2),
    };
    let push = pusher.open(&target, open(), EXTENT, far()).expect("starts");
    push_all(&push, EXTENT).await.expect("taken");
    soon("the commit", push.commit(NUM_TOKENS, first_tokens()))
        .await
        .expect("committed");
    second.assert_exact();
    assert_eq!((first.opened(), second.commits().len(), second.aborted()), (0, 1, 0));
}

#[tokio::test]
async fn a_failed_dial_is_the_answer_to_all_who_wait_for_it() {
    let ca = CertificateAuthority::generate().expect("an authority");
    let transfer = super::transfer();
    let prefill = endpoint(&ca, Role::Prefill, "p0", &transfer).await;
    let pusher = Pusher::new(prefill, LAYOUT, &transfer).expect("settings");
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("bound").to_string();
    let target = HandoffTarget {
        node: NodeId("d0".to_owned()),
        address: address.clone(),
        ticket: TICKET,
        have_blocks: HaveBlocks::all(2),
    };
    let mut pushes: Vec<Push> = (0..50)
        .map(|_| pusher.open(&target, open(), EXTENT, far()).expect("starts"))
        .collect();
    // One after the other, 50 dials of a second each would outlast the patience of `soon`.
    soon("all failures", async {
        for push in &mut pushes {
            let error = push.failed().await;
            assert!(
                matches!(&error, TransferError::Link { reason } if reason.contains(&address)),
                "{error}"
            );
        }
    })
    .await;
}

#[tokio::test]
async fn a_node_of_another_name_gets_no_kv() {
    let cluster = Cluster::plain(Node::new()).await;
    let target = HandoffTarget {
        node: NodeId("d7".to_owned()),
        ..cluster.target(TICKET)
    };
    let mut push = cluster.pusher.open(&target, open(), EXTENT, far()).expect("starts");
    let error = soon("the refusal", push.failed()).await.to_string();
    assert!(error.contains("is decode d0, expected decode d7"), "{error}");
    assert_eq!(cluster.node.opened(), 0);
}

#[tokio::test]
async fn a_target_that_contradicts_the_handoff_is_refused_at_once() {
    let cluster = Cluster::plain(Node::new()).await;
    let error = cluster
        .pusher
        .open(&cluster.target(Ticket(1)), open(), EXTENT, far())
        .err()
        .expect("refused");
    assert!(
        error.to_string().contains("the target's ticket is 0000000000000001"),
        "{error}"
    );
    let target = HandoffTarget {
        have_blocks: HaveBlocks::all(3),
        ..cluster.target(TICKET)
    };
    let error = cluster
        .pusher
        .open(&target, open(), EXTENT, far())
        .err()
        .expect("refused");
    assert!(error.to_string().contains("the decode node has 3 blocks"), "{error}");
}

#[tokio::test]
async fn a_warm_connection_outlives_a_long_pause() {
    let cluster = Cluster::plain(Node::new()).await;
    cluster
        .pusher
        .warm(NodeId("d0".to_owned()), cluster.target(TICKET).address)
        .await
        .expect("dialled");
    // Longer than the idle timeout: keep-alives hold it.
    tokio::time::sleep(Duration::from_millis(2_000)).await;
    let push = cluster.push();
    push_all(&push, EXTENT).await.expect("taken");
    soon("the commit", push.commit(NUM_TOKENS, first_tokens()))
        .await
        .expect("committed");
    assert_eq!(cluster.decode.accept_stats().accepted, 1);
    let path = |address: &str| cluster.pusher.path(NodeId("d0".to_owned()), address.to_owned());
    assert_eq!(path("127.0.0.1:1").map(drop), None);
    assert!(path(&cluster.target(TICKET).address).is_some_and(|path| path.sent_packets > 10));
    cluster.prefill.close("done").await;
}

#[tokio::test]
async fn garbage_on_a_stream_of_the_kv_plane_is_refused() {
    use runtime::quic::{Alpn, Expect};
    let cluster = Cluster::plain(Node::new()).await;
    let expect = Expect {
        role: Role::Decode,
        node: None,
    };
    let link = cluster
        .prefill
        .connect(&cluster.target(TICKET).address, Alpn::Kv, expect)
        .await
        .expect("a link");
    let (mut send, mut receive) = link.connection.open_bi().await.expect("a stream");
    // Length and version of a message, then bytes that are none.
    let mut garbage = vec![5, 0, 0, 0];
    garbage.extend_from_slice(&protocol::PROTOCOL_VERSION.to_le_bytes());
    garbage.extend_from_slice(&[0xFF; 5]);
    send.write_chunk(Bytes::from(garbage)).await.expect("sent");
    let reply = soon("the reply", runtime::framing::read_message(&mut receive, 1 << 16))
        .await
        .expect("a message");
    let Some(protocol::transfer::PushReply::Refused { reason }) = reply else {
        panic!("{reply:?}")
    };
    assert!(reason.contains("malformed"), "{reason}");
    assert_eq!(cluster.node.opened(), 0);
}
