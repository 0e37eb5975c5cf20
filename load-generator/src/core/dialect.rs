//! The ways to ask that are measured: what is sent, and what the pieces of an answer mean.

use serde::Deserialize;
use serde_json::{Map, Value, json};

/// A way to ask for text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `POST /generate` of TGI: the whole answer at once.
    Generate,
    /// `POST /generate_stream` of TGI: an event for each token.
    GenerateStream,
    /// `POST /v1/completions` of OpenAI.
    Completions,
    /// `POST /v1/chat/completions` of OpenAI.
    Chat,
}

impl Dialect {
    /// Its name among the arguments.
    pub fn name(self) -> &'static str {
        match self {
            Self::Generate => "generate",
            Self::GenerateStream => "generate_stream",
            Self::Completions => "completions",
            Self::Chat => "chat",
        }
    }

    /// The path that is asked.
    pub fn path(self) -> &'static str {
        match self {
            Self::Generate => "/generate",
            Self::GenerateStream => "/generate_stream",
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }

    /// Whether it is one of OpenAI's: names a model, and knows `ignore_eos` on servers of open models.
    pub fn is_openai(self) -> bool {
        matches!(self, Self::Completions | Self::Chat)
    }
}

/// How all requests of a run are made.
#[derive(Clone, Debug)]
pub struct Form {
    /// The way to ask.
    pub dialect: Dialect,
    /// Whether the answer comes as events.
    pub streamed: bool,
    /// The model's name, for OpenAI's dialects.
    pub model: String,
    /// Whether generation goes on behind an end token, for OpenAI's dialects.
    pub ignore_eos: bool,
    /// Further members of the body; objects in it are merged with those that are there.
    pub extra: Map<String, Value>,
}

impl Form {
    /// The body of a request.
    pub fn body(&self, prompt: &str, max_tokens: u32) -> Vec<u8> {
        let mut body = match self.dialect {
            Dialect::Generate | Dialect::GenerateStream => {
                json!({"inputs": prompt, "parameters": {"max_new_tokens": max_tokens, "details": true}})
            }
            Dialect::Completions => json!({"model": self.model, "prompt": prompt, "max_tokens": max_tokens}),
            Dialect::Chat => {
                let messages = json!([{"role": "user", "content": prompt}]);
                json!({"model": self.model, "messages": messages, "max_tokens": max_tokens})
            }
        };
        if let (true, Some(body)) = (self.dialect.is_openai(), body.as_object_mut()) {
            if self.streamed {
                body.insert("stream".to_owned(), Value::Bool(true));
                body.insert("stream_options".to_owned(), json!({"include_usage": true}));
            }
            if self.ignore_eos {
                body.insert("ignore_eos".to_owned(), Value::Bool(true));
            }
        }
        if let Some(body) = body.as_object_mut() {
            merge(body, &self.extra);
        }
        body.to_string().into_bytes()
    }
}

fn merge(into: &mut Map<String, Value>, from: &Map<String, Value>) {
    for (name, value) in from {
        match (into.get_mut(name), value) {
            (Some(Value::Object(inner)), Value::Object(more)) => merge(inner, more),
            _ => {
                into.insert(name.clone(), value.clone());
            }
        }
    }
}

/// What an event, or a whole answer, says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// Text, and perhaps the end.
    Text,
    /// Nothing that a reader would see.
    Nothing,
    /// The request failed, in the server's words.
    Error(String),
    /// No answer of this dialect, and why.
    Malformed(String),
}

/// What is known of an answer so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Tokens of the prompt, as the server counts.
    pub prompt_tokens: Option<u32>,
    /// Of those, the ones that a prefix cache saved it to compute.
    pub cached_tokens: Option<u32>,
    /// Tokens generated, as the server counts.
    pub output_tokens: Option<u32>,
    /// Events with text.
    pub text_events: u32,
    /// Whether the answer is complete by the rules of its dialect.
    pub ended: bool,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u32>,
}

/// A chunk of a stream, or a whole answer, of OpenAI's.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Option<Vec<Choice>>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<Visible>,
    delta: Option<Message>,
    message: Option<Message>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<Visible>,
    reasoning_content: Option<Visible>,
    tool_calls: Option<Vec<serde::de::IgnoredAny>>,
}

/// Of a text, only whether there is one: it may be long, and nobody reads it.
struct Visible(bool);

impl<'de> Deserialize<'de> for Visible {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;
        impl serde::de::Visitor<'_> for Look {
            type Value = Visible;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a string")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Visible, E> {
                Ok(Visible(!text.is_empty()))
            }
        }
        deserializer.deserialize_str(Look)
    }
}

fn is_visible(text: Option<&Visible>) -> bool {
    text.is_some_and(|text| text.0)
}

impl Message {
    fn says_something(&self) -> bool {
        is_visible(self.content.as_ref())
            || is_visible(self.reasoning_content.as_ref())
            || self.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty())
    }
}

