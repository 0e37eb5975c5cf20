//! Beam search: which hypotheses go on after a step. Pure; the engine owns the sequences behind the hypotheses.
//!
//! A search keeps at most `width` living hypotheses. In a step each of them proposes its `2 * width` most probable next
//! tokens by the unmodified distribution of the model. A proposal that ends a hypothesis (an end or stop token) makes it a
//! finished one; of the others the best `width` by the sum of the log-probabilities live on. Equal sums: the lower token id
//! first, then the better parent. Finished hypotheses are ranked by their sum divided by their length, the ending token
//! included; equal scores: the one that finished first. That is vLLM's search with a length penalty of 1.
//!
//! A search ends when nothing lives, when the living have reached the longest length (they are finished then), or when
//! `width` are finished and the best living one cannot come to more than the last of them: log-probabilities are at most
//! 0, so the best it can hope for is its present sum divided by the longest length. The last rule changes no result.

use std::cmp::Ordering;

use protocol::sampling::{SampledToken, StopRules};
use thiserror::Error;

/// A finished hypothesis.
#[derive(Clone, PartialEq, Debug)]
pub struct Hypothesis {
    /// Its tokens, by position.
    pub tokens: Vec<SampledToken>,
    /// Sum of the tokens' log-probabilities divided by their number, in nats.
    pub score: f32,
}

/// Why a beam search is impossible on an engine; it will be every time.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum BeamError {
    /// No hypotheses, or more than a step has sequences.
    #[error("beam width is {width}; it must be at least 1 and at most {limit}, the most sequences of a step")]
    Width {
        /// The width.
        width: usize,
        /// `EngineLimits::max_num_seqs`.
        limit: usize,
    },
    /// The pool does not hold that many sequences of that length.
    #[error(
        "beam width is {width}; {width} sequences of up to {tokens} tokens that share their prompt need {needed} KV blocks, \
         the pool has {total}"
    )]
    Blocks {
        /// The width.
        width: usize,
        /// The longest length.
        tokens: usize,
        /// Blocks needed.
        needed: usize,
        /// Blocks of the pool.
        total: usize,
    },
    /// A parameter that has no meaning in a beam search.
    #[error("{field} is set, which a beam search does not know: it ranks by the unmodified distribution of the model")]
    Parameter {
        /// The field of the sequence.
        field: &'static str,
    },
    /// Tokens after the prompt.
    #[error("a beam search starts at its prompt; {generated} tokens follow it")]
    Started {
        /// Tokens after the prompt.
        generated: usize,
    },
}

/// What the model thinks of a living hypothesis' next token: the most probable ones, best first.
pub(crate) type Candidates = Vec<(u32, f32)>;

/// The rules of one search.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) width: usize,
    pub(crate) stop: StopRules,
    /// Longest hypothesis, in tokens.
    pub(crate) longest: usize,
    /// Alternatives to report at every token.
    pub(crate) top_logprobs: Option<u8>,
}

impl Rules {
    /// How many candidates a step has to yield for every hypothesis.
    pub(crate) fn candidates(&self) -> usize {
        (2 * self.width).max(usize::from(self.top_logprobs.unwrap_or(0)))
    }
}

/// A hypothesis that has not been unrolled.
#[derive(Clone, Copy, Debug, Default)]
struct Living {
    /// Its last token among the search's; none at the start.
    last: Option<usize>,
    /// Its tokens.
    length: usize,
    /// Sum of their log-probabilities.
    sum: f64,
}

impl Living {
    fn score(&self) -> f64 {
        self.sum / self.length as f64
    }
}

/// A hypothesis of the next step: which of the living ones it comes from, by rank, and with which token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Child {
    pub(crate) parent: usize,
    pub(crate) token: u32,
}

/// A candidate with the hypothesis that proposes it.
struct Proposal {
    parent: usize,
    token: u32,
    logprob: f32,
    sum: f64,
}

impl Proposal {
    fn rank(&self, other: &Self) -> Ordering {
        let better = other.sum.total_cmp(&self.sum);
        better
            .then(self.token.cmp(&other.token))
            .then(self.parent.cmp(&other.parent))
    }
}

/// A search: its hypotheses.
#[derive(Clone, Debug)]
pub(crate) struct Search {
    rules: Rules,
    /// Best first.
    living: Vec<Living>,
    /// Best first, at most as many as the search is wide.
    finished: Vec<Living>,
    /// The tokens of all hypotheses, each with the one before it.
    tokens: Vec<(SampledToken, Option<usize>)>,
}

