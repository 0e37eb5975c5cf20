//! The sections and their fields. Each field: one default, one line with its unit, its legal values.

use crate::field::{Kind, Text, int, millis, section};
use crate::types::{
    BestOf, Compute, DiscoveryMethod, KvDtypeConfig, LocalPrefillConfig, LogFormat, LogRequests, LogprobsConfig,
    NodeRoleConfig, Quantize, RoutingConfig, Secret,
};

section! {
    /// Who belongs to the cluster, and the links between its processes.
    ClusterConfig = "cluster" {
        /// Path of the cluster's certificate authority (PEM).
        ca_cert_path: String = String::new(), Kind::Text(Text::Any);
        /// Path of this process's certificate (PEM).
        cert_path: String = String::new(), Kind::Text(Text::Any);
        /// Path of this process's private key (PEM).
        key_path: String = String::new(), Kind::Text(Text::Any);
        /// A silent link counts as lost after this time, in milliseconds.
        idle_timeout_ms: u64 = 1_500, millis();
        /// A sign of life is sent on an idle link this often, in milliseconds.
        keep_alive_ms: u64 = 300, millis();
        /// Longest wait for a new link to another process, in milliseconds.
        connect_timeout_ms: u64 = 3_000, millis();
    }
}

section! {
    /// The model that is served. All processes of a cluster name the same one.
    ModelConfig = "model" {
        /// A GGUF file (of a split model any part), or a directory with one, or one with config.json, tokenizer.json and
        /// safetensors files; or where a hub has them, from which they are fetched into hub_cache_dir: hf://ORG/NAME (a
        /// directory) or hf://ORG/NAME/FILE.gguf. Of a branch or tag with @REVISION behind it; of one commit, the same bytes for
        /// ever and for all processes, with @COMMIT.
        path: String = String::new(), Kind::Text(Text::ModelPath);
        /// Name clients use; empty takes the name in the model's files.
        model_name: String = String::new(), Kind::Text(Text::Any);
        /// Further names under which clients may ask for the model.
        model_aliases: Vec<String> = Vec::new(), Kind::List { item: Text::NonEmpty, min_items: 0 };
        /// Low-rank adapters of the model, each as name=path of a directory that PEFT has written; all processes list the
        /// same ones. Clients ask for one by its name, as adapter_id or as the model.
        adapters: Vec<String> = Vec::new(), Kind::List { item: Text::Adapter, min_items: 0 };
        /// How quantised weights are multiplied; the others are in float32 always. "quantised": as they are in the file, with
        /// activations rounded to int8 (of query, key, value and head to about 15 bits); "precise": all activations to about
        /// 15 bits, at up to twice the arithmetic; "float32": widened to float32.
        compute: Compute = Compute::Quantised, Kind::Choice(&["quantised", "precise", "float32"]);
        /// Models whose rotary embeddings change with the length of a text (longrope, dynamic) have one set of them for all
        /// texts here: off, that for texts up to the length of their first training, and longer ones are refused; on, that
        /// for long texts, for short ones too. An error for models without such a choice.
        long_texts: bool = false, Kind::Bool;
        /// What matrices of floats (F32, F16, BF16, and F8_E4M3 with its scales) become when the model is loaded, by the rules of
        /// llama.cpp's quantiser: the output matrix becomes q6_k (q8_0 with q8_0), routers, norms and biases stay, rows that
        /// do not fit blocks of 256 take the type of blocks of 32 with about as many bits, and quantised tensors stay. All
        /// nodes name the same. "none": nothing changes.
        quantize: Quantize = Quantize::None,
            Kind::Choice(&["none", "q8_0", "q6_k", "q5_k", "q4_k", "q5_1", "q5_0", "q4_1", "q4_0"]);
        /// Element type of the KV cache; int8 has a scale for each token and head.
        kv_dtype: KvDtypeConfig = KvDtypeConfig::F16, Kind::Choice(&["f16", "bf16", "int8", "f32"]);
        /// Use of a hub's models what is in hub_cache_dir, and ask nobody. The variable HF_HUB_OFFLINE sets it too.
        offline: bool = false, Kind::Bool;
        /// The hub that hf:// means: any server that speaks the protocol of the Hugging Face hub. HF_ENDPOINT sets it too.
        hub_endpoint: String = "https://huggingface.co".to_owned(), Kind::Text(Text::Url);
        /// Folder of what has been fetched, laid out as the tools of the Hugging Face hub do it, which may share it. Set by
        /// HF_HUB_CACHE, as hub below HF_HOME, or as .cache/huggingface/hub below HOME, too.
        hub_cache_dir: String = String::new(), Kind::Text(Text::Any);
        /// File with the token for models that not everybody may fetch, with or without a line end. HF_TOKEN_PATH sets it too.
        /// Of a token and a file with one the one in the stronger layer holds, of the same layer the token.
        hub_token_file: String = String::new(), Kind::Text(Text::Any);
        /// That token itself; better not as an argument, which every user of the machine can see. HF_TOKEN sets it too.
        hub_token: Secret = Secret::default(), Kind::Text(Text::Token);
        /// Longest wait for a connection to the hub, for an answer, and for more of one, in milliseconds.
        hub_timeout_ms: u64 = 30_000, millis();
        /// Most tries of a request to the hub, or of a file, that fail one after the other without getting further; waits
        /// between them grow from half a second to half a minute.
        hub_tries: u32 = 8, int(1, 1_000);
    }
}

