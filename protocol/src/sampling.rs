//! How tokens are drawn, when a sequence ends, and what a sampled token looks like.

use bincode::{Decode, Encode};

/// How the next token is chosen from the logits.
///
/// Order of the warpers: repetition, presence and frequency penalty, temperature, `top_k`, `top_p`, `typical_p`,
/// `min_p`. The random draw is a pure function of (`seed`, `choice`, output position), so nothing about random state
/// ever has to move between nodes.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct SamplingParams {
    /// Take the most probable token after penalties; ties go to the lowest id. The warpers below temperature do not
    /// apply.
    pub greedy: bool,
    /// Divides the logits; > 0.
    pub temperature: f32,
    /// Keep the k most probable tokens; 0 = off.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this; 1.0 = off.
    pub top_p: f32,
    /// Locally typical sampling mass; 1.0 = off.
    pub typical_p: f32,
    /// Drop tokens below this fraction of the best token's probability; 0.0 = off.
    pub min_p: f32,
    /// > 0; 1.0 = off. Over the distinct tokens of prompt and output: positive logits divided, negative multiplied.
    pub repetition_penalty: f32,
    /// Subtracted once from each distinct token of the output; 0.0 = off.
    pub presence_penalty: f32,
    /// Subtracted from each token of the output once per occurrence; 0.0 = off.
    pub frequency_penalty: f32,
    /// Seed of the draws.
    pub seed: u64,
    /// Which choice of the request this sequence is (0-based).
    pub choice: u32,
    /// Number of alternatives to report at every position; `None` = do not report any.
    pub top_logprobs: Option<u8>,
}

impl SamplingParams {
    /// Greedy decoding without penalties and without reported alternatives.
    pub fn greedy() -> Self {
        Self {
            greedy: true,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            typical_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            choice: 0,
            top_logprobs: None,
        }
    }

    /// True if the token history changes the logits.
    pub fn needs_history(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// When a sequence ends by itself. Stop strings are the coordinator's business: nodes see token ids only.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct StopRules {
    /// Most tokens to generate over all nodes, the prefill node's first token included; >= 1.
    pub max_tokens: u32,
    /// The model's end-of-sequence tokens.
    pub eos_token_ids: Vec<u32>,
    /// Do not end at `eos_token_ids`.
    pub ignore_eos: bool,
    /// Further tokens that end the sequence, also with `ignore_eos`.
    pub stop_token_ids: Vec<u32>,
}

impl StopRules {
    /// Why a sequence ends with `token` as its `generated`-th token (1-based), if it does. A terminating token wins
    /// over the length limit; the HTTP layer maps the tie per endpoint.
    pub fn finish(&self, token: u32, generated: u32) -> Option<FinishReason> {
        if !self.ignore_eos && self.eos_token_ids.contains(&token) {
            Some(FinishReason::Eos)
        } else if self.stop_token_ids.contains(&token) {
            Some(FinishReason::StopToken(token))
        } else if generated >= self.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}

/// Why a sequence ended on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum FinishReason {
    /// `StopRules::max_tokens` tokens were generated.
    Length,
    /// An end-of-sequence token was generated.
    Eos,
    /// The given token of `StopRules::stop_token_ids` was generated.
    StopToken(u32),
}

/// What the model thought of one token of the prompt.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
pub struct PromptLogprob {
    /// Log-probability (nats) of the token in the unmodified model distribution.
    pub logprob: f32,
    /// The most probable tokens at its place with their log-probabilities, best first; empty unless asked for.
    pub top: Vec<(u32, f32)>,
}

/// One token as it was sampled.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct SampledToken {
    /// 0-based index among the generated tokens; 0 is the prefill node's.
    pub position: u32,
    /// Token id.
    pub token: u32,
    /// Log-probability (nats) after penalties, temperature and filters: what TGI reports.
    pub logprob: f32,
    /// Log-probability (nats) of the unmodified model distribution: what OpenAI reports.
    pub raw_logprob: f32,
    /// The most probable tokens of the unmodified distribution with their log-probabilities, best first; empty unless
    /// `SamplingParams::top_logprobs` asks for some.
    pub top_logprobs: Vec<(u32, f32)>,
}
