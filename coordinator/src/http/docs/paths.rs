//! What each path takes and answers.

use utoipa::ToSchema;
use utoipa::openapi::content::ContentBuilder;
use utoipa::openapi::path::{HttpMethod, OperationBuilder, ParameterBuilder, ParameterIn, PathItem, PathsBuilder};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{Paths, Ref, RefOr, Required, Schema};

use super::answers::{ChatAnswer, CompletionAnswer, EventStream, OpenAiError, TgiError};
use super::chat::{ChatRequest, DetokenizeRequest, TokenizeRequest};
use super::fields::{CompletionRequest, GenerateRequest};
use super::served;
use crate::http::error::Family;
use crate::http::tgi::answer::Generated;
use crate::http::tokens::{Detokenized, Tokenized};

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";

/// Statuses of errors on paths that read a body, beside the one of a wrong body.
const ERRORS: [(u16, &str); 9] = [
    (401, "No valid API key, where some are configured."),
    (404, "There is no such model or adapter."),
    (408, "The body comes too slowly."),
    (413, "The body is too large."),
    (415, "The body is declared as something else than JSON."),
    (424, "The nodes failed while they worked on the request."),
    (429, "No room: again after the seconds in `Retry-After`."),
    (500, "The nodes failed while they worked on the request."),
    (503, "No node serves, or the server stops."),
];

/// All paths, as they are registered in [`crate::http::routes`].
pub fn paths() -> Paths {
    let mut paths = PathsBuilder::new();
    for (path, item) in generating().into_iter().chain(tokenizing()).chain(reading()) {
        paths = paths.path(path, item);
    }
    paths.build()
}

/// Name and description of a schema in the document.
fn reference<T: ToSchema>() -> RefOr<Schema> {
    RefOr::Ref(Ref::from_schema_name(T::name()))
}

fn generating() -> Vec<(&'static str, PathItem)> {
    let generate = reference::<GenerateRequest>;
    let whole = || (JSON, reference::<Generated>());
    let list = || {
        let list = utoipa::openapi::ArrayBuilder::new()
            .items(reference::<Generated>())
            .min_items(Some(1))
            .max_items(Some(1));
        (JSON, RefOr::T(Schema::from(list)))
    };
    let events = || (EVENTS, reference::<EventStream>());
    let root = || {
        post(
            Family::Tgi,
            "Generate: a list with one answer, or an event stream.",
            generate(),
            &[list(), events()],
        )
    };
    let probe = || {
        get(
            "200 while a request sent now would be worked on.",
            &[(200, None), (503, Some(reference::<TgiError>()))],
        )
    };
    vec![
        (
            "/generate",
            PathItem::new(
                HttpMethod::Post,
                post(Family::Tgi, "Generate: a whole answer.", generate(), &[whole()]),
            ),
        ),
        (
            "/generate_stream",
            PathItem::new(
                HttpMethod::Post,
                post(Family::Tgi, "Generate: an event stream.", generate(), &[events()]),
            ),
        ),
        ("/invocations", PathItem::new(HttpMethod::Post, root())),
        ("/", {
            let mut both = PathItem::new(HttpMethod::Post, root());
            both.merge_operations(PathItem::new(HttpMethod::Get, probe()));
            both
        }),
        (
            "/v1/completions",
            PathItem::new(HttpMethod::Post, {
                let answers = [(JSON, reference::<CompletionAnswer>()), events()];
                post(
                    Family::OpenAi,
                    "Complete a prompt.",
                    reference::<CompletionRequest>(),
                    &answers,
                )
            }),
        ),
        (
            "/v1/chat/completions",
            PathItem::new(HttpMethod::Post, {
                let answers = [(JSON, reference::<ChatAnswer>()), events()];
                post(
                    Family::OpenAi,
                    "Go on with a conversation.",
                    reference::<ChatRequest>(),
                    &answers,
                )
            }),
        ),
    ]
}

fn tokenizing() -> Vec<(&'static str, PathItem)> {
    let tokenize = [(JSON, reference::<Tokenized>())];
    let detokenize = [(JSON, reference::<Detokenized>())];
    vec![
        (
            "/tokenize",
            PathItem::new(
                HttpMethod::Post,
                post(
                    Family::OpenAi,
                    "The tokens of a text or a conversation.",
                    reference::<TokenizeRequest>(),
                    &tokenize,
                ),
            ),
        ),
        (
            "/detokenize",
            PathItem::new(
                HttpMethod::Post,
                post(
                    Family::OpenAi,
                    "The text of tokens.",
                    reference::<DetokenizeRequest>(),
                    &detokenize,
                ),
            ),
        ),
    ]
}

