//! The control plane and the driver over real QUIC: joining, jobs, cancels, losses, slow clients, the end.

mod fake_node;

use std::time::Duration;

use coordinator::core::types::{ClientEvent, Finish, ServeErrorKind};
use fake_node::{Coordinator, SOON, finish, hello, request, tokens};
use protocol::codec::MAX_CONTROL_BYTES;
use protocol::control::{HandoffStats, JobEvent, JobUpdate, KvSource, LoadReport};
use protocol::ids::Role;
use runtime::framing::MessageWriter;
use tokio::time::timeout;

fn kind(event: &ClientEvent) -> ServeErrorKind {
    match event {
        ClientEvent::Failed(error) => error.kind,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_request_is_served_by_two_nodes() {
    let (coordinator, prefill, decode) = Coordinator::with_nodes().await;
    let mut stream = coordinator.submit(request(1, 3)).await;
    let (job, mut d) = decode.decode().await;
    assert_eq!((job.source, &job.token_ids[..]), (KvSource::Handoff, &[1, 2, 3][..]));
    d.grant().await;
    let (job, mut p) = prefill.prefill().await;
    let target = job.handoff.expect("a target");
    assert_eq!((target.node.0.as_str(), target.address.as_str()), ("d0", "127.0.0.1:9"));
    p.first_token('a').await;
    d.say(JobEvent::Committed).await;
    p.say(JobEvent::HandedOff(HandoffStats::default())).await;
    d.token(1, 'b').await;
    d.token(2, 'c').await;
    let (text, end, last) = finish(&mut stream).await;
    assert!(matches!(last, ClientEvent::Done { .. }), "{last:?}");
    let end = end.expect("an end of the choice");
    assert_eq!(
        (text.as_str(), end.finish, end.generated_tokens),
        ("abc", Finish::Length, 3)
    );
    assert_eq!(stream.next().await, None);
    coordinator
        .until(|status| status.running == 0 && status.nodes.iter().all(|n| n.jobs == 0))
        .await;
}

#[tokio::test]
async fn dropping_the_stream_cancels_both_legs() {
    let (coordinator, prefill, decode) = Coordinator::with_nodes().await;
    let stream = coordinator.submit(request(1, 3)).await;
    let (_, mut d) = decode.decode().await;
    d.grant().await;
    let (_, p) = prefill.prefill().await;
    drop(stream);
    d.cancelled().await;
    p.cancelled().await;
    coordinator
        .until(|status| status.running == 0 && status.nodes.iter().all(|n| n.booked_blocks == 0))
        .await;
}

#[tokio::test]
async fn a_request_outlives_its_decode_node() {
    let (coordinator, prefill, decode) = Coordinator::with_nodes().await;
    let mut stream = coordinator.submit(request(1, 4)).await;
    let (_, mut d) = decode.decode().await;
    d.grant().await;
    let (_, mut p) = prefill.prefill().await;
    p.first_token('a').await;
    d.token(1, 'b').await;
    tokens(&mut stream, 2).await;
    let other = coordinator.join(Role::Decode, "d1").await;
    decode.link.connection.close(0_u32.into(), b"gone");
    let (job, mut d) = other.decode().await;
    assert_eq!((job.source, &job.token_ids[..]), (KvSource::Compute, &[1, 2, 3][..]));
    assert_eq!(job.choices[0].generated, ['a' as u32, 'b' as u32]);
    p.cancelled().await;
    d.token(2, 'c').await;
    d.token(3, 'd').await;
    let (text, _, end) = finish(&mut stream).await;
    assert_eq!(text, "cd");
    assert!(matches!(end, ClientEvent::Done { .. }), "{end:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_vanishes_without_a_word_is_lost_after_the_idle_timeout() {
    let (coordinator, _prefill, _decode) = Coordinator::with_nodes().await;
    // A node on a runtime of its own, which ends as a killed process does: nothing is sent any more, not even a close.
    let vanish = || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let node = runtime
            .block_on(coordinator.try_join(hello(Role::Decode, "d1", 1)))
            .expect("welcome");
        runtime.shutdown_background();
        drop(node);
    };
    tokio::task::block_in_place(|| std::thread::scope(|scope| scope.spawn(vanish).join())).expect("no panic");
    coordinator.until(|status| status.nodes.len() == 3).await;
    coordinator.until(|status| status.nodes.len() == 2).await;
}

#[tokio::test]
async fn garbage_on_a_job_stream_costs_the_attempt_and_not_the_node() {
    let (coordinator, _prefill, decode) = Coordinator::with_nodes().await;
    let _stream = coordinator.submit(request(1, 3)).await;
    let (first, mut d) = decode.decode().await;
    // A message of another type: its bytes are no job event.
    d.events.write(&"what is this".to_owned()).await.expect("sent");
    let (second, _d) = decode.decode().await;
    assert_eq!((first.epoch.0, second.epoch.0), (1, 2));
    assert_eq!(coordinator.handle.status().nodes.len(), 2);
}

#[tokio::test]
async fn a_node_that_does_not_fit_reads_why() {
    let (coordinator, _prefill, _decode) = Coordinator::with_nodes().await;
    let mut other = hello(Role::Decode, "d1", 1);
    other.model.weights_hash = 1;
    let reason = coordinator.refuses(other).await;
    assert!(reason.starts_with("weights hash: cluster has 0"), "{reason}");
    let mut other = hello(Role::Decode, "d1", 1);
    other.protocol_version = 9;
    let reason = coordinator.refuses(other).await;
    let ours = protocol::PROTOCOL_VERSION;
    assert_eq!(reason, format!("protocol version: cluster has {ours}, node has 9"));
    assert_eq!(coordinator.handle.status().nodes.len(), 2);
}

#[tokio::test]
async fn a_node_that_says_nothing_or_nonsense_is_dropped_and_holds_up_nobody() {
    let coordinator = Coordinator::start().await;
    let (_endpoint, silent) = coordinator.dial(Role::Decode, "d0").await;
    let (_endpoint, babbler) = coordinator.dial(Role::Decode, "d1").await;
    let (send, _recv) = babbler.connection.open_bi().await.expect("a stream");
    let mut writer = MessageWriter::new(send, MAX_CONTROL_BYTES);
    writer.write(&"hello".to_owned()).await.expect("sent");
    let prefill = coordinator.join(Role::Prefill, "p0").await;
    for link in [silent, babbler] {
        let error = timeout(SOON, link.connection.closed()).await.expect("closed");
        assert!(
            matches!(error, quinn::ConnectionError::ApplicationClosed(_)),
            "{error:?}"
        );
    }
    assert_eq!(coordinator.handle.status().nodes.len(), 1);
    drop(prefill);
}

#[tokio::test]
async fn a_restarted_node_replaces_the_old_link() {
    let (coordinator, _prefill, decode) = Coordinator::with_nodes().await;
    let _stream = coordinator.submit(request(1, 3)).await;
    let (first, _d) = decode.decode().await;
    let again = coordinator
        .try_join(hello(Role::Decode, "d0", 2))
        .await
        .expect("welcome");
    assert!(decode.closed().await.contains("the node has connected again"));
    let (second, _d) = again.decode().await;
    assert_eq!((first.epoch.0, second.epoch.0), (1, 2));
    coordinator.until(|status| status.nodes.len() == 2).await;
}

#[tokio::test]
async fn reports_reach_the_status() {
    let (coordinator, _prefill, mut decode) = Coordinator::with_nodes().await;
    assert!(coordinator.handle.status().is_ready());
    decode
        .report(LoadReport {
            sequence: 1,
            free_blocks: 42,
            draining: true,
            ..LoadReport::default()
        })
        .await;
    coordinator
        .until(|status| status.nodes.iter().any(|n| n.free_blocks == 42 && n.draining))
        .await;
    assert!(!coordinator.handle.status().is_ready());
}

#[tokio::test]
async fn a_client_that_stops_reading_loses_its_request_and_nobody_else_notices() {
    let coordinator = Coordinator::start_with(|config| config.coordinator.client_stall_timeout_ms = 300).await;
    let prefill = coordinator.join(Role::Prefill, "p0").await;
    let decode = coordinator.join(Role::Decode, "d0").await;
    let mut stalled = coordinator.submit(request(1, 50)).await;
    let (_, mut d1) = decode.decode().await;
    d1.grant().await;
    let (_, mut p1) = prefill.prefill().await;
    p1.first_token('a').await;
    p1.cancelled().await;
    d1.cancelled().await;
    let (text, _, end) = finish(&mut stalled).await;
    assert_eq!((text.as_str(), kind(&end)), ("a", ServeErrorKind::Cancelled));
}

#[tokio::test]
async fn a_client_too_far_behind_loses_its_request() {
    let coordinator = Coordinator::start_with(|config| config.coordinator.stream_buffer_tokens = 3).await;
    let prefill = coordinator.join(Role::Prefill, "p0").await;
    let decode = coordinator.join(Role::Decode, "d0").await;
    let mut stream = coordinator.submit(request(1, 50)).await;
    let (_, mut d) = decode.decode().await;
    d.grant().await;
    let (_, mut p) = prefill.prefill().await;
    p.first_token('a').await;
    for position in 1..4 {
        d.token(position, 'b').await;
    }
    d.cancelled().await;
    let (text, _, end) = finish(&mut stream).await;
    assert_eq!((text.as_str(), kind(&end)), ("abb", ServeErrorKind::Cancelled));
}

#[tokio::test]
async fn a_requested_shutdown_lets_running_requests_end() {
    let (coordinator, prefill, decode) = Coordinator::with_nodes().await;
    let mut stream = coordinator.submit(request(1, 2)).await;
    let (_, mut d) = decode.decode().await;
    d.grant().await;
    let (_, mut p) = prefill.prefill().await;
    coordinator.shutdown.request();
    coordinator.until(|status| status.draining).await;
    let refused = coordinator
        .handle
        .submit(vec![request(2, 2)])
        .await
        .expect_err("refused");
    assert_eq!(refused.kind, ServeErrorKind::Unavailable);
    p.first_token('a').await;
    d.token(1, 'b').await;
    assert_eq!(finish(&mut stream).await.0, "ab");
    timeout(SOON, coordinator.driver)
        .await
        .expect("the driver ends")
        .expect("without a panic");
}

#[tokio::test]
async fn the_end_of_the_drain_time_ends_what_is_left() {
    let coordinator = Coordinator::start_with(|config| config.coordinator.drain_timeout_ms = 200).await;
    let prefill = coordinator.join(Role::Prefill, "p0").await;
    let decode = coordinator.join(Role::Decode, "d0").await;
    let mut stream = coordinator.submit(request(1, 2)).await;
    let (_, d) = decode.decode().await;
    coordinator.shutdown.request();
    let (_, _, end) = finish(&mut stream).await;
    assert_eq!(kind(&end), ServeErrorKind::Unavailable);
    d.cancelled().await;
    timeout(SOON, coordinator.driver)
        .await
        .expect("the driver ends")
        .expect("without a panic");
    let late = coordinator
        .handle
        .submit(vec![request(3, 2)])
        .await
        .expect_err("nobody is there");
    assert_eq!(late.kind, ServeErrorKind::Unavailable);
    drop(prefill);
}

#[tokio::test]
async fn a_forced_shutdown_does_not_wait() {
    let (coordinator, _prefill, decode) = Coordinator::with_nodes().await;
    let mut stream = coordinator.submit(request(1, 2)).await;
    let (_, d) = decode.decode().await;
    coordinator.shutdown.force();
    let (_, _, end) = finish(&mut stream).await;
    assert_eq!(kind(&end), ServeErrorKind::Unavailable);
    d.cancelled().await;
    timeout(Duration::from_secs(5), coordinator.driver)
        .await
        .expect("the driver ends")
        .expect("without a panic");
}

#[tokio::test]
async fn a_stop_string_of_one_choice_reaches_the_decode_node_and_the_job_goes_on() {
    let (coordinator, prefill, decode) = Coordinator::with_nodes().await;
    let mut wanted = request(1, 3);
    wanted.choices = 2;
    wanted.stop_strings = ["x".to_owned()].into();
    let mut stream = coordinator.submit(wanted).await;
    let (job, mut d) = decode.decode().await;
    assert_eq!(job.choices.len(), 2);
    d.grant().await;
    let (job, mut p) = prefill.prefill().await;
    assert_eq!(job.choices, 2);
    p.first_tokens(&['a', 'x']).await;
    assert_eq!(d.update().await, JobUpdate::EndChoice { choice: 1 });
    d.say(JobEvent::Committed).await;
    d.token(1, 'b').await;
    d.token(2, 'c').await;
    let mut last = Vec::new();
    while let Some(event) = timeout(SOON, stream.next()).await.expect("an event in time") {
        last.push(event);
    }
    let ended = |event: &&ClientEvent| matches!(event, ClientEvent::Ended { .. });
    assert_eq!(last.iter().filter(ended).count(), 2);
    assert!(matches!(last.last(), Some(ClientEvent::Done { .. })), "{last:?}");
}
