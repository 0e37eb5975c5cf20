//! The prompt of a conversation.

use std::time::SystemTime;

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
    messages: Vec<Tree>,
    tools: Option<Tree>,
    options: Options,
}

/// What a client may tell the template.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// How the prompt ends.
    pub ending: Ending,
    /// Further variables of the template.
    pub variables: Option<Map<String, Value>>,
}

/// How the prompt of a conversation ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ending {
    /// With the opening of the assistant's answer.
    #[default]
    Opened,
    /// With whatever ends the last message.
    Closed,
    /// With the last message's words: the answer goes on where they end.
    Continued,
}

/// Stands behind the words that are to be continued while the template works, to show where they end. A template that
/// trims its messages takes away the white space at its end: what it took from the words themselves is then known, too.
/// (The method of Hugging Face's `apply_chat_template`; it asks for less white space, of which some templates write as much
/// themselves.)
const MARK: &str = "CONTINUE_FINAL_MESSAGE\t\n";

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

/// Reads what a client may tell the template: `add_generation_prompt`, `continue_final_message` and
/// `chat_template_kwargs`.
///
/// # Errors
/// A wrong value, or a field that is not supported.
pub fn options(fields: &Fields<'_>) -> Result<Options, ApiError> {
    if fields.get("chat_template").is_some() {
        // A template of the client's own is a program of the client's own.
        let problem = "is given, but must be absent: the model's own template is used, and `chat_template_kwargs` are its \
            variables";
        return Err(FieldError::rule("chat_template", problem).into());
    }
    if fields.get("documents").is_some() {
        return Err(ApiError::not_supported_yet("documents"));
    }
    let opens = fields.bool("add_generation_prompt")?;
    let ending = match (fields.bool("continue_final_message")?.unwrap_or(false), opens) {
        (true, Some(true)) => {
            let problem = "is true, but must be false or absent where `add_generation_prompt` is true: the answer goes on \
                with the last message or begins a new one";
            return Err(FieldError::rule("continue_final_message", problem).into());
        }
        (true, Some(false) | None) => Ending::Continued,
        (false, Some(false)) => Ending::Closed,
        (false, Some(true) | None) => Ending::Opened,
    };
    let name = "chat_template_kwargs";
    fields.object(name, "", &[])?;
    let variables = fields.get(name).map(|raw| {
        serde_json::from_str(raw.text())
            .map_err(|_| FieldError::rule(name, "contains a number that is too large for a double"))
    });
    Ok(Options {
        ending,
        variables: variables.transpose()?,
    })
}

impl Conversation {
    /// Puts a conversation together. `tools`: those that the model is to know of.
    ///
    /// # Errors
    /// The last message cannot be continued.
    pub fn new(
        mut messages: Vec<Tree>,
        mut tools: Option<Tree>,
        options: Options,
        facts: TemplateFacts,
    ) -> Result<Self, FieldError> {
        if options.ending == Ending::Continued {
            mark_end(&mut messages)?;
        }
        if !facts.knows_tools
            && let Some(tools) = tools.take()
        {
            generic::describe(&mut messages, &tools);
        }
        Ok(Self {
            messages,
            tools,
            options,
        })
    }

    /// The prompt's text.
    ///
    /// # Errors
    /// The template refuses the conversation, or does not show the message that is to be continued.
    fn render(&self, template: &ChatTemplate, now: SystemTime) -> Result<String, FieldError> {
        let input = RenderInput {
            messages: &self.messages,
            tools: self.tools.as_ref(),
            add_generation_prompt: self.options.ending == Ending::Opened,
            now: Some(now),
            variables: self.options.variables.as_ref(),
        };
        let mut text = template
            .render(&input)
            .map_err(|error| FieldError::rule("messages", format!("cannot be rendered: {error}")))?;
        if self.options.ending == Ending::Continued {
            let end = end_of_words(&text, self.last_white_space()).ok_or_else(|| {
                let problem = "cannot be continued: the model's chat template does not show the last one's content";
                FieldError::rule("messages", problem)
            })?;
            text.truncate(end);
        }
        Ok(text)
    }

    /// The white space at the end of the words that are to be continued. Of words that are nothing else a template that
    /// trims leaves none.
    fn last_white_space(&self) -> &str {
        match self.messages.last().and_then(|message| message.get("content")) {
            Some(Tree::String(content)) => {
                let words = content.strip_suffix(MARK).unwrap_or_default();
                match words.trim_end() {
                    "" => "",
                    trimmed => &words[trimmed.len()..],
                }
            }
            _ => "",
        }
    }
}

/// Puts the mark behind the words of the last message.
fn mark_end(messages: &mut [Tree]) -> Result<(), FieldError> {
    let index = messages.len().saturating_sub(1);
    let Some(Tree::Object(message)) = messages.last_mut() else {
        return Ok(());
    };
    if message.iter().any(|(name, _)| name == "tool_calls") {
        let problem = "is given, but must be absent in a message that is to be continued";
        return Err(FieldError::rule(format!("messages[{index}].tool_calls"), problem));
    }
    for (name, value) in message {
        if let (true, Tree::String(text)) = (name == "content", value) {
            text.push_str(MARK);
        }
    }
    Ok(())
}

/// Where the words end that the mark stands behind. `white_space`: what the words end with, unless the template trims.
fn end_of_words(rendered: &str, white_space: &str) -> Option<usize> {
    let start = rendered.rfind(MARK.trim_end())?;
    let words = &rendered[..start];
    if rendered[start..].starts_with(MARK) {
        Some(start)
    } else {
        Some(words.strip_suffix(white_space).unwrap_or(words).len())
    }
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
            let text = conversation.render(&template, now)?;
            tokenizer
                .encode_plain(&text)
                .map_err(|error| FieldError::rule("messages", format!("cannot be tokenised: {error}")))
        };
        let tokens: Result<Vec<u32>, FieldError> = self.work_on(bytes, work).await?;
        Ok(tokens?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn continued(template: &str, content: &str) -> Result<String, String> {
        let message = |role: &str, content: &str| {
            let members = [("role", role), ("content", content)];
            Tree::Object(members.map(|(name, text)| (name.to_owned(), Tree::from(text))).into())
        };
        let messages = vec![message("user", "hi"), message("assistant", content)];
        let options = Options {
            ending: Ending::Continued,
            variables: None,
        };
        let conversation = Conversation::new(messages, None, options, TemplateFacts::of(template)).expect("words");
        conversation
            .render(&ChatTemplate::new(template, "<s>", "</s>"), SystemTime::UNIX_EPOCH)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_prompt_ends_where_the_words_end_that_are_continued() {
        let keeps = "{% for m in messages %}[{{ m.role }}]\n{{ m.content }} </s>{% endfor %}";
        let trims = "{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }} </s>{% endfor %}";
        for (content, kept, trimmed) in [
            ("Sure", "Sure", "Sure"),
            (" a \n", " a \n", "a"),
            ("", "", ""),
            ("\n", "\n", ""),
            // What a template writes itself is no end.
            ("s", "s", "s"),
            ("</s>", "</s>", "</s>"),
        ] {
            let before = "[user]\nhi </s>[assistant]\n";
            assert_eq!(continued(keeps, content), Ok(format!("{before}{kept}")), "{content:?}");
            assert_eq!(
                continued(trims, content),
                Ok(format!("{before}{trimmed}")),
                "{content:?}"
            );
        }
        let first_only = continued("{{ messages[0].content }}", "x").expect_err("the last one is not shown");
        assert!(first_only.starts_with("`messages` cannot be continued"), "{first_only}");
    }
}
