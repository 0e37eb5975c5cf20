//! Answers with several choices.

use anyhow::{Context, Result, ensure};
use protocol::sampling::SampledToken;
use serde_json::Value;

/// Holds a whole answer of `/v1/completions` or `/v1/chat/completions` that was asked for token ids and log-probabilities
/// against the tokens that each choice must have, in order. How many numbers were compared.
///
/// # Errors
/// Any of them differs in any bit.
pub fn check_choices(answer: &Value, expected: &[&[SampledToken]]) -> Result<usize> {
    let choices = answer["choices"].as_array().context("no choices")?;
    ensure!(choices.len() == expected.len(), "{} choices", choices.len());
    let mut numbers = 0;
    for (index, (choice, tokens)) in choices.iter().zip(expected).enumerate() {
        ensure!(choice["index"] == index, "{choice}");
        let ids: Vec<u32> = serde_json::from_value(choice["token_ids"].clone())?;
        let right: Vec<u32> = tokens.iter().map(|token| token.token).collect();
        ensure!(ids == right, "choice {index}: {ids:?} instead of {right:?}");
        let told: Vec<u32> = logprobs(choice)?.into_iter().map(f32::to_bits).collect();
        let right: Vec<u32> = tokens.iter().map(|token| token.raw_logprob.to_bits()).collect();
        ensure!(told == right, "choice {index}: other log-probabilities: {choice}");
        numbers += ids.len() + told.len();
    }
    Ok(numbers)
}

/// The log-probability of each token of a choice.
fn logprobs(choice: &Value) -> Result<Vec<f32>> {
    let told = &choice["logprobs"];
    let values: Vec<&Value> = match (&told["token_logprobs"], &told["content"]) {
        (Value::Array(values), _) => values.iter().collect(),
        (_, Value::Array(tokens)) => tokens.iter().map(|token| &token["logprob"]).collect(),
        _ => anyhow::bail!("no log-probabilities in {choice}"),
    };
    let number = |value: &Value| Ok(value.as_f64().with_context(|| format!("{value} is no number"))? as f32);
    values.into_iter().map(number).collect()
}
