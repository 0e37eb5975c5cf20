//! The layers and the errors, through the public functions.

use config::{Compute, Config, ConfigArgs, ConfigError, LogFormat, Origin, Secret, Sources, load, load_from};

/// Loads from a file's text, variables and arguments.
fn try_load(file: &str, env: &[(&str, &str)], set: &[&str]) -> Result<Config, ConfigError> {
    let sources = Sources {
        file: Some(("baton.toml".to_owned(), file.to_owned())),
        set: set.iter().map(|argument| (*argument).to_owned()).collect(),
    };
    load_from(
        &sources,
        env.iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
    )
}

/// The one line that is printed for a wrong configuration.
fn refusal(file: &str, env: &[(&str, &str)], set: &[&str]) -> String {
    let error = try_load(file, env, set).expect_err("must be refused").to_string();
    assert!(!error.contains('\n'), "more than one line: {error}");
    error
}

#[test]
fn nothing_given_is_the_defaults() {
    let config = load_from(&Sources::default(), []).unwrap();
    assert_eq!(config, Config::default());
    assert_eq!(config.engine.kv_pool_tokens, 32_768);
    assert_eq!(config.limits.max_body_bytes, 40 << 20);
    assert_eq!(config.node.coordinators, ["127.0.0.1:7600"]);
}

#[test]
fn stronger_layers_win() {
    let file = "[engine]\nthreads = 2\nmax_num_seqs = 32\nkv_block_tokens = 32\n";
    let env = [("BATON_ENGINE__THREADS", "3"), ("BATON_ENGINE__MAX_NUM_SEQS", "33")];
    let config = try_load(file, &env, &["engine.threads=4", "engine.threads=5"]).unwrap();
    assert_eq!(config.engine.threads, 5);
    assert_eq!(config.engine.max_num_seqs, 33);
    assert_eq!(config.engine.kv_block_tokens, 32);
    assert_eq!(config.engine.max_batch_tokens, 512);
}

#[test]
fn every_kind_of_value_can_be_given_as_text() {
    let env = [
        ("BATON_MODEL__COMPUTE", "float32"),
        ("BATON_TRANSFER__GSO", "false"),
        ("BATON_NODE__COORDINATORS", "a.example:7600, b.example:7601"),
        ("BATON_MODEL__PATH", "models/a=b.gguf"),
    ];
    let set = [
        r#"model.model_aliases=["x, y", "z"]"#,
        "limits.max_seq_len=16_384",
        "telemetry.log_format=json",
    ];
    let config = try_load("", &env, &set).unwrap();
    assert_eq!(config.model.compute, Compute::Float32);
    assert!(!config.transfer.gso);
    assert_eq!(config.node.coordinators, ["a.example:7600", "b.example:7601"]);
    assert_eq!(config.model.path, "models/a=b.gguf");
    assert_eq!(config.model.model_aliases, ["x, y", "z"]);
    assert_eq!(config.limits.max_seq_len, 16_384);
    assert_eq!(config.telemetry.log_format, LogFormat::Json);
    assert!(
        try_load("", &[], &["model.model_aliases="])
            .unwrap()
            .model
            .model_aliases
            .is_empty()
    );
}

#[test]
fn numbers_in_other_notations_mean_the_same() {
    let config = try_load("[limits]\nmax_seq_len = 0x2000\nmax_iter_times = 1_000\n", &[], &[]).unwrap();
    assert_eq!(
        (config.limits.max_seq_len, config.limits.max_iter_times),
        (8_192, 1_000)
    );
}

