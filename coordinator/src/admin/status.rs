//! `GET /status`: the cluster in one answer, and with `?since=N` the last minutes as points from number N on.

use std::time::{Duration, Instant};

use actix_web::HttpRequest;
use actix_web::web::{Data, Json};
use serde_json::{Map, Value, json};

use super::AdminState;
use super::answers::{NodeAnswer, PoolAnswer, Problem};
use crate::core::series::{Point, ROLES, Rates, Series, Spread};
use crate::live::{Live, STEP};

/// `GET /status`, `?since=N`.
pub async fn status(request: HttpRequest, state: Data<AdminState>) -> Result<Json<Value>, Problem> {
    state.admit(&request)?;
    let query = request.query_string();
    let since = match query.strip_prefix("since=") {
        None if query.is_empty() => Some(None),
        None => None,
        Some(number) => number.parse::<u64>().ok().map(Some),
    };
    let since = since.ok_or_else(|| {
        let given: String = query.chars().take(64).collect();
        Problem::Invalid(format!(
            "the query is {given:?}; right is since=N with the number of a point"
        ))
    })?;
    Ok(Json(told(&state, since)))
}

fn told(state: &AdminState, since: Option<u64>) -> Value {
    let (status, live) = (state.handle.status(), &state.live);
    let now = live.now();
    let series = live.series();
    let nodes: Vec<NodeAnswer<'_>> = status.nodes.iter().map(NodeAnswer::from).collect();
    let pools: Vec<PoolAnswer> = status.pools.iter().map(PoolAnswer::from).collect();
    let gone = series.gone(now, &status);
    let gone: Vec<Value> = gone
        .iter()
        .map(|gone| json!({ "node": gone.node, "role": gone.role.as_str(), "age_ms": ms(gone.since) }))
        .collect();
    let mut answer = json!({
        "coordinator": {
            "node": state.about.node,
            "model": state.about.model,
            "version": env!("CARGO_PKG_VERSION"),
            "boot": live.boot(),
            "up_ms": ms(now.saturating_duration_since(live.started())),
        },
        "ready": status.is_ready(),
        "draining": status.draining,
        "queued": status.queued,
        "queued_bytes": status.queued_bytes,
        "running": status.running,
        "recent": recent(&series),
        "pools": pools,
        "nodes": nodes,
        "gone": gone,
    });
    if let (Some(since), Some(answer)) = (since, answer.as_object_mut()) {
        answer.insert("series".to_owned(), points(&series, live, since));
    }
    answer
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Milliseconds with three digits behind the point.
fn fine_ms(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

/// Three digits behind the point: more are noise, and bytes.
fn short(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

fn recent(series: &Series) -> Value {
    let (rates, window) = series.recent();
    let (ttft, itl) = series.spreads();
    let spread = |spread: Spread| {
        let of = |number: usize| spread.quantiles.map(|all| fine_ms(all[number]));
        json!({ "p50": of(0), "p90": of(1), "p99": of(2), "count": spread.count })
    };
    let Rates {
        answered,
        failed,
        prompt_tokens,
        generated_tokens,
    } = rates;
    json!({
        "window_ms": ms(window),
        "ttft_ms": spread(ttft),
        "itl_ms": spread(itl),
        "answered_per_s": short(answered),
        "failed_per_s": short(failed),
        "prompt_tokens_per_s": short(prompt_tokens),
        "generated_tokens_per_s": short(generated_tokens),
    })
}

/// The points as columns: a page of a quarter of an hour stays small, and charts want columns.
fn points(series: &Series, live: &Live, since: u64) -> Value {
    let (first, points) = series.since(since);
    let points: Vec<&Point> = points.collect();
    let column = |of: &dyn Fn(&Point) -> Value| -> Value { points.iter().map(|point| of(point)).collect() };
    let number = |of: fn(&Point) -> f64| column(&|point| json!(short(of(point))));
    let spread = |of: fn(&Point) -> Spread| -> Value {
        let names = ["p50", "p90", "p99"].into_iter().enumerate();
        let of_quantile = |at: usize| column(&|point| json!(of(point).quantiles.map(|all| fine_ms(all[at]))));
        let columns: Map<String, Value> = names.map(|(at, name)| (name.to_owned(), of_quantile(at))).collect();
        Value::Object(columns)
    };
    let kv = ROLES.into_iter().enumerate();
    let kv: Map<String, Value> = kv
        .map(|(at, role)| {
            let used = column(&|point| json!(point.kv_used[at].map(short)));
            (role.as_str().to_owned(), used)
        })
        .collect();
    let up = |at: Instant| ms(at.saturating_duration_since(live.started()));
    json!({
        "step_ms": ms(STEP),
        "first": first,
        "next": series.next(),
        "up_ms": column(&|point| json!(up(point.at))),
        "queued": column(&|point| json!(point.queued)),
        "running": column(&|point| json!(point.running)),
        "answered_per_s": number(|point| point.rates.answered),
        "failed_per_s": number(|point| point.rates.failed),
        "prompt_tokens_per_s": number(|point| point.rates.prompt_tokens),
        "generated_tokens_per_s": number(|point| point.rates.generated_tokens),
        "ttft_ms": spread(|point| point.ttft),
        "itl_ms": spread(|point| point.itl),
        "kv_used": kv,
    })
}
