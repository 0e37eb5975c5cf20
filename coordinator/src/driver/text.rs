//! The model's tokenizer, as the ledger sees it.

use model_files::{IncrementalDecoder, TextTokenizer};

use crate::core::ledger::{Detokenizer, TextDecoder};

impl Detokenizer for TextTokenizer {
    fn decoder(&self, skip_special: bool) -> Box<dyn TextDecoder> {
        Box::new(self.incremental(skip_special))
    }

    fn is_special(&self, token: u32) -> bool {
        Self::is_special(self, token)
    }
}

impl TextDecoder for IncrementalDecoder {
    fn push(&mut self, token: u32) -> String {
        Self::push(self, token)
    }

    fn finish(&mut self) -> String {
        Self::finish(self)
    }
}