#[test]
fn unknown_names_come_with_a_suggestion() {
    let cases: &[(&str, &[(&str, &str)], &[&str], &str)] = &[
        (
            "\n[engine]\nthread = 2\n",
            &[],
            &[],
            "baton.toml:3: unknown key `engine.thread`; did you mean `engine.threads`?",
        ),
        (
            "[engine]\nmax_seq_len = 2\n",
            &[],
            &[],
            "baton.toml:2: unknown key `engine.max_seq_len`; did you mean `limits.max_seq_len`?",
        ),
        (
            "[cluster]\nidle_timeout = 2\n",
            &[],
            &[],
            "did you mean `cluster.idle_timeout_ms`?",
        ),
        (
            "[engin]\nthreads = 2\n",
            &[],
            &[],
            "baton.toml:1: unknown section `engin`; did you mean `engine`?",
        ),
        (
            "[quantum]\nx = 2\n",
            &[],
            &[],
            "unknown section `quantum`; the sections are cluster, model,",
        ),
        (
            "[telemetry]\nquux = 2\n",
            &[],
            &[],
            "the keys of [telemetry] are log_level, log_format",
        ),
        (
            "[engine.threads]\nx = 2\n",
            &[],
            &[],
            "baton.toml:1: engine.threads = {..} is not valid; expected a whole number",
        ),
        (
            "",
            &[("BATON_ENGINE__THREAD", "2")],
            &[],
            "environment variable BATON_ENGINE__THREAD: unknown setting `BATON_ENGINE__THREAD`; did you mean BATON_ENGINE__THREADS?",
        ),
        (
            "",
            &[("BATON_ENGINE_THREADS", "2")],
            &[],
            "did you mean BATON_ENGINE__THREADS?",
        ),
        (
            "",
            &[("BATON_ENGIN_THREADS", "2")],
            &[],
            "did you mean BATON_ENGINE__THREADS?",
        ),
        (
            "",
            &[("BATON_engine__threads", "2")],
            &[],
            "did you mean BATON_ENGINE__THREADS?",
        ),
        (
            "",
            &[("BATON_FOO__BAR", "2")],
            &[],
            "variables are named BATON_SECTION__FIELD",
        ),
        (
            "",
            &[],
            &["engine.treads=2"],
            "--set engine.treads: unknown key `engine.treads`; did you mean `engine.threads`?",
        ),
        (
            "",
            &[],
            &["modle.path=x"],
            "--set modle.path: unknown section `modle`; did you mean `model`?",
        ),
    ];
    for (file, env, set, expected) in cases {
        let error = refusal(file, env, set);
        assert!(error.contains(expected), "got      {error}\nexpected {expected}");
    }
}

#[test]
fn variables_of_others_are_left_alone() {
    let env = [
        ("BATON_CACHE", "/tmp/x"),
        ("BATON_TEST_MODEL", "m"),
        ("PATH", "p"),
        ("ENGINE__THREADS", "x"),
    ];
    assert_eq!(try_load("", &env, &[]).unwrap(), Config::default());
}

#[test]
fn wrong_values_name_place_key_value_and_what_is_right() {
    let cases: &[(&str, &[(&str, &str)], &[&str], &str)] = &[
        (
            "[engine]\nthreads = 0\n",
            &[],
            &[],
            "baton.toml:2: engine.threads = 0 is not valid; expected a whole number from 1 to 1024",
        ),
        (
            "[engine]\nthreads = \"2\"\n",
            &[],
            &[],
            "engine.threads = \"2\" is not valid; expected a whole number from 1 to 1024",
        ),
        (
            "[engine]\nthreads = 2.0\n",
            &[],
            &[],
            "engine.threads = 2.0 is not valid",
        ),
        (
            "[engine]\nthreads = 99999999999999999999\n",
            &[],
            &[],
            "engine.threads = 99999999999999999999 is not valid",
        ),
        (
            "[transfer]\ngso = 1\n",
            &[],
            &[],
            "transfer.gso = 1 is not valid; expected true or false",
        ),
        (
            "[transfer]\ndatagram_bytes = 65001\n",
            &[],
            &[],
            "expected a whole number from 1200 to 65000",
        ),
        (
            "[model]\ncompute = \"int4\"\n",
            &[],
            &[],
            "model.compute = \"int4\" is not valid; expected one of quantised, float32",
        ),
        (
            "[node]\ncoordinators = []\n",
            &[],
            &[],
            "expected a list of at least 1 string, each host:port",
        ),
        (
            "[node]\ncoordinators = [1]\n",
            &[],
            &[],
            "node.coordinators = [.., 1, ..] is not valid",
        ),
        (
            "[node]\ncoordinators = \"a:1\"\n",
            &[],
            &[],
            "node.coordinators = \"a:1\" is not valid",
        ),
        (
            "[node]\nid = \"a b\"\n",
            &[],
            &[],
            "node.id = \"a b\" is not valid; expected a name of up to 64",
        ),
        (
            "[coordinator]\nlisten = \"localhost:7600\"\n",
            &[],
            &[],
            "expected IP:port",
        ),
        (
            "[coordinator]\nhttp_host = \"\"\n",
            &[],
            &[],
            "expected a string that is not empty",
        ),
        (
            "engine = 3\n",
            &[],
            &[],
            "baton.toml:1: engine = (integer) is not valid; expected a section: a line [engine]",
        ),
        (
            "[[engine]]\nthreads = 1\n",
            &[],
            &[],
            "engine = (array) is not valid; expected a section",
        ),
        (
            "",
            &[("BATON_NODE__COORDINATORS", "a.example")],
            &[],
            "environment variable BATON_NODE__COORDINATORS: node.coordinators = [.., \"a.example\", ..] is not valid",
        ),
        (
            "",
            &[("BATON_COORDINATOR__HTTP_PORT", "65536")],
            &[],
            "coordinator.http_port = \"65536\" is not valid; expected a whole number from 0 to 65535",
        ),
        (
            "",
            &[("BATON_COORDINATOR__HTTP_PORT", "")],
            &[],
            "coordinator.http_port = \"\" is not valid",
        ),
        (
            "",
            &[],
            &["engine.threads=two\nlines"],
            "--set engine.threads: engine.threads = \"two\\nlines\" is not valid",
        ),
        (
            "",
            &[],
            &["model.model_aliases=[1, 2"],
            "model.model_aliases = \"[1, 2\" is not valid",
        ),
    ];
    for (file, env, set, expected) in cases {
        let error = refusal(file, env, set);
        assert!(error.contains(expected), "got      {error}\nexpected {expected}");
    }
}

