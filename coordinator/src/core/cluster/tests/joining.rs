//! Who may join, and what a second connection of a node does.

use protocol::ids::{NodeId, Role};
use protocol::kv::AdapterIdentity;

use super::bench::{Bench, at};
use crate::core::cluster::Action;
use crate::core::fixtures::{hello, request, settings};
use crate::core::nodes::PeerName;

fn refusal(bench: &mut Bench, change: impl FnOnce(&mut protocol::control::Hello)) -> String {
    let mut wrong = hello(Role::Decode, "d9", 1, 100);
    let peer = PeerName {
        role: wrong.role,
        node: wrong.node.clone(),
    };
    change(&mut wrong);
    match bench.join_as(peer, wrong).as_slice() {
        [Action::Refuse { reason, .. }] => reason.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_node_that_differs_is_refused_by_name_of_what_differs() {
    let mut bench = Bench::with_nodes();
    let reason = refusal(&mut bench, |hello| hello.protocol_version = 9);
    let ours = protocol::PROTOCOL_VERSION;
    assert_eq!(reason, format!("protocol version: cluster has {ours}, node has 9"));
    let reason = refusal(&mut bench, |hello| hello.node = NodeId("p7".to_owned()));
    assert_eq!(reason, "name: certificate says decode d9, node says decode p7");
    let reason = refusal(&mut bench, |hello| hello.role = Role::Prefill);
    assert_eq!(reason, "name: certificate says decode d9, node says prefill d9");
    let reason = refusal(&mut bench, |hello| {
        hello.model.weights_hash = 1;
        hello.layout.head_dim = 8;
    });
    assert_eq!(
        reason,
        "weights hash: cluster has 00000000000000000000000000000009, node has 00000000000000000000000000000001; \
         KV layout: cluster has 2 layers x 1 kv heads x 4 dims, 4 tokens a block, f32, \
         node has 2 layers x 1 kv heads x 8 dims, 4 tokens a block, f32"
    );
    let namesake = hello(Role::Prefill, "d0", 1, 100);
    let peer = PeerName {
        role: Role::Prefill,
        node: namesake.node.clone(),
    };
    let actions = bench.join_as(peer, namesake);
    let reason = "name: d0 is the name of a connected decode node";
    assert!(
        matches!(&actions[..], [Action::Refuse { reason: said, .. }] if said == reason),
        "{actions:?}"
    );
    let reason = refusal(&mut bench, |hello| hello.total_blocks = 0);
    assert_eq!(reason, "total_blocks: is 0, must be at least 1");
    // Also of the first node, which nobody contradicts.
    let reason = refusal(&mut Bench::default(), |hello| {
        let layout = &mut hello.layout;
        (layout.num_layers, layout.head_dim, layout.block_tokens) = (u32::MAX, u32::MAX, u32::MAX);
    });
    let most = usize::MAX;
    assert_eq!(
        reason,
        format!("KV layout: a block has {most} bytes, must have at most 1099511627776")
    );
}

#[test]
fn a_node_with_another_tokenizer_than_the_coordinator_is_refused_also_when_it_is_the_first() {
    let mut bench = Bench::default();
    let reason = refusal(&mut bench, |hello| {
        hello.model.tokenizer_hash = 8;
        hello.model.vocab_size = 9;
    });
    assert_eq!(
        reason,
        "tokenizer hash: coordinator has 0000000000000007, node has 0000000000000008; \
         vocabulary size: coordinator has 258, node has 9"
    );
}

#[test]
fn a_node_has_the_coordinators_adapters_and_those_of_the_other_nodes() {
    let adapter = |name: &str, hash| AdapterIdentity {
        name: name.to_owned(),
        hash,
    };
    let mut cluster = settings();
    cluster.text.adapters = vec!["a".to_owned(), "b".to_owned()];
    let mut bench = Bench::new(cluster);
    let reason = refusal(&mut bench, |hello| hello.model.adapters = vec![adapter("b", 2)]);
    assert_eq!(reason, "adapters: coordinator has a, node has not");
    let mut first = hello(Role::Decode, "d0", 1, 100);
    first.model.adapters = vec![adapter("a", 1), adapter("b", 2)];
    let peer = PeerName {
        role: first.role,
        node: first.node.clone(),
    };
    let actions = bench.join_as(peer, first);
    assert!(
        !actions.iter().any(|action| matches!(action, Action::Refuse { .. })),
        "{actions:?}"
    );
    let reason = refusal(&mut bench, |hello| {
        hello.model.adapters = vec![adapter("a", 1), adapter("b", 3)]
    });
    assert_eq!(
        reason,
        "adapters: cluster has a 0000000000000001, b 0000000000000002, node has a 0000000000000001, b 0000000000000003"
    );
}

#[test]
fn the_first_node_defines_the_model_only_while_a_node_is_connected() {
    let mut bench = Bench::default();
    bench.join_decode("d0");
    assert!(refusal(&mut bench, |hello| hello.model.weights_hash = 1).starts_with("weights hash"));
    bench.lose("d0");
    let mut other = hello(Role::Decode, "d1", 1, 100);
    other.model.weights_hash = 1;
    let peer = PeerName {
        role: other.role,
        node: other.node.clone(),
    };
    assert!(matches!(bench.join_as(peer, other)[..], [Action::Welcome { .. }]));
}

#[test]
fn a_restarted_node_replaces_its_old_link_and_the_jobs_there_are_lost() {
    let mut bench = at("decoding");
    let old = bench.link("d0");
    let actions = bench.join(Role::Decode, "d0", 2);
    assert!(
        actions.contains(&Action::Close {
            link: old,
            reason: "the node has connected again"
        }),
        "{actions:?}"
    );
    assert_eq!(bench.state(1), "resuming", "on the node as it came back");
    assert_eq!(bench.cluster.status().nodes.len(), 2);
    let decode = bench.started("d0");
    bench.token(decode, 2, 67);
    bench.token(decode, 3, 68);
    assert_eq!(bench.text(1), "ABCD");
    bench.assert_idle();
}

#[test]
fn two_nodes_share_the_work() {
    let mut bench = Bench::with_nodes();
    bench.join_decode("d1");
    for id in 1..=8 {
        bench.submit(request(id, 6, 3));
    }
    assert_eq!((bench.on("d0").len(), bench.on("d1").len()), (4, 4));
}

#[test]
fn of_two_processes_of_one_name_the_newer_one_stays() {
    let mut bench = Bench::with_nodes();
    bench.join(Role::Decode, "d0", 2);
    let older = hello(Role::Decode, "d0", 1, 100);
    let peer = PeerName {
        role: Role::Decode,
        node: older.node.clone(),
    };
    let actions = bench.join_as(peer.clone(), older.clone());
    let reason = "name: a process d0 that was started later is connected; names must be unique";
    assert!(
        matches!(&actions[..], [Action::Refuse { reason: said, .. }] if said == reason),
        "{actions:?}"
    );
    bench.lose("d0");
    let actions = bench.join_as(peer, older);
    assert!(matches!(actions[..], [Action::Welcome { .. }]), "{actions:?}");
}
