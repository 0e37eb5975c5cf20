//! Operators' orders.

use protocol::control::{CoordinatorMessage, Job, JobEvent, KvSource};
use protocol::ids::Role;

use super::bench::{Bench, at};
use crate::core::cluster::{Action, Order, OrderError};
use crate::core::fixtures::request;

fn told(actions: &[Action]) -> Vec<CoordinatorMessage> {
    let mut told = Vec::new();
    for action in actions {
        if let Action::Tell { message, .. } = action {
            told.push(message.clone());
        }
    }
    told
}

#[test]
fn a_node_that_is_drained_gets_nothing_new_and_finishes_what_runs() {
    let mut bench = at("decoding");
    let drain = Order::Drain { move_running: false };
    let actions = bench.order("d0", drain).expect("connected");
    assert_eq!(told(&actions), [CoordinatorMessage::Drain { on: true }]);
    bench.submit(request(2, 6, 3));
    assert_eq!((bench.state(1), bench.state(2)), ("decoding", "queued"));
    let decode = bench.started("d0");
    bench.token(decode, 2, 67);
    bench.token(decode, 3, 68);
    assert_eq!(bench.text(1), "ABCD");
    let actions = bench.order("d0", Order::Undrain).expect("connected");
    assert_eq!(told(&actions), [CoordinatorMessage::Drain { on: false }]);
    bench.report("d0", 100, false);
    assert_eq!(bench.state(2), "reserving");
}

#[test]
fn what_generates_is_moved_where_that_is_wanted_and_there_is_another_node() {
    let drain = Order::Drain { move_running: true };
    let mut alone = at("decoding");
    alone.order("d0", drain).expect("connected");
    assert_eq!(alone.state(1), "decoding", "nowhere to go");

    let mut bench = at("decoding");
    bench.join_decode("d1");
    let old = bench.started("d0");
    // More often than nodes may be lost under a request.
    for (from, to) in [("d0", "d1"), ("d1", "d0"), ("d0", "d1"), ("d1", "d0")] {
        bench.order(from, drain).expect("connected");
        assert_eq!(bench.state(1), "resuming", "from {from}");
        let leg = bench.last_started(to);
        let Job::Decode(job) = bench.job(leg) else {
            panic!("a decode job")
        };
        assert_eq!((job.source, job.choices[0].generated.len()), (KvSource::Compute, 2));
        bench.event(leg, JobEvent::Committed);
        assert_eq!(bench.on(from).len(), 0, "{from} is empty");
        bench.token(leg, 1, 66);
        bench.order(from, Order::Undrain).expect("connected");
        bench.report(from, 100, false);
    }
    assert!(!bench.open_legs().contains(&old));
    let leg = bench.last_started("d0");
    bench.token(leg, 2, 67);
    bench.token(leg, 3, 68);
    assert_eq!(bench.text(1), "ABCD");
    bench.assert_idle();
}

#[test]
fn orders_that_cannot_be_given_say_why() {
    let mut bench = Bench::with_nodes();
    assert_eq!(
        bench.order("d7", Order::Undrain),
        Err(OrderError::UnknownNode { node: "d7".to_owned() })
    );
    let refused = bench
        .order("d0", Order::SetRole(Role::Prefill))
        .expect_err("its certificate");
    assert_eq!(
        refused.to_string(),
        "the certificate of d0 is for the role decode; it may not serve as prefill"
    );
    let refused = bench
        .order("d0", Order::SetRole(Role::Coordinator))
        .expect_err("no role");
    assert_eq!(refused.to_string(), "coordinator is not a role of a node");
    let actions = bench.order("d0", Order::SetRole(Role::Decode)).expect("its role");
    assert_eq!(told(&actions), [CoordinatorMessage::SetRole { role: Role::Decode }]);
}
