//! Spans as OTLP has them, in protobuf (opentelemetry-proto, `collector/trace/v1`), written straight from [`Span`].
//!
//! The library makes three trees of strings of each span before it has bytes, which was most of what traces cost. A test
//! holds these bytes to the library's. Only fields that spans here have are written; all others have their default, which
//! protobuf leaves out.

use opentelemetry::{Array, KeyValue, StringValue, Value};

use super::SpanKind;
use super::span::{Span, SpanEvent, WallTime};

/// Parent is known to be another process's, or this one's.
const HAS_IS_REMOTE: u32 = 0x100;
const IS_REMOTE: u32 = 0x200;
const SAMPLED: u32 = 0x1;
const STATUS_ERROR: u64 = 2;

/// Wire types of protobuf.
#[derive(Clone, Copy)]
enum Wire {
    Varint = 0,
    Fixed64 = 1,
    Length = 2,
    Fixed32 = 5,
}

/// The request that exports `spans`, which [`span`] has written one after the other, for a process with these attributes.
pub(super) fn request(resource: &[KeyValue], scope: &str, spans: &[u8]) -> Vec<u8> {
    let mut head = Vec::new();
    message(&mut head, 1, |out| {
        resource.iter().for_each(|attribute| key_value(out, 1, attribute));
    });
    let mut scope_head = Vec::new();
    message(&mut scope_head, 1, |out| text(out, 1, scope));
    let in_scope = scope_head.len() + spans.len();
    key(&mut head, 2, Wire::Length);
    varint(&mut head, in_scope as u64);
    head.extend_from_slice(&scope_head);
    let mut out = Vec::with_capacity(head.len() + spans.len() + 16);
    key(&mut out, 1, Wire::Length);
    varint(&mut out, (head.len() + spans.len()) as u64);
    out.extend_from_slice(&head);
    out.extend_from_slice(spans);
    out
}

/// Adds a span of a scope.
pub(super) fn span(out: &mut Vec<u8>, span: &Span, wall: &WallTime) {
    message(out, 2, |out| {
        let context = &span.context;
        bytes(out, 1, &context.trace_id.to_be_bytes());
        bytes(out, 2, &context.span_id.to_be_bytes());
        text(out, 3, &context.state);
        if let Some(parent) = span.parent {
            bytes(out, 4, &parent.to_be_bytes());
        }
        text(out, 5, &span.name);
        number(out, 6, kind(&span.kind));
        fixed64(out, 7, wall.nanos(span.from));
        fixed64(out, 8, wall.nanos(span.to));
        span.attributes
            .iter()
            .for_each(|attribute| key_value(out, 9, attribute));
        span.events.iter().for_each(|one| event(out, one, wall));
        message(out, 15, |out| {
            if let Some(error) = &span.error {
                text(out, 2, error);
                number(out, 3, STATUS_ERROR);
            }
        });
        let remote = if span.remote { IS_REMOTE } else { 0 };
        key(out, 16, Wire::Fixed32);
        out.extend_from_slice(&(SAMPLED | HAS_IS_REMOTE | remote).to_le_bytes());
    });
}

fn event(out: &mut Vec<u8>, event: &SpanEvent, wall: &WallTime) {
    message(out, 11, |out| {
        fixed64(out, 1, wall.nanos(event.at));
        text(out, 2, event.name);
        event
            .attributes
            .iter()
            .for_each(|attribute| key_value(out, 3, attribute));
    });
}

fn kind(kind: &SpanKind) -> u64 {
    match kind {
        SpanKind::Internal => 1,
        SpanKind::Server => 2,
        SpanKind::Client => 3,
        SpanKind::Producer => 4,
        SpanKind::Consumer => 5,
    }
}

fn key_value(out: &mut Vec<u8>, field: u32, attribute: &KeyValue) {
    message(out, field, |out| {
        text(out, 1, attribute.key.as_str());
        message(out, 2, |out| any_value(out, &attribute.value));
    });
}

fn any_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::String(value) => bytes(out, 1, value.as_str().as_bytes()),
        Value::Bool(value) => varint_field(out, 2, u64::from(*value)),
        // As two's complement, like all of protobuf's plain integers.
        Value::I64(value) => varint_field(out, 3, value.cast_unsigned()),
        Value::F64(value) => fixed64(out, 4, value.to_bits()),
        Value::Array(Array::String(values)) => message(out, 5, |out| {
            let element = |out: &mut Vec<u8>, value: &StringValue| bytes(out, 1, value.as_str().as_bytes());
            values
                .iter()
                .for_each(|value| message(out, 1, |out| element(out, value)));
        }),
        // No span here has others; as text they would still be told.
        other => bytes(out, 1, other.to_string().as_bytes()),
    }
}

/// A message in a field: what `write` adds, with its length before it.
fn message(out: &mut Vec<u8>, field: u32, write: impl FnOnce(&mut Vec<u8>)) {
    key(out, field, Wire::Length);
    let at = out.len();
    out.push(0);
    write(out);
    let length = out.len() - at - 1;
    if let (true, Some(place)) = (length < 0x80, out.get_mut(at)) {
        *place = length as u8;
        return;
    }
    // A longer length takes more than the byte that was left for it.
    let mut prefix = Vec::with_capacity(5);
    varint(&mut prefix, length as u64);
    out.splice(at..=at, prefix);
}

fn bytes(out: &mut Vec<u8>, field: u32, value: &[u8]) {
    key(out, field, Wire::Length);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// Nothing if it is empty.
fn text(out: &mut Vec<u8>, field: u32, value: &str) {
    if !value.is_empty() {
        bytes(out, field, value.as_bytes());
    }
}

/// Nothing if it is 0.
fn number(out: &mut Vec<u8>, field: u32, value: u64) {
    if value != 0 {
        varint_field(out, field, value);
    }
}

fn varint_field(out: &mut Vec<u8>, field: u32, value: u64) {
    key(out, field, Wire::Varint);
    varint(out, value);
}

fn fixed64(out: &mut Vec<u8>, field: u32, value: u64) {
    key(out, field, Wire::Fixed64);
    out.extend_from_slice(&value.to_le_bytes());
}

fn key(out: &mut Vec<u8>, field: u32, wire: Wire) {
    varint(out, u64::from(field << 3 | wire as u32));
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