#[test]
fn dial_addresses_are_checked() {
    let loads = |address: &str| try_load("", &[], &[&format!("node.advertise={address}")]).is_ok();
    for good in ["a:1", "node-3.rack_1.example:65535", "10.0.0.1:7600", "[::1]:7600", ""] {
        assert!(loads(good), "{good} must be accepted");
    }
    let long = format!("{}:1", "a".repeat(64));
    for bad in [
        "a",
        "a:0",
        "a:65536",
        "a:+1",
        ":1",
        "a b:1",
        "10.0.0:1",
        "256.0.0.1:1",
        "0.0.0.0:1",
        "-a:1",
        "a..b:1",
        "::1:7600:",
        &long,
    ] {
        assert!(!loads(bad), "{bad} must be refused");
    }
}

#[test]
fn broken_files_name_the_line() {
    let error = refusal("[engine]\nthreads = = 2\n", &[], &[]);
    assert!(error.starts_with("baton.toml:2: not valid TOML: "), "{error}");
    let error = refusal("[engine]\nthreads = 1\nthreads = 2\n", &[], &[]);
    assert!(error.starts_with("baton.toml:3: not valid TOML: "), "{error}");
    assert!(refusal("", &[], &["threads"]).contains("write --set section.field=value"));
    assert!(refusal("", &[], &["engine.threads"]).contains("write --set section.field=value"));
    assert!(refusal("", &[], &["threads=2"]).contains("write --set section.field=value"));
}

#[test]
fn contradictions_name_both_sides() {
    let cases: &[(&[&str], &str)] = &[
        (
            &["engine.kv_pool_tokens=4096"],
            "--set engine.kv_pool_tokens: engine.kv_pool_tokens = 4096 contradicts limits.max_seq_len = 8192 (default); the pool must hold",
        ),
        (
            &["limits.max_seq_len=65536"],
            "limits.max_seq_len = 65536 contradicts engine.kv_pool_tokens = 32768 (default)",
        ),
        (&["engine.kv_pool_tokens=32769"], "must be a whole number of blocks"),
        (
            &["engine.prefill_chunk_tokens=513"],
            "contradicts engine.max_batch_tokens = 512",
        ),
        (
            &["engine.max_batch_tokens=256", "engine.max_num_seqs=257"],
            "max_num_seqs is at most max_batch_tokens",
        ),
        (
            &["limits.max_stop_string_chars=40000"],
            "contradicts limits.max_stop_total_chars = 32768",
        ),
        (
            &["limits.max_queued_bytes=1048576"],
            "contradicts limits.max_body_bytes = 41943040",
        ),
        (
            &["transfer.frame_bytes=1048576", "transfer.staging_bytes=524288"],
            "contradicts transfer.staging_bytes = 524288 (--set transfer.staging_bytes)",
        ),
        (
            &["transfer.datagram_bytes=6551"],
            "--set transfer.datagram_bytes: transfer.datagram_bytes = 6551 contradicts transfer.gso = true (default)",
        ),
        (
            &[
                "transfer.datagram_bytes=65000",
                "transfer.gso=false",
                "transfer.initial_window_bytes=14720",
            ],
            "initial_window_bytes is at least twice",
        ),
        (&["cluster.keep_alive_ms=751"], "keep_alive_ms is at most half"),
        (
            &["cluster.cert_path=a.pem"],
            "a certificate and its key are given together",
        ),
        (
            &["cluster.cert_path=a.pem", "cluster.key_path=a.key"],
            "a certificate and its authority are given together",
        ),
        (
            &["node.reconnect_min_ms=3000"],
            "reconnect_min_ms is at most reconnect_max_ms",
        ),
        (&["node.listen=0.0.0.0:7601"], "set advertise to host:port"),
        (
            &["node.load_report_interval_ms=1501"],
            "load_report_interval_ms is at most",
        ),
    ];
    for (set, expected) in cases {
        let error = refusal("", &[], set);
        assert!(error.contains(expected), "got      {error}\nexpected {expected}");
    }
    assert!(try_load("", &[], &["transfer.datagram_bytes=6550"]).is_ok());
    assert!(try_load("", &[], &["node.listen=0.0.0.0:7601", "node.advertise=a.example:7601"]).is_ok());
}

