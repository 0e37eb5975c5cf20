//! Schemas that no Rust type has: what may be one of several things.

use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, OneOfBuilder, SchemaType, Type};
use utoipa::openapi::{Ref, RefOr, Schema};

use super::served;

/// A string of at least one character.
fn text() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::String).min_length(Some(1))
}

fn nothing() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::Null)
}

fn token_id() -> RefOr<Schema> {
    served::reference(served::TOKEN_ID)
}

/// What is one of the schemas of [`served`], or null.
fn or_null(name: &str, description: &str) -> Schema {
    OneOfBuilder::new()
        .description(Some(description))
        .item(nothing())
        .item(served::reference(name))
        .into()
}

/// `model` where it must be given.
pub(super) fn model() -> RefOr<Schema> {
    let mut model = Ref::from_schema_name(served::MODEL_NAME);
    "Name of the model, one of its aliases, or of an adapter.".clone_into(&mut model.description);
    RefOr::Ref(model)
}

/// `model` where it can be left out.
pub(super) fn known_model() -> Schema {
    or_null(served::MODEL_NAME, "Name of the model.")
}

/// `adapter_id`.
pub(super) fn adapter() -> Schema {
    or_null(served::ADAPTER_NAME, "LoRA adapter; \"None\" is no adapter.")
}

/// `seed`.
pub(super) fn seed() -> Schema {
    or_null(
        served::SEED,
        "Seed of the draws, up to 18446744073709551615; drawn if absent, and told in the `details` of the TGI paths.",
    )
}

/// `allowed_token_ids`.
pub(super) fn allowed() -> Schema {
    OneOfBuilder::new()
        .description(Some("Only these tokens may be generated."))
        .item(nothing())
        .item(list(token_id()))
        .into()
}

/// `tokens` of `/detokenize`.
pub(super) fn tokens() -> Schema {
    let tokens = ArrayBuilder::new().description(Some("Token ids of the model."));
    tokens.items(token_id()).max_items(Some(1_048_576)).into()
}

/// `truncate_prompt_tokens`.
pub(super) fn kept_tokens() -> Schema {
    let number = || ObjectBuilder::new().schema_type(Type::Integer);
    OneOfBuilder::new()
        .description(Some("Keep only so many tokens at the end of the prompt; -1: all."))
        .item(nothing())
        .item(number().enum_values(Some([-1])))
        .item(number().minimum(Some(1)).maximum(Some(2_147_483_647)))
        .into()
}

/// `top_k` of the `/v1` paths.
pub(super) fn top_k() -> Schema {
    let number = || ObjectBuilder::new().schema_type(Type::Integer);
    OneOfBuilder::new()
        .description(Some("Draw among the k most probable tokens only; -1: among all."))
        .item(nothing())
        .item(number().enum_values(Some([-1])))
        .item(number().minimum(Some(1)).maximum(Some(2_147_483_647)))
        .into()
}

/// A member that must not be there, or be null.
pub(super) fn absent() -> Schema {
    nothing().description(Some("Must be absent.")).into()
}

/// `tools` of a prompt.
pub(super) fn no_tools() -> Schema {
    no_list("Only with `messages`.")
}

/// `tool_calls` of a message without any.
pub(super) fn no_calls() -> Schema {
    no_list("In an assistant's message only.")
}

/// A list that must be empty. `why` describes it.
fn no_list(why: &str) -> Schema {
    ArrayBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Array, Type::Null]))
        .description(Some(why))
        .max_items(Some(0))
        .into()
}

/// An object that must be empty.
pub(super) fn no_variables() -> Schema {
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Object, Type::Null]))
        .description(Some("Only with `messages`."))
        .max_properties(Some(0))
        .into()
}

/// Must not be true. `why` describes it.
fn not_true(why: &str) -> Schema {
    OneOfBuilder::new()
        .description(Some(why))
        .item(nothing())
        .item(
            ObjectBuilder::new()
                .schema_type(Type::Boolean)
                .enum_values(Some([false])),
        )
        .into()
}

