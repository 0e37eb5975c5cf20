//! `GET /v1/models` and `GET /v1/models/{id}`.

use actix_web::HttpResponse;
use actix_web::web::{Data, Path};
use serde_json::{Value, json};

use super::handlers::unknown_model;
use crate::http::error::Family;
use crate::http::state::HttpState;

/// `GET /v1/models`.
pub async fn list(state: Data<HttpState>) -> HttpResponse {
    let models: Vec<Value> = state.model.names().map(|name| describe(name, &state)).collect();
    HttpResponse::Ok().json(json!({ "object": "list", "data": models }))
}

/// `GET /v1/models/{id}`.
pub async fn one(id: Path<String>, state: Data<HttpState>) -> HttpResponse {
    if state.model.is_called(&id) {
        HttpResponse::Ok().json(describe(&id, &state))
    } else {
        unknown_model(&id).respond(Family::OpenAi)
    }
}

/// An adapter's parent is the model it changes; its own files are nobody's business.
fn describe(name: &str, state: &HttpState) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": state.started_at,
        "owned_by": "baton",
        "root": state.model.name,
        "parent": state.model.adapter(name).map(|_| state.model.name.as_str()),
        "max_model_len": state.lengths.total(),
    })
}
