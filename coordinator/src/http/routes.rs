//! Which path is answered by whom. Everything else is a JSON error in the path's family.

use actix_web::http::StatusCode;
use actix_web::web::{self, Data, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse, Resource, Route};
use runtime::telemetry::METRICS_OFF;

use super::error::{ApiError, ErrorKind, Family};
use super::state::HttpState;
use super::{docs, openai, tgi, tokens};
use crate::metrics::nodes;

/// Paths of the API that are not built yet: told apart from typing errors.
const UNBUILT: [&str; 1] = ["/v1/embeddings"];

/// What a path can be asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Methods {
    /// `GET` (and `HEAD`).
    Read,
    /// `POST`.
    Post,
    /// Both.
    Both,
}

impl Methods {
    /// Value of the `Allow` header.
    pub fn allow(self) -> &'static str {
        match self {
            Self::Read => "GET, HEAD, OPTIONS",
            Self::Post => "POST, OPTIONS",
            Self::Both => "GET, HEAD, POST, OPTIONS",
        }
    }
}

/// A path and who answers it.
pub struct Entry {
    /// As actix writes it.
    pub path: &'static str,
    /// What it can be asked.
    pub methods: Methods,
    routes: Vec<Route>,
}

impl Entry {
    fn post(path: &'static str, post: Route) -> Self {
        Self {
            path,
            methods: Methods::Post,
            routes: vec![post],
        }
    }

    /// `get` and `head` have the same handler; actix leaves the body out of the answer to `HEAD`.
    fn read(path: &'static str, get: Route, head: Route) -> Self {
        Self {
            path,
            methods: Methods::Read,
            routes: vec![get, head],
        }
    }

    /// Answers what the path can be asked, and refuses other methods.
    fn resource(self) -> Resource {
        let allow = self.methods.allow();
        let resource = web::resource(self.path).default_service(web::to(move |request: HttpRequest| async move {
            let message = format!("{} is not possible here; allowed: {allow}", request.method());
            ApiError::new(ErrorKind::WrongMethod { allow }, message).respond(Family::of_path(request.path()))
        }));
        self.routes.into_iter().fold(resource, Resource::route)
    }
}

/// All paths.
pub fn table() -> Vec<Entry> {
    let mut all = generating();
    all.extend(reading());
    all
}

fn generating() -> Vec<Entry> {
    use openai::chat::handlers::chat_completions;
    use openai::handlers::completions;
    use tgi::handlers::{generate, generate_stream, root};
    vec![
        Entry::post("/generate", web::post().to(generate)),
        Entry::post("/generate_stream", web::post().to(generate_stream)),
        Entry::post("/invocations", web::post().to(root)),
        Entry {
            path: "/",
            methods: Methods::Both,
            routes: vec![
                web::post().to(root),
                web::get().to(tgi::info::health),
                web::head().to(tgi::info::health),
            ],
        },
        Entry::post("/v1/completions", web::post().to(completions)),
        Entry::post("/v1/chat/completions", web::post().to(chat_completions)),
        Entry::post("/tokenize", web::post().to(tokens::tokenize)),
        Entry::post("/detokenize", web::post().to(tokens::detokenize)),
    ]
}

fn reading() -> Vec<Entry> {
    use super::dashboard::page as dashboard;
    use docs::viewer::{file, page};
    use openai::models::{list, one};
    use tgi::info::{health, info};
    use tokens::tokenizer_info;
    vec![
        Entry::read("/health", web::get().to(health), web::head().to(health)),
        Entry::read("/ping", web::get().to(health), web::head().to(health)),
        Entry::read("/info", web::get().to(info), web::head().to(info)),
        Entry::read("/metrics", web::get().to(metrics), web::head().to(metrics)),
        Entry::read("/v1/models", web::get().to(list), web::head().to(list)),
        Entry::read("/v1/models/{id:.+}", web::get().to(one), web::head().to(one)),
        Entry::read(
            "/tokenizer_info",
            web::get().to(tokenizer_info),
            web::head().to(tokenizer_info),
        ),
        Entry::read(
            "/openapi.json",
            web::get().to(docs::openapi),
            web::head().to(docs::openapi),
        ),
        Entry::read("/dashboard", web::get().to(dashboard), web::head().to(dashboard)),
        Entry::read("/docs", web::get().to(page), web::head().to(page)),
        Entry::read("/docs/{file}", web::get().to(file), web::head().to(file)),
    ]
}

/// Registers all paths.
pub fn configure(config: &mut ServiceConfig) {
    for entry in table() {
        config.service(entry.resource());
    }
}

/// Everything that is nowhere.
pub async fn unknown_path(request: HttpRequest) -> HttpResponse {
    let path = request.path();
    let shown = super::json::fields::quoted(path);
    let message = if UNBUILT.contains(&path) {
        format!("not supported yet: {path}")
    } else {
        format!("there is nothing under the path {shown}")
    };
    ApiError::new(ErrorKind::UnknownPath, message).respond(Family::of_path(path))
}

/// `GET /metrics`: the Prometheus text format.
async fn metrics(state: Data<HttpState>) -> HttpResponse {
    let status = state.backend.status();
    state.metrics.observe(&status);
    let Some(mut page) = (state.render_metrics)() else {
        return ApiError::new(ErrorKind::UnknownPath, METRICS_OFF).respond(Family::Tgi);
    };
    page.push_str(&nodes::render(&status));
    HttpResponse::build(StatusCode::OK)
        .content_type("text/plain; version=0.0.4; charset=utf-8")
        .body(page)
}
