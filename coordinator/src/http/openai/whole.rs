//! `/v1/completions` as one answer.

use model_files::TextTokenizer;

use super::answer::{Choice, Counter, StopReason, Usage, finish_reason};
use super::choices::Choices;
use super::echo::Echo;
use super::logprobs::{Logprobs, LogprobsWriter, PromptLogprobs};
use crate::http::answer::{Answer, Collected, PromptPart};
use crate::http::error::ApiError;
use crate::metrics::RequestTimer;

/// What an answer is to say.
pub struct WholeWords<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a TextTokenizer,
    /// Which choices are returned, and in which order.
    pub choices: Choices,
    /// The texts of the prompts, if they are asked for.
    pub echoes: Option<Vec<Echo>>,
    /// If log-probabilities are asked for.
    pub logprobs: Option<LogprobsWriter>,
    /// If those of the prompt are asked for in a list of their own: with how many alternatives.
    pub prompt_logprobs: Option<u8>,
    /// If token ids are asked for.
    pub token_ids: bool,
    /// The usage tells about every step.
    pub timings: bool,
}

impl WholeWords<'_> {
    /// Waits for the whole answer, and gives it back with its clock. Dropping the future cancels the call.
    ///
    /// # Errors
    /// A part of the answer is missing.
    pub async fn collect(&self, mut answer: Answer) -> Result<(Vec<Choice>, Usage, RequestTimer), ApiError> {
        let mut drawn = answer.collect().await?.into_iter();
        let per_prompt = answer.per_prompt();
        let returned = self.choices.returned as usize;
        let mut counter = Counter::new(answer.prompts.len() * returned, self.timings);
        let mut choices = Vec::with_capacity(answer.prompts.len() * returned);
        // The offsets of an answer count on from choice to choice.
        let mut offset = 0;
        for (number, prompt) in answer.prompts.iter().enumerate() {
            counter.add_prompt(prompt.tokens.len(), prompt.cached_tokens);
            let mut of_prompt: Vec<Collected> = drawn.by_ref().take(per_prompt).collect();
            self.choices.arrange(&mut of_prompt);
            // A prompt that is all that is wanted has no choices that were drawn.
            let nothing = std::iter::repeat_with(|| None).take(returned - of_prompt.len());
            for collected in of_prompt.into_iter().map(Some).chain(nothing) {
                let index = choices.len();
                for shown in collected.iter().flat_map(|collected| &collected.shown) {
                    counter.add(index, shown.token.step);
                }
                choices.push(self.choice(index, number, prompt, collected.as_ref(), &mut offset));
            }
        }
        answer.timer.succeeded();
        Ok((choices, counter.total(), answer.into_timer()))
    }

    fn choice(
        &self,
        index: usize,
        number: usize,
        prompt: &PromptPart,
        collected: Option<&Collected>,
        offset: &mut usize,
    ) -> Choice {
        let mut text = String::new();
        let mut logprobs = Logprobs::default();
        if let Some(echo) = self.echoes.as_ref().and_then(|all| all.get(number)) {
            text.push_str(echo.text());
            echo.add_logprobs(prompt, self.logprobs.as_ref(), offset, &mut logprobs);
        }
        let shown = collected
            .map(|collected| collected.shown.as_slice())
            .unwrap_or_default();
        for shown in shown {
            text.push_str(&shown.text);
            if let Some(writer) = &self.logprobs {
                writer.add(shown, offset, &mut logprobs);
            }
        }
        text.push_str(collected.map_or("", |collected| &collected.tail));
        let completion = collected.map(|collected| &collected.completion);
        Choice {
            index,
            text,
            logprobs: self.logprobs.is_some().then_some(logprobs),
            finish_reason: Some(completion.map_or("length", finish_reason)),
            stop_reason: completion.and_then(StopReason::of),
            token_ids: self
                .token_ids
                .then(|| shown.iter().map(|shown| shown.token.sampled.token).collect()),
            prompt_token_ids: self.token_ids.then(|| prompt.tokens.to_vec()),
            prompt_logprobs: self
                .prompt_logprobs
                .map(|count| PromptLogprobs::new(prompt, count, self.tokenizer)),
        }
    }
}
