//! Prompts to tokens: once per request, never on the threads that serve connections if it takes long.

use std::sync::Arc;

use model_files::TextTokenizer;
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

/// Texts up to this many bytes are tokenised where they are: that takes less time than a change of threads.
const INLINE_BYTES: usize = 2_048;

/// Why a piece of work has no result.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PromptError {
    /// The tokenizer refuses the text.
    #[error("{0}")]
    Refused(String),
    /// The process stops.
    #[error("the coordinator stops")]
    Stopped,
}

/// A bounded number of threads for work that would hold up the connections of its thread.
#[derive(Clone)]
pub struct LongWork {
    slots: Arc<Semaphore>,
}

impl LongWork {
    /// `at_once`: most pieces of work at the same time; further ones wait their turn, in order.
    pub fn new(at_once: usize) -> Self {
        Self {
            slots: Arc::new(Semaphore::new(at_once.max(1))),
        }
    }

    /// Does `work` on another thread. Dropping the future gives up the place in the queue; work that runs ends by itself.
    ///
    /// # Errors
    /// [`PromptError::Stopped`].
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, PromptError> {
        let slot = Arc::clone(&self.slots)
            .acquire_owned()
            .await
            .map_err(|_| PromptError::Stopped)?;
        let done = spawn_blocking(move || {
            let result = work();
            drop(slot);
            result
        });
        done.await.map_err(|_| PromptError::Stopped)
    }
}

/// Tokenises prompts.
pub struct PromptTokenizer {
    tokenizer: TextTokenizer,
    long_work: LongWork,
}

impl PromptTokenizer {
    /// Long prompts are tokenised as `long_work`.
    pub fn new(tokenizer: TextTokenizer, long_work: LongWork) -> Self {
        Self { tokenizer, long_work }
    }

    /// The tokenizer itself.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// The tokens of `text`, with the begin-of-text token if the model's rule says so.
    ///
    /// # Errors
    /// [`PromptError`].
    pub async fn encode(&self, text: Arc<str>) -> Result<Vec<u32>, PromptError> {
        let encoded = if text.len() <= INLINE_BYTES {
            self.tokenizer.encode(&text)
        } else {
            let tokenizer = self.tokenizer.clone();
            self.long_work.run(move || tokenizer.encode(&text)).await?
        };
        encoded.map_err(|error| PromptError::Refused(error.to_string()))
    }
}
