//! Text to token ids and back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use tokenizers::Tokenizer;

use super::bytes::{ByteRule, TokenTable};
use super::incremental::IncrementalDecoder;
use crate::error::TextError;

/// U+FFFD, which stands for what is no text.
const REPLACEMENT: &str = "\u{fffd}";

/// Writes a run of byte tokens, which is text as a whole or not at all.
fn end_run(run: &mut Vec<u8>, text: &mut String) {
    match std::str::from_utf8(run) {
        Ok(valid) => text.push_str(valid),
        Err(_) => text.push_str(&REPLACEMENT.repeat(run.len())),
    }
    run.clear();
}

/// A model's tokenizer. Cheap to clone, shared between threads.
#[derive(Debug, Clone)]
pub struct TextTokenizer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    tokenizer: Tokenizer,
    table: TokenTable,
    rule: ByteRule,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
}

impl TextTokenizer {
    /// `tokenizer` adds no special tokens by itself; `prefix` and `suffix` are what [`Self::encode`] puts around a text.
    pub(crate) fn new(
        tokenizer: Tokenizer,
        table: TokenTable,
        rule: ByteRule,
        prefix: Vec<u32>,
        suffix: Vec<u32>,
    ) -> Self {
        Self(Arc::new(Inner {
            tokenizer,
            table,
            rule,
            prefix,
            suffix,
        }))
    }

    /// Token ids of a prompt: the text's ids, with the begin-of-text token in front if the model's rule says so. Special
    /// tokens written in the text become their ids.
    ///
    /// # Errors
    /// [`TextError::Tokenize`] if the tokenizer's pattern gives up on this text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let plain = self.encode_plain(text)?;
        let Inner { prefix, suffix, .. } = &*self.0;
        Ok(prefix.iter().chain(&plain).chain(suffix).copied().collect())
    }

    /// Token ids of the text alone: for rendered chat templates, which bring their own begin-of-text token.
    ///
    /// # Errors
    /// [`TextError::Tokenize`] if the tokenizer's pattern gives up on this text.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        // The regular expression engine panics when a text makes it exceed its own retry limit; a text must never take
        // the process down. The tokenizer keeps no state between calls but a cache that is valid after any of them.
        let encoded = catch_unwind(AssertUnwindSafe(|| self.0.tokenizer.encode_fast(text, false)));
        match encoded {
            Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
            Ok(Err(error)) => Err(TextError::Tokenize(error.to_string())),
            Err(_) => Err(TextError::Tokenize(format!(
                "the splitting pattern gave up on a text of {} bytes",
                text.len()
            ))),
        }
    }

    /// The text of a whole token sequence, as Hugging Face's `tokenizers` decodes it. Bytes that are no UTF-8 become U+FFFD:
    /// of byte-level BPE once per maximal invalid part; of SentencePiece every byte of a run of byte tokens that is not UTF-8
    /// as a whole, the valid characters among them too.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let Inner { table, rule, .. } = &*self.0;
        let shown = ids.iter().filter(|&&id| !(skip_special && table.is_special(id)));
        let ByteRule::Sentence {
            strip_leading_spaces, ..
        } = *rule
        else {
            let bytes: Vec<u8> = shown.flat_map(|&id| table.get(id)).copied().collect();
            return String::from_utf8_lossy(&bytes).into_owned();
        };
        let (mut text, mut run) = (String::new(), Vec::new());
        for &id in shown {
            let bytes = table.get(id);
            if table.is_fallback(id) {
                run.extend_from_slice(bytes);
            } else if !bytes.is_empty() {
                end_run(&mut run, &mut text);
                text.push_str(&String::from_utf8_lossy(bytes));
            }
        }
        end_run(&mut run, &mut text);
        let spaces = text
            .bytes()
            .take(strip_leading_spaces)
            .take_while(|&byte| byte == b' ')
            .count();
        text.drain(..spaces);
        text
    }

    /// A decoder for generated text, token by token.
    pub fn incremental(&self, skip_special: bool) -> IncrementalDecoder {
        IncrementalDecoder::new(self.clone(), skip_special)
    }

    /// True for tokens that are not part of the text (begin, end, padding, roles).
    pub fn is_special(&self, id: u32) -> bool {
        self.0.table.is_special(id)
    }

    /// The raw bytes a token adds; a special token's literal name; nothing for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.0.table.get(id)
    }

    /// The token's own text, for lists of alternatives: a part of a character shows as U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    /// The id of a vocabulary entry, written as the vocabulary writes it.
    pub fn token_id(&self, entry: &str) -> Option<u32> {
        self.0.tokenizer.token_to_id(entry)
    }

    /// The vocabulary's own spelling of a token: the inverse of [`Self::token_id`].
    pub fn token_entry(&self, id: u32) -> Option<String> {
        self.0.tokenizer.id_to_token(id)
    }

    /// Number of token ids, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.0.table.len()
    }

    /// What a decoder writes for `count` bytes in a row that are no UTF-8.
    pub(crate) fn replacement(&self, count: usize) -> String {
        let times = match self.0.rule {
            ByteRule::ByteLevel => count.min(1),
            ByteRule::Sentence { .. } => count,
        };
        REPLACEMENT.repeat(times)
    }

    pub(crate) fn visible_bytes(&self, id: u32, skip_special: bool) -> &[u8] {
        if skip_special && self.is_special(id) {
            &[]
        } else {
            self.token_bytes(id)
        }
    }
}
