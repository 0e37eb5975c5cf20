//! One output's place in its grammar.

use std::sync::Arc;

use llguidance::Matcher;
use protocol::sampling::Grammar;

use crate::compile::Grammars;
use crate::error::{GrammarError, brief};

/// What may follow an output: a bit for every token id, 32 to a word, the lowest id in the lowest bit. Ids beyond the end
/// may not follow.
pub type TokenMask = Vec<u32>;

/// See the head of the file. The tokens it has been told only save work: every answer is a function of the grammar and the
/// tokens that are asked about.
pub struct GrammarState {
    grammars: Grammars,
    grammar: Arc<Grammar>,
    matcher: Matcher,
    /// What the matcher has taken.
    tokens: Vec<u32>,
}

impl GrammarState {
    pub(crate) fn new(grammars: Grammars, grammar: Arc<Grammar>, matcher: Matcher) -> Self {
        Self {
            grammars,
            grammar,
            matcher,
            tokens: Vec::new(),
        }
    }

    /// The grammar.
    pub fn grammar(&self) -> &Grammar {
        &self.grammar
    }

    /// Which tokens may follow `output`, the tokens generated so far. Where the text is complete the end tokens are among
    /// them; where nothing may be added, they are all there is.
    ///
    /// # Errors
    /// [`GrammarError::Misfit`] and [`GrammarError::TooComplex`].
    pub fn mask(&mut self, output: &[u32]) -> Result<TokenMask, GrammarError> {
        match self.try_mask(output) {
            Err(GrammarError::TooComplex(_)) => {
                // All outputs of a grammar share one lexer; a bound on its states may have been reached by the others.
                self.grammars.forget(&self.grammar);
                self.restart()?;
                self.try_mask(output)
            }
            result => result,
        }
    }

    fn try_mask(&mut self, output: &[u32]) -> Result<TokenMask, GrammarError> {
        if !output.starts_with(&self.tokens) {
            self.restart()?;
        }
        for (position, &token) in output.iter().enumerate().skip(self.tokens.len()) {
            self.advance(token, position)?;
        }
        let mask = self.matcher.compute_mask_or_eos();
        mask.map(Vec::from)
            .map_err(|error| GrammarError::TooComplex(brief(&error.to_string())))
    }

    fn restart(&mut self) -> Result<(), GrammarError> {
        let (grammar, matcher) = self.grammars.matcher(&self.grammar)?;
        (self.grammar, self.matcher) = (grammar, matcher);
        self.tokens.clear();
        Ok(())
    }

    fn advance(&mut self, token: u32, position: usize) -> Result<(), GrammarError> {
        // Behind its end an output has end tokens, if it goes on at all.
        if !self.matcher.is_stopped() {
            let taken = self.matcher.try_consume_tokens(&[token]);
            match taken {
                Ok(1) => {}
                Ok(_) => return Err(GrammarError::Misfit { token, position }),
                Err(error) => return Err(GrammarError::TooComplex(brief(&error.to_string()))),
            }
        }
        self.tokens.push(token);
        Ok(())
    }
}