section! {
    /// Batching and the KV pool of a node.
    EngineConfig = "engine" {
        /// Length of a KV block, in tokens.
        kv_block_tokens: usize = 16, int(1, 1_024);
        /// Size of the KV pool, in tokens whose KV is kept in all layers; a whole number of blocks. Layers with a sliding window
        /// keep less of a text, so that the pool holds more then.
        kv_pool_tokens: usize = 32_768, int(1, 1 << 30);
        /// Size of the KV pool, in bytes, in place of kv_pool_tokens; as many blocks as fit. 0: as kv_pool_tokens says. Of
        /// the two the one in the stronger layer holds (arguments, environment, file).
        kv_pool_bytes: usize = 0, int(0, 1 << 44);
        /// Most sequences in one step.
        max_num_seqs: usize = 256, int(1, 4_096);
        /// Most rows (tokens of all sequences together) in one step.
        max_batch_tokens: usize = 512, int(1, 65_536);
        /// Most rows of one prompt in one step.
        prefill_chunk_tokens: usize = 256, int(1, 65_536);
        /// By how much prompts may make a step longer that also generates, in milliseconds: what they may add to the time
        /// between two tokens. As many of their rows are computed as fit by the times of earlier steps, which are fewer
        /// after many tokens; at least one. 0: mixed_prefill_tokens alone bounds them.
        mixed_prefill_ms: u64 = 25, int(0, 600_000);
        /// Most rows of prompts in a step that also generates, whatever time they take; at most max_batch_tokens. The
        /// default is bounded by what max_batch_tokens leaves.
        mixed_prefill_tokens: usize = 128, int(1, 65_536);
        /// Keep the KV of computed prompts while there is room, for prompts that begin alike. The whole KV pool is resident
        /// after a while.
        prefix_cache: bool = true, Kind::Bool;
        /// Compute threads.
        threads: usize = 1, int(1, 1_024);
        /// CPU cores that the compute threads are pinned to, one for each, for example "0,2-3"; empty: not pinned.
        /// Every process needs cores of its own.
        cores: String = String::new(), Kind::Text(Text::Cores);
    }
}

