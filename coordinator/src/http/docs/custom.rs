//! Schemas that no Rust type has: what may be one of several things.

use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, OneOfBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};

/// A string of at least one character.
fn text() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::String).min_length(Some(1))
}

fn nothing() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::Null)
}

fn token_id() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0))
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
pub(super) fn content() -> Schema {
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
        .description(Some(
            "A text, or a list of text parts, which are put together. An assistant that only calls has none.",
        ))
        .item(ObjectBuilder::new().schema_type(Type::String))
        .item(list(part))
        .item(nothing())
        .into()
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
