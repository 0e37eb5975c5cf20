//! Requests and a text in which every token is a byte: for the tests of the core.

use std::sync::Arc;

use protocol::ids::RequestId;
use protocol::sampling::{SampledToken, SamplingParams, StopRules};

use super::ledger::{Detokenizer, TextDecoder};
use super::types::ServeRequest;

/// Ends a sequence; special, and hidden text `</s>`.
pub(crate) const EOS: u32 = 256;
/// A special token with the text `<s>`.
pub(crate) const SPECIAL: u32 = 257;

/// Tokens 0..=255 are bytes.
pub(crate) struct ByteText;

struct ByteDecoder {
    skip_special: bool,
    pending: Vec<u8>,
}

impl Detokenizer for ByteText {
    fn decoder(&self, skip_special: bool) -> Box<dyn TextDecoder> {
        Box::new(ByteDecoder { skip_special, pending: Vec::new() })
    }

    fn is_special(&self, token: u32) -> bool {
        token >= EOS
    }
}

impl TextDecoder for ByteDecoder {
    fn push(&mut self, token: u32) -> String {
        let Ok(byte) = u8::try_from(token) else {
            if self.skip_special {
                return String::new();
            }
            return self.finish() + if token == EOS { "</s>" } else { "<s>" };
        };
        self.pending.push(byte);
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

/// A request of `prompt` tokens for at most `max_tokens`.
pub(crate) fn request(id: u128, prompt: usize, max_tokens: u32) -> ServeRequest {
    ServeRequest {
        id: RequestId(id),
        token_ids: (0..prompt as u32).map(|i| i % 256).collect::<Arc<[u32]>>(),
        body_bytes: prompt,
        sampling: SamplingParams::greedy(),
        stop: StopRules { max_tokens, eos_token_ids: vec![EOS], ignore_eos: false, stop_token_ids: Vec::new() },
        stop_strings: Vec::new(),
        include_stop_str: false,
        skip_special_tokens: true,
        prompt_logprobs: false,
    }
}

/// A sampled token.
pub(crate) fn sampled(position: u32, token: u32) -> SampledToken {
    SampledToken { position, token, logprob: -0.5, raw_logprob: -0.25, top_logprobs: Vec::new() }
}
