//! Where requests go.

use proptest::prelude::*;
use protocol::control::{CacheChange, HandoffStats, JobEvent};
use protocol::ids::{RequestId, Role};
use protocol::prefix::block_hashes;

use super::bench::Bench;
use crate::core::cluster::Fact;
use crate::core::decisions::Way;
use crate::core::fixtures::{BLOCK_TOKENS, hello, request, settings};
use crate::core::nodes::{LegId, PeerName};
use crate::core::routing::Policy;

const POLICIES: [Policy; 3] = [Policy::PrefixAffinity, Policy::LeastLoaded, Policy::RoundRobin];

/// `nodes` nodes of each role.
fn cluster(policy: Policy, nodes: usize) -> Bench {
    let mut settings = settings();
    settings.policy = policy;
    let mut bench = Bench::new(settings);
    for number in 0..nodes {
        bench.join_prefill(&format!("p{number}"));
        bench.join_decode(&format!("d{number}"));
    }
    bench
}

/// Runs `requests` equal requests, at most `at_once` at a time, the nodes in an order that `random` says. How
/// many went to each node.
fn run(
    bench: &mut Bench,
    nodes: usize,
    requests: u128,
    at_once: usize,
    mut random: impl FnMut() -> usize,
) -> Vec<Vec<usize>> {
    let (mut next, mut open) = (1, Vec::new());
    while next <= requests || !open.is_empty() {
        while next <= requests && open.len() < at_once {
            bench.submit(request(next, 24, 3));
            open.push(next);
            next += 1;
        }
        // All nodes are equally fast: in each round each computes a prompt and ends an answer, the oldest.
        let first = random();
        for node in (0..nodes).map(|number| (first + number) % nodes) {
            for leg in bench.open_legs() {
                if bench.state(bench.request_of(leg)) == "reserving" {
                    bench.granted(leg, 1);
                }
            }
            if let Some(leg) = bench.on(&format!("p{node}")).first().copied() {
                bench.first_token(leg, 65);
                let stats = HandoffStats {
                    bytes: 4_096,
                    exposed_us: 700 + 10 * (random() as u64 % 10),
                    ..HandoffStats::default()
                };
                bench.event(leg, JobEvent::HandedOff(stats));
            }
            let ready = |bench: &Bench, leg: &LegId| bench.state(bench.request_of(*leg)) == "transferring";
            let decode = bench.on(&format!("d{node}"));
            if let Some(leg) = decode.into_iter().find(|leg| ready(bench, leg)) {
                bench.event(leg, JobEvent::Committed);
                bench.token(leg, 1, 66);
                bench.token(leg, 2, 67);
            }
        }
        open.retain(|id| bench.ends(*id) == 0);
    }
    let of = |role| {
        (0..nodes)
            .map(|number| bench.jobs_sent(&format!("{role}{number}")))
            .collect()
    };
    vec![of('p'), of('d')]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Equal requests on equal nodes: none gets more than a fifth more than the mean.
    #[test]
    fn equal_nodes_share_equal_requests_equally(
        nodes in 1_usize..6,
        policy in 0_usize..3,
        choices in proptest::collection::vec(0_usize..60, 256),
    ) {
        let mut bench = cluster(POLICIES[policy], nodes);
        let mut turn = 0;
        let requests = 40 * nodes as u128;
        let counts = run(&mut bench, nodes, requests, 4 * nodes, || {
            turn += 1;
            choices[turn % 256] + turn / 256
        });
        for of_role in counts {
            prop_assert_eq!(of_role.iter().map(|count| *count as u128).sum::<u128>(), requests);
            let most = *of_role.iter().max().expect("nodes") as u128;
            prop_assert!(most * 5 * nodes as u128 <= requests * 6, "{:?}: {:?}", POLICIES[policy], of_role);
        }
        bench.assert_idle();
    }
}

