//! Text from tokens as they come, exact to the byte.

use super::tokenizer::TextTokenizer;

/// Turns generated tokens into text one by one. Holds back the bytes of an incomplete character (at most three), so that
/// what it returns is always whole text. The concatenation of everything returned is what [`TextTokenizer::decode`] gives, but
/// for two things that only a look ahead could know: leading spaces are kept (below), and of a run of SentencePiece's byte
/// tokens that ends in an incomplete character or has an invalid byte, the characters that were complete stay: they are out
/// already.
///
/// Generated text continues a prompt: a leading space of the first token is part of it and is kept.
#[derive(Debug, Clone)]
pub struct IncrementalDecoder {
    tokenizer: TextTokenizer,
    skip_special: bool,
    pending: Vec<u8>,
}

impl IncrementalDecoder {
    pub(crate) fn new(tokenizer: TextTokenizer, skip_special: bool) -> Self {
        Self {
            tokenizer,
            skip_special,
            pending: Vec::new(),
        }
    }

    /// The text this token adds: empty while a character is incomplete. Special tokens add their literal name, or nothing if
    /// they are skipped. Invalid bytes become U+FFFD as soon as they are proven invalid: of byte-level BPE once per maximal
    /// invalid part, of SentencePiece once per byte.
    pub fn push(&mut self, id: u32) -> String {
        self.pending
            .extend_from_slice(self.tokenizer.visible_bytes(id, self.skip_special));
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, tail) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).expect("checked by the error's valid_up_to"));
                    rest = tail;
                    let Some(invalid) = error.error_len() else { break };
                    text.push_str(&self.tokenizer.replacement(invalid));
                    rest = &rest[invalid..];
                }
            }
        }
        let consumed = self.pending.len() - rest.len();
        self.pending.drain(..consumed);
        text
    }

    /// The end of the text: a still incomplete character becomes U+FFFD, as in [`Self::push`]. Afterwards the decoder is as
    /// new.
    pub fn finish(&mut self) -> String {
        let tail = self.tokenizer.replacement(self.pending.len());
        self.pending.clear();
        tail
    }

    /// Bytes held back: the begin of a character that is not complete yet.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }
}
