//! Values that are legal alone and wrong together.

use toml::Value;

use crate::Config;
use crate::error::{ConfigError, Origin, Setting};
use crate::load::Layers;
use crate::types::{DiscoveryMethod, cores};

/// A field's address.
type Key = (&'static str, &'static str);

/// What the kernel takes in one send, in bytes: the largest UDP payload.
const MAX_SEND_BYTES: u64 = 65_507;
/// Datagrams that the QUIC library puts into one send.
const DATAGRAMS_PER_SEND: u64 = 10;

/// Two fields, and what must hold between them.
struct Conflict {
    first: Key,
    second: Key,
    expected: &'static str,
}

/// Checks what must hold between fields.
pub(crate) fn check_together(config: &Config, layers: &Layers) -> Result<(), ConfigError> {
    let Some(conflict) = first_conflict(config, layers) else {
        return Ok(());
    };
    let values = toml::Table::try_from(config).map_err(|error| ConfigError::Internal {
        reason: error.to_string(),
    })?;
    let setting = |(section, field): Key| {
        let value = values.get(section).and_then(|section| section.get(field));
        let value = value.map_or_else(String::new, Value::to_string);
        Box::new(Setting {
            origin: layers.origin(section, field),
            key: format!("{section}.{field}"),
            value,
        })
    };
    let (mut first, mut second) = (setting(conflict.first), setting(conflict.second));
    // The value somebody wrote is the one to point at.
    if first.origin == Origin::Default {
        std::mem::swap(&mut first, &mut second);
    }
    Err(ConfigError::Contradiction {
        first,
        second,
        expected: conflict.expected.to_owned(),
    })
}

fn first_conflict(config: &Config, layers: &Layers) -> Option<Conflict> {
    let rules = engine_rules(config, layers)
        .into_iter()
        .chain(model_rules(config))
        .chain(transfer_rules(config))
        .chain(admin_rules(config))
        .chain(link_rules(config))
        .chain(discovery_rules(config));
    rules
        .map(|(holds, first, second, expected)| {
            (
                holds,
                Conflict {
                    first,
                    second,
                    expected,
                },
            )
        })
        .find_map(|(holds, conflict)| (!holds).then_some(conflict))
}

