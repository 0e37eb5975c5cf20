use std::time::{Instant, SystemTime, UNIX_EPOCH};

use opentelemetry::InstrumentationScope;
use opentelemetry::trace::{Event, SpanContext, SpanId, Status, TraceFlags, TraceId};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use prost::Message;

use super::span::WallTime;
use super::*;
use crate::clock::Clock;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn tracer(most: usize, ratio: f64) -> Tracer {
    Tracer {
        waiting: Arc::new(Waiting::new(most)),
        sampler: Sampler::TraceIdRatioBased(ratio),
    }
}

#[test]
fn a_call_is_traced_as_its_parent_is() {
    let never = tracer(8, 0.0);
    let begun = never
        .begin(Some(PARENT), Some("a=1,b=2"))
        .expect("its parent is sampled");
    assert_eq!(begun.parent, Some(0xb7ad_6b71_6920_3331));
    assert_eq!(begun.context.trace_id, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c);
    assert_ne!(begun.context.span_id, 0xb7ad_6b71_6920_3331);
    assert_eq!(begun.context.state, "a=1,b=2");
    let always = tracer(8, 1.0);
    assert_eq!(always.begin(Some(&PARENT.replace("-01", "-00")), None), None);
}

#[test]
fn a_call_without_a_parent_is_traced_by_chance() {
    let always = tracer(8, 1.0);
    for malformed in [None, Some("00-0-0-01"), Some("")] {
        let begun = always.begin(malformed, Some("a=1")).expect("all are sampled");
        assert_eq!((begun.parent, begun.context.state.as_str()), (None, ""));
    }
    let never = tracer(8, 0.0);
    assert_eq!(never.begin(None, None), None);
    let some = tracer(8, 0.25);
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
    let tracer = tracer(10, 1.0);
    let mut made = 0;
    for _ in 0..3 {
        tracer.report(4, |_| made += 1);
    }
    assert_eq!(
        (tracer.waiting.spans(), made),
        (8, 2),
        "the third one has no room, and is not made"
    );
    let batch = tracer.waiting.take().expect("what had room");
    assert_eq!((batch.spans, tracer.waiting.spans()), (8, 0));
    assert!(tracer.waiting.take().is_none());
}

#[test]
fn a_batch_ends_with_the_report_that_fills_it() {
    let tracer = tracer(10_000, 1.0);
    let (now, parent) = (Clock.now(), parent());
    for _ in 0..300 {
        tracer.report(7, |spans| {
            spans.extend((0..7).map(|_| Span::child(&parent, "decode", now, now)))
        });
    }
    let batches: Vec<Batch> = std::iter::from_fn(|| tracer.waiting.take()).collect();
    let spans: Vec<usize> = batches.iter().map(|batch| batch.spans).collect();
    assert_eq!(spans, [1_029, 1_029, 42]);
    for batch in batches {
        let request = otlp::request(&[], "baton", &batch.bytes);
        let read = ExportTraceServiceRequest::decode(request.as_slice()).expect("a request");
        assert_eq!(read.resource_spans[0].scope_spans[0].spans.len(), batch.spans);
    }
}

#[test]
fn whoever_exports_is_woken_for_the_first_span_and_for_a_batch() {
    let tracer = tracer(16, 1.0);
    let mut woken = Vec::new();
    for _ in 0..8 {
        tracer.report(2, |_| {});
        // A wake that nobody waited for stays until somebody does.
        let wake = Box::pin(tracer.waiting.changed.notified()).as_mut().enable();
        woken.push(wake);
    }
    assert_eq!(woken, [true, false, false, true, false, false, false, false]);
}

fn parent() -> TraceContext {
    TraceContext {
        trace_id: 7,
        span_id: 8,
        state: "a=1".to_owned(),
    }
}

#[test]
fn spans_keep_their_distances_when_they_get_wall_times() {
    let (start, wall) = (Clock.now(), UNIX_EPOCH + Duration::from_secs(1_000));
    let ms = |ms: u64| Duration::from_millis(ms);
    let mut clock = WallTime::new(start + ms(10), wall);
    assert_eq!(
        (clock.at(start), clock.at(start + ms(25))),
        (wall - ms(10), wall + ms(15))
    );
    assert_eq!(clock.nanos(start), 999_990_000_000);
    // A clock that is set is followed; one that drifts a little is not.
    clock.follow(start + ms(20), wall + ms(10) + Duration::from_micros(900));
    assert_eq!(clock.at(start), wall - ms(10));
    clock.follow(start + ms(20), wall + ms(3_010));
    assert_eq!(clock.at(start), wall + ms(2_990));
}

