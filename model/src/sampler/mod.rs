//! From logits to a token: pure functions of (logits, parameters, history, position).
//!
//! Order: watermark, `logit_bias`, repetition, presence and frequency penalty, what may not be drawn, temperature, `top_k`,
//! `top_p`, `typical_p`, `min_p`, then the draw by the inverse of the cumulative distribution over the remaining tokens in
//! the order of their ids. Greedy decoding takes the best token that may be drawn, after the penalties; temperature and
//! filters do not apply to it.

mod constraint;
mod filter;
pub mod math;
mod penalty;
pub mod random;
mod watermark;

use protocol::sampling::{SampledToken, SamplingParams};
use thiserror::Error;

use filter::Candidate;
use math::SUM_BLOCK;

/// Why no token could be sampled.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SampleError {
    /// A logit is NaN.
    #[error("the logit of token {token} is not a number")]
    NotANumber {
        /// The first such token.
        token: u32,
    },
    /// A logit is positive infinity.
    #[error("the logit of token {token} is infinite")]
    Infinite {
        /// The first such token.
        token: u32,
    },
    /// Every logit is negative infinity, or there are none.
    #[error("none of the {vocab} tokens has a finite logit")]
    NoToken {
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A parameter out of its range.
    #[error("sampling parameter {name} is {value}, {right} is required")]
    Parameter {
        /// The field of [`SamplingParams`].
        name: &'static str,
        /// Its value.
        value: f32,
        /// What would be right.
        right: &'static str,
    },
    /// A token id outside of the vocabulary.
    #[error("token {token} is outside of the vocabulary of {vocab} tokens")]
    NoSuchToken {
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A history shorter than its prompt.
    #[error("history of {length} tokens is shorter than its prompt of {prompt_len}")]
    History {
        /// Tokens given.
        length: usize,
        /// Prompt length given.
        prompt_len: usize,
    },
}

/// Which token of which sequence is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    /// Parameters of the request.
    pub params: &'a SamplingParams,
    /// For which choice: that many after `params.choice`.
    pub further: u32,
    /// 0-based index of the new token among the generated ones.
    pub position: u32,
    /// Prompt and output so far; may be empty unless [`SamplingParams::needs_history`].
    pub history: &'a [u32],
    /// How many tokens of the history are the prompt.
    pub prompt_len: usize,
    /// Which tokens the grammar allows, if there is one: a bit for each id, 32 to a word, the lowest id in the lowest bit.
    pub mask: Option<&'a [u32]>,
}

/// A token that was drawn, and what its distribution was measured against.
struct Chosen {
    token: u32,
    logprob: f32,
    /// Best logit.
    best: f32,
    /// Logarithm of the sum of the remaining tokens' weights.
    log_sum: f64,
    /// `Sampler::candidates` are the tokens that remained; otherwise all did.
    filtered: bool,
}

/// Samples tokens; holds scratch memory only, so results do not depend on what it sampled before.
#[derive(Debug, Default)]
pub struct Sampler {
    penalties: penalty::Penalties,
    watermark: watermark::Watermark,
    /// Logits after biases, penalties and bans.
    adjusted: Vec<f32>,
    weights: Vec<f32>,
    sums: Vec<f64>,
    candidates: Vec<Candidate>,
}

/// Checks the ranges of the parameters that sampling reads.
///
/// # Errors
/// [`SampleError::Parameter`] names the field, its value and what would be right.
pub fn check(params: &SamplingParams) -> Result<(), SampleError> {
    let require = |ok: bool, name, value, right| {
        if ok {
            Ok(())
        } else {
            Err(SampleError::Parameter { name, value, right })
        }
    };
    let p = params;
    let fraction = |x: f32| x > 0.0 && x <= 1.0;
    require(
        p.repetition_penalty > 0.0 && p.repetition_penalty.is_finite(),
        "repetition_penalty",
        p.repetition_penalty,
        "a finite number above 0",
    )?;
    require(
        p.presence_penalty.is_finite(),
        "presence_penalty",
        p.presence_penalty,
        "a finite number",
    )?;
    require(
        p.frequency_penalty.is_finite(),
        "frequency_penalty",
        p.frequency_penalty,
        "a finite number",
    )?;
    if p.greedy {
        return Ok(());
    }
    require(
        p.temperature > 0.0 && p.temperature.is_finite(),
        "temperature",
        p.temperature,
        "a finite number above 0",
    )?;
    require(fraction(p.top_p), "top_p", p.top_p, "a number above 0 and at most 1")?;
    require(
        fraction(p.typical_p),
        "typical_p",
        p.typical_p,
        "a number above 0 and at most 1",
    )?;
    require((0.0..=1.0).contains(&p.min_p), "min_p", p.min_p, "a number from 0 to 1")
}