section! {
    /// How much a client may ask for, and how much is held at once.
    LimitsConfig = "limits" {
        /// Longest prompt, in tokens; also bounded by max_seq_len - 1 and by the model.
        max_input_token_len: usize = 8_192, int(1, 1_048_576);
        /// Longest prompt and answer together, in tokens; also bounded by the model.
        max_seq_len: usize = 8_192, int(2, 1_048_576);
        /// Longest answer, in tokens.
        max_iter_times: usize = 512, int(1, 1_048_576);
        /// One token more than max_iter_times where that limit, not the client's, ends an answer.
        extra_decode_iteration: bool = true, Kind::Bool;
        /// Longest prompt, in Unicode characters.
        max_input_chars: usize = 4_194_304, int(1, 1 << 30);
        /// Longest request body, in bytes.
        max_body_bytes: usize = 41_943_040, int(1_024, 1 << 32);
        /// Most choices of a prompt (`n`). A decode node runs them at once: its engine.max_num_seqs bounds them too.
        max_choices: usize = 8_192, int(1, 8_192);
        /// Most choices to choose from (`best_of`).
        max_best_of: usize = 128, int(1, 128);
        /// Most prompts of a request of /v1/completions.
        max_prompts: usize = 1_024, int(1, 65_536);
        /// Most requests held at once, queued and running. One with several prompts counts once.
        max_concurrent_requests: usize = 512, int(1, 1_000_000);
        /// Most requests waiting for a node.
        max_queued_requests: usize = 256, int(1, 1_000_000);
        /// Most memory held by waiting requests (body, tokens, stop strings), in bytes.
        max_queued_bytes: usize = 268_435_456, int(1_024, 1 << 40);
        /// Most stop strings in a request of the TGI paths; /v1 has no such limit.
        max_stop_strings: usize = 1_024, int(1, 65_536);
        /// Longest stop string of a request of the TGI paths, in Unicode characters.
        max_stop_string_chars: usize = 1_024, int(1, 1_048_576);
        /// All stop strings of a request together, in Unicode characters.
        max_stop_total_chars: usize = 32_768, int(1, 16_777_216);
        /// Longest time from a request's arrival to its last token, in milliseconds; clients may ask for less with the header
        /// x-baton-timeout-ms.
        request_timeout_ms: u64 = 600_000, millis();
        /// Longest JSON schema, regular expression or grammar of a request, in bytes.
        max_grammar_bytes: usize = 262_144, int(1, 4_194_304);
    }
}