fn reading() -> Vec<(&'static str, PathItem)> {
    let object = || Some(RefOr::T(Schema::from(ObjectBuilder::new())));
    let probe = || {
        get(
            "200 while a request sent now would be worked on.",
            &[(200, None), (503, Some(reference::<TgiError>()))],
        )
    };
    let id = ParameterBuilder::new()
        .name("id")
        .parameter_in(ParameterIn::Path)
        .required(Required::True)
        .description(Some("Name of a model."))
        .schema(Some(served::reference(served::MODEL_ID)));
    let named = get(
        "One model.",
        &[(200, object()), (404, Some(reference::<OpenAiError>()))],
    )
    .parameter(id);
    let item = |operation: OperationBuilder| PathItem::new(HttpMethod::Get, operation);
    vec![
        ("/health", item(probe())),
        ("/ping", item(probe())),
        (
            "/info",
            item(get("What is served, within which limits.", &[(200, object())])),
        ),
        (
            "/metrics",
            item(
                text("Metrics, in the text format of Prometheus.", "text/plain")
                    .response("404", error("They are switched off.", reference::<TgiError>())),
            ),
        ),
        (
            "/v1/models",
            item(get("The models and their names.", &[(200, object())])),
        ),
        ("/v1/models/{id}", item(named)),
        (
            "/tokenizer_info",
            item(get(
                "What `tokenizer_config.json` says of the model.",
                &[(200, object())],
            )),
        ),
        ("/openapi.json", item(get("This document.", &[(200, object())]))),
        (
            "/dashboard",
            item(text("Where the dashboard of operators is.", "text/html")),
        ),
        ("/docs", item(text("A page that shows this document.", "text/html"))),
    ]
}

/// An operation that reads a body.
fn post(family: Family, summary: &str, body: RefOr<Schema>, answers: &[(&str, RefOr<Schema>)]) -> OperationBuilder {
    let content = ContentBuilder::new().schema(Some(body)).build();
    let body = RequestBodyBuilder::new()
        .content(JSON, content)
        .required(Some(Required::True))
        .build();
    let mut fine = ResponseBuilder::new().description("The answer.");
    for (kind, schema) in answers {
        fine = fine.content(*kind, ContentBuilder::new().schema(Some(schema.clone())).build());
    }
    let (wrong, own, cluster) = match family {
        Family::Tgi => (422, reference::<TgiError>(), 424),
        Family::OpenAi => (400, reference::<OpenAiError>(), 500),
    };
    let mut operation = OperationBuilder::new()
        .summary(Some(summary))
        .request_body(Some(body))
        .response("200", fine.build())
        .response(
            wrong.to_string(),
            error("The body is not JSON, or a field is wrong.", own.clone()),
        );
    for (status, meaning) in ERRORS {
        if status == 424 && cluster != 424 {
            continue;
        }
        let schema = if status == 401 {
            reference::<OpenAiError>()
        } else {
            own.clone()
        };
        operation = operation.response(status.to_string(), error(meaning, schema));
    }
    operation
}

fn error(meaning: &str, schema: RefOr<Schema>) -> utoipa::openapi::Response {
    ResponseBuilder::new()
        .description(meaning)
        .content(JSON, ContentBuilder::new().schema(Some(schema)).build())
        .build()
}

/// An operation that only reads. `None`: the answer has no body.
fn get(summary: &str, answers: &[(u16, Option<RefOr<Schema>>)]) -> OperationBuilder {
    let mut operation = OperationBuilder::new().summary(Some(summary));
    for (status, schema) in answers {
        let mut response =
            ResponseBuilder::new().description(if *status == 200 { "The answer." } else { "It is not so." });
        if let Some(schema) = schema {
            response = response.content(JSON, ContentBuilder::new().schema(Some(schema.clone())).build());
        }
        operation = operation.response(status.to_string(), response.build());
    }
    operation.response("401", error(ERRORS[0].1, reference::<OpenAiError>()))
}

/// An operation that answers with text of some kind.
fn text(summary: &str, kind: &str) -> OperationBuilder {
    let schema = ObjectBuilder::new().schema_type(Type::String);
    let content = ContentBuilder::new().schema(Some(schema)).build();
    OperationBuilder::new().summary(Some(summary)).response(
        "200",
        ResponseBuilder::new()
            .description("The text.")
            .content(kind, content)
            .build(),
    )
}