impl Sampler {
    /// A sampler whose memory for rows of so many logits is there from the start: no draw allocates any (what a draw
    /// reports may). With several threads nobody knows which of them meets a request that samples, and when.
    pub fn with_vocabulary(vocab: usize) -> Self {
        Self {
            penalties: penalty::Penalties::with_vocabulary(vocab),
            watermark: watermark::Watermark::with_vocabulary(vocab),
            adjusted: Vec::with_capacity(vocab),
            weights: Vec::with_capacity(vocab),
            sums: Vec::with_capacity(vocab.div_ceil(SUM_BLOCK)),
            candidates: Vec::with_capacity(vocab),
        }
    }

    /// Samples one token from a row of logits of the whole vocabulary.
    ///
    /// # Errors
    /// [`SampleError`]: logits without an order, parameters out of range, a history that contradicts itself.
    pub fn sample(&mut self, logits: &[f32], draw: &Draw<'_>) -> Result<SampledToken, SampleError> {
        let params = draw.params;
        check(params)?;
        let raw_best = math::best(logits)?;
        let raw_log_sum = math::sum_exp(logits, raw_best.logit).ln();
        let raw = |logit: f32| (f64::from(logit - raw_best.logit) - raw_log_sum) as f32;

        let known = Some((raw_best, raw_log_sum));
        let mut top_logprobs = Vec::new();
        let (token, logprob) = if draw.mask.is_some() || params.changes_logits(draw.position) {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            let drawn = self
                .adjust(&mut adjusted, draw)
                .and_then(|()| self.choose(&adjusted, draw, None, &mut top_logprobs));
            self.adjusted = adjusted;
            drawn?
        } else {
            self.choose(logits, draw, known, &mut top_logprobs)?
        };
        if let Some(n) = params.top_logprobs.filter(|_| !params.processed_logprobs) {
            filter::top_k(logits, usize::from(n), &mut self.candidates);
            top_logprobs.extend(self.candidates.iter().map(|c| (c.token, raw(c.logit))));
        }
        let raw_logprob = raw(logits[token as usize]);
        Ok(SampledToken {
            position: draw.position,
            token,
            logprob,
            raw_logprob,
            top_logprobs,
        })
    }

    /// The `count` most probable tokens of the unmodified distribution with their log-probabilities, best first and equals by
    /// their id; all tokens, if there are fewer.
    ///
    /// # Errors
    /// [`SampleError`]: logits without an order.
    pub fn most_probable(&mut self, logits: &[f32], count: usize) -> Result<Vec<(u32, f32)>, SampleError> {
        let best = math::best(logits)?;
        let log_sum = math::sum_exp(logits, best.logit).ln();
        let raw = |logit: f32| (f64::from(logit - best.logit) - log_sum) as f32;
        filter::top_k(logits, count, &mut self.candidates);
        Ok(self.candidates.iter().map(|c| (c.token, raw(c.logit))).collect())
    }

    /// The `count` best tokens of a row, best first and equals by their id.
    ///
    /// # Errors
    /// As [`Self::most_probable`].
    pub fn best(&mut self, logits: &[f32], count: usize) -> Result<impl Iterator<Item = u32>, SampleError> {
        math::best(logits)?;
        filter::top_k(logits, count, &mut self.candidates);
        Ok(self.candidates.iter().map(|c| c.token))
    }

