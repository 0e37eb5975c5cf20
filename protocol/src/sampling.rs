//! How tokens are drawn, when a sequence ends, and what a sampled token looks like.

use bincode::{Decode, Encode};

/// How the next token is chosen from the logits.
///
/// Order of the warpers: `watermark`, `logit_bias`, repetition, presence and frequency penalty, then what may not be drawn
/// (`allowed_token_ids`, `bad_words`, `min_tokens`, `grammar`), temperature, `top_k`, `top_p`, `typical_p`, `min_p`. The
/// random draw is a pure function of (seed, choice, output position), so nothing about random state
/// ever has to move between nodes.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct SamplingParams {
    /// Take the most probable token of those that may be drawn, after penalties; ties go to the lowest id. Temperature and
    /// the warpers behind it do not apply.
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
    /// A seed for each choice of the request, by its number: choice j is what a request with that seed alone gets. Empty:
    /// all choices have `seed`, and differ by their numbers.
    pub choice_seeds: Vec<u64>,
    /// Number of alternatives to report at every position; `None` = do not report any.
    pub top_logprobs: Option<u8>,
    /// The alternatives are those of the distribution that tokens are drawn from, not of the model's.
    pub processed_logprobs: bool,
    /// Make "green" tokens more probable: half of the vocabulary, chosen anew by each previous token, gains 2.0 (nats).
    pub watermark: bool,
    /// Added to the logits of single tokens; ascending ids, finite numbers.
    pub logit_bias: Vec<(u32, f32)>,
    /// Only these tokens may be drawn; ascending; empty = all.
    pub allowed_token_ids: Vec<u32>,
    /// Sequences of tokens of which the output never has the last one behind the others; none is empty.
    pub bad_words: Vec<Vec<u32>>,
    /// Tokens that must be generated before one of `end_token_ids` may be. A grammar that allows nothing else goes first.
    pub min_tokens: u32,
    /// What `min_tokens` holds back; empty where that is 0.
    pub end_token_ids: Vec<u32>,
    /// What the output must be.
    pub grammar: Option<Grammar>,
}

/// What the text of an output must be. An end-of-sequence token is allowed where the text is complete.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Grammar {
    /// JSON that fits this JSON schema (itself JSON).
    JsonSchema(String),
    /// The whole output matches this regular expression.
    Regex(String),
    /// A context-free grammar: in Lark's notation, whose first rule is `start`, or in llama.cpp's GBNF (`root`).
    Lark(String),
    /// One of these strings.
    Choice(Vec<String>),
}

impl Grammar {
    /// Bytes of the text that describes it.
    pub fn len(&self) -> usize {
        match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(choices) => choices.iter().map(String::len).sum(),
        }
    }

    /// True if nothing describes it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
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
            choice_seeds: Vec::new(),
            top_logprobs: None,
            processed_logprobs: false,
            watermark: false,
            logit_bias: Vec::new(),
            allowed_token_ids: Vec::new(),
            bad_words: Vec::new(),
            min_tokens: 0,
            end_token_ids: Vec::new(),
            grammar: None,
        }
    }

    /// What the random numbers of the choice that many after `choice` depend on beside the position: seed, and number of
    /// the choice among those with that seed.
    pub fn stream_of(&self, further: u32) -> (u64, u32) {
        let choice = self.choice.wrapping_add(further);
        match self.choice_seeds.get(choice as usize) {
            Some(seed) => (*seed, 0),
            None => (self.seed, choice),
        }
    }

    /// The same for the choice of that number alone.
    pub fn of_choice(&self, choice: u32) -> Self {
        let whose = Self { choice, ..self.clone() };
        let (seed, choice) = whose.stream_of(0);
        Self {
            seed,
            choice,
            choice_seeds: Vec::new(),
            ..whose
        }
    }

    /// True if tokens that occurred are penalised.
    pub fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// True if the token history changes the logits, or which tokens may be drawn.
    pub fn needs_history(&self) -> bool {
        self.penalises() || self.watermark || !self.bad_words.is_empty() || self.grammar.is_some()
    }

    /// True if the distribution that tokens are drawn from, before temperature and filters, is not the model's; for the
    /// token at `position` of the output.
    pub fn changes_logits(&self, position: u32) -> bool {
        self.needs_history()
            || !self.logit_bias.is_empty()
            || !self.allowed_token_ids.is_empty()
            || position < self.min_tokens
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
    /// Ends after so many tokens, and at no token.
    pub fn length(max_tokens: u32) -> Self {
        Self {
            max_tokens,
            eos_token_ids: Vec::new(),
            ignore_eos: true,
            stop_token_ids: Vec::new(),
        }
    }

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
    /// The most probable tokens of the unmodified distribution (or, with `SamplingParams::processed_logprobs`, of the one
    /// tokens are drawn from) with their log-probabilities, best first; empty unless `SamplingParams::top_logprobs` asks for
    /// some.
    pub top_logprobs: Vec<(u32, f32)>,
}