section! {
    /// The front door.
    CoordinatorConfig = "coordinator" {
        /// Address or host name on which clients are served.
        http_host: String = "127.0.0.1".to_owned(), Kind::Text(Text::NonEmpty);
        /// TCP port on which clients are served; 0 takes a free one.
        http_port: u16 = 8_080, int(0, 65_535);
        /// UDP address on which nodes are met.
        listen: String = "127.0.0.1:7600".to_owned(), Kind::Text(Text::BindAddress);
        /// host:port under which nodes reach this coordinator, which it registers in etcd; empty takes the bound address.
        advertise: String = String::new(), Kind::Text(Text::OptionalDialAddress);
        /// HTTP worker threads.
        http_workers: usize = 2, int(1, 256);
        /// How nodes are chosen. "prefix_affinity": the least predicted time for the request and those it delays, by measured
        /// step times, what is queued, what nodes have cached, and measured transfers; "least_loaded": the least work ahead;
        /// "round_robin": one after the other.
        routing: RoutingConfig = RoutingConfig::PrefixAffinity, Kind::Choice(&["prefix_affinity", "least_loaded", "round_robin"]);
        /// Whether decode nodes compute prompts themselves. "auto": where that is predicted to cost less than a prefill node and
        /// the transfer, what it costs the sequences there included, or where no prefill node could take the job; "always":
        /// every prompt; "never": none, so that without a prefill node nothing is served. What a node of role both would hand
        /// over to itself it computes as a decode node with any of them.
        local_prefill: LocalPrefillConfig = LocalPrefillConfig::Auto, Kind::Choice(&["never", "auto", "always"]);
        /// A node that has work and takes no step for this long, or reports nothing, gets no jobs, and those it has are done
        /// elsewhere, until it gets on, in milliseconds. Longer than the longest step, and than a second.
        node_stall_ms: u64 = 10_000, int(1_000, 86_400_000);
        /// A node on which so many jobs in a row have failed gets none for breaker_open_ms, then one to try it.
        breaker_failures: u32 = 5, int(1, 1_000_000);
        /// How long a node gets no jobs after breaker_failures, in milliseconds; while another node of its role takes jobs, twice
        /// as long after each try that fails, up to 32 times.
        breaker_open_ms: u64 = 1_000, millis();
        /// Decisions about where requests go that are kept, with all that was looked at; the admin plane tells them.
        decision_records: usize = 1_024, int(0, 1_048_576);
        /// Longest wait for a node, in milliseconds.
        queue_timeout_ms: u64 = 60_000, millis();
        /// Longest wait for a decode node's answer to a reservation, in milliseconds.
        reserve_timeout_ms: u64 = 5_000, millis();
        /// Longest wait for the first token, in milliseconds.
        prefill_timeout_ms: u64 = 120_000, millis();
        /// Longest wait between the first token and the KV cache's arrival on the decode node, in milliseconds.
        handoff_timeout_ms: u64 = 30_000, millis();
        /// Longest gap between two tokens, in milliseconds.
        inter_token_timeout_ms: u64 = 30_000, millis();
        /// At shutdown, longest wait for running requests, in milliseconds.
        drain_timeout_ms: u64 = 30_000, millis();
        /// Longest wait for a request's head, in milliseconds.
        request_head_timeout_ms: u64 = 10_000, millis();
        /// A comment is sent on an idle event stream this often, in milliseconds.
        stream_keep_alive_ms: u64 = 15_000, millis();
        /// A client that takes no bytes for this long is given up, in milliseconds.
        client_stall_timeout_ms: u64 = 30_000, millis();
        /// Tokens kept for a slow client before its request is ended.
        stream_buffer_tokens: usize = 4_096, int(1, 1_048_576);
        /// A call with the header Idempotency-Key goes on for this long without its client, and is remembered for this long
        /// after its end, in milliseconds: sent again, it is answered from the beginning without being computed again.
        reattach_ms: u64 = 60_000, millis();
        /// Keys of which clients must send one; none lets everybody in.
        api_keys: Vec<Secret> = Vec::new(), Kind::List { item: Text::Secret, min_items: 0 };
        /// Path of the certificate (PEM, with those that vouch for it) with which clients are served over HTTPS; empty: plain
        /// HTTP. The file is read again when it changes, and on SIGHUP.
        tls_cert_path: String = String::new(), Kind::Text(Text::Any);
        /// Path of the private key (PEM) of tls_cert_path.
        tls_key_path: String = String::new(), Kind::Text(Text::Any);
        /// Take any model name on /v1 for the served model; for clients that send "tgi", "dummy" or a URL.
        any_model_name: bool = false, Kind::Bool;
        /// Put batch_size and queue_wait_time, one number for each token, into the usage of /v1.
        usage_timings: bool = true, Kind::Bool;
        /// Answer what MindIE answers in its prefill/decode mode: refuse stop and adapter_id on the TGI paths, and logprobs, n,
        /// best_of and beam search on /v1; ignore typical_p and watermark; nulls in the details of tokens; its error words,
        /// with 422 for everything wrong in a request.
        strict_mindie: bool = false, Kind::Bool;
        /// Accept a seed of 0.
        allow_seed_zero: bool = false, Kind::Bool;
        /// top_k of sampled requests where neither the client nor the model's files give one.
        default_top_k: u32 = 1_000, int(1, 2_147_483_647);
        /// What /v1/completions returns of best_of choices. "all": every one, the best first, so that OpenAI's answer is the
        /// beginning; "openai": the best n.
        best_of: BestOf = BestOf::All, Kind::Choice(&["all", "openai"]);
        /// Log-probabilities that the TGI paths tell of generated tokens. "processed": of what tokens are drawn from, after
        /// penalties, temperature and filters; "raw": of the model.
        generate_logprobs: LogprobsConfig = LogprobsConfig::Processed, Kind::Choice(&["raw", "processed"]);
        /// The same for the /v1 paths, alternatives included.
        completions_logprobs: LogprobsConfig = LogprobsConfig::Raw, Kind::Choice(&["raw", "processed"]);
    }
}

section! {
    /// The coordinator's listener for operators: nodes, drain, roles.
    AdminConfig = "admin" {
        /// TCP address of the admin plane; empty turns it off.
        listen: String = String::new(), Kind::Text(Text::OptionalBindAddress);
        /// Tokens of which operators must send one, as Authorization: Bearer TOKEN; at least one where there is a listener.
        tokens: Vec<Secret> = Vec::new(), Kind::List { item: Text::Secret, min_items: 0 };
    }
}

