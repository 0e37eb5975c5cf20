//! Chat templates: a conversation becomes a prompt.
//!
//! Templates are Jinja, written for the environment of Hugging Face transformers; this module gives them the same one:
//! `trim_blocks`, `lstrip_blocks`, loop controls, Python's methods on strings, lists and maps, values that print as Python
//! prints them, `raise_exception`, `strftime_now`, a `tojson` that writes what Python's `json.dumps` writes, and the
//! `generation` tag (which marks the assistant's words for training and means nothing here).

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::SystemTime;

use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;

use super::python;
use super::strftime::strftime;
use super::tojson::tojson;
use crate::error::TextError;

const NAME: &str = "chat";

/// A model's chat template. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ChatTemplate(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    source: String,
    compiled: Result<Environment<'static>, String>,
    bos: String,
    eos: String,
}

/// What a template renders.
#[derive(Debug, Clone, Copy)]
pub struct RenderInput<'a, M, T = serde_json::Value> {
    /// The conversation: a list of messages with `role`, `content` and whatever else the template reads.
    pub messages: &'a M,
    /// Tool definitions, if the request brings any.
    pub tools: Option<&'a T>,
    /// True: the prompt ends with the opening of the assistant's answer.
    pub add_generation_prompt: bool,
    /// The time `strftime_now` shows (in UTC). Without it, a template that asks for the time fails.
    pub now: Option<SystemTime>,
    /// More variables for the template (`chat_template_kwargs` of a request). They cannot replace the ones above.
    pub variables: Option<&'a serde_json::Map<String, serde_json::Value>>,
}

impl<'a, M> RenderInput<'a, M> {
    /// A conversation without tools, time and variables, whose answer comes next.
    pub fn new(messages: &'a M) -> Self {
        Self {
            messages,
            tools: None,
            add_generation_prompt: true,
            now: None,
            variables: None,
        }
    }
}

impl ChatTemplate {
    /// Takes the template's text, and the texts of the begin and end tokens it may use. A template that does not compile
    /// is kept too: its model can do everything but chat. [`Self::problem`] and [`Self::render`] say what is wrong.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Self {
        Self(Arc::new(Inner {
            source: source.to_string(),
            // As in `render`: constant parts are worked out while compiling.
            compiled: match catch_unwind(|| compile(source)) {
                Ok(compiled) => compiled.map_err(|error| chain(&error)),
                Err(_) => Err("the template engine gave up on it".to_owned()),
            },
            bos: bos_token.to_string(),
            eos: eos_token.to_string(),
        }))
    }

    /// Why the template does not compile, if so.
    pub fn problem(&self) -> Option<TextError> {
        self.0
            .compiled
            .as_ref()
            .err()
            .map(|what| TextError::TemplateSyntax(what.clone()))
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.0.source
    }

    /// Renders a conversation into the prompt's text.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] if the template does not compile, [`TextError::TemplateRender`] if it refuses the
    /// conversation (the message is the template's own) or fails.
    pub fn render<M: Serialize, T: Serialize>(&self, input: &RenderInput<'_, M, T>) -> Result<String, TextError> {
        let Inner { compiled, bos, eos, .. } = &*self.0;
        let environment = compiled
            .as_ref()
            .map_err(|what| TextError::TemplateSyntax(what.clone()))?;
        let now = input.now;
        let strftime_now = Value::from_function(move |format: String| match now {
            Some(now) => strftime(&format, now).map_err(|what| Error::new(ErrorKind::InvalidOperation, what)),
            None => Err(Error::new(
                ErrorKind::InvalidOperation,
                "strftime_now needs the current time, none was given",
            )),
        });
        let own = minijinja::context! {
            messages => Value::from_serialize(input.messages),
            tools => input.tools.map(Value::from_serialize),
            add_generation_prompt => input.add_generation_prompt,
            bos_token => bos,
            eos_token => eos,
            strftime_now,
        };
        let context = match input.variables {
            Some(variables) => minijinja::context! { ..own, ..Value::from_serialize(variables) },
            None => own,
        };
        let template = environment
            .get_template(NAME)
            .map_err(|error| TextError::TemplateSyntax(chain(&error)))?;
        // The template engine has places that panic (a slice of nothing with a negative step is one); a conversation must
        // never take the process down. What was rendered until then is dropped, nothing else is touched.
        match catch_unwind(AssertUnwindSafe(|| template.render(context))) {
            Ok(rendered) => rendered.map_err(|error| TextError::TemplateRender(chain(&error))),
            Err(_) => Err(TextError::TemplateRender(
                "the template engine gave up on this conversation".to_owned(),
            )),
        }
    }
}

fn compile(source: &str) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_filter("tojson", tojson);
    python::install(&mut environment);
    environment.add_template_owned(NAME, without_generation_tags(source).into_owned())?;
    Ok(environment)
}

/// The error and its causes in one line, without the template's text.
fn chain(error: &Error) -> String {
    let mut text = match (error.detail(), error.line()) {
        (Some(detail), Some(line)) => format!("{detail} (line {line})"),
        (Some(detail), None) => detail.to_string(),
        (None, Some(line)) => format!("{} (line {line})", error.kind()),
        (None, None) => error.kind().to_string(),
    };
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Turns `{% generation %} .. {% endgeneration %}` into a block that is always shown, keeping its white space control.
fn without_generation_tags(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let name = tag[2..tag.len() - 2]
            .trim_matches(|character: char| "-+".contains(character))
            .trim();
        match name {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    Cow::Owned(out)
}
