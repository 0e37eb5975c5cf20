//! Control messages: a byte that says which kind, then head and body as on the wire.

use bincode::{Decode, Encode};
use protocol::PROTOCOL_VERSION;
use protocol::codec::{HEAD_BYTES, MAX_CONTROL_BYTES, decode_body, decode_head, encode};
use protocol::control::{CoordinatorMessage, Job, JobEvent, JobUpdate, NodeMessage};
use protocol::transfer::PushReply;

use super::Target;
use crate::corpus::shape;

pub(crate) struct Control;

const KINDS: u8 = 6;

/// Calls the function for the type that a byte names.
macro_rules! for_kind {
    ($kind:expr, $function:ident($($argument:expr),*)) => {
        match $kind % KINDS {
            0 => $function::<NodeMessage>($($argument),*),
            1 => $function::<CoordinatorMessage>($($argument),*),
            2 => $function::<Job>($($argument),*),
            3 => $function::<JobUpdate>($($argument),*),
            4 => $function::<JobEvent>($($argument),*),
            _ => $function::<PushReply>($($argument),*),
        }
    };
}

impl Target for Control {
    fn name(&self) -> &'static str {
        "control"
    }

    /// Bodies of one variant's number and zeros, or other small numbers, at every length that is a whole message.
    fn seeds(&self) -> Vec<Vec<u8>> {
        let mut seeds = Vec::new();
        for kind in 0..KINDS {
            for variant in 0..12 {
                for fill in 0..3_u8 {
                    for length in 0..300 {
                        let mut body = vec![variant];
                        body.resize(1 + length, fill);
                        if for_kind!(kind, whole(&body)) {
                            seeds.push(framed(kind, &body));
                        }
                    }
                }
            }
        }
        seeds
    }

    fn run(&self, input: &[u8]) -> Result<String, String> {
        let Some((kind, message)) = input.split_first() else {
            return Ok("empty".to_owned());
        };
        let Some((head, rest)) = message.split_first_chunk::<HEAD_BYTES>() else {
            return Ok("no head".to_owned());
        };
        let length = match decode_head(*head, MAX_CONTROL_BYTES) {
            Ok(length) => length,
            Err(error) => return Ok(shape(&error.to_string())),
        };
        let Some(body) = rest.get(..length) else {
            return Ok("truncated".to_owned());
        };
        for_kind!(*kind, judge(body))
    }

    fn repair(&self, input: &mut Vec<u8>) {
        if let Some(body) = input.get(1 + HEAD_BYTES..) {
            *input = framed(input[0], body);
        }
    }
}

fn framed(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut message = vec![kind];
    message.extend_from_slice(&(body.len() as u32).to_le_bytes());
    message.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    message.extend_from_slice(body);
    message
}

fn whole<T: Decode<()>>(body: &[u8]) -> bool {
    decode_body::<T>(body).is_ok()
}

/// What is understood is said again in the same words.
fn judge<T: Decode<()> + Encode + std::fmt::Debug>(body: &[u8]) -> Result<String, String> {
    let message: T = match decode_body(body) {
        Ok(message) => message,
        Err(error) => return Ok(shape(&error.to_string())),
    };
    let said = encode(&message, MAX_CONTROL_BYTES).map_err(|error| format!("understood but not said: {error}"))?;
    let again: T = decode_body(&said[HEAD_BYTES..]).map_err(|error| format!("not understood again: {error}"))?;
    if encode(&again, MAX_CONTROL_BYTES).as_ref() != Ok(&said) {
        return Err("said in other words the second time".to_owned());
    }
    Ok(shape(&format!("{message:?}")))
}
