//! The spans of a request's phases. What is around them, the span of its call, is the HTTP layer's (`http::trace`).

use std::sync::Arc;

use runtime::traces::{KeyValue, Span, SpanEvent, tracer};

use crate::core::journey::{Attempt, Ended};
use crate::core::phases::Stretch;

/// Exports the phases of a request that is traced.
pub(super) fn export(ended: Box<Ended>) {
    if ended.context.trace.is_none() {
        return;
    }
    if let Some(tracer) = tracer() {
        tracer.report(ended.stretches.len(), move |spans| make(&ended, spans));
    }
}

/// One span for each stretch of a phase. One that ends with a lost attempt, or with the request without an answer, has failed.
fn make(ended: &Ended, spans: &mut Vec<Span>) {
    let Some(trace) = &ended.context.trace else { return };
    // Shared by all: nothing of it is copied for a span.
    let id: Arc<str> = ended.id.to_string().into();
    let last = ended.stretches.len().saturating_sub(1);
    for (number, stretch) in ended.stretches.iter().enumerate() {
        let mut span = Span::child(trace, stretch.phase.as_str(), stretch.from, stretch.to);
        span.attributes = attributes(&id, stretch, &ended.served.attempts);
        for incident in ended
            .served
            .incidents
            .iter()
            .filter(|incident| incident.at == stretch.to)
        {
            let cause = KeyValue::new("baton.cause", incident.cause.clone());
            span.error = Some(incident.cause.clone().into());
            span.events.push(SpanEvent {
                name: incident.what,
                at: incident.at,
                attributes: vec![cause],
            });
        }
        if number == last
            && let Some(error) = &ended.error
        {
            span.error = Some(error.clone().into());
        }
        spans.push(span);
    }
}

fn attributes(id: &Arc<str>, stretch: &Stretch, attempts: &[Attempt]) -> Vec<KeyValue> {
    let mut attributes = vec![
        KeyValue::new("baton.request_id", Arc::clone(id)),
        KeyValue::new("baton.attempt", i64::from(stretch.attempt)),
    ];
    let attempt = attempts.iter().rev().find(|attempt| attempt.number == stretch.attempt);
    if let Some(node) = attempt.and_then(|attempt| attempt.node_of(stretch.phase)) {
        attributes.push(KeyValue::new("baton.node", Arc::clone(node)));
    }
    attributes
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use protocol::context::{RequestContext, TraceContext};
    use protocol::ids::RequestId;

    use super::*;
    use crate::core::fixtures::record;
    use crate::core::journey::{Incident, Served};
    use crate::core::phases::Phase;
    use crate::origin::origin;

    #[test]
    fn a_lost_attempt_is_the_end_of_a_failed_span() {
        let start = origin();
        let at = |ms| start + Duration::from_millis(ms);
        let trace = TraceContext {
            trace_id: 1,
            span_id: 2,
            state: String::new(),
        };
        let attempt = |number, node: &str| Attempt {
            number,
            prefill: None,
            decode: Some(node.into()),
        };
        let stretch = |phase, attempt, from, to| Stretch {
            phase,
            attempt,
            from: at(from),
            to: at(to),
        };
        let ended = Ended {
            id: RequestId(5),
            context: Arc::new(RequestContext {
                client_id: None,
                trace: Some(trace),
            }),
            record: record(),
            error: None,
            served: Served {
                attempts: vec![attempt(1, "d0"), attempt(2, "d1")],
                incidents: vec![Incident {
                    at: at(10),
                    what: "migration",
                    cause: "node lost".to_owned(),
                }],
            },
            stretches: vec![
                stretch(Phase::Decode, 1, 0, 10),
                stretch(Phase::DecodeQueue, 2, 10, 12),
                stretch(Phase::Decode, 2, 12, 30),
            ],
        };
        let mut spans = Vec::new();
        make(&ended, &mut spans);
        let told: Vec<(&str, Option<&str>, usize)> = spans
            .iter()
            .map(|span| (span.name.as_ref(), span.error.as_deref(), span.events.len()))
            .collect();
        let expected = [
            ("decode", Some("node lost"), 1),
            ("decode_queue", None, 0),
            ("decode", None, 0),
        ];
        assert_eq!(told, expected);
        let node = |span: &Span| {
            let found = span
                .attributes
                .iter()
                .find(|attribute| attribute.key.as_str() == "baton.node");
            found.map(|attribute| attribute.value.to_string())
        };
        let nodes: Vec<Option<String>> = spans.iter().map(node).collect();
        assert_eq!(
            nodes,
            [Some("d0".to_owned()), Some("d1".to_owned()), Some("d1".to_owned())]
        );
        assert!(
            spans
                .iter()
                .all(|span| span.parent == Some(2) && span.context.trace_id == 1)
        );
    }
}