#[test]
fn a_slow_pair_is_left_for_a_fast_one() {
    let mut bench = cluster(Policy::PrefixAffinity, 2);
    let pair = |bench: &mut Bench, id| {
        bench.submit(request(id, 24, 3));
        let on = |bench: &Bench, role| {
            let name = |number| format!("{role}{number}");
            (0..2).find(|number| !bench.on(&name(*number)).is_empty()).map(name)
        };
        let decode = on(bench, 'd').expect("a reservation");
        bench.granted(bench.started(&decode), 1);
        let prefill = on(bench, 'p').expect("a prefill job");
        let leg = bench.started(&prefill);
        bench.first_token(leg, 65);
        let exposed_us = if (prefill.as_str(), decode.as_str()) == ("p1", "d1") {
            100
        } else {
            900_000
        };
        let stats = HandoffStats {
            bytes: 65_536,
            exposed_us,
            ..HandoffStats::default()
        };
        bench.event(leg, JobEvent::HandedOff(stats));
        bench.cancel(id);
        (prefill, decode)
    };
    // The first pairs are tried, since nothing is known of them; the fast one is kept.
    let pairs: Vec<_> = (1..=12).map(|id| pair(&mut bench, id)).collect();
    let fast = ("p1".to_owned(), "d1".to_owned());
    assert!(pairs[6..].iter().all(|pair| *pair == fast), "{pairs:?}");
    assert_ne!(pairs[0], fast, "equal nodes are taken by name");
}

/// A node tells that it has the whole prompt of [`request`]s with so many tokens.
fn caches(bench: &mut Bench, node: &str, sequence: u64, prompt: usize) {
    let tokens = request(0, prompt, 1).token_ids;
    let change = CacheChange {
        sequence,
        reset: sequence == 1,
        added: block_hashes(&tokens, BLOCK_TOKENS as usize, 0),
        removed: Vec::new(),
    };
    bench.fact(Fact::NodeCache {
        link: bench.link(node),
        change,
    });
}

#[test]
fn a_prompt_goes_where_it_is_cached_unless_that_node_has_too_much_to_do() {
    let mut bench = Bench::default();
    for number in 0..3 {
        for (role, letter) in [(Role::Prefill, 'p'), (Role::Decode, 'd')] {
            let mut hello = hello(role, &format!("{letter}{number}"), 1, 100);
            // A quarter of a mebibyte a block.
            hello.layout.head_dim = 4_096;
            let node = hello.node.clone();
            bench.join_as(PeerName { role, node }, hello);
        }
    }
    caches(&mut bench, "p2", 1, 48);
    caches(&mut bench, "d1", 1, 48);
    let grant = |bench: &mut Bench| {
        for leg in bench.open_legs() {
            if bench.state(bench.request_of(leg)) == "reserving" {
                bench.granted(leg, 1);
            }
        }
    };
    bench.submit(request(1, 60, 3));
    assert_eq!(bench.on("d1").len(), 1);
    grant(&mut bench);
    let prefill = bench.started("p2");
    // Twelve rows are ahead there: what is cached still saves more than that.
    bench.submit(request(2, 60, 3));
    grant(&mut bench);
    assert_eq!(bench.on("p2").len(), 2);
    bench.first_token(prefill, 65);
    // A prompt of which nothing is cached goes to a free node.
    let mut other = request(3, 60, 3);
    other.token_ids = (100..160).collect();
    bench.submit(other);
    grant(&mut bench);
    assert_eq!((bench.on("p0").len(), bench.on("p2").len()), (1, 2));
    bench.fact(Fact::NodeCache {
        link: bench.link("p2"),
        change: CacheChange {
            sequence: 2,
            reset: true,
            ..CacheChange::default()
        },
    });
    let on_p2 = bench.on("p2").len();
    bench.submit(request(4, 60, 3));
    assert_eq!(bench.on("p2").len(), on_p2, "it has forgotten everything");
}

#[test]
fn a_decision_tells_what_was_looked_at() {
    let mut bench = cluster(Policy::PrefixAffinity, 2);
    caches(&mut bench, "p1", 1, 24);
    bench.submit(request(1, 24, 3));
    bench.advance(std::time::Duration::from_millis(20));
    let told = bench.cluster.decisions(bench.now, RequestId(1));
    let [decision] = told.as_slice() else {
        panic!("{told:?}")
    };
    assert_eq!((decision.attempt, decision.age_ms, decision.way), (1, 20, Way::Handoff));
    assert_eq!(
        (decision.prefill.as_deref(), decision.decode.as_deref()),
        (Some("p1"), Some("d0"))
    );
    let cached: Vec<_> = decision
        .candidates
        .prefill
        .iter()
        .map(|option| option.cached_tokens)
        .collect();
    assert_eq!(cached, [0, 20], "the last row is computed in any case");
    assert_eq!(decision.remote_us, Some(decision.candidates.pair_us(1, 0)));
    assert_eq!(decision.candidates.transfer_us.len(), 4);
    // Another attempt is another decision.
    bench.lose("d0");
    let told = bench.cluster.decisions(bench.now, RequestId(1));
    assert_eq!(told.iter().map(|decision| decision.attempt).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(told[1].decode.as_deref(), Some("d1"));
}
