//! What of a request's constraints takes the tokenizer, or long: words to tokens, and whether a grammar can be used.

use protocol::sampling::Grammar;

use super::error::ApiError;
use super::json::fields::FieldError;
use super::state::{HttpState, stopped};

/// Most tokens of all bad words together: nodes look at each word at every step.
const MAX_BAD_WORD_TOKENS: usize = 65_536;

impl HttpState {
    /// The sequences of tokens that spell `words`, as vLLM finds them: without a space in front, and with one where that
    /// makes another word of as many tokens.
    ///
    /// # Errors
    /// A word that cannot be tokenised, too many tokens, or the process stops.
    pub async fn bad_words(&self, field: &'static str, words: Vec<String>) -> Result<Vec<Vec<u32>>, ApiError> {
        let tokenizer = self.model.text.tokenizer.clone();
        let spell = move || {
            let encode = |text: &str| {
                tokenizer
                    .encode_plain(text)
                    .map_err(|error| FieldError::rule(field, format!("cannot be tokenised: {error}")))
            };
            let (mut sequences, mut total) = (Vec::new(), 0);
            for word in &words {
                let word = word.trim_start();
                let bare = encode(word)?;
                let spaced = encode(&format!(" {word}"))?;
                let another = bare.first() != spaced.first() && bare.len() == spaced.len();
                let spellings = [Some(bare), another.then_some(spaced)];
                sequences.extend(spellings.into_iter().flatten().filter(|tokens| !tokens.is_empty()));
                total = sequences.iter().map(Vec::len).sum::<usize>().max(total);
                if total > MAX_BAD_WORD_TOKENS {
                    let problem = format!("must have at most {MAX_BAD_WORD_TOKENS} tokens together");
                    return Err(FieldError::rule(field, problem));
                }
            }
            Ok(sequences)
        };
        Ok(self.long_work().run(spell).await.map_err(stopped)??)
    }

    /// Whether outputs can be held to `grammar`, which came in `field`.
    ///
    /// # Errors
    /// They cannot, or the process stops.
    pub async fn check_grammar(&self, field: &str, grammar: &Grammar) -> Result<(), ApiError> {
        let (grammars, grammar) = (self.grammars.clone(), grammar.clone());
        let checked = self.long_work().run(move || grammars.prepare(&grammar)).await;
        checked.map_err(stopped)?.map_err(|error| {
            FieldError::rule(field, format!("must be something that answers can be held to: {error}")).into()
        })
    }
}
