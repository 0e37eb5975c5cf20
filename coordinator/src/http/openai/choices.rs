//! How many answers a request wants, and how they come about: `n`, `best_of`, `use_beam_search`.

use config::BestOf;

use crate::http::answer::Collected;
use crate::http::error::ApiError;
use crate::http::json::fields::{FieldError, Fields};
use crate::http::state::HttpState;

/// Names of the fields: part of the list of known names of a body that has them.
pub const NAMES: [&str; 3] = ["best_of", "n", "use_beam_search"];

/// What the checks need to know of the configuration.
#[derive(Clone, Copy, Debug)]
pub struct ChoiceRules {
    /// Most choices of a prompt.
    pub most: usize,
    /// Most choices to choose from.
    pub most_best_of: usize,
    /// What `best_of` returns.
    pub best_of: BestOf,
}

impl ChoiceRules {
    /// The rules of a server.
    pub fn new(state: &HttpState) -> Self {
        Self {
            most: state.limits.max_choices,
            most_best_of: state.limits.max_best_of,
            best_of: state.front.best_of,
        }
    }
}

/// The checked fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    /// Choices drawn for each prompt.
    pub drawn: u32,
    /// How many of them are returned.
    pub returned: u32,
    /// They are returned by their cumulative log-probability, the highest first; otherwise in the order of their numbers.
    pub ranked: bool,
    /// They are found by a beam search.
    pub beam: bool,
}

impl Choices {
    /// Puts the drawn choices of one prompt into the order of the answer, and leaves out what is not returned.
    pub fn arrange(self, drawn: &mut Vec<Collected>) {
        if self.ranked {
            let sum = |of: &Collected| -> f64 {
                let shown = of.shown.iter();
                shown.map(|shown| f64::from(shown.token.sampled.raw_logprob)).sum()
            };
            // The order of their numbers among equals.
            drawn.sort_by(|a, b| sum(b).total_cmp(&sum(a)));
        }
        drawn.truncate(self.returned as usize);
    }

    /// `n` sampled choices in the order of their numbers.
    pub fn plain(n: u32) -> Self {
        Self {
            drawn: n,
            returned: n,
            ranked: false,
            beam: false,
        }
    }
}

/// What else in the request the fields have to do with.
#[derive(Clone, Copy, Debug)]
pub struct Beside {
    /// Its temperature is 0.
    pub greedy: bool,
    /// It has stop strings.
    pub has_stop: bool,
    /// It wants a stream.
    pub stream: bool,
}

/// Reads `n` alone: 1 if it is absent. More than one choice needs a temperature.
///
/// # Errors
/// What is wrong with it.
pub fn read_n(fields: &Fields<'_>, rules: ChoiceRules, greedy: bool) -> Result<u32, FieldError> {
    let n = count(fields, "n", rules.most)?.unwrap_or(1);
    sampled("n", n, greedy)?;
    Ok(n)
}

/// Reads the fields.
///
/// # Errors
/// What is wrong with them, each alone and together.
pub fn read(fields: &Fields<'_>, rules: ChoiceRules, beside: Beside) -> Result<Choices, ApiError> {
    let beam = fields.bool("use_beam_search")?.unwrap_or(false);
    let best_of = count(fields, "best_of", rules.most_best_of)?;
    if beam {
        if beside.has_stop {
            let problem = "is true, but must be false where `stop` is given";
            return Err(FieldError::rule("use_beam_search", problem).into());
        }
        let width = count(fields, "n", rules.most)?.unwrap_or(1);
        return Ok(Choices {
            beam: true,
            ..Choices::plain(width)
        });
    }
    let n = read_n(fields, rules, beside.greedy)?;
    let Some(best_of) = best_of else {
        return Ok(Choices::plain(n));
    };
    sampled("best_of", best_of, beside.greedy)?;
    if beside.stream && best_of != n {
        let problem = format!("is {best_of}, but must be equal to `n`, which is {n}, in a stream");
        return Err(FieldError::rule("best_of", problem).into());
    }
    if best_of < n {
        let problem = format!("is {best_of}, but must be at least `n`, which is {n}");
        return Err(FieldError::rule("best_of", problem).into());
    }
    Ok(Choices {
        drawn: best_of,
        returned: match rules.best_of {
            BestOf::All => best_of,
            BestOf::Openai => n,
        },
        ranked: true,
        beam: false,
    })
}

fn count(fields: &Fields<'_>, name: &str, most: usize) -> Result<Option<u32>, FieldError> {
    let most = i64::try_from(most).unwrap_or(i64::MAX);
    Ok(fields.int(name, 1, most)?.and_then(|count| u32::try_from(count).ok()))
}

/// Without a temperature all choices would be the same.
fn sampled(name: &str, count: u32, greedy: bool) -> Result<(), FieldError> {
    if count > 1 && greedy {
        let problem = format!("is {count}, but must be 1 where `temperature` is 0");
        return Err(FieldError::rule(name, problem));
    }
    Ok(())
}
