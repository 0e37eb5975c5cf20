//! `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, as vLLM has them: a client that needs the model's
//! tokens needs no tokenizer of its own.

use std::sync::Arc;

use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse};
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorKind, Family};
use super::json::fields::{FieldError, Fields, wrong_element};
use super::json::raw::{Kind, Raw};
use super::json::scan;
use super::json::tree::Tree;
use super::openai::chat::messages::Reader;
use super::openai::chat::template::{Conversation, Ending, Options, TemplateFacts};
use super::openai::chat::{messages, template, tools};
use super::openai::handlers::unknown_model;
use super::state::HttpState;

/// Most tokens that are turned into text at once.
const MAX_TOKENS: usize = 1_048_576;

/// What `/tokenize` reads.
pub const TOKENIZE_FIELDS: &[&str] = &[
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "messages",
    "model",
    "prompt",
    "return_token_strs",
    "tools",
];
/// What `/detokenize` reads.
pub const DETOKENIZE_FIELDS: &[&str] = &["model", "tokens"];

/// What `/tokenize` answers.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Tokenized {
    /// Number of tokens.
    pub count: usize,
    /// Longest sequence, prompt and answer together, in tokens.
    pub max_model_len: usize,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Each token as the vocabulary writes it, if asked for.
    pub token_strs: Option<Vec<String>>,
}

/// What `/detokenize` answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Detokenized {
    /// The text of all tokens, special ones literally.
    pub prompt: String,
}

/// What is to be tokenised.
#[derive(Clone, Debug, PartialEq)]
enum Source {
    /// A text, with or without what the model puts around texts.
    Prompt { text: String, special: bool },
    /// A conversation; its template brings its own special tokens.
    Chat(Conversation),
}

/// `POST /tokenize`.
pub async fn tokenize(request: HttpRequest, payload: Payload, state: Data<HttpState>) -> HttpResponse {
    match tokenized(&request, payload, &state).await {
        Ok(answer) => HttpResponse::Ok().json(answer),
        Err(error) => error.respond(Family::OpenAi),
    }
}

/// `POST /detokenize`.
pub async fn detokenize(request: HttpRequest, payload: Payload, state: Data<HttpState>) -> HttpResponse {
    match detokenized(&request, payload, &state).await {
        Ok(answer) => HttpResponse::Ok().json(answer),
        Err(error) => error.respond(Family::OpenAi),
    }
}

/// `GET /tokenizer_info`: what a client's own tokenizer would read in `tokenizer_config.json`.
pub async fn tokenizer_info(state: Data<HttpState>) -> HttpResponse {
    let text = &state.model.text;
    let tokenizer = state.prompts.tokenizer();
    let literal = |id: Option<u32>| id.map(|id| tokenizer.token_text(id));
    let eos = text.eos_token_ids.first().copied();
    HttpResponse::Ok().json(json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size(),
        "model_max_length": state.lengths.total(),
        "add_bos_token": text.add_bos,
        "bos_token": literal(text.bos_token_id),
        "bos_token_id": text.bos_token_id,
        "eos_token": literal(eos),
        "eos_token_id": eos,
        "eos_token_ids": text.eos_token_ids,
        "pad_token": literal(eos),
        "chat_template": text.chat_template.as_ref().map(|template| template.source()),
    }))
}

async fn tokenized(request: &HttpRequest, payload: Payload, state: &HttpState) -> Result<Tokenized, ApiError> {
    let body = state.read_body(request, payload).await?;
    let (facts, media) = (state.template_facts(), Arc::clone(&state.media));
    let max_chars = state.limits.max_input_chars;
    let read = move |bytes: &[u8]| {
        let reader = Reader {
            max_chars,
            knows_developer: facts.knows_developer,
            media: &media,
        };
        read_tokenize(bytes, reader, facts)
    };
    let (model, source, strings) = state.check_body(&body, read).await?;
    known_model(state, model.as_deref())?;
    let tokens = match source {
        Source::Prompt { text, special: true } => state.encode("prompt", text.into()).await?,
        Source::Prompt { text, special: false } => encode_plain(state, text.into()).await?,
        Source::Chat(conversation) => state.encode_chat(conversation, body.bytes.len()).await?,
    };
    let tokenizer = state.prompts.tokenizer();
    let entry = |id: &u32| tokenizer.token_entry(*id).unwrap_or_else(|| tokenizer.token_text(*id));
    Ok(Tokenized {
        count: tokens.len(),
        max_model_len: state.lengths.total(),
        token_strs: strings.then(|| tokens.iter().map(entry).collect()),
        tokens,
    })
}

async fn encode_plain(state: &HttpState, text: Arc<str>) -> Result<Vec<u32>, ApiError> {
    let tokenizer = state.prompts.tokenizer().clone();
    let tokens = state.work_on(text.len(), move || tokenizer.encode_plain(&text)).await?;
    Ok(tokens.map_err(|error| FieldError::rule("prompt", format!("cannot be tokenised: {error}")))?)
}

