//! What the loss of a node's link means for the jobs that run over it: one loss, counted once, after the last thing that
//! the node had said.

mod fake_node;

use coordinator::core::types::ClientEvent;
use coordinator::handle::RequestStream;
use fake_node::{Coordinator, JobSide, Node, finish, request, tokens};
use protocol::control::{HandoffStats, JobEvent, KvSource};
use protocol::ids::Role;

/// Jobs that run over the link; the more, the surer one of them is faster than the link's own end.
const JOBS: u128 = 12;

/// Brings requests for three tokens each to the decode node, with the first token out.
async fn decoding(coordinator: &Coordinator, prefill: &Node, decode: &Node) -> (Vec<RequestStream>, Vec<JobSide>) {
    let (mut streams, mut jobs) = (Vec::new(), Vec::new());
    for id in 1..=JOBS {
        let mut stream = coordinator.submit(request(id, 3)).await;
        let (_, mut d) = decode.decode().await;
        d.grant().await;
        let (_, mut p) = prefill.prefill().await;
        p.first_token('a').await;
        p.say(JobEvent::HandedOff(HandoffStats::default())).await;
        d.say(JobEvent::Committed).await;
        tokens(&mut stream, 1).await;
        p.events.finish().expect("open");
        streams.push(stream);
        jobs.push(d);
    }
    (streams, jobs)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_wait_for_a_node_that_comes_back() {
    let (coordinator, prefill, decode) = Coordinator::with_nodes().await;
    let (mut streams, _jobs) = decoding(&coordinator, &prefill, &decode).await;
    decode.link.connection.close(0_u32.into(), b"gone");
    coordinator.until(|status| status.nodes.len() == 1).await;
    let decode = coordinator.join(Role::Decode, "d0").await;
    let mut again = Vec::new();
    for _ in 0..JOBS {
        let (job, mut d) = decode.decode().await;
        assert_eq!(
            (job.source, job.epoch.0),
            (KvSource::Compute, 2),
            "one loss is one new attempt"
        );
        d.token(1, 'b').await;
        d.token(2, 'c').await;
        again.push(d);
    }
    for stream in &mut streams {
        let (text, _, end) = finish(stream).await;
        assert!(matches!(end, ClientEvent::Done { .. }), "{end:?}");
        assert_eq!(text, "bc");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_said_before_it_left_counts() {
    let (coordinator, prefill, decode) = Coordinator::with_nodes().await;
    let (mut streams, mut jobs) = decoding(&coordinator, &prefill, &decode).await;
    for d in &mut jobs {
        d.token(1, 'b').await;
        d.token(2, 'c').await;
        d.say(JobEvent::Finished).await;
        d.events.finish().expect("open");
    }
    for d in &mut jobs {
        // Both mean that it has all arrived.
        drop(d.events.stopped().await);
    }
    decode.link.connection.close(0_u32.into(), b"drained");
    for stream in &mut streams {
        let (text, _, end) = finish(stream).await;
        assert!(matches!(end, ClientEvent::Done { .. }), "{end:?}");
        assert_eq!(text, "bc");
    }
}
