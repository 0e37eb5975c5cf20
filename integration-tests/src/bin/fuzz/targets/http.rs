//! Bodies of HTTP requests: a letter that says for which path, then the body.

use config::{BestOf, MediaConfig};
use coordinator::http::error::{ApiError, Family};
use coordinator::http::json::fields::StopLimits;
use coordinator::http::openai::chat::template::TemplateFacts;
use coordinator::http::openai::choices::ChoiceRules;
use coordinator::http::openai::prompt::PromptLimits;
use coordinator::http::{openai, tgi};
use coordinator::media::policy::Policy;
use serde_json::Value;

use super::Target;
use crate::corpus::shape;

pub(crate) struct Http {
    media: Policy,
    facts: TemplateFacts,
}

const STOPS: StopLimits = StopLimits {
    strings: 8,
    chars: 16,
    total_chars: 64,
};

fn tgi_rules(strict: bool) -> tgi::request::Rules {
    tgi::request::Rules {
        max_best_of: 128,
        max_input_chars: 2_000,
        stops: STOPS,
        least_seed: 1,
        fresh_seed: 5,
        default_top_k: 10,
        vocab_size: 300,
        strict,
        max_grammar_bytes: 1_000,
        processed_logprobs: true,
    }
}

fn openai_rules(strict: bool) -> openai::request::Rules {
    openai::request::Rules {
        choices: ChoiceRules {
            most: 8_192,
            most_best_of: 128,
            best_of: BestOf::All,
        },
        prompt: PromptLimits {
            prompts: 64,
            chars: 2_000,
            tokens: 500,
            vocab_size: 300,
        },
        shared: openai::shared::SharedRules {
            vocab_size: 300,
            stops: STOPS,
            least_seed: 1,
            fresh_seed: 5,
            default_temperature: 1.0,
            default_top_k: 10,
            max_grammar_bytes: 1_000,
            processed_logprobs: false,
        },
        strict,
    }
}

impl Http {
    pub(crate) fn new() -> Self {
        Self {
            media: Policy::new(&MediaConfig::default()),
            facts: TemplateFacts::of("{% if tools %}<tool_call>{% endif %}"),
        }
    }
}

impl Target for Http {
    fn name(&self) -> &'static str {
        "http"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        Vec::new()
    }

    fn run(&self, input: &[u8]) -> Result<String, String> {
        let Some((path, body)) = input.split_first() else {
            return Ok("empty".to_owned());
        };
        let (family, parsed) = match path {
            b'g' | b'G' => {
                let parsed = tgi::request::parse(body, &tgi_rules(*path == b'G'), &self.media);
                (Family::Tgi, parsed.map(|request| format!("{request:?}")))
            }
            b'h' | b'H' => {
                let rules = openai_rules(*path == b'H');
                let parsed = openai::chat::request::parse(body, &rules, self.facts, &self.media);
                (Family::OpenAi, parsed.map(|request| format!("{request:?}")))
            }
            _ => {
                let parsed = openai::request::parse(body, &openai_rules(*path == b'C'));
                (Family::OpenAi, parsed.map(|request| format!("{request:?}")))
            }
        };
        match parsed {
            Ok(request) => Ok(shape(&request)),
            Err(error) => refusal(&error, family),
        }
    }
}

/// Promise: a refusal is a JSON error with a status of the client's fault, and says something in one short line.
fn refusal(error: &ApiError, family: Family) -> Result<String, String> {
    let json: Value = serde_json::from_str(&error.json(family)).map_err(|e| format!("a refusal is no JSON: {e}"))?;
    let message = json
        .pointer("/error/message")
        .or(json.get("error"))
        .and_then(Value::as_str);
    let Some(message) = message.filter(|message| !message.is_empty()) else {
        return Err(format!("a refusal says nothing: {json}"));
    };
    if message.len() > 1_000 || error.message.contains('\n') {
        return Err(format!("a refusal is one short line, not {message:?}"));
    }
    if !error.status(family).is_client_error() {
        return Err(format!("a body is never the server's fault: {}", error.status(family)));
    }
    Ok(shape(&format!("{} {:?} {message}", error.status(family), error.param)))
}