impl Choice {
    fn says_something(&self) -> bool {
        is_visible(self.text.as_ref())
            || self.delta.as_ref().is_some_and(Message::says_something)
            || self.message.as_ref().is_some_and(Message::says_something)
    }
}

/// An event of a stream, or a whole answer, of TGI's.
#[derive(Deserialize)]
struct Tgi {
    token: Option<serde::de::IgnoredAny>,
    generated_text: Option<Visible>,
    details: Option<Details>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Details {
    generated_tokens: Option<u32>,
    prompt_tokens: Option<u32>,
    /// The later name of `prompt_tokens`.
    input_length: Option<u32>,
}

/// The words of an error, whichever form it has.
fn words(error: &Value) -> String {
    let text = match error {
        Value::String(text) => text.clone(),
        other => other
            .get("message")
            .and_then(Value::as_str)
            .map_or_else(|| other.to_string(), str::to_owned),
    };
    shortened(&text)
}

/// At most 200 characters, for messages.
pub fn shortened(text: &str) -> String {
    text.chars().take(200).collect()
}

/// The words of the body of an answer that is no 200.
pub fn refusal(body: &[u8]) -> String {
    let read: Option<Value> = serde_json::from_slice(body).ok();
    match read.as_ref().and_then(|body| body.get("error")) {
        Some(error) => words(error),
        None => shortened(String::from_utf8_lossy(body).trim()),
    }
}

impl Dialect {
    /// Takes an event of a stream: its name (mostly empty) and its data.
    pub fn event(self, name: &[u8], data: &[u8], answer: &mut Answer) -> Said {
        if self.is_openai() && data == b"[DONE]" {
            answer.ended = true;
            return Said::Nothing;
        }
        if name == b"error" {
            return Said::Error(refusal(data));
        }
        let said = self.read(data, answer);
        if said == Said::Text {
            answer.text_events += 1;
        }
        said
    }

    /// Takes a whole answer.
    pub fn whole(self, body: &[u8], answer: &mut Answer) -> Said {
        let said = self.read(body, answer);
        if matches!(said, Said::Text | Said::Nothing) {
            answer.ended = true;
        }
        said
    }

    fn read(self, data: &[u8], answer: &mut Answer) -> Said {
        if self.is_openai() {
            openai(data, answer)
        } else {
            tgi(data, answer)
        }
    }
}

fn openai(data: &[u8], answer: &mut Answer) -> Said {
    let chunk: Chunk = match serde_json::from_slice(data) {
        Ok(chunk) => chunk,
        Err(error) => return malformed(&error, data),
    };
    if let Some(error) = chunk.error {
        return Said::Error(words(&error));
    }
    if let Some(usage) = chunk.usage {
        answer.prompt_tokens = usage.prompt_tokens.or(answer.prompt_tokens);
        answer.output_tokens = usage.completion_tokens.or(answer.output_tokens);
        let cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens);
        answer.cached_tokens = cached.or(answer.cached_tokens);
    } else if chunk.choices.is_none() {
        return Said::Malformed(format!("neither choices nor usage: {}", shown(data)));
    }
    let speaks = chunk.choices.iter().flatten().any(Choice::says_something);
    if speaks { Said::Text } else { Said::Nothing }
}

fn tgi(data: &[u8], answer: &mut Answer) -> Said {
    let event: Tgi = match serde_json::from_slice(data) {
        Ok(event) => event,
        Err(error) => return malformed(&error, data),
    };
    if let Some(error) = event.error {
        return Said::Error(words(&error));
    }
    if event.token.is_none() && event.generated_text.is_none() {
        return Said::Malformed(format!("neither token nor generated_text: {}", shown(data)));
    }
    if let Some(details) = event.details {
        answer.output_tokens = details.generated_tokens.or(answer.output_tokens);
        let prompt = details.prompt_tokens.or(details.input_length);
        answer.prompt_tokens = prompt.or(answer.prompt_tokens);
    }
    answer.ended |= event.generated_text.is_some();
    Said::Text
}

fn malformed(error: &serde_json::Error, data: &[u8]) -> Said {
    Said::Malformed(format!("{error}: {}", shown(data)))
}