/// `continue_final_message` where there is none.
pub(super) fn nothing_to_continue() -> Schema {
    not_true("Only with `messages`.")
}

/// `add_special_tokens` of a conversation.
pub(super) fn templates_own() -> Schema {
    not_true("Must not be true: the template brings the special tokens.")
}

fn list(item: impl Into<RefOr<Schema>>) -> ArrayBuilder {
    let item: RefOr<Schema> = item.into();
    ArrayBuilder::new().items(item).min_items(Some(1))
}

/// `stop`: a string or a list of strings.
pub(super) fn stop() -> Schema {
    let strings = ArrayBuilder::new().items(text());
    OneOfBuilder::new()
        .description(Some(
            "A string, or a list of strings, that end the answer. Together at most 32768 characters; on the TGI paths at \
             most 1024 strings of at most 1024 characters. What is matched is not part of the text.",
        ))
        .item(text().max_length(Some(32_768)))
        .item(strings)
        .item(nothing())
        .into()
}

/// `prompt` of a completion.
pub(super) fn prompt() -> Schema {
    OneOfBuilder::new()
        .description(Some(
            "A text, a list of texts, the token ids of a prompt, or a list of such. A list of texts or of lists is \
             answered with a choice for each.",
        ))
        .item(text())
        .item(list(text()))
        .item(list(token_id()))
        .item(list(list(token_id())))
        .into()
}

/// `inputs` of `/generate`.
pub(super) fn inputs() -> Schema {
    let item = ObjectBuilder::new()
        .property(
            "type",
            ObjectBuilder::new()
                .schema_type(Type::String)
                .enum_values(Some(["text"])),
        )
        .required("type")
        .property("text", text())
        .required("text");
    OneOfBuilder::new()
        .description(Some(
            "The prompt: a text, or a list of text items, which are put together without anything between them.",
        ))
        .item(text())
        .item(list(item))
        .into()
}

/// `content` of a message.
pub(super) fn words() -> Schema {
    contents("A text, or a list of text parts, which are put together.").into()
}

/// `content` of a message that may be calls alone.
pub(super) fn words_or_none() -> Schema {
    let words =
        contents("A text, or a list of text parts, which are put together; none, if the assistant only called.");
    words.item(nothing()).into()
}

fn contents(description: &str) -> OneOfBuilder {
    let part = ObjectBuilder::new()
        .property(
            "type",
            ObjectBuilder::new()
                .schema_type(Type::String)
                .enum_values(Some(["text"])),
        )
        .required("type")
        .property("text", ObjectBuilder::new().schema_type(Type::String))
        .required("text");
    OneOfBuilder::new()
        .description(Some(description))
        .item(ObjectBuilder::new().schema_type(Type::String))
        .item(list(part))
}

/// `tool_choice`.
pub(super) fn tool_choice() -> Schema {
    let words = ObjectBuilder::new()
        .schema_type(Type::String)
        .enum_values(Some(["none", "auto", "required"]));
    let name = ObjectBuilder::new().property("name", text()).required("name");
    let named = ObjectBuilder::new()
        .property(
            "type",
            ObjectBuilder::new()
                .schema_type(Type::String)
                .enum_values(Some(["function"])),
        )
        .required("type")
        .property("function", name)
        .required("function");
    OneOfBuilder::new()
        .description(Some(
            "Whether the model calls a function: as it likes (the default), not, at least one, or a certain one.",
        ))
        .item(words)
        .item(named)
        .item(nothing())
        .into()
}

/// A number, or null: as a type of its own, because a map's values can be any number.
pub(super) fn bias() -> Schema {
    let value = ObjectBuilder::new().schema_type(Type::Number);
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Object, Type::Null]))
        .description(Some("Added to the logit of each token, by its id; cut to -100 .. 100."))
        .additional_properties(Some(Schema::from(value)))
        .into()
}

pub(super) fn arguments() -> Schema {
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::String, Type::Object, Type::Null]))
        .description(Some("A JSON object, in a string or as it is."))
        .into()
}