section! {
    /// Images, videos and audio that a prompt names: from where they may come. Models that read text only refuse them all.
    MediaConfig = "media" {
        /// Hosts from which media may be fetched, by name or address; none: nothing is fetched. The variable
        /// ALLOWED_MEDIA_DOMAINS_ENV, a list with commas, sets it too.
        allowed_domains: Vec<String> = Vec::new(), Kind::List { item: Text::NonEmpty, min_items: 0 };
        /// Folder below which local media files must lie.
        local_root: String = "/data/multimodal_inputs/".to_owned(), Kind::Text(Text::NonEmpty);
        /// Largest image, in bytes.
        max_image_bytes: u64 = 41_943_040, int(1, 1 << 32);
        /// Largest video, in bytes.
        max_video_bytes: u64 = 536_870_912, int(1, 1 << 32);
        /// Largest audio file, in bytes.
        max_audio_bytes: u64 = 41_943_040, int(1, 1 << 32);
        /// Most media of one request.
        max_per_request: usize = 20, int(1, 1_024);
        /// Largest size of all media of one request together, in bytes.
        max_total_bytes: u64 = 1_048_576_000, int(1, 1 << 40);
        /// Folder into which media are downloaded. One and a half times the largest medium for each of
        /// limits.max_concurrent_requests must be free there, or nothing is downloaded.
        download_dir: String = "/var/tmp".to_owned(), Kind::Text(Text::NonEmpty);
    }
}

section! {
    /// A prefill or decode node.
    NodeConfig = "node" {
        /// The node's name, unique in the cluster; the one in its certificate.
        id: String = String::new(), Kind::Text(Text::NodeName);
        /// What the program `node` serves at first; operators may switch it. The programs prefill-node and decode-node are what
        /// their names say.
        role: NodeRoleConfig = NodeRoleConfig::Both, Kind::Choice(&["prefill", "decode", "both"]);
        /// UDP address to bind.
        listen: String = "127.0.0.1:0".to_owned(), Kind::Text(Text::BindAddress);
        /// host:port under which others reach this node; empty takes the bound address.
        advertise: String = String::new(), Kind::Text(Text::OptionalDialAddress);
        /// host:port of every coordinator, if discovery.method is "static".
        coordinators: Vec<String> = vec!["127.0.0.1:7600".to_owned()], Kind::List { item: Text::DialAddress, min_items: 1 };
        /// A load report is sent this often, in milliseconds.
        load_report_interval_ms: u64 = 50, millis();
        /// First wait before dialling a lost coordinator again, in milliseconds.
        reconnect_min_ms: u64 = 100, millis();
        /// Longest wait before dialling a lost coordinator again, in milliseconds.
        reconnect_max_ms: u64 = 2_000, millis();
        /// At shutdown, longest wait for running jobs, in milliseconds.
        drain_timeout_ms: u64 = 30_000, millis();
        /// Most jobs held at once; more are refused as busy.
        max_jobs: usize = 256, int(1, 65_536);
        /// TCP address for GET /metrics; empty turns it off.
        metrics_listen: String = String::new(), Kind::Text(Text::OptionalBindAddress);
    }
}