fn read_tokenize(
    body: &[u8],
    reader: Reader<'_>,
    facts: TemplateFacts,
) -> Result<(Option<String>, Source, bool), ApiError> {
    let max_chars = reader.max_chars;
    let fields = object(body, TOKENIZE_FIELDS)?;
    let prompt = fields.string("prompt", "a string")?;
    // Whatever is given must be right, also where it changes nothing.
    let special = fields.bool("add_special_tokens")?;
    let tools = tools::listed(&fields)?.map(|(list, _)| list);
    let options = template::options(&fields)?;
    let source = match (prompt, fields.get("messages")) {
        (Some(_), Some(_)) => {
            return Err(FieldError::rule("prompt", "must be absent where `messages` is given").into());
        }
        (None, None) => return Err(fields.missing("prompt", "a string, or `messages` in its place").into()),
        (Some(text), None) => {
            let chars = text.chars().count();
            if chars > max_chars {
                let problem = format!("has {chars} characters, but must have at most {max_chars}");
                return Err(FieldError::rule("prompt", problem).into());
            }
            of_chats_only(tools.as_ref(), &options)?;
            Source::Prompt {
                text: text.into_owned(),
                special: special.unwrap_or(true),
            }
        }
        (None, Some(_)) => {
            if special.unwrap_or(false) {
                let problem = "is true, but must be false or absent with `messages`: the template brings them";
                return Err(FieldError::rule("add_special_tokens", problem).into());
            }
            let messages = messages::read(&fields, reader)?;
            Source::Chat(Conversation::new(messages, tools, options, facts)?)
        }
    };
    let strings = fields.bool("return_token_strs")?.unwrap_or(false);
    Ok((model(&fields)?, source, strings))
}

/// Refuses what a prompt without a template could only ignore.
fn of_chats_only(tools: Option<&Tree>, options: &Options) -> Result<(), FieldError> {
    let variables = options
        .variables
        .as_ref()
        .is_some_and(|variables| !variables.is_empty());
    let given = [
        ("tools", tools.is_some()),
        ("chat_template_kwargs", variables),
        ("continue_final_message", options.ending == Ending::Continued),
    ];
    match given.into_iter().find_map(|(name, given)| given.then_some(name)) {
        Some(name) => {
            let problem = "must be absent where `prompt` is given: it needs `messages`";
            Err(FieldError::rule(name, problem))
        }
        None => Ok(()),
    }
}

async fn detokenized(request: &HttpRequest, payload: Payload, state: &HttpState) -> Result<Detokenized, ApiError> {
    let body = state.read_body(request, payload).await?;
    let vocab_size = state.model.text.vocab_size;
    let read = move |bytes: &[u8]| read_detokenize(bytes, vocab_size);
    let (model, tokens) = state.check_body(&body, read).await?;
    known_model(state, model.as_deref())?;
    let tokenizer = state.prompts.tokenizer().clone();
    let prompt = state
        .work_on(tokens.len(), move || tokenizer.decode(&tokens, false))
        .await?;
    Ok(Detokenized { prompt })
}

fn read_detokenize(body: &[u8], vocab_size: usize) -> Result<(Option<String>, Vec<u32>), ApiError> {
    let expected = "a list of token ids";
    let fields = object(body, DETOKENIZE_FIELDS)?;
    let list = fields
        .list("tokens", expected)?
        .ok_or_else(|| fields.missing("tokens", expected))?;
    let mut tokens = Vec::new();
    for (index, raw) in list.elements().enumerate() {
        if index == MAX_TOKENS {
            let problem = format!("has more than {MAX_TOKENS} tokens, but must have at most {MAX_TOKENS}");
            return Err(FieldError::rule("tokens", problem).into());
        }
        tokens.push(token(raw, vocab_size).ok_or_else(|| {
            let expected = format!("a token id from 0 to {}", vocab_size.saturating_sub(1));
            wrong_element("tokens", index, raw, &expected)
        })?);
    }
    Ok((model(&fields)?, tokens))
}

/// The token that `raw` names, if it is one of the model's.
fn token(raw: Raw<'_>, vocab_size: usize) -> Option<u32> {
    if raw.kind() != Kind::Number {
        return None;
    }
    let id: u32 = raw.text().parse().ok()?;
    ((id as usize) < vocab_size).then_some(id)
}

fn object<'a>(body: &'a [u8], known: &'static [&'static str]) -> Result<Fields<'a>, ApiError> {
    let raw = scan::check(body)?;
    if raw.kind() != Kind::Object {
        let message = format!("the body is {}, but must be a JSON object", raw.shown());
        return Err(ApiError::new(ErrorKind::Invalid, message));
    }
    Ok(Fields::of_object(raw, "", known)?)
}

/// `model`, which these paths can do without.
fn model(fields: &Fields<'_>) -> Result<Option<String>, FieldError> {
    let name = fields.string("model", "the name of the served model")?;
    Ok(name.map(std::borrow::Cow::into_owned))
}

fn known_model(state: &HttpState, name: Option<&str>) -> Result<(), ApiError> {
    match name.filter(|name| !state.serves(name)) {
        Some(unknown) => Err(unknown_model(unknown)),
        None => Ok(()),
    }
}
