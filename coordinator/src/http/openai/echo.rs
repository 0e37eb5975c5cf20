//! `echo`: the prompt in front of every answer to it.

use model_files::TextTokenizer;

use super::logprobs::{Logprobs, LogprobsWriter};
use crate::http::answer::PromptPart;

/// The text of a prompt as it is given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Echo {
    text: String,
    chars: usize,
}

impl Echo {
    /// The text the client sent.
    pub fn of_text(text: String) -> Self {
        let chars = text.chars().count();
        Self { text, chars }
    }

    /// The text of the tokens the client sent.
    pub fn of_tokens(tokens: &[u32], skip_special: bool, tokenizer: &TextTokenizer) -> Self {
        Self::of_text(tokenizer.decode(tokens, skip_special))
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Adds the entries of the prompt's tokens; without a writer only counts its characters.
    pub fn add_logprobs(
        &self,
        prompt: &PromptPart,
        writer: Option<&LogprobsWriter>,
        offset: &mut usize,
        logprobs: &mut Logprobs,
    ) {
        match writer {
            Some(writer) => writer.add_prompt(prompt, self.chars, offset, logprobs),
            None => *offset += self.chars,
        }
    }
}
