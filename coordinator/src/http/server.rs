//! The HTTP server: listeners, limits of connections.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::{Server, ServerHandle};
use actix_web::http::KeepAlive;
use actix_web::web::Data;
use actix_web::{App, HttpServer, middleware};
use config::CoordinatorConfig;

use super::connection::{Connection, ConnectionLimits};
use super::envelope::envelope;
use super::routes::{configure, unknown_path};
use super::state::HttpState;
use super::tls::{Certificates, follow};

/// How long an unused connection stays open. Longer than the usual 60 s of proxies in front, so that they end first.
const KEEP_ALIVE: Duration = Duration::from_secs(75);
/// How long a client may take to read an early answer to a body it still sends.
const LINGER: Duration = Duration::from_secs(2);

/// A server that has its port.
pub struct HttpFront {
    /// Runs until it is stopped; must be awaited or spawned.
    pub server: Server,
    /// Where it listens.
    pub address: SocketAddr,
}

impl HttpFront {
    /// Stops it: `handle().stop(true)` lets running requests end, within the configured drain time.
    pub fn handle(&self) -> ServerHandle {
        self.server.handle()
    }
}

/// Binds the configured address and starts the worker threads. Must be called within a tokio runtime.
///
/// # Errors
/// The address cannot be bound.
pub fn bind(state: Data<HttpState>) -> io::Result<HttpFront> {
    let listener = TcpListener::bind((state.front.http_host.as_str(), state.front.http_port))?;
    listen(state, listener, KEEP_ALIVE)
}

/// Like [`bind`], on a bound socket. `keep_alive`: how long an unused connection stays open.
///
/// # Errors
/// The socket cannot be listened on.
pub fn listen(state: Data<HttpState>, listener: TcpListener, keep_alive: Duration) -> io::Result<HttpFront> {
    let address = listener.local_addr()?;
    let front = &state.front;
    let millis = Duration::from_millis;
    let head = millis(front.request_head_timeout_ms);
    let limits = ConnectionLimits::new(keep_alive, head, millis(front.client_stall_timeout_ms));
    let clock = state.clock;
    let workers = front.http_workers;
    let drain = front.drain_timeout_ms.div_ceil(1_000);
    let per_worker = state
        .limits
        .max_concurrent_requests
        .saturating_mul(8)
        .clamp(256, 25_000);
    let certificates = certificates(front)?;
    let server = HttpServer::new(move || {
        App::new()
            .app_data(state.clone())
            .wrap(middleware::from_fn(envelope))
            .configure(configure)
            .default_service(actix_web::web::to(unknown_path))
    })
    .workers(workers)
    .max_connections(per_worker)
    .keep_alive(KeepAlive::Timeout(keep_alive))
    .client_request_timeout(head)
    .client_disconnect_timeout(LINGER)
    // A client that has closed its side is gone: waiting for it to read an answer would keep its request running on the
    // nodes, and a closed connection looks no different.
    .h1_allow_half_closed(false)
    .tcp_nodelay(true)
    .shutdown_timeout(drain)
    .disable_signals()
    .on_connect(move |io, data| Connection::watch(io, data, limits, clock));
    let server = match certificates {
        Some(certificates) => {
            let settings = certificates.server_config().map_err(io::Error::other)?;
            tokio::spawn(follow(Arc::downgrade(&certificates)));
            server.listen_rustls_0_23(listener, settings)?
        }
        None => server.listen(listener)?,
    };
    Ok(HttpFront {
        server: server.run(),
        address,
    })
}

/// What clients are shown, where they are served over HTTPS.
fn certificates(front: &CoordinatorConfig) -> io::Result<Option<Arc<Certificates>>> {
    if front.tls_cert_path.is_empty() {
        return Ok(None);
    }
    let certificates = Certificates::load(&front.tls_cert_path, &front.tls_key_path);
    Ok(Some(Arc::new(certificates.map_err(io::Error::other)?)))
}
