//! The fake tokenizer: letters, the two halves of a character, and a special end token.

use coordinator::core::ledger::{Detokenizer, TextDecoder};

use crate::model::EOS;

/// First of the two tokens that make one character together.
const LEFT: u32 = 13;
/// Second of them.
const RIGHT: u32 = 14;

/// See the head of the file.
#[derive(Debug)]
pub struct Letters;

#[derive(Debug)]
struct Decoder {
    skip_special: bool,
    pending: Vec<u8>,
}

/// The bytes of a token that is not special.
fn byte(token: u32) -> u8 {
    match token {
        LEFT => 0xc3,
        RIGHT => 0xa9,
        letter => b'a' + letter as u8,
    }
}

impl Detokenizer for Letters {
    fn decoder(&self, skip_special: bool) -> Box<dyn TextDecoder> {
        Box::new(Decoder {
            skip_special,
            pending: Vec::new(),
        })
    }

    fn is_special(&self, token: u32) -> bool {
        token >= EOS
    }
}

impl TextDecoder for Decoder {
    fn push(&mut self, token: u32) -> String {
        if token >= EOS {
            if self.skip_special {
                return String::new();
            }
            return self.finish() + "</s>";
        }
        self.pending.push(byte(token));
        match std::str::from_utf8(&self.pending) {
            Ok(text) => {
                let text = text.to_owned();
                self.pending.clear();
                text
            }
            Err(error) if error.error_len().is_none() => String::new(),
            Err(_) => self.finish(),
        }
    }

    fn finish(&mut self) -> String {
        let bytes = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
