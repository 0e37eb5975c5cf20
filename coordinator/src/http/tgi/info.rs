//! `/health`, `/ping` and `/info`.

use actix_web::HttpResponse;
use actix_web::web::Data;
use protocol::ids::Role;
use serde_json::{Value, json};

use crate::http::error::{ApiError, ErrorKind, Family};
use crate::http::state::HttpState;

/// `GET /health`, `/ping`, `/`: 200 while a request sent now would be worked on.
pub async fn health(state: Data<HttpState>) -> HttpResponse {
    if state.backend.status().is_ready() {
        HttpResponse::Ok().finish()
    } else {
        ApiError::new(ErrorKind::Unhealthy, "unhealthy").respond(Family::Tgi)
    }
}

/// `GET /info`: what is served, within which limits. `sha` and `docker_label` are TGI's own and stay null.
pub async fn info(state: Data<HttpState>) -> HttpResponse {
    HttpResponse::Ok().json(describe(&state))
}

fn describe(state: &HttpState) -> Value {
    let model = &state.model;
    let dtype = match model.compute {
        config::Compute::Quantised => "quantised",
        config::Compute::Precise => "precise",
        config::Compute::Float32 => "float32",
    };
    let device = "cpu";
    let pipeline = "text-generation";
    let version = env!("CARGO_PKG_VERSION");
    let status = state.backend.status();
    // All nodes serve the same weights; without a node nobody has read them.
    let sha = status.nodes.first().map(|node| format!("{:032x}", node.weights_hash));
    let decoding = status.nodes.iter().filter(|node| node.role.may_act_as(Role::Decode));
    let pool_tokens: u64 = decoding.map(|node| node.pool_tokens).sum();
    json!({
        "model_id": model.name,
        "model_sha": sha,
        "model_dtype": dtype,
        "model_device_type": device,
        "model_pipeline_tag": pipeline,
        "max_concurrent_requests": state.limits.max_concurrent_requests,
        "max_best_of": state.limits.max_best_of,
        "max_stop_sequences": state.limits.max_stop_strings,
        "max_input_length": state.lengths.input,
        "max_total_tokens": state.lengths.total(),
        // A prompt that waits joins the next step, however many sequences generate.
        "waiting_served_ratio": 0.0,
        "max_batch_total_tokens": pool_tokens,
        "max_waiting_tokens": 1,
        "validation_workers": state.front.http_workers,
        "version": version,
        "sha": null,
        "docker_label": null,
        "models": [{
            "model_id": model.name,
            "model_sha": sha,
            "model_dtype": dtype,
            "model_device_type": device,
            "model_pipeline_tag": pipeline,
            "max_total_tokens": state.lengths.total(),
        }],
    })
}