fn shown(data: &[u8]) -> String {
    shortened(&String::from_utf8_lossy(data))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(dialect: Dialect) -> Form {
        Form {
            dialect,
            streamed: dialect != Dialect::Generate,
            model: "m".to_owned(),
            ignore_eos: true,
            extra: Map::new(),
        }
    }

    fn read(dialect: Dialect, events: &[&str]) -> (Vec<Said>, Answer) {
        let mut answer = Answer::default();
        let said = events
            .iter()
            .map(|event| dialect.event(b"", event.as_bytes(), &mut answer))
            .collect();
        (said, answer)
    }

    #[test]
    fn bodies_are_what_the_dialects_ask_for() {
        let body = |form: &Form| -> Value { serde_json::from_slice(&form.body("hi \"x\"", 7)).expect("JSON") };
        for dialect in [Dialect::Generate, Dialect::GenerateStream] {
            let expected = json!({"inputs": "hi \"x\"", "parameters": {"max_new_tokens": 7, "details": true}});
            assert_eq!(body(&form(dialect)), expected);
        }
        let streamed = json!({"model": "m", "prompt": "hi \"x\"", "max_tokens": 7, "ignore_eos": true, "stream": true,
            "stream_options": {"include_usage": true}});
        assert_eq!(body(&form(Dialect::Completions)), streamed);
        let whole = Form {
            streamed: false,
            ignore_eos: false,
            ..form(Dialect::Chat)
        };
        let messages = json!([{"role": "user", "content": "hi \"x\""}]);
        assert_eq!(
            body(&whole),
            json!({"model": "m", "messages": messages, "max_tokens": 7})
        );
    }

    #[test]
    fn further_members_are_merged() {
        let mut form = form(Dialect::Generate);
        let extra = json!({"parameters": {"temperature": 0.5, "details": false}, "user": "me"});
        form.extra = extra.as_object().expect("an object").clone();
        let body: Value = serde_json::from_slice(&form.body("x", 1)).expect("JSON");
        assert_eq!(
            body,
            json!({"inputs": "x", "user": "me",
                "parameters": {"max_new_tokens": 1, "details": false, "temperature": 0.5}})
        );
    }

    #[test]
    fn streams_of_completions_and_chats() {
        let (said, answer) = read(
            Dialect::Completions,
            &[
                r#"{"choices":[{"text":"a","finish_reason":null}],"usage":null}"#,
                r#"{"choices":[{"text":"","finish_reason":"length"}]}"#,
                r#"{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#,
                "[DONE]",
            ],
        );
        assert_eq!(said, [Said::Text, Said::Nothing, Said::Nothing, Said::Nothing]);
        let expected = Answer {
            prompt_tokens: Some(5),
            cached_tokens: Some(4),
            output_tokens: Some(2),
            text_events: 1,
            ended: true,
        };
        assert_eq!(answer, expected);
        let (said, answer) = read(
            Dialect::Chat,
            &[
                r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
                r#"{"choices":[{"delta":{"content":"b"}}]}"#,
                r#"{"choices":[{"delta":{"reasoning_content":"c"}}]}"#,
                r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#,
                r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
            ],
        );
        let texts = said.iter().map(|said| *said == Said::Text).collect::<Vec<_>>();
        assert_eq!(texts, [false, true, true, true, false]);
        assert!(!answer.ended, "cut off before [DONE]");
    }

    #[test]
    fn streams_and_answers_of_tgi() {
        let (said, answer) = read(
            Dialect::GenerateStream,
            &[
                r#"{"token":{"id":3,"text":""},"generated_text":null,"details":null}"#,
                r#"{"token":{"id":4,"text":"x"},"generated_text":"x","details":{"generated_tokens":2,"input_length":9}}"#,
            ],
        );
        assert_eq!(said, [Said::Text, Said::Text]);
        assert_eq!(
            (answer.prompt_tokens, answer.output_tokens, answer.ended),
            (Some(9), Some(2), true)
        );
        let mut answer = Answer::default();
        let body = br#"{"generated_text":"","details":{"generated_tokens":1,"prompt_tokens":4}}"#;
        assert_eq!(Dialect::Generate.whole(body, &mut answer), Said::Text);
        assert_eq!(
            (answer.prompt_tokens, answer.output_tokens, answer.ended),
            (Some(4), Some(1), true)
        );
    }

    #[test]
    fn errors_in_a_stream_are_errors_in_every_form() {
        for (dialect, event, expected) in [
            (Dialect::Chat, r#"{"error":{"message":"no","type":"x"}}"#, "no"),
            (Dialect::Completions, r#"{"error":"down"}"#, "down"),
            (Dialect::Completions, r#"{"error":{"code":3}}"#, r#"{"code":3}"#),
            (
                Dialect::GenerateStream,
                r#"{"error":"lost","error_type":"generation"}"#,
                "lost",
            ),
        ] {
            let (said, answer) = read(dialect, &[event]);
            assert_eq!(said, [Said::Error(expected.to_owned())], "{event}");
            assert!(!answer.ended);
        }
        let said = Dialect::Chat.event(b"error", b"gone", &mut Answer::default());
        assert_eq!(said, Said::Error("gone".to_owned()));
        assert_eq!(refusal(br#"{"error":{"message":"full"}}"#), "full");
        assert_eq!(refusal(b" plain \n"), "plain");
    }

    #[test]
    fn what_is_no_answer_is_malformed() {
        for (dialect, event) in [
            (Dialect::Chat, "{"),
            (Dialect::Chat, "{\"id\": 1}"),
            (Dialect::GenerateStream, "[DONE]"),
            (Dialect::GenerateStream, "{\"id\": 1}"),
        ] {
            let (said, _) = read(dialect, &[event]);
            assert!(matches!(said[..], [Said::Malformed(_)]), "{event}: {said:?}");
        }
    }
}
