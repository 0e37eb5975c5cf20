//! The coordinator's process: configuration, identity, text model, control plane, HTTP; and their orderly end.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use actix_web::web::Data;
use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use config::{Config, ConfigArgs, DiscoveryMethod};
use coordinator::admin::{self, About, AdminFront};
use coordinator::certs::CertsCommand;
use coordinator::console::ConsoleCommand;
use coordinator::control;
use coordinator::core::nodes::TextIdentity;
use coordinator::driver::{Driver, DriverSettings, settings};
use coordinator::handle::CoordinatorHandle;
use coordinator::http::server::{self, HttpFront};
use coordinator::http::state::HttpState;
use coordinator::live;
use discovery::Registration;
use model_files::{ModelFiles, TextModel};
use model_hub::Need;
use protocol::ids::Role;
use runtime::clock::Clock;
use runtime::identity::Identity;
use runtime::quic::QuicEndpoint;
use runtime::renewal;
use runtime::shutdown::Shutdown;
use runtime::telemetry;
use runtime::traces::{self, Service};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Most threads of the driver, of links and jobs. HTTP has threads of its own.
const MOST_WORKER_THREADS: usize = 4;
/// One of them for so many cores. On few cores one is enough, and a request's tasks, which wake each other, wake no second
/// thread for it: `scripts/bench coordinator` adds a tenth less to a request than with two.
const CORES_A_WORKER: usize = 4;
/// Once every request has ended, its answer has this long to reach its client.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// The front door of a Baton cluster.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// The certificates that let processes into the cluster.
    #[command(subcommand)]
    Certs(CertsCommand),
    #[command(flatten)]
    Console(ConsoleCommand),
}

#[allow(
    clippy::print_stderr,
    reason = "the log may not be set up yet, and this line is for whoever started the process"
)]
fn main() -> ExitCode {
    match start(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("coordinator: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// The error and its causes, each said once: some errors name their cause themselves.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.is_empty() {
            line = cause;
        } else if !line.ends_with(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}

#[allow(
    clippy::print_stdout,
    reason = "what was asked for on the command line is answered on standard output"
)]
fn start(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Some(Command::Certs(certs)) => {
            print!("{}", certs.run()?);
            return Ok(ExitCode::SUCCESS);
        }
        Some(Command::Console(command)) => return Ok(coordinator::console::run(command)),
        None => {}
    }
    let config = config::load(&cli.config)?;
    if let Some(answer) = cli.config.answer(&config)? {
        print!("{answer}");
        return Ok(ExitCode::SUCCESS);
    }
    telemetry::init_logging(&config.telemetry)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(worker_threads())
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    runtime.block_on(run(config))?;
    Ok(ExitCode::SUCCESS)
}

fn worker_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (cores / CORES_A_WORKER).clamp(1, MOST_WORKER_THREADS)
}

async fn run(mut config: Config) -> anyhow::Result<()> {
    let shutdown = Shutdown::on_signals().context("cannot install signal handlers")?;
    let metrics = telemetry::install_metrics(&config.telemetry, &coordinator::metrics::measures())?;
    let endpoint = open_endpoint(&config).await?;
    tokio::select! {
        here = model_hub::localise(&mut config.model, Need::Text) => here.context("model.path")?,
        () = shutdown.wait() => {
            endpoint.close("the coordinator stops").await;
            return Ok(());
        }
    }
    let text = load_text(&config)?;
    let (driver, handle, to_driver) = new_driver(&config, &text, shutdown.clone())?;
    tokio::spawn(metrics.clone().fold());
    let render = Arc::new(move || metrics.render());
    let state = Data::new(HttpState::new(&config, text, Arc::new(handle.clone()), render));
    let admin = open_admin(&config, &state, &endpoint, handle)?;
    let front = open_http(&config, state)?;
    let service = Service {
        role: Role::Coordinator.as_str(),
        instance: endpoint.identity().node.0.clone(),
    };
    let exported = traces::install(&config.telemetry, &service)?;
    tracing::info!(http = %front.address, control = %endpoint.local_addr()?, "ready");

    let registered = register(&config, &endpoint, shutdown.clone())?;
    let hello_timeout = Duration::from_millis(config.cluster.connect_timeout_ms);
    let end_of_control = CancellationToken::new();
    let control = control::serve(Arc::clone(&endpoint), to_driver, hello_timeout, end_of_control.clone());
    let control = tokio::spawn(control);
    let http = front.handle();
    let mut server = tokio::spawn(front.server);
    let mut driver = tokio::spawn(driver.run());
    if let Some(admin) = admin {
        tracing::info!(admin = %admin.address, "operators");
        tokio::spawn(admin.server);
    }

    tokio::select! {
        // In this order: the driver's end may follow the request at once.
        biased;
        () = shutdown.wait() => {}
        ended = &mut server => bail!("the HTTP server ended by itself: {ended:?}"),
        ended = &mut driver => bail!("the driver ended by itself: {ended:?}"),
    }
    // No new connections from here on; `stop` ends when the last answer is out.
    let stopped = tokio::spawn(http.stop(true));
    driver.await.context("the driver failed")?;
    if tokio::time::timeout(LAST_ANSWERS, stopped).await.is_err() {
        tracing::debug!("connections without requests were still open");
    }
    if let Some(registered) = registered {
        registered.await.context("discovery failed")?;
    }
    end_of_control.cancel();
    control.await.context("the control plane failed")?;
    endpoint.close("the coordinator stops").await;
    server.abort();
    if let Some(exported) = exported {
        exported.close().await;
    }
    tracing::info!("stopped");
    Ok(())
}