    /// The `count` most probable tokens of the distribution that tokens are drawn from at temperature 1, without filters;
    /// otherwise as [`Self::most_probable`]. Tokens that may not be drawn are not among them.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub fn candidates(
        &mut self,
        logits: &[f32],
        draw: &Draw<'_>,
        count: usize,
    ) -> Result<Vec<(u32, f32)>, SampleError> {
        if draw.mask.is_none() && !draw.params.changes_logits(draw.position) {
            return self.most_probable(logits, count);
        }
        let mut adjusted = std::mem::take(&mut self.adjusted);
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        let found = self
            .adjust(&mut adjusted, draw)
            .and_then(|()| self.most_probable(&adjusted, count));
        self.adjusted = adjusted;
        found.map(|mut tokens| {
            tokens.retain(|(_, logprob)| *logprob > f32::NEG_INFINITY);
            tokens
        })
    }

    /// Everything that changes logits before the temperature does.
    fn adjust(&mut self, logits: &mut [f32], draw: &Draw<'_>) -> Result<(), SampleError> {
        let (params, history) = (draw.params, draw.history);
        if params.watermark
            && let Some(&previous) = history.last()
        {
            self.watermark.apply(logits, previous);
        }
        constraint::bias(logits, &params.logit_bias)?;
        if params.penalises() {
            self.penalties.apply(logits, params, history, draw.prompt_len)?;
        }
        let output = history.get(draw.prompt_len..).unwrap_or_default();
        constraint::forbid(logits, params, draw.position, output, draw.mask)
    }

    /// A token and its log-probability; with [`SamplingParams::processed_logprobs`] also the most probable ones beside it.
    fn choose(
        &mut self,
        logits: &[f32],
        draw: &Draw<'_>,
        known: Option<(math::Best, f64)>,
        top: &mut Vec<(u32, f32)>,
    ) -> Result<(u32, f32), SampleError> {
        let chosen = self.draw(logits, draw, known)?;
        if let Some(n) = draw.params.top_logprobs.filter(|_| draw.params.processed_logprobs) {
            self.alternatives(logits, usize::from(n), draw.params, &chosen, top);
        }
        Ok((chosen.token, chosen.logprob))
    }

    /// The `n` most probable tokens of the distribution that was drawn from. Tokens that it does not have follow the others,
    /// as impossible ones.
    fn alternatives(
        &mut self,
        logits: &[f32],
        n: usize,
        params: &SamplingParams,
        chosen: &Chosen,
        top: &mut Vec<(u32, f32)>,
    ) {
        let temperature = if params.greedy { 1.0 } else { params.temperature };
        let logprob = |logit: f32| (f64::from(math::scaled(logit, chosen.best, temperature)) - chosen.log_sum) as f32;
        if chosen.filtered {
            self.candidates.sort_unstable_by(Candidate::by_probability);
            top.extend(self.candidates.iter().take(n).map(|c| (c.token, logprob(c.logit))));
            let rest = n - top.len();
            if rest > 0 {
                filter::top_k(logits, n, &mut self.candidates);
                let others = self.candidates.iter().map(|c| c.token);
                let others: Vec<u32> = others.filter(|id| top.iter().all(|(known, _)| known != id)).collect();
                top.extend(others.into_iter().take(rest).map(|id| (id, f32::NEG_INFINITY)));
            }
        } else {
            filter::top_k(logits, n, &mut self.candidates);
            top.extend(self.candidates.iter().map(|c| (c.token, logprob(c.logit))));
        }
    }

    /// Draws a token. `known`: best logit and logarithm of the sum of exponentials, if computed before.
    fn draw(
        &mut self,
        logits: &[f32],
        draw: &Draw<'_>,
        known: Option<(math::Best, f64)>,
    ) -> Result<Chosen, SampleError> {
        let best = match known {
            Some((best, _)) => best,
            None => math::best(logits)?,
        };
        let params = draw.params;
        if params.greedy {
            let log_sum = known.map_or_else(|| math::sum_exp(logits, best.logit).ln(), |(_, log_sum)| log_sum);
            return Ok(Chosen {
                token: best.token,
                logprob: -log_sum as f32,
                best: best.logit,
                log_sum,
                filtered: false,
            });
        }
        let (seed, choice) = params.stream_of(draw.further);
        let random = random::uniform(seed, choice, draw.position);
        let filtered = self.filter(logits, best.logit, params);
        let (token, log_sum) = if filtered {
            draw_candidate(&mut self.candidates, random)
        } else {
            self.draw_unfiltered(random)
        };
        let log_weight = math::scaled(logits[token as usize], best.logit, params.temperature);
        Ok(Chosen {
            token,
            logprob: (f64::from(log_weight) - log_sum) as f32,
            best: best.logit,
            log_sum,
            filtered,
        })
    }

    /// Leaves the remaining tokens in `candidates`, or, if no filter applies, all weights in `weights`: then false.
    fn filter(&mut self, logits: &[f32], max: f32, params: &SamplingParams) -> bool {
        let (temperature, vocab) = (params.temperature, logits.len());
        let top_k = if params.top_k == 0 {
            vocab
        } else {
            params.top_k as usize
        };
        let candidates = &mut self.candidates;
        if top_k < vocab {
            filter::top_k(logits, top_k, candidates);
            filter::weigh(candidates, max, temperature);
            if params.top_p < 1.0 {
                let target = f64::from(params.top_p) * filter::mass(candidates);
                candidates.truncate(filter::prefix(candidates, target).unwrap_or(candidates.len()));
            }
        } else {
            math::weights(logits, max, temperature, &mut self.weights, &mut self.sums);
            if params.top_p < 1.0 {
                let target = f64::from(params.top_p) * self.sums.iter().sum::<f64>();
                let mut k = 64;
                loop {
                    filter::top_k(logits, k, candidates);
                    filter::weigh(candidates, max, temperature);
                    if let Some(kept) = filter::prefix(candidates, target) {
                        candidates.truncate(kept);
                        break;
                    }
                    if k >= vocab {
                        break;
                    }
                    k *= 16;
                }
            } else if params.typical_p < 1.0 || params.min_p > 0.0 {
                candidates.clear();
                let weighed = logits.iter().zip(&self.weights).enumerate();
                candidates.extend(weighed.map(|(i, (&logit, &weight))| Candidate::new(i as u32, logit, weight)));
            } else {
                return false;
            }
        }
        if params.typical_p < 1.0 {
            filter::typical(candidates, max, temperature, f64::from(params.typical_p));
        }
        if params.min_p > 0.0 {
            filter::min_p(candidates, params.min_p);
        }
        true
    }

    /// Draws from `weights`; returns the token and the logarithm of the total weight.
    fn draw_unfiltered(&self, random: f64) -> (u32, f64) {
        let total: f64 = self.sums.iter().sum();
        let target = random * total;
        let mut before = 0.0;
        let mut last = 0;
        for (block, &sum) in self
            .weights
            .chunks(SUM_BLOCK)
            .zip(&self.sums)
            .enumerate()
            .map(|(i, (w, s))| ((i, w), s))
        {
            let (index, weights) = block;
            if before + sum > target {
                let mut cumulative = before;
                for (i, &weight) in weights.iter().enumerate() {
                    if weight > 0.0 {
                        cumulative += f64::from(weight);
                        last = (index * SUM_BLOCK + i) as u32;
                        if cumulative > target {
                            break;
                        }
                    }
                }
                break;
            }
            before += sum;
        }
        (last, total.ln())
    }
}

/// Draws from the candidates, which it puts into the order of their ids.
fn draw_candidate(candidates: &mut [Candidate], random: f64) -> (u32, f64) {
    candidates.sort_unstable_by_key(|c| c.token);
    let total = filter::mass(candidates);
    let target = random * total;
    let mut cumulative = 0.0;
    let mut last = 0;
    for c in candidates.iter().filter(|c| c.weight > 0.0) {
        cumulative += f64::from(c.weight);
        last = c.token;
        if cumulative > target {
            break;
        }
    }
    (last, total.ln())
}
