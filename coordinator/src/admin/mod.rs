//! The admin plane: an HTTP listener of its own, with a token of its own, for operators.
//!
//! | path | what |
//! |---|---|
//! | `GET /dashboard` | a page for operators, which asks for the token; see [`dashboard`] |
//! | `GET /status`, `?since=N` | the cluster in one answer: nodes, pools, recent rates and latencies, and the last minutes |
//! | `GET /nodes`, `GET /nodes/{node}` | the connected nodes: role, blocks, jobs |
//! | `POST /nodes/{node}/drain` | the node gets nothing new and finishes what runs; `{"move": true}` moves what generates elsewhere at once |
//! | `POST /nodes/{node}/undrain` | it takes jobs again |
//! | `POST /nodes/{node}/role` | `{"role": "prefill" \| "decode" \| "both"}`: what it serves from now on |
//! | `GET /debug/requests?most=N` | requests that run and requests that ended last, with the time of each phase |
//! | `GET /debug/decisions/{request}` | what became of a request (by the id that the coordinator gave it, or by the client's `X-Request-Id`: then the newest one, and the ids of `others`), and why it went where it went, by attempt: the way (`handoff`, `local`, `prompt_only`, `resume`), `remote_us` and `local_us`, which the first two are predicted to cost, and every candidate |
//! | `GET /debug/blocks` | every block of every connected node by owner and age, held against what is booked here: `docs/admin.md` |
//!
//! Orders go to the node, which is the truth about itself: all its coordinators learn of them from its next report.
//! Errors are `{"error": "..."}` with 400, 401, 404, 409 or 503.

pub mod answers;
pub mod dashboard;
pub mod handlers;
pub mod status;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::Server;
use actix_web::web::{Data, PayloadConfig};
use actix_web::{App, HttpRequest, HttpServer, web};
use config::{AdminConfig, Secret};

use self::answers::Problem;
use crate::handle::CoordinatorHandle;
use crate::http::keys;
use crate::live::Live;

/// Longest body, in bytes.
const MAX_BODY: usize = 65_536;
/// Longest wait for a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// The paths that take a query.
const TAKE_QUERIES: [&str; 2] = ["/status", "/debug/requests"];

/// Whose admin plane it is.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// Name of the coordinator.
    pub node: String,
    /// The name that clients use for the model.
    pub model: String,
}

/// What the handlers share.
pub struct AdminState {
    handle: CoordinatorHandle,
    tokens: Vec<Secret>,
    live: Arc<Live>,
    about: About,
}

impl AdminState {
    /// An error unless `request` has a token, and no query where none is understood.
    fn admit(&self, request: &HttpRequest) -> Result<(), Problem> {
        match keys::bearer(request.headers()).and_then(|given| keys::find(&self.tokens, given)) {
            // What is not understood is not ignored.
            Some(_) if !TAKE_QUERIES.contains(&request.path()) && !request.query_string().is_empty() => {
                let query: String = request.query_string().chars().take(64).collect();
                let path = request.path();
                Err(Problem::Invalid(format!(
                    "{path} takes no query; this one is {query:?}"
                )))
            }
            Some(_) => Ok(()),
            None => Err(Problem::Unauthorised),
        }
    }
}

/// A server that has its port.
pub struct AdminFront {
    /// Runs until it is stopped; must be awaited or spawned.
    pub server: Server,
    /// Where it listens.
    pub address: SocketAddr,
}

/// Binds the configured address; `None` if there is none. `live`: the last minutes, which somebody samples. Must be called within a tokio runtime.
///
/// # Errors
/// The address cannot be bound.
pub fn bind(
    config: &AdminConfig,
    handle: CoordinatorHandle,
    live: Arc<Live>,
    about: About,
) -> io::Result<Option<AdminFront>> {
    if config.listen.is_empty() {
        return Ok(None);
    }
    let listener = TcpListener::bind(&config.listen)?;
    let address = listener.local_addr()?;
    let state = Data::new(AdminState {
        handle,
        tokens: config.tokens.clone(),
        live,
        about,
    });
    let server = HttpServer::new(move || {
        App::new()
            .app_data(state.clone())
            .app_data(PayloadConfig::new(MAX_BODY))
            .configure(routes)
            .default_service(web::to(handlers::unknown_path))
    })
    .workers(1)
    .max_connections(64)
    .client_request_timeout(HEAD_TIMEOUT)
    .shutdown_timeout(1)
    .disable_signals()
    .listen(listener)?
    .run();
    Ok(Some(AdminFront { server, address }))
}

fn routes(service: &mut web::ServiceConfig) {
    service
        .route("/dashboard", web::get().to(dashboard::page))
        .route("/dashboard/{file}", web::get().to(dashboard::file))
        .route("/status", web::get().to(status::status))
        .route("/nodes", web::get().to(handlers::nodes))
        .route("/nodes/{node}", web::get().to(handlers::node))
        .route("/nodes/{node}/drain", web::post().to(handlers::drain))
        .route("/nodes/{node}/undrain", web::post().to(handlers::undrain))
        .route("/nodes/{node}/role", web::post().to(handlers::role))
        .route("/debug/requests", web::get().to(handlers::requests))
        .route("/debug/blocks", web::get().to(handlers::blocks))
        .route("/debug/decisions/{request}", web::get().to(handlers::decisions));
}
