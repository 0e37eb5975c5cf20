//! By which names a request goes beside its id, in logs and traces. Nothing is decided by them.

use std::fmt;

use bincode::{Decode, Encode};

/// Travels with every job of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct RequestContext {
    /// The client's own name for it: its header `X-Request-Id`.
    pub client_id: Option<String>,
    /// The span of the call, if the call is traced.
    pub trace: Option<TraceContext>,
}

impl RequestContext {
    /// Name of its trace, if it is traced.
    pub fn trace_id(&self) -> Option<TraceId> {
        self.trace.as_ref().map(|trace| TraceId(trace.trace_id))
    }
}

/// A span whose children are recorded: what W3C Trace Context calls a sampled parent.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TraceContext {
    /// Name of the trace; not 0.
    pub trace_id: u128,
    /// Name of the span; not 0.
    pub span_id: u64,
    /// The `tracestate` that the client sent: passed on as it is; may be empty.
    pub state: String,
}

/// A trace's name as it is written: 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(pub u128);

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// What the header `traceparent` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// Name of the trace; not 0.
    pub trace_id: u128,
    /// Name of the caller's span; not 0.
    pub span_id: u64,
    /// The caller records its span.
    pub sampled: bool,
}

impl TraceParent {
    /// Reads a header. `None` if it is not one of W3C Trace Context (level 1, section 3.2): then it is as if there were none.
    /// A later version may have more fields behind the four that are known.
    pub fn parse(header: &str) -> Option<Self> {
        let header = header.trim_matches([' ', '\t']);
        let mut fields = header.splitn(5, '-');
        let mut field = |digits: usize| {
            let field = fields.next()?;
            let hexadecimal = field.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
            (field.len() == digits && hexadecimal).then_some(field)
        };
        let version = u8::from_str_radix(field(2)?, 16).ok()?;
        let trace_id = u128::from_str_radix(field(32)?, 16).ok()?;
        let span_id = u64::from_str_radix(field(16)?, 16).ok()?;
        let flags = u8::from_str_radix(field(2)?, 16).ok()?;
        let known = match version {
            0 => fields.next().is_none(),
            0xff => false,
            _ => true,
        };
        (known && trace_id != 0 && span_id != 0).then_some(Self {
            trace_id,
            span_id,
            sampled: flags & 1 == 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_is_read_as_w3c_writes_it() {
        let parent = TraceParent::parse(PARENT).expect("the example of the specification");
        assert_eq!(TraceId(parent.trace_id).to_string(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!((parent.span_id, parent.sampled), (0xb7ad_6b71_6920_3331, true));
        let unsampled = TraceParent::parse(&PARENT.replace("-01", "-00")).expect("valid");
        assert!(!unsampled.sampled);
        let other_flags = TraceParent::parse(&PARENT.replace("-01", "-fe")).expect("valid");
        assert!(!other_flags.sampled, "only the last bit counts");
        let later = format!("cc{}-what-comes-later", &PARENT[2..]);
        assert_eq!(TraceParent::parse(&later), Some(parent));
        assert_eq!(TraceParent::parse(&format!(" {PARENT}\t")), Some(parent));
    }

    #[test]
    fn a_malformed_traceparent_is_none() {
        let zero_trace = PARENT.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32));
        let zero_span = PARENT.replace("b7ad6b7169203331", &"0".repeat(16));
        let more = format!("{PARENT}-00");
        let upper = PARENT.to_uppercase();
        let signed = PARENT.replace("-0af7", "-+af7");
        let wrong = [
            "",
            "00",
            "garbage",
            &PARENT[1..],
            &PARENT[..54],
            &format!("ff{}", &PARENT[2..]),
            &format!("0x{}", &PARENT[2..]),
            &zero_trace,
            &zero_span,
            &more,
            &upper,
            &signed,
        ];
        for header in wrong {
            assert_eq!(TraceParent::parse(header), None, "{header}");
        }
    }
}
