//! The vocabulary as a trie of bytes.

use std::sync::Arc;

use model_files::TextModel;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::error::GrammarError;

/// Builds the trie over all rows of the model's output. Special tokens are in there under their names behind a byte that
/// no text has: only a grammar that names them reaches them.
pub(crate) fn environment(text: &TextModel) -> Result<TokEnv, GrammarError> {
    let rows = text.vocab_size;
    let ends: Vec<u32> = text
        .eos_token_ids
        .iter()
        .copied()
        .filter(|&id| (id as usize) < rows)
        .collect();
    let Some(&end) = ends.first() else {
        return Err(GrammarError::NoEndToken);
    };
    let count = u32::try_from(rows).map_err(|_| GrammarError::Vocabulary(format!("it has {rows} tokens")))?;
    let words: Vec<Vec<u8>> = (0..count)
        .map(|id| {
            let bytes = text.tokenizer.token_bytes(id);
            if text.tokenizer.is_special(id) || ends.contains(&id) {
                let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
                word.extend_from_slice(bytes);
                word
            } else {
                bytes.to_vec()
            }
        })
        .collect();
    let trie = TokTrie::from(&TokRxInfo::new(count, end), &words).with_eos_tokens(&ends);
    // Not canonical: no text is forced through a tokenizer, so what may follow depends on the text so far alone.
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}