/// Whether a rule holds, the two fields it is about, and what would be right.
type Rule = (bool, Key, Key, &'static str);

fn engine_rules(config: &Config, layers: &Layers) -> [Rule; 8] {
    let (engine, limits) = (&config.engine, &config.limits);
    // A pool given in bytes has as many blocks as the model's layout allows, which the node finds out.
    let in_bytes = engine.kv_pool_bytes > 0;
    let rank = |field| layers.origin("engine", field).rank();
    [
        // Of different layers the stronger one holds: see `Layers::into_config`.
        (
            !in_bytes || rank("kv_pool_bytes") > rank("kv_pool_tokens"),
            ("engine", "kv_pool_bytes"),
            ("engine", "kv_pool_tokens"),
            "the pool's size is given once in a file, in the environment, or by arguments: in tokens or in bytes",
        ),
        (
            in_bytes || engine.kv_pool_tokens.is_multiple_of(engine.kv_block_tokens),
            ("engine", "kv_pool_tokens"),
            ("engine", "kv_block_tokens"),
            "kv_pool_tokens must be a whole number of blocks",
        ),
        (
            engine.prefill_chunk_tokens <= engine.max_batch_tokens,
            ("engine", "prefill_chunk_tokens"),
            ("engine", "max_batch_tokens"),
            "a chunk must fit in a step: prefill_chunk_tokens is at most max_batch_tokens",
        ),
        (
            rank("mixed_prefill_tokens") == 0 || engine.mixed_prefill_tokens <= engine.max_batch_tokens,
            ("engine", "mixed_prefill_tokens"),
            ("engine", "max_batch_tokens"),
            "what prompts get of a step must fit in it: mixed_prefill_tokens is at most max_batch_tokens",
        ),
        (
            engine.max_num_seqs <= engine.max_batch_tokens,
            ("engine", "max_num_seqs"),
            ("engine", "max_batch_tokens"),
            "each sequence of a step needs a row: max_num_seqs is at most max_batch_tokens",
        ),
        (
            engine.cores.is_empty() || cores(&engine.cores).is_some_and(|cores| cores.len() == engine.threads),
            ("engine", "cores"),
            ("engine", "threads"),
            "every compute thread needs a core of its own: cores is empty, or names as many as threads says",
        ),
        (
            limits.max_stop_string_chars <= limits.max_stop_total_chars,
            ("limits", "max_stop_string_chars"),
            ("limits", "max_stop_total_chars"),
            "one stop string must fit in the total: max_stop_string_chars is at most max_stop_total_chars",
        ),
        (
            limits.max_body_bytes <= limits.max_queued_bytes,
            ("limits", "max_body_bytes"),
            ("limits", "max_queued_bytes"),
            "the queue must hold the largest body: max_queued_bytes is at least max_body_bytes",
        ),
    ]
}

fn model_rules(config: &Config) -> [Rule; 2] {
    let model = &config.model;
    let free = |taken: &dyn Fn(&str) -> bool| !model.named_adapters().any(|(name, _)| taken(name));
    [
        (
            free(&|name| name == model.model_name),
            ("model", "adapters"),
            ("model", "model_name"),
            "an adapter has another name than the model",
        ),
        (
            free(&|name| model.model_aliases.iter().any(|alias| alias == name)),
            ("model", "adapters"),
            ("model", "model_aliases"),
            "an adapter has another name than the model",
        ),
    ]
}

fn admin_rules(config: &Config) -> [Rule; 1] {
    let admin = &config.admin;
    [(
        admin.listen.is_empty() || !admin.tokens.is_empty(),
        ("admin", "listen"),
        ("admin", "tokens"),
        "operators need a token: tokens has at least one, or listen is empty",
    )]
}

fn transfer_rules(config: &Config) -> [Rule; 3] {
    let transfer = &config.transfer;
    let datagram = u64::from(transfer.datagram_bytes);
    [
        (
            transfer.frame_bytes <= transfer.staging_bytes,
            ("transfer", "frame_bytes"),
            ("transfer", "staging_bytes"),
            "staging must hold at least one frame: staging_bytes is at least frame_bytes",
        ),
        // Larger sends fail in the kernel, and the link then falls back to the smallest datagrams.
        (
            !transfer.gso || datagram * DATAGRAMS_PER_SEND <= MAX_SEND_BYTES,
            ("transfer", "datagram_bytes"),
            ("transfer", "gso"),
            "with gso a send of ten datagrams must fit in 65507 bytes: datagram_bytes is at most 6550, or gso = false",
        ),
        // A congestion window smaller than two datagrams lets none out.
        (
            transfer.initial_window_bytes >= 2 * datagram,
            ("transfer", "initial_window_bytes"),
            ("transfer", "datagram_bytes"),
            "initial_window_bytes is at least twice datagram_bytes, or nothing can be sent",
        ),
    ]
}

fn link_rules(config: &Config) -> [Rule; 7] {
    let (cluster, node, front) = (&config.cluster, &config.node, &config.coordinator);
    let any_address = node
        .listen
        .parse::<std::net::SocketAddr>()
        .is_ok_and(|address| address.ip().is_unspecified());
    let both = |one: &str, other: &str| one.is_empty() == other.is_empty();
    [
        (
            cluster.keep_alive_ms.saturating_mul(2) <= cluster.idle_timeout_ms,
            ("cluster", "keep_alive_ms"),
            ("cluster", "idle_timeout_ms"),
            "two signs of life must fit in the timeout: keep_alive_ms is at most half of idle_timeout_ms",
        ),
        (
            both(&cluster.cert_path, &cluster.key_path),
            ("cluster", "cert_path"),
            ("cluster", "key_path"),
            "a certificate and its key are given together",
        ),
        (
            both(&front.tls_cert_path, &front.tls_key_path),
            ("coordinator", "tls_cert_path"),
            ("coordinator", "tls_key_path"),
            "a certificate and its key are given together",
        ),
        (
            both(&cluster.cert_path, &cluster.ca_cert_path),
            ("cluster", "cert_path"),
            ("cluster", "ca_cert_path"),
            "a certificate and its authority are given together",
        ),
        (
            node.reconnect_min_ms <= node.reconnect_max_ms,
            ("node", "reconnect_min_ms"),
            ("node", "reconnect_max_ms"),
            "reconnect_min_ms is at most reconnect_max_ms",
        ),
        (
            !any_address || !node.advertise.is_empty(),
            ("node", "listen"),
            ("node", "advertise"),
            "a node bound to every address must be told which one others dial: set advertise to host:port",
        ),
        (
            node.load_report_interval_ms <= cluster.idle_timeout_ms,
            ("node", "load_report_interval_ms"),
            ("cluster", "idle_timeout_ms"),
            "a load must be reported before the link counts as lost: load_report_interval_ms is at most idle_timeout_ms",
        ),
    ]
}

fn discovery_rules(config: &Config) -> [Rule; 7] {
    let (discovery, front) = (&config.discovery, &config.coordinator);
    let etcd = discovery.method == DiscoveryMethod::Etcd;
    let tls = discovery.etcd_endpoints.iter().any(|url| url.starts_with("https://"));
    let both = |one: &str, other: &str| one.is_empty() == other.is_empty();
    let any_address = front
        .listen
        .parse::<std::net::SocketAddr>()
        .is_ok_and(|address| address.ip().is_unspecified());
    let key = |field| ("discovery", field);
    [
        (
            discovery.method != DiscoveryMethod::Dns || !discovery.dns_names.is_empty(),
            key("method"),
            key("dns_names"),
            "dns needs at least one name: set dns_names to host:port",
        ),
        (
            !etcd || !discovery.etcd_endpoints.is_empty(),
            key("method"),
            key("etcd_endpoints"),
            "etcd needs at least one address: set etcd_endpoints to http://host:port or https://host:port",
        ),
        (
            !etcd || !any_address || !front.advertise.is_empty(),
            ("coordinator", "listen"),
            ("coordinator", "advertise"),
            "a coordinator bound to every address must be told which one it registers in etcd: set advertise to host:port",
        ),
        (
            !tls || !discovery.etcd_ca_cert_path.is_empty(),
            key("etcd_endpoints"),
            key("etcd_ca_cert_path"),
            "an https endpoint needs the certificate that vouches for it: set etcd_ca_cert_path",
        ),
        (
            both(&discovery.etcd_cert_path, &discovery.etcd_key_path),
            key("etcd_cert_path"),
            key("etcd_key_path"),
            "a certificate and its key are given together",
        ),
        (
            both(&discovery.etcd_user, &discovery.etcd_password_path),
            key("etcd_user"),
            key("etcd_password_path"),
            "a user and the password are given together",
        ),
        (
            discovery.etcd_lease_ms % 1_000 == 0 && discovery.etcd_timeout_ms * 2 <= discovery.etcd_lease_ms,
            key("etcd_lease_ms"),
            key("etcd_timeout_ms"),
            "a lease is whole seconds and outlives two waits for an answer: etcd_lease_ms is a multiple of 1000 and at \
             least twice etcd_timeout_ms",
        ),
    ]
}