section! {
    /// How nodes find the coordinators.
    DiscoveryConfig = "discovery" {
        /// "static": node.coordinators lists them; "dns": every address of dns_names is one; "etcd": they register there.
        method: DiscoveryMethod = DiscoveryMethod::Static, Kind::Choice(&["static", "dns", "etcd"]);
        /// host:port of names that resolve to the coordinators' addresses, all of which are dialled.
        dns_names: Vec<String> = Vec::new(), Kind::List { item: Text::DialAddress, min_items: 0 };
        /// Names are resolved, and etcd is asked, at least this often, in milliseconds; etcd tells changes at once.
        refresh_ms: u64 = 5_000, int(100, 3_600_000);
        /// URLs of the members of the etcd cluster (3.4 or newer); another one is asked when one does not answer.
        etcd_endpoints: Vec<String> = Vec::new(), Kind::List { item: Text::HttpUrl, min_items: 0 };
        /// Beginning of all keys in etcd; coordinators are below its coordinators/.
        etcd_prefix: String = "/baton".to_owned(), Kind::Text(Text::NonEmpty);
        /// A coordinator that falls silent vanishes from etcd after this time, in milliseconds; whole seconds.
        etcd_lease_ms: u64 = 10_000, int(2_000, 3_600_000);
        /// Longest wait for an answer of etcd, in milliseconds.
        etcd_timeout_ms: u64 = 2_000, int(10, 60_000);
        /// Path of the certificate (PEM) that vouches for etcd's; needed if an endpoint is https.
        etcd_ca_cert_path: String = String::new(), Kind::Text(Text::Any);
        /// Path of the certificate (PEM) that is shown to etcd; empty: none. Together with etcd_user it must have no
        /// CommonName, or etcd refuses it.
        etcd_cert_path: String = String::new(), Kind::Text(Text::Any);
        /// Path of the private key (PEM) of etcd_cert_path.
        etcd_key_path: String = String::new(), Kind::Text(Text::Any);
        /// Name of etcd's user; empty: none.
        etcd_user: String = String::new(), Kind::Text(Text::Any);
        /// Path of a file that holds the password of etcd_user, with or without a line end.
        etcd_password_path: String = String::new(), Kind::Text(Text::Any);
    }
}

section! {
    /// Moving KV blocks between nodes.
    TransferConfig = "transfer" {
        /// Size of a KV frame, in bytes.
        frame_bytes: usize = 524_288, int(4_096, 4_194_304);
        /// Most computed but unsent KV data on a prefill node, in bytes.
        staging_bytes: usize = 67_108_864, int(4_096, 1 << 40);
        /// Largest UDP payload, in bytes; the network must carry it.
        datagram_bytes: u16 = 1_452, int(1_200, 65_000);
        /// Let the kernel cut one send into many datagrams (GSO).
        gso: bool = true, Kind::Bool;
        /// Flow-control window of a connection, in bytes.
        window_bytes: u64 = 16_777_216, int(65_536, 1 << 32);
        /// Congestion window of a new connection, in bytes.
        initial_window_bytes: u64 = 4_194_304, int(2_400, 1 << 32);
        /// Send and receive buffer asked of the kernel for a UDP socket, in bytes.
        socket_buffer_bytes: usize = 8_388_608, int(65_536, 1 << 30);
        /// Longest wait for the receiver's answer to a commit, in milliseconds.
        commit_timeout_ms: u64 = 10_000, millis();
        /// Most times the frames of one handoff are sent again before it fails.
        max_resends: u32 = 8, int(0, 1_000);
    }
}

section! {
    /// Logs, metrics and traces.
    TelemetryConfig = "telemetry" {
        /// Least severe level that is logged.
        log_level: String = "info".to_owned(), Kind::Choice(&["off", "error", "warn", "info", "debug", "trace"]);
        /// Shape of a log line.
        log_format: LogFormat = LogFormat::Human, Kind::Choice(&["human", "json"]);
        /// Level of the line that the coordinator logs of each request that has ended: where its time went, tokens, nodes.
        log_requests: LogRequests = LogRequests::Debug, Kind::Choice(&["off", "debug", "info"]);
        /// Count and measure, and show it under /metrics; if not, that path answers 404.
        metrics: bool = true, Kind::Bool;
        /// URL of an OpenTelemetry collector, which gets traces by OTLP over HTTP under its path /v1/traces; empty: none are
        /// made.
        otlp_endpoint: String = String::new(), Kind::Text(Text::CollectorUrl);
        /// Beginning of the service's name in traces; the role follows it: baton-coordinator, baton-prefill, baton-decode,
        /// baton-both.
        service_name: String = "baton".to_owned(), Kind::Text(Text::NonEmpty);
        /// Of a million requests that come without a traceparent, about so many are traced. Those that come with one are traced
        /// if it says so.
        traces_per_million: u32 = 1_000_000, int(0, 1_000_000);
        /// Most spans that wait to be exported; more are dropped and counted.
        trace_queue_spans: usize = 16_384, int(64, 1_048_576);
        /// Longest time that the collector may take for a batch of spans, and for the last ones at shutdown, in milliseconds.
        trace_export_timeout_ms: u64 = 5_000, int(10, 60_000);
    }
}
