//! The prompt of a conversation.

use model_files::{ChatTemplate, RenderInput};
use serde_json::{Map, Value};

use super::tools::format::Format;
use super::tools::generic;
use crate::http::error::ApiError;
use crate::http::json::fields::{FieldError, Fields};
use crate::http::json::tree::Tree;
use crate::http::state::HttpState;

/// What a template is asked to render.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The messages, as the template reads them.
    pub messages: Vec<Tree>,
    /// The tools, if the model is to know of any.
    pub tools: Option<Tree>,
    /// The prompt ends with the opening of the assistant's answer.
    pub opens_answer: bool,
    /// Further variables of the template.
    pub variables: Option<Map<String, Value>>,
}

/// What has to be known of a template before it renders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateFacts {
    /// It tells the role `developer` from `system`.
    pub knows_developer: bool,
    /// It shows tools.
    pub knows_tools: bool,
    /// How the calls look that it asks for, if that is known.
    pub format: Option<Format>,
}

impl TemplateFacts {
    /// Reads them off a template's text.
    pub fn of(source: &str) -> Self {
        Self {
            knows_developer: source.contains("developer"),
            knows_tools: source.contains("tools"),
            format: Format::of_template(source),
        }
    }
}

/// Puts a conversation together with what a client may tell the template: `add_generation_prompt` and
/// `chat_template_kwargs`. `tools`: those that the model is to know of.
///
/// # Errors
/// A wrong value, or a field that is not supported.
pub fn options(
    fields: &Fields<'_>,
    mut messages: Vec<Tree>,
    mut tools: Option<Tree>,
    facts: TemplateFacts,
) -> Result<Conversation, ApiError> {
    // A template of the client's own is a program of the client's own.
    for name in ["chat_template", "documents"] {
        if fields.get(name).is_some() {
            return Err(ApiError::not_supported_yet(name));
        }
    }
    if fields.bool("continue_final_message")?.unwrap_or(false) {
        return Err(ApiError::not_supported_yet("continue_final_message"));
    }
    let name = "chat_template_kwargs";
    fields.object(name, "", &[])?;
    let variables = fields.get(name).map(|raw| {
        serde_json::from_str(raw.text())
            .map_err(|_| FieldError::rule(name, "contains a number that is too large for a double"))
    });
    if !facts.knows_tools
        && let Some(tools) = tools.take()
    {
        generic::describe(&mut messages, &tools);
    }
    Ok(Conversation {
        messages,
        tools,
        opens_answer: fields.bool("add_generation_prompt")?.unwrap_or(true),
        variables: variables.transpose()?,
    })
}

impl HttpState {
    /// The model's chat template.
    ///
    /// # Errors
    /// It has none, or one that does not compile.
    pub fn chat_template(&self) -> Result<&ChatTemplate, ApiError> {
        let refused = |problem: String| ApiError::from(FieldError::rule("messages", problem));
        let template = self.model.text.chat_template.as_ref().ok_or_else(|| {
            refused("cannot be used: this model has no chat template; /v1/completions takes a prompt".to_owned())
        })?;
        match template.problem() {
            Some(problem) => Err(refused(format!(
                "cannot be used: this model's chat template does not work: {problem}"
            ))),
            None => Ok(template),
        }
    }

    /// What has to be known of the model's chat template; that of no template if it has none.
    pub fn template_facts(&self) -> TemplateFacts {
        let template = self.model.text.chat_template.as_ref();
        TemplateFacts::of(template.map_or("", ChatTemplate::source))
    }

    /// The tokens of a conversation that came in a body of `bytes` bytes. A rendered prompt brings its own begin-of-text
    /// token.
    ///
    /// # Errors
    /// There is no template, or it refuses the conversation; or the process stops.
    pub async fn encode_chat(&self, conversation: Conversation, bytes: usize) -> Result<Vec<u32>, ApiError> {
        let template = self.chat_template()?.clone();
        let now = self.clock.wall_time();
        let tokenizer = self.prompts.tokenizer().clone();
        let work = move || {
            let input = RenderInput {
                messages: &conversation.messages,
                tools: conversation.tools.as_ref(),
                add_generation_prompt: conversation.opens_answer,
                now: Some(now),
                variables: conversation.variables.as_ref(),
            };
            let text = template
                .render(&input)
                .map_err(|error| FieldError::rule("messages", format!("cannot be rendered: {error}")))?;
            tokenizer
                .encode_plain(&text)
                .map_err(|error| FieldError::rule("messages", format!("cannot be tokenised: {error}")))
        };
        let tokens: Result<Vec<u32>, FieldError> = self.work_on(bytes, work).await?;
        Ok(tokens?)
    }
}