/// A prompt limit above the sequence limit is legal: the smaller one rules.
#[test]
fn a_prompt_limit_above_the_sequence_limit_is_legal() {
    assert!(try_load("", &[], &["limits.max_input_token_len=1048576"]).is_ok());
}

#[test]
fn secrets_are_never_printed() {
    let key = "sk-0123456789abcdef";
    let config = try_load("", &[], &[&format!("coordinator.api_keys={key}")]).unwrap();
    assert_eq!(config.coordinator.api_keys[0].expose(), key);
    let printed = config.to_toml().unwrap();
    assert!(!printed.contains(key) && printed.contains(Secret::HIDDEN), "{printed}");
    assert!(!format!("{config:?}").contains(key));
    for text in ["short-secret", "[\"short-secret\"]", "0123456789abcdef,short-secret"] {
        let error = refusal("", &[], &[&format!("coordinator.api_keys={text}")]);
        assert!(
            !error.contains("short-secret") && error.contains("at least 16"),
            "{error}"
        );
    }
    // A printed configuration does not turn its placeholder into a key.
    assert!(refusal(&printed, &[], &[]).contains("coordinator.api_keys"));
}

#[test]
fn long_values_are_shortened() {
    let error = refusal("", &[], &[&format!("node.id={}", "x".repeat(10_000))]);
    assert!(error.len() < 300, "{} characters", error.len());
}

#[test]
fn an_error_keeps_its_parts() {
    let error = try_load("\n\n[engine]\nthreads = 0\n", &[], &[]).unwrap_err();
    let ConfigError::Value { setting, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(
        setting.origin,
        Origin::File {
            path: "baton.toml".into(),
            line: 4
        }
    );
    assert_eq!((setting.key.as_str(), setting.value.as_str()), ("engine.threads", "0"));
}

#[test]
fn files_are_read_and_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("baton.toml");
    std::fs::write(&path, "[engine]\nthreads = 7\n").unwrap();
    let args = |path: &std::path::Path| ConfigArgs {
        config: Some(path.to_owned()),
        ..ConfigArgs::default()
    };
    assert_eq!(load(&args(&path)).unwrap().engine.threads, 7);

    let missing = load(&args(&dir.path().join("none.toml"))).unwrap_err().to_string();
    assert!(
        missing.contains("none.toml") && missing.contains("give the path of a TOML file"),
        "{missing}"
    );

    std::fs::write(&path, "#".repeat((1 << 20) + 1)).unwrap();
    let large = load(&args(&path)).unwrap_err().to_string();
    assert!(large.contains("file too large"), "{large}");

    std::fs::write(&path, b"[engine]\n# \xff\n").unwrap();
    assert!(load(&args(&path)).unwrap_err().to_string().contains("UTF-8"));
}

#[test]
fn questions_about_the_configuration_are_answered() {
    let config = Config::default();
    let ask = |print_config, check| ConfigArgs {
        print_config,
        check,
        ..ConfigArgs::default()
    };
    assert_eq!(ask(false, false).answer(&config).unwrap(), None);
    assert_eq!(
        ask(false, true).answer(&config).unwrap().as_deref(),
        Some("the configuration is valid\n")
    );
    assert_eq!(
        ask(true, false).answer(&config).unwrap(),
        Some(config.to_toml().unwrap())
    );
}

#[test]
fn arguments_have_their_documented_form() {
    #[derive(clap::Parser)]
    struct Program {
        #[command(flatten)]
        config: ConfigArgs,
    }
    let line = [
        "program",
        "--config",
        "a.toml",
        "--set",
        "a.b=c",
        "--set",
        "d.e=-1,f",
        "--print-config",
        "--check",
    ];
    let args = <Program as clap::Parser>::try_parse_from(line).unwrap().config;
    assert_eq!(args.config.as_deref(), Some(std::path::Path::new("a.toml")));
    assert_eq!(args.set, ["a.b=c", "d.e=-1,f"]);
    assert!(args.print_config && args.check);
}