impl Search {
    /// A search whose one hypothesis is empty.
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            rules,
            living: vec![Living::default()],
            finished: Vec::new(),
            tokens: Vec::new(),
        }
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// One step, given the candidates of every living hypothesis, by rank. Returns those that live on, best first; none if
    /// the search is over.
    pub(crate) fn step(&mut self, candidates: &[Candidates]) -> Vec<Child> {
        let width = self.rules.width;
        let parents = std::mem::take(&mut self.living);
        let mut children = Vec::with_capacity(width);
        for proposal in proposals(&parents, candidates, 2 * width) {
            let ends = self.rules.stop.finish(proposal.token, 0).is_some();
            if !ends && self.living.len() == width {
                continue;
            }
            let parent = &parents[proposal.parent];
            let token = sampled(&self.rules, &proposal, parent.length, &candidates[proposal.parent]);
            self.tokens.push((token, parent.last));
            let hypothesis = Living {
                last: Some(self.tokens.len() - 1),
                length: parent.length + 1,
                sum: proposal.sum,
            };
            if ends {
                self.finish(hypothesis);
            } else {
                self.living.push(hypothesis);
                children.push(Child {
                    parent: proposal.parent,
                    token: proposal.token,
                });
            }
        }
        if self.is_over() {
            children.clear();
            for hypothesis in std::mem::take(&mut self.living) {
                self.finish(hypothesis);
            }
        }
        children
    }

    fn is_over(&self) -> bool {
        let Some(best) = self.living.first() else { return true };
        let longest = self.rules.longest;
        let beaten = |last: &Living| last.score() >= best.sum / longest as f64;
        best.length >= longest || (self.finished.len() == self.rules.width && self.finished.last().is_some_and(beaten))
    }

    fn finish(&mut self, hypothesis: Living) {
        let worse = |other: &Living| other.score().total_cmp(&hypothesis.score()) == Ordering::Less;
        let place = self.finished.iter().position(worse).unwrap_or(self.finished.len());
        self.finished.insert(place, hypothesis);
        self.finished.truncate(self.rules.width);
    }

    /// The tokens of the living hypothesis of that rank.
    pub(crate) fn living_tokens(&self, rank: usize) -> Vec<u32> {
        let living = self.living.get(rank).copied().unwrap_or_default();
        self.unroll(&living, |token| token.token)
    }

    /// The answer, once the search is over.
    pub(crate) fn into_hypotheses(self) -> Vec<Hypothesis> {
        let hypothesis = |living: &Living| Hypothesis {
            tokens: self.unroll(living, SampledToken::clone),
            score: living.score() as f32,
        };
        self.finished.iter().map(hypothesis).collect()
    }

    fn unroll<T>(&self, living: &Living, take: impl Fn(&SampledToken) -> T) -> Vec<T> {
        let mut tokens = Vec::with_capacity(living.length);
        let mut at = living.last;
        while let Some((token, before)) = at.and_then(|at| self.tokens.get(at)) {
            tokens.push(take(token));
            at = *before;
        }
        tokens.reverse();
        tokens
    }
}

/// What the living hypotheses propose, best first.
fn proposals(living: &[Living], candidates: &[Candidates], each: usize) -> Vec<Proposal> {
    let mut proposals = Vec::with_capacity(living.len() * each);
    for (parent, (hypothesis, candidates)) in living.iter().zip(candidates).enumerate() {
        // A token that cannot come has a log-probability of negative infinity.
        let possible = candidates.iter().take(each).filter(|(_, logprob)| logprob.is_finite());
        proposals.extend(possible.map(|&(token, logprob)| Proposal {
            parent,
            token,
            logprob,
            sum: hypothesis.sum + f64::from(logprob),
        }));
    }
    proposals.sort_unstable_by(Proposal::rank);
    proposals
}

fn sampled(rules: &Rules, proposal: &Proposal, position: usize, candidates: &Candidates) -> SampledToken {
    let alternatives = usize::from(rules.top_logprobs.unwrap_or(0));
    SampledToken {
        position: position as u32,
        token: proposal.token,
        logprob: proposal.logprob,
        raw_logprob: proposal.logprob,
        top_logprobs: candidates.iter().take(alternatives).copied().collect(),
    }
}
