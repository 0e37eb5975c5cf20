//! Runs a model against outputs of Hugging Face transformers in float32 (`golden.json`).

use std::path::Path;

use config::{Compute, EngineConfig, KvDtypeConfig, ModelConfig};
use engine::runner::RunnerError;
use serde_json::Value;
use thiserror::Error;

use crate::load::{LoadError, load};
use crate::runner::ModelRunner;

/// Rows that are computed at once.
const ROWS: usize = 32;
/// Where the reference's best two tokens are closer than this, another order of sums may turn them around.
const SURE_MARGIN: f64 = 0.01;

/// Why a model could not be held against a reference.
#[derive(Debug, Error)]
pub enum VerifyError {
    /// The model cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The reference cannot be read.
    #[error("{path}: {reason}")]
    Golden {
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// A step failed.
    #[error(transparent)]
    Run(#[from] RunnerError),
}

/// What became of one prompt of a reference.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptCheck {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Largest difference at the last position: of the logits, or of the log-probabilities that the reference lists.
    pub last: f64,
    /// Largest difference of a log-probability in the prompt.
    pub prompt: f64,
    /// Largest difference of a log-probability in the reference's answer.
    pub answer: f64,
    /// Tokens of the answer that are the most probable here as well, up to the first that is not.
    pub agreed: usize,
    /// Tokens of the answer up to the first that is about as probable as another.
    pub sure: usize,
}

impl PromptCheck {
    /// Whether all differences are below `tolerance` and the answer is the reference's.
    pub fn passes(&self, tolerance: f64) -> bool {
        [self.last, self.prompt, self.answer].iter().all(|&d| d < tolerance) && self.agreed >= self.sure
    }
}

/// A prompt of a reference.
struct Golden {
    tokens: Vec<u32>,
    answer: Vec<u32>,
    prompt_logprobs: Vec<f64>,
    answer_logprobs: Vec<f64>,
    last_logits: Vec<f64>,
    /// Tokens and their log-probabilities.
    last_logprobs: Vec<(usize, f64)>,
    sure: usize,
}

/// Holds the model at `path` against the reference in `golden`, in float32 with `threads` threads.
///
/// # Errors
/// [`VerifyError`] names the file and what is wrong with it.
pub fn verify(path: &Path, golden: &Path, threads: usize) -> Result<Vec<PromptCheck>, VerifyError> {
    let prompts = read(golden)?;
    let longest = prompts
        .iter()
        .map(|p| p.tokens.len() + p.answer.len())
        .max()
        .unwrap_or(1);
    let model = ModelConfig {
        path: path.display().to_string(),
        compute: Compute::Float32,
        kv_dtype: KvDtypeConfig::F32,
        ..ModelConfig::default()
    };
    let engine = EngineConfig {
        kv_pool_tokens: longest.next_multiple_of(EngineConfig::default().kv_block_tokens),
        threads,
        ..EngineConfig::default()
    };
    let mut runner = load(&model, &engine, longest)?.runner;
    prompts.iter().map(|prompt| check(&mut runner, prompt)).collect()
}

fn read(path: &Path) -> Result<Vec<Golden>, VerifyError> {
    let wrong = |reason: String| VerifyError::Golden {
        path: path.display().to_string(),
        reason,
    };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let json: Value = serde_json::from_str(&text).map_err(|error| wrong(format!("not valid JSON: {error}")))?;
    let prompts = json["prompts"].as_array();
    let prompts = prompts.ok_or_else(|| wrong("key `prompts` must be a list".to_owned()))?;
    let read = |(i, prompt): (usize, &Value)| {
        let missing =
            "must hold lists of token ids `ids` and `greedy`, and of numbers `prompt_logprobs` and `greedy_logprobs`";
        golden(prompt).ok_or_else(|| wrong(format!("prompts[{i}] {missing}")))
    };
    prompts.iter().enumerate().map(read).collect()
}

fn golden(prompt: &Value) -> Option<Golden> {
    let ids = |key: &str| -> Option<Vec<u32>> {
        let list = prompt[key].as_array()?.iter();
        list.map(|id| u32::try_from(id.as_u64()?).ok()).collect()
    };
    // The first token has no probability: some files have a null for it.
    let numbers = |key: &str| -> Option<Vec<f64>> {
        let list = prompt[key].as_array()?.iter();
        Some(list.filter_map(Value::as_f64).collect())
    };
    let answer = ids("greedy")?;
    let sure = match numbers("margins") {
        Some(margins) => margins.iter().take_while(|&&margin| margin >= SURE_MARGIN).count(),
        None => answer.len(),
    };
    let pair = |pair: &Value| Some((usize::try_from(pair[0].as_u64()?).ok()?, pair[1].as_f64()?));
    let listed = prompt["top20"].as_array();
    let golden = Golden {
        tokens: ids("ids")?,
        prompt_logprobs: numbers("prompt_logprobs")?,
        answer_logprobs: numbers("greedy_logprobs")?,
        last_logits: numbers("last_logits").unwrap_or_default(),
        last_logprobs: listed.map_or(Some(Vec::new()), |list| list.iter().map(pair).collect())?,
        sure: sure.min(answer.len()),
        answer,
    };
    let fits = !golden.tokens.is_empty()
        && golden.prompt_logprobs.len() + 1 == golden.tokens.len()
        && golden.answer_logprobs.len() == golden.answer.len();
    fits.then_some(golden)
}

/// The larger of two differences; what is not a number is larger than any.
fn worse(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

/// Runs along the reference's prompt and answer.
fn check(runner: &mut ModelRunner, golden: &Golden) -> Result<PromptCheck, VerifyError> {
    let (count, all) = (golden.tokens.len(), [&golden.tokens[..], &golden.answer[..]].concat());
    let mut found = PromptCheck {
        tokens: count,
        last: 0.0,
        prompt: 0.0,
        answer: 0.0,
        agreed: 0,
        sure: golden.sure,
    };
    let vocab = runner.vocab_size();
    // Nobody asks for what follows the last token of an answer.
    let rows = all.len() - usize::from(!golden.answer.is_empty());
    let mut logits = Vec::new();
    for start in (0..rows).step_by(ROWS) {
        let chunk = start..rows.min(start + ROWS);
        runner.logits_of(&all, chunk.clone(), &mut logits)?;
        for (row, logits) in chunk.zip(logits.chunks_exact(vocab)) {
            look(row, logits, golden, &all, &mut found);
        }
    }
    Ok(found)
}

/// What the logits of a row say.
fn look(row: usize, logits: &[f32], golden: &Golden, all: &[u32], found: &mut PromptCheck) {
    let count = golden.tokens.len();
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    let logprob = |token: usize| logits.get(token).map_or(f64::NAN, |&x| f64::from(x - max) - sum.ln());
    let next = all.get(row + 1).map(|&token| token as usize);
    if row + 1 < count {
        if let Some(next) = next {
            found.prompt = worse(found.prompt, (logprob(next) - golden.prompt_logprobs[row]).abs());
        }
        return;
    }
    if row + 1 == count {
        if !golden.last_logits.is_empty() && golden.last_logits.len() != logits.len() {
            found.last = f64::NAN;
        }
        for (&found_one, expected) in logits.iter().zip(&golden.last_logits) {
            found.last = worse(found.last, (f64::from(found_one) - expected).abs());
        }
        for &(token, expected) in &golden.last_logprobs {
            found.last = worse(found.last, (logprob(token) - expected).abs());
        }
    }
    if let Some(next) = next {
        let place = row + 1 - count;
        found.answer = worse(found.answer, (logprob(next) - golden.answer_logprobs[place]).abs());
        if found.agreed == place && logits.iter().position(|&x| x == max) == Some(next) {
            found.agreed += 1;
        }
    }
}
