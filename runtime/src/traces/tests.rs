use std::time::{Instant, UNIX_EPOCH};

use opentelemetry::InstrumentationScope;
use opentelemetry::trace::Status;

use super::span::WallTime;
use super::*;
use crate::clock::Clock;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn tracer(most: usize, ratio: f64) -> (Tracer, mpsc::Receiver<Report>) {
    let (queue, reports) = mpsc::channel(most);
    let tracer = Tracer {
        queue,
        waiting: Arc::default(),
        most,
        sampler: Sampler::TraceIdRatioBased(ratio),
    };
    (tracer, reports)
}

#[test]
fn a_call_is_traced_as_its_parent_is() {
    let (never, _reports) = tracer(8, 0.0);
    let begun = never
        .begin(Some(PARENT), Some("a=1,b=2"))
        .expect("its parent is sampled");
    assert_eq!(begun.parent, Some(0xb7ad_6b71_6920_3331));
    assert_eq!(begun.context.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c);
    assert_ne!(begun.context.span_id, 0xb7ad_6b71_6920_3331);
    assert_eq!(begun.context.state, "a=1,b=2");
    let (always, _reports) = tracer(8, 1.0);
    assert_eq!(always.begin(Some(&PARENT.replace("-01", "-00")), None), None);
}

#[test]
fn a_call_without_a_parent_is_traced_by_chance() {
    let (always, _reports) = tracer(8, 1.0);
    for malformed in [None, Some("00-0-0-01"), Some("")] {
        let begun = always.begin(malformed, Some("a=1")).expect("all are sampled");
        assert_eq!((begun.parent, begun.context.state.as_str()), (None, ""));
    }
    let (never, _reports) = tracer(8, 0.0);
    assert_eq!(never.begin(None, None), None);
    let (some, _reports) = tracer(8, 0.25);
    let traced = (0..1_000).filter(|_| some.begin(None, None).is_some()).count();
    assert!((100..400).contains(&traced), "{traced} of 1000");
}

#[test]
fn a_state_that_is_none_is_not_passed_on() {
    assert_eq!(valid_state(" a=1 "), "a=1");
    assert_eq!(valid_state("no list"), "");
    assert_eq!(valid_state(&format!("a={}", "x".repeat(600))), "");
}

#[test]
fn a_full_queue_drops_and_does_not_wait() {
    let (tracer, mut reports) = tracer(10, 1.0);
    for _ in 0..3 {
        tracer.report(4, |_| {});
    }
    assert_eq!(tracer.waiting.load(Ordering::Relaxed), 8, "the third one has no room");
    let spans: Vec<usize> = std::iter::from_fn(|| reports.try_recv().ok())
        .map(|report| report.spans)
        .collect();
    assert_eq!(spans, [4, 4]);
}

#[test]
fn spans_keep_their_distances_when_they_get_wall_times() {
    let (start, wall) = (Clock.now(), UNIX_EPOCH + Duration::from_secs(1_000));
    let ms = |ms: u64| Duration::from_millis(ms);
    let parent = TraceContext {
        trace_id: 7,
        span_id: 8,
        state: "a=1".to_owned(),
    };
    let span = |from: Instant, to: Instant| Span {
        error: Some("lost".into()),
        events: vec![SpanEvent {
            name: "restart",
            at: to,
            attributes: Vec::new(),
        }],
        ..Span::child(&parent, "prefill", from, to)
    };
    let mut clock = WallTime::new(start + ms(10), wall);
    let scope = InstrumentationScope::builder("baton").build();
    let data = span(start, start + ms(25)).into_data(&clock, &scope);
    assert_eq!((data.start_time, data.end_time), (wall - ms(10), wall + ms(15)));
    assert_eq!(data.events[0].timestamp, wall + ms(15));
    assert_eq!(data.parent_span_id.to_string(), "0000000000000008");
    assert_eq!(data.span_context.trace_id().to_string(), format!("{:032x}", 7));
    assert_eq!(data.span_context.trace_state().header(), "a=1");
    assert_eq!(data.status, Status::error("lost"));
    // A clock that is set is followed; one that drifts a little is not.
    clock.follow(start + ms(20), wall + ms(10) + Duration::from_micros(900));
    assert_eq!(span(start, start).into_data(&clock, &scope).start_time, wall - ms(10));
    clock.follow(start + ms(20), wall + ms(3_010));
    assert_eq!(
        span(start, start).into_data(&clock, &scope).start_time,
        wall + ms(2_990)
    );
}
