//! Length-prefixed, versioned, bounded encoding of messages.
//!
//! A message on the wire is a 6-byte head and a body: `body length: u32 LE`, `version: u16 LE`, body. The body is
//! `bincode` 2 in its standard configuration. Nothing is allocated for a length that exceeds the limit of the plane, and a
//! body must be consumed to its last byte. This module is the only user of bincode.

use bincode::config::{Config, standard};
use bincode::{Decode, Encode};
use thiserror::Error;

use crate::PROTOCOL_VERSION;

/// Bytes of a message head.
pub const HEAD_BYTES: usize = 6;
/// Largest body of a control message, in bytes: a job of 1,048,576 token ids fits.
pub const MAX_CONTROL_BYTES: usize = 8 << 20;
/// Largest body of a KV-plane message (frame payloads are not part of it), in bytes.
pub const MAX_TRANSFER_BYTES: usize = 64 << 10;
/// Largest payload of a KV frame, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 4 << 20;

/// Why bytes are not a message.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CodecError {
    /// The body is longer than the plane allows.
    #[error("message of {length} bytes is over the limit of {limit} bytes")]
    TooLong {
        /// Announced or encoded length.
        length: usize,
        /// The plane's limit.
        limit: usize,
    },
    /// The peer speaks another version.
    #[error("message of protocol version {theirs}, this side speaks {PROTOCOL_VERSION}")]
    Version {
        /// The version in the head.
        theirs: u16,
    },
    /// The body is not a value of the expected type.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// The value does not encode.
    #[error("message cannot be encoded: {0}")]
    Unencodable(String),
}

fn bounded() -> impl Config {
    standard().with_limit::<MAX_CONTROL_BYTES>()
}

