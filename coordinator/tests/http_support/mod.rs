//! A front door on a real port in front of a scripted cluster: what the HTTP tests share.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "every test file uses a part of it; nobody else does"
)]

pub mod backend;
pub mod client;
pub mod completions;
pub mod model;

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::rt::System;
use actix_web::web::Data;
use config::Config;
use coordinator::http::server::listen;
use coordinator::http::state::{HttpState, RenderMetrics};

use backend::Scripted;
use model_files::{ChatTemplate, TextModel};

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
    launch(&config, model::text(), Duration::from_secs(75))
}

/// Starts a front door whose model has a chat template, and room for a conversation.
pub fn start_chat(template: &str) -> Front {
    start_chat_with(template, |_| {})
}

/// Like [`start_chat`], with a changed configuration.
pub fn start_chat_with(template: &str, change: impl FnOnce(&mut Config)) -> Front {
    let mut text = model::text();
    text.chat_template = Some(ChatTemplate::new(template, "<s>", "</s>"));
    text.max_position_embeddings = 4_096;
    let mut config = config();
    config.limits.max_input_token_len = 2_000;
    config.limits.max_iter_times = 256;
    change(&mut config);
    launch(&config, text, Duration::from_secs(75))
}

/// Starts a front door that gives up on slow clients quickly, in front of a model that talks for long.
pub fn start_impatient() -> Front {
    let mut config = config();
    config.coordinator.client_stall_timeout_ms = 300;
    config.coordinator.request_head_timeout_ms = 300;
    config.limits.max_iter_times = 1_000_000;
    config.limits.max_seq_len = 1_000_000;
    let mut text = model::text();
    text.max_position_embeddings = 1_000_000;
    launch(&config, text, Duration::from_millis(200))
}

fn launch(config: &Config, text: TextModel, keep_alive: Duration) -> Front {
    let backend = Arc::new(Scripted::new(text.tokenizer.clone()));
    let state = HttpState::new(config, text, backend.clone(), render_metrics(config));
    let (send, receive) = mpsc::sync_channel(1);
    let thread = thread::spawn(move || {
        System::new().block_on(async move {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            let front = listen(Data::new(state), listener, keep_alive).expect("listening");
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
fn render_metrics(config: &Config) -> RenderMetrics {
    if !config.telemetry.metrics {
        return Arc::new(|| None);
    }
    static RENDER: OnceLock<RenderMetrics> = OnceLock::new();
    RENDER
        .get_or_init(|| {
            let (telemetry, measures) = (Config::default().telemetry, coordinator::metrics::measures());
            let handle = runtime::telemetry::install_metrics(&telemetry, &measures).expect("installed once");
            Arc::new(move || handle.render())
        })
        .clone()
}

/// Tries to listen with a configuration; the error if that is not possible.
pub fn try_listen(config: &Config) -> Result<(), String> {
    let text = model::text();
    let backend = Arc::new(Scripted::new(text.tokenizer.clone()));
    let state = HttpState::new(config, text, backend, render_metrics(config));
    System::new().block_on(async move {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let listening = listen(Data::new(state), listener, Duration::from_secs(75));
        listening.map(|_| ()).map_err(|error| error.to_string())
    })
}
