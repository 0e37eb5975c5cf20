//! `GET /openapi.json`: the API as OpenAPI 3.1, made from types; and `GET /docs`: a page that shows it, with everything
//! it needs in this program.
//!
//! [`paths`] lists what each path takes and answers. A test holds it to the routes, and [`fields`] and [`chat`] to the
//! names that the readers of bodies know.

pub mod answers;
pub mod chat;
mod custom;
pub mod fields;
pub mod parts;
pub mod paths;
pub mod served;
pub mod viewer;

use actix_web::HttpResponse;
use actix_web::web::Data;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{ComponentsBuilder, InfoBuilder, OpenApi, OpenApiBuilder, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use served::Served;

use crate::http::state::HttpState;
use crate::http::{tgi, tokens};

/// `GET /openapi.json`.
pub async fn openapi(state: Data<HttpState>) -> HttpResponse {
    // Strings, numbers and maps with text keys always serialise.
    let write = || document(&Served::of(&state)).to_json().unwrap_or_default();
    let text = state.document.get_or_init(write).clone();
    HttpResponse::Ok().content_type("application/json").body(text)
}

/// The document of a server.
pub fn document(served: &Served) -> OpenApi {
    let about = "One server in front of prefill and decode nodes, with the paths of TGI 0.9.4 and OpenAI. In every body \
        null equals absent, and unknown members are ignored.";
    let info = InfoBuilder::new()
        .title("Baton")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(about));
    let mut components =
        ComponentsBuilder::new().security_scheme("key", SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)));
    for (name, schema) in schemas() {
        components = components.schema(name, schema);
    }
    for (name, schema) in served.schemas() {
        components = components.schema(name, schema);
    }
    OpenApiBuilder::new()
        .info(info.build())
        .paths(paths::paths())
        .components(Some(components.build()))
        // Keys are asked for where some are configured.
        .security(Some([
            SecurityRequirement::default(),
            SecurityRequirement::new::<_, [&str; 0], &str>("key", []),
        ]))
        .build()
}

/// Every type that the paths refer to, and the types in them.
fn schemas() -> Vec<(String, RefOr<Schema>)> {
    let mut all = Vec::new();
    add::<fields::GenerateRequest>(&mut all);
    add::<fields::CompletionRequest>(&mut all);
    add::<chat::ChatRequest>(&mut all);
    add::<chat::TokenizeRequest>(&mut all);
    add::<chat::DetokenizeRequest>(&mut all);
    add::<answers::TgiError>(&mut all);
    add::<answers::OpenAiError>(&mut all);
    add::<answers::CompletionAnswer>(&mut all);
    add::<answers::ChatAnswer>(&mut all);
    add::<answers::EventStream>(&mut all);
    add::<tgi::answer::Generated>(&mut all);
    add::<tokens::Tokenized>(&mut all);
    add::<tokens::Detokenized>(&mut all);
    all
}

fn add<T: ToSchema + PartialSchema>(all: &mut Vec<(String, RefOr<Schema>)>) {
    all.push((T::name().into_owned(), T::schema()));
    T::schemas(all);
}