/// The span as OpenTelemetry's library has it.
fn in_library(span: Span, at: impl Fn(Instant) -> SystemTime) -> SpanData {
    let mut events = SpanEvents::default();
    let told = |event: SpanEvent| Event::new(event.name, at(event.at), event.attributes, 0);
    events.events = span.events.into_iter().map(told).collect();
    let state = TraceState::from_str(&span.context.state).expect("a valid state");
    let (trace, id) = (TraceId::from(span.context.trace_id), SpanId::from(span.context.span_id));
    SpanData {
        span_context: SpanContext::new(trace, id, TraceFlags::SAMPLED, false, state),
        parent_span_id: span.parent.map_or(SpanId::INVALID, SpanId::from),
        parent_span_is_remote: span.remote,
        span_kind: span.kind,
        name: span.name,
        start_time: at(span.from),
        end_time: at(span.to),
        attributes: span.attributes,
        dropped_attributes_count: 0,
        events,
        links: SpanLinks::default(),
        status: span
            .error
            .map_or(Status::Unset, |error| Status::error(error.into_owned())),
        instrumentation_scope: InstrumentationScope::builder("baton").build(),
    }
}

/// One of each kind of attribute, an empty and a long text among them.
fn attributes() -> Vec<KeyValue> {
    vec![
        KeyValue::new("text", "words"),
        KeyValue::new("empty", ""),
        KeyValue::new("long", "x".repeat(20_000)),
        KeyValue::new("yes", true),
        KeyValue::new("zero", 0_i64),
        KeyValue::new("negative", -5_i64),
        KeyValue::new("most", i64::MAX),
        KeyValue::new("half", 0.5),
        KeyValue::new(
            "list",
            Value::Array(Array::String(vec!["a".into(), "".into(), "c".repeat(200).into()])),
        ),
        KeyValue::new("no list", Value::Array(Array::String(Vec::new()))),
    ]
}

#[test]
fn the_bytes_are_those_of_the_library() {
    let (start, wall) = (Clock.now(), UNIX_EPOCH + Duration::from_secs(1_700_000_000));
    let clock = WallTime::new(start, wall);
    let at = |us| start + Duration::from_micros(us);
    let begun = |parent| Begun {
        context: TraceContext {
            state: String::new(),
            ..self::parent()
        },
        parent,
    };
    let spans = vec![
        Span {
            attributes: attributes(),
            events: vec![
                SpanEvent {
                    name: "restart",
                    at: at(9),
                    attributes: attributes(),
                },
                SpanEvent {
                    name: "first_token",
                    at: at(11),
                    attributes: Vec::new(),
                },
            ],
            error: Some("lost".into()),
            ..Span::child(&parent(), "prefill", at(1), at(25))
        },
        Span::child(&parent(), "queue", at(0), at(0)),
        Span::of_call(begun(None), "POST /generate".to_owned(), at(0), at(1_000_000)),
        Span::of_call(begun(Some(3)), "", at(0), at(3)),
        Span {
            error: Some("".into()),
            ..Span::child(&parent(), "decode", at(2), at(3))
        },
    ];
    let resource = [
        KeyValue::new("service.name", "baton-test"),
        KeyValue::new("x", "y".repeat(300)),
    ];
    let mut ours = Vec::new();
    spans.iter().for_each(|span| otlp::span(&mut ours, span, &clock));
    let ours = otlp::request(&resource, "baton", &ours);
    let theirs = spans.into_iter().map(|span| in_library(span, |time| clock.at(time)));
    // Theirs has the resource in an order of its own.
    let resource = Resource::builder_empty().with_attributes(resource).build();
    let theirs = ExportTraceServiceRequest {
        resource_spans: group_spans_by_resource_and_scope(theirs.collect(), &(&resource).into()),
    };
    let sorted = |mut request: ExportTraceServiceRequest| {
        for resource in request
            .resource_spans
            .iter_mut()
            .filter_map(|spans| spans.resource.as_mut())
        {
            resource.attributes.sort_by(|a, b| a.key.cmp(&b.key));
        }
        request
    };
    let read = ExportTraceServiceRequest::decode(ours.as_slice()).expect("a request");
    assert_eq!(
        read.encode_to_vec(),
        ours,
        "nothing in it is written in another way than the library does"
    );
    assert_eq!(sorted(read), sorted(theirs));
}
