//! A front door on a real port in front of a scripted cluster: what the HTTP tests share.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "every test file uses a part of it; nobody else does"
)]

pub mod backend;
pub mod client;
pub mod model;

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;

use actix_web::dev::ServerHandle;
use actix_web::rt::System;
use actix_web::web::Data;
use config::Config;
use coordinator::http::server::listen;
use coordinator::http::state::{HttpState, RenderMetrics};

use backend::Scripted;

/// A running front door; stops when it is dropped.
pub struct Front {
    pub address: SocketAddr,
    pub backend: Arc<Scripted>,
    handle: ServerHandle,
    thread: Option<thread::JoinHandle<()>>,
}

/// The configuration of the tests: small limits, one worker.
pub fn config() -> Config {
    let mut config = Config::default();
    config.model.model_name = "tiny".to_owned();
    config.model.model_aliases = vec!["org/tiny-alias".to_owned()];
    config.limits.max_body_bytes = 1 << 20;
    config.limits.max_input_token_len = 200;
    config.limits.max_iter_times = 64;
    config.coordinator.http_workers = 1;
    config
}

/// Starts a front door with the tests' configuration.
pub fn start() -> Front {
    start_with(|_| {})
}

/// Starts a front door with a changed configuration.
pub fn start_with(change: impl FnOnce(&mut Config)) -> Front {
    let mut config = config();
    change(&mut config);
    let backend = Arc::new(Scripted::new(model::text().tokenizer));
    let state = HttpState::new(&config, model::text(), backend.clone(), render_metrics());
    let (send, receive) = mpsc::sync_channel(1);
    let thread = thread::spawn(move || {
        System::new().block_on(async move {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            let front = listen(Data::new(state), listener).expect("listening");
            send.send((front.address, front.handle()))
                .expect("the test waits for it");
            front.server.await.expect("served until stopped");
        });
    });
    let (address, handle) = receive.recv().expect("the server starts");
    Front {
        address,
        backend,
        handle,
        thread: Some(thread),
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        // The stop command is queued by the call; awaiting it would only wait for the end, which join does.
        drop(self.handle.stop(false));
        let ended = self.thread.take().map(thread::JoinHandle::join);
        assert!(
            thread::panicking() || !matches!(ended, Some(Err(_))),
            "the server thread panicked"
        );
    }
}

/// The recorder is one per process.
fn render_metrics() -> RenderMetrics {
    static RENDER: OnceLock<RenderMetrics> = OnceLock::new();
    RENDER
        .get_or_init(|| {
            let handle = runtime::telemetry::install_metrics().expect("installed once");
            Arc::new(move || handle.render())
        })
        .clone()
}
