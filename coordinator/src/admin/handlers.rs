//! The admin plane's requests.

use actix_web::web::{Bytes, Data, Json, Path};
use actix_web::{HttpRequest, HttpResponse};
use protocol::ids::{RequestId, Role};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::AdminState;
use super::answers::{NodeAnswer, PoolAnswer, Problem};
use crate::core::block_audit::AuditReport;
use crate::core::cluster::{Asked, Explained, Order};
use crate::core::types::ClusterStatus;

/// Requests shown of each kind if nobody says how many.
const SHOWN: usize = 100;
/// Most requests shown of each kind.
const MOST_SHOWN: usize = 10_000;

/// `GET /nodes`.
pub async fn nodes(request: HttpRequest, state: Data<AdminState>) -> Result<Json<Value>, Problem> {
    state.admit(&request)?;
    let status = state.handle.status();
    let nodes: Vec<NodeAnswer<'_>> = status.nodes.iter().map(NodeAnswer::from).collect();
    let pools: Vec<PoolAnswer> = status.pools.iter().map(PoolAnswer::from).collect();
    Ok(Json(json!({
        "nodes": nodes,
        "pools": pools,
        "queued": status.queued,
        "queued_bytes": status.queued_bytes,
        "running": status.running,
        "draining": status.draining,
        "ready": status.is_ready(),
    })))
}

/// `GET /nodes/{node}`.
pub async fn node(request: HttpRequest, state: Data<AdminState>, name: Path<String>) -> Result<Json<Value>, Problem> {
    state.admit(&request)?;
    Ok(Json(shown(&state.handle.status(), &name)?))
}

/// `POST /nodes/{node}/drain`.
pub async fn drain(
    request: HttpRequest,
    state: Data<AdminState>,
    name: Path<String>,
    body: Bytes,
) -> Result<HttpResponse, Problem> {
    state.admit(&request)?;
    let DrainBody { move_running } = parse(&body, r#"{"move": true}, {"move": false} or nothing"#)?;
    order(&state, &name, Order::Drain { move_running }).await
}

/// `POST /nodes/{node}/undrain`.
pub async fn undrain(
    request: HttpRequest,
    state: Data<AdminState>,
    name: Path<String>,
) -> Result<HttpResponse, Problem> {
    state.admit(&request)?;
    order(&state, &name, Order::Undrain).await
}

/// `POST /nodes/{node}/role`.
pub async fn role(
    request: HttpRequest,
    state: Data<AdminState>,
    name: Path<String>,
    body: Bytes,
) -> Result<HttpResponse, Problem> {
    state.admit(&request)?;
    let right = r#"{"role": "prefill"}, {"role": "decode"} or {"role": "both"}"#;
    let RoleBody { role } = parse(&body, right)?;
    let wanted = [Role::Prefill, Role::Decode, Role::Both]
        .into_iter()
        .find(|of| of.as_str() == role);
    let shown: String = role.chars().take(32).collect();
    let wanted = wanted.ok_or_else(|| Problem::Invalid(format!("`role` is {shown:?}; right is {right}")))?;
    order(&state, &name, Order::SetRole(wanted)).await
}

/// `GET /debug/decisions/{request}`.
pub async fn decisions(
    request: HttpRequest,
    state: Data<AdminState>,
    id: Path<String>,
) -> Result<Json<Value>, Problem> {
    state.admit(&request)?;
    let number = u128::from_str_radix(&id, 16).ok();
    let asked = match number.filter(|_| id.len() == 32) {
        Some(number) => Asked::Id(RequestId(number), id.clone()),
        None => Asked::Client(id.clone()),
    };
    let Explained {
        record,
        decisions,
        others,
    } = state.handle.explain(asked).await?;
    if record.is_none() && decisions.is_empty() {
        let shown: String = id.chars().take(64).collect();
        return Err(Problem::NotFound(format!(
            "nothing is kept about request {shown:?}; right is the answer's x-request-id, or the one that the client sent"
        )));
    }
    let others: Vec<String> = others.iter().map(ToString::to_string).collect();
    Ok(Json(
        json!({ "request": record, "decisions": decisions, "others": others }),
    ))
}

/// `GET /debug/requests`, `?most=N`.
pub async fn requests(request: HttpRequest, state: Data<AdminState>) -> Result<Json<Value>, Problem> {
    state.admit(&request)?;
    let query = request.query_string();
    let most = match query.strip_prefix("most=") {
        None if query.is_empty() => Some(SHOWN),
        None => None,
        Some(number) => number.parse().ok().filter(|most| (1..=MOST_SHOWN).contains(most)),
    };
    let most = most.ok_or_else(|| {
        let given: String = query.chars().take(64).collect();
        Problem::Invalid(format!(
            "the query is {given:?}; right is most=N with N from 1 to {MOST_SHOWN}"
        ))
    })?;
    let (running, ended) = state.handle.recent_requests(most).await?;
    Ok(Json(json!({ "running": running, "ended": ended })))
}

/// `GET /debug/blocks`.
pub async fn blocks(request: HttpRequest, state: Data<AdminState>) -> Result<Json<AuditReport>, Problem> {
    state.admit(&request)?;
    Ok(Json(state.handle.audit_blocks().await??))
}

/// Any other path.
pub async fn unknown_path(request: HttpRequest, state: Data<AdminState>) -> Result<HttpResponse, Problem> {
    state.admit(&request)?;
    Err(Problem::NotFound(format!(
        "{} {} is not an admin path",
        request.method(),
        request.path()
    )))
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct DrainBody {
    #[serde(rename = "move")]
    move_running: bool,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RoleBody {
    role: String,
}

/// The body; one that is empty has only defaults.
fn parse<T: DeserializeOwned + Default>(body: &[u8], right: &str) -> Result<T, Problem> {
    if body.is_empty() {
        return Ok(T::default());
    }
    serde_json::from_slice(body)
        .map_err(|error| Problem::Invalid(format!("the body is wrong: {error}; right is {right}")))
}

/// Gives an order; the answer shows the node as it was when the order left.
async fn order(state: &AdminState, name: &str, order: Order) -> Result<HttpResponse, Problem> {
    state.handle.order(name.to_owned(), order).await??;
    Ok(HttpResponse::Accepted().json(shown(&state.handle.status(), name)?))
}

fn shown(status: &ClusterStatus, name: &str) -> Result<Value, Problem> {
    let node = status.nodes.iter().find(|node| node.node == name);
    let node = node.ok_or_else(|| Problem::NotFound(format!("no node named {name:?} is connected")))?;
    serde_json::to_value(NodeAnswer::from(node)).map_err(|error| Problem::Unavailable(error.to_string()))
}

impl From<crate::core::types::ServeError> for Problem {
    fn from(error: crate::core::types::ServeError) -> Self {
        Self::Unavailable(error.message)
    }
}
