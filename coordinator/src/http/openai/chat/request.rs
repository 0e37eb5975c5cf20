//! The body of `/v1/chat/completions`, field by field.

use protocol::sampling::Grammar;

use super::messages::{self, Reader};
use super::template::{self, Conversation, TemplateFacts};
use super::tools::{self, ToolChoice, Tools, forced};
use crate::http::error::{ApiError, ErrorKind};
use crate::http::json::fields::{FieldError, Fields, quoted};
use crate::http::json::raw::{Kind, Raw};
use crate::http::json::scan;
use crate::http::mindie;
use crate::http::openai::choices::{Choices, read_n};
use crate::http::openai::request::{Rules, StreamUsage, model, positive, stream};
use crate::http::openai::shared::{self, Shared};

use crate::http::openai::structured::Constraint;
use crate::media::policy::Policy;

/// Most alternatives reported for a token.
const MAX_TOP_LOGPROBS: i64 = 20;

/// Most of a completion's `best_of`.
const MAX_BEST_OF: i64 = 128;

/// Fields that only chats have.
const OWN: &[&str] = &[
    "add_generation_prompt",
    "best_of",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "function_call",
    "functions",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "modalities",
    "model",
    "n",
    "parallel_tool_calls",
    "prompt_logprobs",
    "return_token_ids",
    "stream",
    "stream_options",
    "suffix",
    "tool_choice",
    "tools",
    "top_logprobs",
    "use_beam_search",
];
/// What the body of a chat may have.
pub const FIELDS: &[&str] = &shared::with_shared::<{ OWN.len() + shared::NAMES.len() }>(OWN);

/// A checked request.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// Name the client uses for the model.
    pub model: String,
    /// What the template renders.
    pub conversation: Conversation,
    /// The functions that the model may call, if there are any.
    pub tools: Option<Tools>,
    /// How many answers.
    pub choices: Choices,
    /// Most tokens to generate, if the client says.
    pub max_tokens: Option<u32>,
    /// How tokens are drawn, and what ends the answer.
    pub shared: Shared,
    /// As a stream, with this usage.
    pub stream: Option<StreamUsage>,
    /// Alternatives to report for every token, if log-probabilities are asked for.
    pub logprobs: Option<u8>,
    /// Report token ids.
    pub return_token_ids: bool,
}

/// Checks a body, except for the model's name.
///
/// # Errors
/// What is wrong, with the field, its value and what would be right.
pub fn parse(body: &[u8], rules: &Rules, facts: TemplateFacts, media: &Policy) -> Result<ChatRequest, ApiError> {
    let raw = scan::check(body)?;
    if raw.kind() != Kind::Object {
        let message = format!("the body is {}, but must be a JSON object", raw.shown());
        return Err(ApiError::new(ErrorKind::Invalid, message));
    }
    let fields = Fields::of_object(raw, "", FIELDS)?;
    let model = model(&fields)?;
    let reader = Reader {
        max_chars: rules.prompt.chars,
        knows_developer: facts.knows_developer,
        media,
    };
    let messages = messages::read(&fields, reader)?;
    let tools = tools::read(&fields, facts.format)?.filter(|tools| tools.choice != ToolChoice::None);
    let list = tools.as_ref().map(|tools| tools.list.clone());
    let conversation = Conversation::new(messages, list, template::options(&fields)?, facts)?;
    modalities(&fields)?;
    if rules.strict {
        mindie::refuse_openai(
            &fields,
            &["logprobs", "top_logprobs", "n", "best_of", "use_beam_search"],
        )?;
    }
    // The newer name wins; both are checked.
    let older = positive(&fields, "max_tokens")?;
    let max_tokens = positive(&fields, "max_completion_tokens")?.or(older);
    let mut shared = shared::read(&fields, &rules.shared, max_tokens)?;
    if let Some(tools) = &tools {
        force(tools, &mut shared, rules.shared.max_grammar_bytes)?;
    }
    let logprobs = logprobs(&fields)?;
    shared.sampling.top_logprobs = logprobs;
    let choices = Choices::plain(read_n(&fields, rules.choices, shared.sampling.greedy)?);
    refuse_unbuilt(&fields)?;
    Ok(ChatRequest {
        model,
        conversation,
        tools,
        choices,
        max_tokens,
        shared,
        stream: stream(&fields)?,
        logprobs,
        return_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
    })
}

/// Fields of completions that some send to chats, too: refused where they would change the answer.
fn refuse_unbuilt(fields: &Fields<'_>) -> Result<(), ApiError> {
    for name in ["echo", "use_beam_search"] {
        if fields.bool(name)?.unwrap_or(false) {
            return Err(ApiError::not_supported_yet(name));
        }
    }
    if fields.int("best_of", 1, MAX_BEST_OF)?.unwrap_or(1) > 1 {
        return Err(ApiError::not_supported_yet("best_of"));
    }
    let suffix = fields.string("suffix", "a string")?;
    if suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::not_supported_yet("suffix"));
    }
    if fields.get("prompt_logprobs").is_some() {
        return Err(ApiError::not_supported_yet("prompt_logprobs"));
    }
    Ok(())
}

/// Holds the answer to a call where one is required.
fn force(tools: &Tools, shared: &mut Shared, max_bytes: usize) -> Result<(), FieldError> {
    const FIELD: &str = "tool_choice";
    let Some(schema) = forced::schema(tools)? else {
        return Ok(());
    };
    if let Some(other) = &shared.constraint {
        let problem = format!(
            "must be \"none\" or \"auto\" where `{}` is given: an answer has one format",
            other.field
        );
        return Err(FieldError::rule(FIELD, problem));
    }
    if schema.len() > max_bytes {
        let problem = format!(
            "asks for a format of {} bytes, but must have at most {max_bytes}",
            schema.len()
        );
        return Err(FieldError::rule(FIELD, problem));
    }
    shared.constraint = Some(Constraint {
        field: FIELD.to_owned(),
        grammar: Grammar::JsonSchema(schema),
    });
    Ok(())
}

/// `logprobs` asks for them, `top_logprobs` for alternatives.
fn logprobs(fields: &Fields<'_>) -> Result<Option<u8>, FieldError> {
    let asked = fields.bool("logprobs")?.unwrap_or(false);
    let count = fields.int("top_logprobs", 0, MAX_TOP_LOGPROBS)?;
    match count {
        Some(count) if count > 0 && !asked => {
            let problem = format!("is {count}, but must be 0 or absent where `logprobs` is not true");
            Err(FieldError::rule("top_logprobs", problem))
        }
        count => Ok(asked.then(|| count.and_then(|count| u8::try_from(count).ok()).unwrap_or(0))),
    }
}

/// Only text can be asked for.
fn modalities(fields: &Fields<'_>) -> Result<(), FieldError> {
    let expected = "[\"text\"]";
    let Some(list) = fields.list("modalities", expected)? else {
        return Ok(());
    };
    match list.elements().find(|kind| kind.string().as_deref() != Some("text")) {
        Some(kind) => {
            let shown = kind.string().map_or_else(|| Raw::shown(kind), |kind| quoted(&kind));
            let problem = format!("contains {shown}, but must be {expected}: this model writes text only");
            Err(FieldError::rule("modalities", problem))
        }
        None => Ok(()),
    }
}