async fn open_endpoint(config: &Config) -> anyhow::Result<Arc<QuicEndpoint>> {
    let identity = Identity::load(&config.cluster)?;
    let peer = identity.peer();
    if peer.role != Role::Coordinator {
        bail!("cluster.cert_path names {peer}, must name a coordinator");
    }
    let listen = &config.coordinator.listen;
    let validity = identity.validity();
    let endpoint = QuicEndpoint::bind(Arc::new(identity), listen, &config.cluster, &config.transfer).await;
    let endpoint = Arc::new(endpoint.context("coordinator.listen")?);
    renewal::watch(&endpoint, &config.cluster, validity);
    Ok(endpoint)
}

/// Makes the coordinator found in etcd, if nodes look there.
fn register(config: &Config, endpoint: &QuicEndpoint, shutdown: Shutdown) -> anyhow::Result<Option<JoinHandle<()>>> {
    if config.discovery.method != DiscoveryMethod::Etcd {
        return Ok(None);
    }
    let address = match config.coordinator.advertise.as_str() {
        "" => endpoint.local_addr()?.to_string(),
        advertised => advertised.to_owned(),
    };
    let registration = Registration::coordinator(&config.discovery, &endpoint.identity().node.0, &address);
    Ok(Some(discovery::register(&config.discovery, registration, shutdown)?))
}

fn load_text(config: &Config) -> anyhow::Result<TextModel> {
    let path = &config.model.path;
    if path.is_empty() {
        bail!("model.path is not set: a GGUF file or a model directory is needed for its tokenizer");
    }
    let files = ModelFiles::open_text(path)?;
    let mut text = files.text()?;
    text.max_position_embeddings = files.positions(config.model.long_texts)?;
    Ok(text)
}

fn new_driver(
    config: &Config,
    text: &TextModel,
    shutdown: Shutdown,
) -> anyhow::Result<(Driver, CoordinatorHandle, tokio::sync::mpsc::Sender<control::FromNode>)> {
    let vocab_size = u32::try_from(text.vocab_size).context("the model's vocabulary has more than 2^32 tokens")?;
    let identity = TextIdentity {
        tokenizer_hash: text.tokenizer_hash,
        vocab_size,
        adapters: config.model.named_adapters().map(|(name, _)| name.to_owned()).collect(),
    };
    let front = &config.coordinator;
    let driver = DriverSettings {
        stream_buffer_tokens: front.stream_buffer_tokens,
        client_stall_timeout: Duration::from_millis(front.client_stall_timeout_ms),
        drain_timeout: Duration::from_millis(front.drain_timeout_ms),
        log_requests: config.telemetry.log_requests,
    };
    let core = settings::cluster(config, identity);
    Ok(Driver::new(
        core,
        driver,
        Arc::new(text.tokenizer.clone()),
        Clock,
        shutdown,
    ))
}

/// The listener for operators, if there is one, and what it shows of the last minutes.
fn open_admin(
    config: &Config,
    state: &Data<HttpState>,
    endpoint: &QuicEndpoint,
    handle: CoordinatorHandle,
) -> anyhow::Result<Option<AdminFront>> {
    let live = state.metrics.live();
    let about = About {
        node: endpoint.identity().node.0.clone(),
        model: state.model.name.clone(),
    };
    let admin = admin::bind(&config.admin, handle.clone(), Arc::clone(&live), about)
        .with_context(|| format!("admin.listen = {}", config.admin.listen))?;
    if let Some(admin) = &admin {
        state.admin.get_or_init(|| admin.address);
        tokio::spawn(live::keep_sampling(live, handle));
    }
    Ok(admin)
}

fn open_http(config: &Config, state: Data<HttpState>) -> anyhow::Result<HttpFront> {
    let (host, port) = (&config.coordinator.http_host, config.coordinator.http_port);
    server::bind(state).with_context(|| format!("cannot listen for HTTP on {host}:{port}"))
}
