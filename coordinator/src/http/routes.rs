//! Which path is answered by whom. Everything else is a JSON error in the path's family.

use actix_web::http::StatusCode;
use actix_web::web::{self, Data, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse, Resource};

use super::error::{ApiError, ErrorKind, Family};
use super::state::HttpState;
use super::{openai, tgi, tokens};

/// Paths of the API that are not built yet: told apart from typing errors.
const UNBUILT: [&str; 1] = ["/v1/embeddings"];

/// Registers all paths.
pub fn configure(config: &mut ServiceConfig) {
    let post_or_get = "GET, HEAD, POST, OPTIONS";
    config
        .service(only(web::resource("/generate"), "POST, OPTIONS").route(web::post().to(tgi::handlers::generate)))
        .service(
            only(web::resource("/generate_stream"), "POST, OPTIONS")
                .route(web::post().to(tgi::handlers::generate_stream)),
        )
        .service(only(web::resource("/invocations"), "POST, OPTIONS").route(web::post().to(tgi::handlers::root)))
        .service(
            only(web::resource("/"), post_or_get)
                .route(web::post().to(tgi::handlers::root))
                .route(web::get().to(tgi::info::health))
                .route(web::head().to(tgi::info::health)),
        )
        .service(
            only(web::resource("/v1/completions"), "POST, OPTIONS")
                .route(web::post().to(openai::handlers::completions)),
        )
        .service(
            only(web::resource("/v1/chat/completions"), "POST, OPTIONS")
                .route(web::post().to(openai::chat::handlers::chat_completions)),
        );
    for (path, route) in [
        ("/tokenize", web::post().to(tokens::tokenize)),
        ("/detokenize", web::post().to(tokens::detokenize)),
    ] {
        config.service(only(web::resource(path), "POST, OPTIONS").route(route));
    }
    read(
        config,
        "/tokenizer_info",
        web::get().to(tokens::tokenizer_info),
        web::head().to(tokens::tokenizer_info),
    );
    read(
        config,
        "/health",
        web::get().to(tgi::info::health),
        web::head().to(tgi::info::health),
    );
    read(
        config,
        "/ping",
        web::get().to(tgi::info::health),
        web::head().to(tgi::info::health),
    );
    read(
        config,
        "/info",
        web::get().to(tgi::info::info),
        web::head().to(tgi::info::info),
    );
    read(config, "/metrics", web::get().to(metrics), web::head().to(metrics));
    read(
        config,
        "/v1/models",
        web::get().to(openai::models::list),
        web::head().to(openai::models::list),
    );
    read(
        config,
        "/v1/models/{id:.+}",
        web::get().to(openai::models::one),
        web::head().to(openai::models::one),
    );
}

/// A path that is only read.
fn read(config: &mut ServiceConfig, path: &str, get: actix_web::Route, head: actix_web::Route) {
    config.service(only(web::resource(path), "GET, HEAD, OPTIONS").route(get).route(head));
}

/// Answers other methods than those of the routes that follow.
fn only(resource: Resource, allow: &'static str) -> Resource {
    resource.default_service(web::to(move |request: HttpRequest| async move {
        let message = format!("{} is not possible here; allowed: {allow}", request.method());
        ApiError::new(ErrorKind::WrongMethod { allow }, message).respond(Family::of_path(request.path()))
    }))
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
    state.metrics.observe(&state.backend.status());
    HttpResponse::build(StatusCode::OK)
        .content_type("text/plain; version=0.0.4; charset=utf-8")
        .body((state.render_metrics)())
}
