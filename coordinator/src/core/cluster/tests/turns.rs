//! Whose turn it is, and whose time is over.

use std::time::Duration;

use protocol::control::Job;

use super::bench::{Bench, STATES, at_with};
use crate::core::fixtures::request;
use crate::core::queue::Tenant;
use crate::core::types::{ServeErrorKind, ServeRequest};

fn of(tenant: u32, id: u128) -> ServeRequest {
    ServeRequest {
        tenant: Tenant(tenant),
        ..request(id, 6, 3)
    }
}

/// The requests that the decode node was asked to take, in order, once it has room again.
fn order(bench: &mut Bench) -> Vec<u128> {
    bench.report("d0", 100, false);
    let request_of = |leg| match bench.job(leg) {
        Job::Decode(job) => job.request.0,
        Job::Prefill(_) => panic!("reservations"),
    };
    bench.on("d0").into_iter().map(request_of).collect()
}

/// The time of a request counts in every state, and ends it there, whatever the state's own deadline is.
#[test]
fn in_every_state_the_requests_own_time_ends_it() {
    for state in STATES {
        let timeout = Duration::from_secs(4);
        let mut bench = at_with(state, |request| request.timeout = timeout);
        assert_ne!(bench.state(1), "gone", "{state}");
        let jobs: Vec<u64> = bench
            .open_legs()
            .into_iter()
            .map(|leg| match bench.job(leg) {
                Job::Decode(job) => job.deadline_ms.max(job.handoff_deadline_ms),
                Job::Prefill(job) => job.deadline_ms,
            })
            .collect();
        assert!(jobs.iter().all(|ms| (1..=4_000).contains(ms)), "{state}: {jobs:?}");
        bench.advance(timeout);
        assert_eq!((bench.state(1), bench.ends(1)), ("gone", 1), "{state}");
        assert_eq!(bench.failure(1), ServeErrorKind::Timeout, "{state}");
        bench.assert_idle();
    }
}

#[test]
fn a_key_with_many_requests_does_not_keep_another_one_waiting() {
    let mut bench = Bench::with_nodes();
    bench.report("d0", 0, false);
    (1..=7).for_each(|id| bench.submit(of(1, id)));
    bench.submit(of(2, 21));
    bench.submit(of(2, 22));
    let order = order(&mut bench);
    let place = |id: u128| order.iter().position(|of| *of == id).expect("served");
    assert!(place(21) <= 2 && place(22) <= 4, "{order:?}");
    assert!(place(1) < place(2) && place(2) < place(7), "{order:?}");
}

#[test]
fn of_one_key_whoever_has_less_time_goes_first() {
    let mut bench = Bench::with_nodes();
    bench.report("d0", 0, false);
    bench.submit(of(0, 1));
    bench.submit(ServeRequest {
        timeout: Duration::from_secs(30),
        ..of(0, 2)
    });
    bench.submit(of(0, 3));
    assert_eq!(order(&mut bench), [2, 1, 3]);
}

#[test]
fn whoever_cannot_be_served_in_time_is_refused_at_once() {
    let mut bench = Bench::with_nodes();
    // One request of the decode node at a time, each for 2 s, while others wait.
    bench.report("d0", 0, false);
    (1..=8).for_each(|id| bench.submit(of(0, id)));
    for id in 1..=5 {
        bench.advance(Duration::from_secs(2));
        bench.cancel(id);
    }
    let hasty = ServeRequest {
        timeout: Duration::from_millis(100),
        ..of(0, 20)
    };
    let error = bench.try_submit(hasty).expect_err("three are ahead, for some seconds");
    assert!(
        matches!(error.kind, ServeErrorKind::Overloaded { retry_after_s: 1.. }),
        "{error}"
    );
    assert!(error.message.contains("a wait of"), "{error}");
    bench.submit(of(0, 21));
    assert_eq!(bench.state(21), "queued");
}
