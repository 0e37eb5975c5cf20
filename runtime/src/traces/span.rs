//! One span, and the clock that its times are told by.

use std::borrow::Cow;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use opentelemetry::KeyValue;
use opentelemetry::trace::SpanKind;
use protocol::context::TraceContext;

use super::{Begun, new_span_id};

/// Something that took time.
#[derive(Clone, Debug)]
pub struct Span {
    /// What it was.
    pub name: Cow<'static, str>,
    /// Which side of a call it was.
    pub kind: SpanKind,
    /// Its trace and its name.
    pub context: TraceContext,
    /// What it was a part of.
    pub parent: Option<u64>,
    /// The parent is another process's.
    pub remote: bool,
    /// When it began.
    pub from: Instant,
    /// When it was over.
    pub to: Instant,
    /// What else is known of it.
    pub attributes: Vec<KeyValue>,
    /// What happened meanwhile.
    pub events: Vec<SpanEvent>,
    /// Why it failed, if it did.
    pub error: Option<Cow<'static, str>>,
}

/// Something that took no time.
#[derive(Clone, Debug)]
pub struct SpanEvent {
    /// What it was.
    pub name: &'static str,
    /// When it was.
    pub at: Instant,
    /// What else is known of it.
    pub attributes: Vec<KeyValue>,
}

impl Span {
    /// The span of a call.
    pub fn of_call(begun: Begun, name: impl Into<Cow<'static, str>>, from: Instant, to: Instant) -> Self {
        Self {
            name: name.into(),
            kind: SpanKind::Server,
            remote: begun.parent.is_some(),
            parent: begun.parent,
            context: begun.context,
            from,
            to,
            attributes: Vec::new(),
            events: Vec::new(),
            error: None,
        }
    }

    /// A part of what `parent` is the span of.
    pub fn child(parent: &TraceContext, name: &'static str, from: Instant, to: Instant) -> Self {
        Self {
            name: Cow::Borrowed(name),
            kind: SpanKind::Internal,
            context: TraceContext {
                span_id: new_span_id(),
                ..parent.clone()
            },
            parent: Some(parent.span_id),
            remote: false,
            from,
            to,
            attributes: Vec::new(),
            events: Vec::new(),
            error: None,
        }
    }
}

/// Turns the monotonic clock's times into those of the wall clock: all of them by the same difference, so that spans fit
/// together to the nanosecond.
#[derive(Clone, Copy, Debug)]
pub(super) struct WallTime {
    monotonic: Instant,
    wall: SystemTime,
}

/// As much as the two clocks may drift apart before the difference is taken anew.
const DRIFT: Duration = Duration::from_millis(1);

impl WallTime {
    /// The two clocks' times at one moment.
    pub(super) fn new(monotonic: Instant, wall: SystemTime) -> Self {
        Self { monotonic, wall }
    }

    /// Takes a later moment, if the wall clock has been set since.
    pub(super) fn follow(&mut self, monotonic: Instant, wall: SystemTime) {
        let expected = self.at(monotonic);
        let drift = wall.duration_since(expected).or_else(|_| expected.duration_since(wall));
        if drift.map_or(true, |drift| drift > DRIFT) {
            *self = Self::new(monotonic, wall);
        }
    }

    /// Nanoseconds since 1970.
    pub(super) fn nanos(&self, time: Instant) -> u64 {
        let since = self.at(time).duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    pub(super) fn at(&self, time: Instant) -> SystemTime {
        match time.checked_duration_since(self.monotonic) {
            Some(after) => self.wall + after,
            None => self.wall - self.monotonic.duration_since(time),
        }
    }
}