/// Encodes head and body. Errors if the body is longer than `limit`.
pub fn encode<T: Encode>(message: &T, limit: usize) -> Result<Vec<u8>, CodecError> {
    let mut out = vec![0; HEAD_BYTES];
    bincode::encode_into_std_write(message, &mut out, bounded()).map_err(|e| CodecError::Unencodable(e.to_string()))?;
    let length = out.len() - HEAD_BYTES;
    if length > limit {
        return Err(CodecError::TooLong { length, limit });
    }
    out[..4].copy_from_slice(&(length as u32).to_le_bytes());
    out[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    Ok(out)
}

/// Checks a head and returns the length of the body that follows, in bytes.
pub fn decode_head(head: [u8; HEAD_BYTES], limit: usize) -> Result<usize, CodecError> {
    let [a, b, c, d, e, f] = head;
    let theirs = u16::from_le_bytes([e, f]);
    if theirs != PROTOCOL_VERSION {
        return Err(CodecError::Version { theirs });
    }
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length > limit {
        return Err(CodecError::TooLong { length, limit });
    }
    Ok(length)
}

/// Decodes a body, which must be consumed to its last byte.
pub fn decode_body<T: Decode<()>>(body: &[u8]) -> Result<T, CodecError> {
    let (value, used) =
        bincode::decode_from_slice(body, bounded()).map_err(|e| CodecError::Malformed(e.to_string()))?;
    if used != body.len() {
        return Err(CodecError::Malformed(format!(
            "{} bytes after the end of the value",
            body.len() - used
        )));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::{
        BlockAudit, BlockOwner, JobKey, JobKind, MAX_BLOCK_OWNERS, MAX_BLOCK_PROBLEMS, MAX_PROBLEM_BYTES, OwnerKind,
    };
    use crate::control::{CacheChange, Job, JobEvent, MAX_CACHE_NAMES, NodeMessage};
    use crate::ids::{Epoch, NodeId, RequestId, Ticket};
    use crate::transfer::{FrameHeader, PushMessage, PushReply};
    use proptest::prelude::*;

    fn decode<T: Decode<()>>(bytes: &[u8]) -> Result<T, CodecError> {
        let head = bytes[..HEAD_BYTES].try_into().expect("a head");
        let length = decode_head(head, MAX_CONTROL_BYTES)?;
        decode_body(&bytes[HEAD_BYTES..HEAD_BYTES + length])
    }

    #[test]
    fn a_frame_header_survives_the_wire() {
        let header = FrameHeader {
            ticket: Ticket(u64::MAX),
            epoch: Epoch(3),
            number: 7,
            first_layer: 1,
            layers: 2,
            first_block: 300,
            blocks: 40,
            checksum: 0x0123_4567_89ab_cdef,
            payload_len: 1 << 20,
        };
        let bytes = encode(&PushMessage::Frame(header), MAX_TRANSFER_BYTES).expect("encodes");
        assert_eq!(decode::<PushMessage>(&bytes), Ok(PushMessage::Frame(header)));
    }

    #[test]
    fn the_largest_cache_change_fits() {
        let change = CacheChange {
            sequence: u64::MAX,
            reset: true,
            added: vec![u64::MAX; MAX_CACHE_NAMES],
            removed: Vec::new(),
        };
        let message = NodeMessage::Cache(change);
        let bytes = encode(&message, MAX_CONTROL_BYTES).expect("encodes");
        assert_eq!(decode::<NodeMessage>(&bytes), Ok(message));
    }

    #[test]
    fn the_largest_audit_fits() {
        let owner = BlockOwner {
            job: Some(JobKey {
                request: RequestId(u128::MAX),
                epoch: Epoch(u32::MAX),
                kind: JobKind::Decode,
            }),
            elsewhere: Some(NodeId("x".repeat(253))),
            kind: OwnerKind::Job,
            parts: u32::MAX,
            blocks: u32::MAX,
            counted_blocks: u32::MAX,
            age_ms: Some(u64::MAX),
        };
        let mut audit = BlockAudit {
            owners: vec![owner.clone(); MAX_BLOCK_OWNERS],
            problems: vec!["x".repeat(MAX_PROBLEM_BYTES); MAX_BLOCK_PROBLEMS],
            ..BlockAudit::default()
        };
        assert_eq!(audit.excess(), None);
        let message = NodeMessage::Blocks(audit.clone());
        let bytes = encode(&message, MAX_CONTROL_BYTES).expect("encodes");
        assert_eq!(decode::<NodeMessage>(&bytes), Ok(message));
        audit.owners.push(owner);
        assert!(audit.excess().is_some_and(|what| what.contains("owners")));
        audit.owners.clear();
        audit.problems[3].push('x');
        assert!(audit.excess().is_some_and(|what| what.contains("problems")));
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = encode(&PushReply::Committed, MAX_TRANSFER_BYTES).expect("encodes");
        bytes[4] = 99;
        assert_eq!(decode::<PushReply>(&bytes), Err(CodecError::Version { theirs: 99 }));
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_allocation() {
        let mut head = [0; HEAD_BYTES];
        head[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        head[4..].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        let length = u32::MAX as usize;
        assert_eq!(
            decode_head(head, MAX_CONTROL_BYTES),
            Err(CodecError::TooLong {
                length,
                limit: MAX_CONTROL_BYTES
            })
        );
        let too_long = PushReply::Refused {
            reason: "x".repeat(MAX_TRANSFER_BYTES),
        };
        assert!(matches!(
            encode(&too_long, MAX_TRANSFER_BYTES),
            Err(CodecError::TooLong { .. })
        ));
    }

    #[test]
    fn trailing_bytes_are_malformed() {
        let bytes = encode(&RequestId(5), MAX_CONTROL_BYTES).expect("encodes");
        let mut body = bytes[HEAD_BYTES..].to_vec();
        body.push(0);
        assert!(matches!(decode_body::<RequestId>(&body), Err(CodecError::Malformed(_))));
    }

    #[test]
    fn a_vector_that_claims_more_than_the_limit_is_refused() {
        // 0xfd = a u64 length follows: the claim is 2^60 elements.
        let mut body = vec![0xfd];
        body.extend_from_slice(&(1u64 << 60).to_le_bytes());
        assert!(matches!(decode_body::<Vec<u32>>(&body), Err(CodecError::Malformed(_))));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            // Any outcome will do, as long as there is one.
            let outcomes = [
                decode_body::<Job>(&bytes).is_ok(),
                decode_body::<JobEvent>(&bytes).is_ok(),
                decode_body::<NodeMessage>(&bytes).is_ok(),
                decode_body::<PushMessage>(&bytes).is_ok(),
                decode_body::<PushReply>(&bytes).is_ok(),
            ];
            prop_assert!(!bytes.is_empty() || outcomes == [false; 5]);
        }
    }
}
