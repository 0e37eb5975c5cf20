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
    let token = try_load("", &[("HF_TOKEN", "hf_0123456789")], &[]).unwrap();
    assert_eq!(token.model.hub_token.expose(), "hf_0123456789");
    let shown = format!("{} {token:?}", token.to_toml().unwrap());
    assert!(!shown.contains("hf_0123") && shown.contains(Secret::HIDDEN), "{shown}");
    assert!(!refusal("", &[("HF_TOKEN", "hf_0123 456789")], &[]).contains("hf_0123"));
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

/// Every case of `refusals.txt`: refused, in one line that holds the expected words.
#[test]
fn wrong_configurations_are_refused_with_a_useful_line() {
    let (mut file, mut env, mut set, mut cases) = (String::new(), Vec::new(), Vec::new(), 0);
    for line in include_str!("refusals.txt").lines() {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "" | "#" => {}
            "file" => file = file + rest + "\n",
            "env" => env.push(rest.split_once('=').unwrap()),
            "set" => set.push(rest.replace("\\n", "\n")),
            "=>" => {
                let error = refusal(&file, &env, &set.iter().map(String::as_str).collect::<Vec<_>>());
                assert!(error.contains(rest), "got      {error}\nexpected {rest}");
                (file, env, set) = (String::new(), Vec::new(), Vec::new());
                cases += 1;
            }
            other => panic!("{other}: not a word of refusals.txt"),
        }
    }
    assert!(cases >= 45, "only {cases} cases");
}

#[test]
fn the_last_legal_values_before_a_contradiction_are_accepted() {
    assert!(try_load("", &[], &["transfer.datagram_bytes=6550"]).is_ok());
    assert!(try_load("", &[], &["cluster.keep_alive_ms=750"]).is_ok());
    // Whether the pool holds such a sequence depends on the model: the node finds out.
    assert!(try_load("", &[], &["limits.max_seq_len=32769"]).is_ok());
    assert!(try_load("", &[], &["engine.kv_pool_bytes=0", "engine.kv_pool_tokens=16384"]).is_ok());
    assert!(try_load("", &[], &["engine.mixed_prefill_tokens=512"]).is_ok());
    assert!(
        try_load(
            "",
            &[],
            &[
                "engine.max_batch_tokens=64",
                "engine.max_num_seqs=8",
                "engine.prefill_chunk_tokens=64"
            ]
        )
        .is_ok(),
        "the default of mixed_prefill_tokens does not contradict it"
    );
    assert!(try_load("", &[], &["node.listen=0.0.0.0:7601", "node.advertise=a.example:7601"]).is_ok());
}

#[test]
fn of_two_sizes_of_the_pool_the_stronger_layer_holds() {
    let (tokens, bytes) = (
        "[engine]\nkv_pool_tokens = 16384\n",
        "[engine]\nkv_pool_bytes = 1000000\n",
    );
    let env = |name, value| [(name, value)];
    let found = |file: &str, env: &[(&str, &str)], set: &[&str]| {
        let engine = try_load(file, env, set).unwrap().engine;
        (engine.kv_pool_tokens, engine.kv_pool_bytes)
    };
    assert_eq!(
        found(tokens, &[], &["engine.kv_pool_bytes=2000000"]),
        (16_384, 2_000_000)
    );
    assert_eq!(found(bytes, &[], &["engine.kv_pool_tokens=8192"]), (8_192, 0));
    assert_eq!(
        found(bytes, &env("BATON_ENGINE__KV_POOL_TOKENS", "8192"), &[]),
        (8_192, 0)
    );
    assert_eq!(
        found(tokens, &env("BATON_ENGINE__KV_POOL_BYTES", "3000000"), &[]),
        (16_384, 3_000_000)
    );
    // What holds is checked: the tokens of the argument, not the bytes of the file.
    assert!(
        try_load(bytes, &[], &["engine.kv_pool_tokens=4100"]).is_err(),
        "no whole number of blocks"
    );
}

/// MindIE's variable sets the media's hosts; the variable with our name is stronger.
#[test]
fn the_media_variable_of_mindie_is_read() {
    let with = |variables: &[(&str, &str)]| {
        let variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        load_from(&Sources::default(), variables).unwrap().media.allowed_domains
    };
    let theirs = ("ALLOWED_MEDIA_DOMAINS_ENV", "a.example, b.example");
    assert_eq!(with(&[theirs]), ["a.example", "b.example"]);
    assert_eq!(
        with(&[theirs, ("BATON_MEDIA__ALLOWED_DOMAINS", "c.example")]),
        ["c.example"]
    );
    assert!(with(&[]).is_empty());
}

/// Operators keep these for their commands, in the same shell in which they may start a server.
#[test]
fn the_variables_of_operators_are_no_settings() {
    let theirs = [
        ("BATON_ADMIN_URL", "http://c0:7700"),
        ("BATON_ADMIN_TOKEN", "operators-only-0123456789"),
    ];
    assert_eq!(try_load("", &theirs, &[]).unwrap(), Config::default());
    assert!(try_load("", &[("BATON_ADMIN_TOKENS", "x")], &[]).is_err());
}

#[test]
fn adapters_have_names_of_their_own() {
    let config = try_load("[model]\nadapters = [\"a=/x\", \"org/b=y=z\"]\n", &[], &[]).unwrap();
    let named: Vec<_> = config.model.named_adapters().collect();
    assert_eq!(named, [("a", "/x"), ("org/b", "y=z")]);
    let variable = try_load("", &[("BATON_MODEL__ADAPTERS", "a=/x, b=/y")], &[]).unwrap();
    assert_eq!(variable.model.adapters, ["a=/x", "b=/y"]);
    for wrong in ["a", "=x", "None=x", "a b=x", "a="] {
        let line = refusal("", &[], &[&format!("model.adapters=[\"{wrong}\"]")]);
        assert!(line.contains("model.adapters") && line.contains("name=path"), "{line}");
    }
    let line = refusal("", &[], &["model.adapters=a=/x,b=/y,a=/z"]);
    assert!(line.contains("a=/z") && line.contains("once"), "{line}");
    let line = refusal("", &[], &["model.adapters=a=/x", "model.model_name=a"]);
    assert!(line.contains("another name than the model"), "{line}");
    let line = refusal("", &[], &["model.adapters=a=/x", "model.model_aliases=b,a"]);
    assert!(line.contains("model_aliases"), "{line}");
}

#[test]
fn discovery_says_what_it_needs() {
    let method = |method: &str| format!("[discovery]\nmethod = \"{method}\"\n");
    let cases = [
        (method("dns"), "set dns_names to host:port"),
        (method("etcd"), "set etcd_endpoints to http://host:port"),
        (
            method("etcd") + "etcd_endpoints = [\"http://e:2379/x\"]\n",
            "without a path",
        ),
        (method("etcd") + "etcd_endpoints = [\"e:2379\"]\n", "http://host:port"),
        (
            method("etcd") + "etcd_endpoints = [\"https://e:2379\"]\n",
            "set etcd_ca_cert_path",
        ),
        (
            method("etcd") + "etcd_endpoints = [\"http://e:2379\"]\netcd_user = \"u\"\n",
            "given together",
        ),
        (method("static") + "etcd_lease_ms = 2500\n", "multiple of 1000"),
        (
            method("static") + "etcd_lease_ms = 3000\n",
            "at least twice etcd_timeout_ms",
        ),
        (method("consul"), "one of static, dns, etcd"),
        (
            method("etcd") + "etcd_endpoints = [\"http://e:2379\"]\n[coordinator]\nlisten = \"0.0.0.0:7600\"\n",
            "set advertise to host:port",
        ),
    ];
    for (file, words) in cases {
        let said = refusal(&file, &[], &[]);
        assert!(said.contains(words), "{file}: {said}");
    }
    let env = [
        ("BATON_DISCOVERY__METHOD", "etcd"),
        ("BATON_DISCOVERY__ETCD_ENDPOINTS", "http://e-0:2379,http://[::1]:2379"),
    ];
    let config = try_load("", &env, &[]).unwrap();
    assert_eq!(
        config.discovery.etcd_endpoints,
        ["http://e-0:2379", "http://[::1]:2379"]
    );
    assert_eq!(config.discovery.refresh_ms, 5_000);
}

#[test]
fn names_with_line_ends_and_without_end_make_no_long_errors() {
    let long = "x".repeat(5_000);
    let file = format!("\"a\\nb{long}\" = 1\n");
    let said = refusal(&file, &[], &[]);
    assert!(said.contains("a\\nb") && said.len() < 500, "{said}");
    let said = refusal("", &[], &[&format!("a\nb{long}")]);
    assert!(said.contains("a\\nb") && said.len() < 500, "{said}");
    let said = refusal("", &[(&format!("BATON_ENGINE__A\n{long}"), "1")], &[]);
    assert!(said.len() < 500, "{said}");
}

#[test]
fn variables_of_the_hubs_own_tools_set_the_same_here() {
    let model = |env: &[(&str, &str)], set: &[&str]| try_load("", env, set).unwrap().model;
    let home = ("HOME", "/home/a");
    assert_eq!(model(&[home], &[]).hub_cache_dir, "/home/a/.cache/huggingface/hub");
    let env = [home, ("HF_HOME", "/hf")];
    assert_eq!(model(&env, &[]).hub_cache_dir, "/hf/hub");
    let env = [("HF_HUB_CACHE", "/c"), ("HF_HOME", "/hf"), home];
    assert_eq!(model(&env, &[]).hub_cache_dir, "/c");
    let env = [("HF_HUB_CACHE", "/c"), ("BATON_MODEL__HUB_CACHE_DIR", "/ours")];
    assert_eq!(model(&env, &[]).hub_cache_dir, "/ours");
    for (word, offline) in [("1", true), ("Yes", true), ("0", false), ("", false), ("off", false)] {
        assert_eq!(model(&[("HF_HUB_OFFLINE", word)], &[]).offline, offline, "{word}");
    }
    assert!(refusal("", &[("HF_HUB_OFFLINE", "perhaps")], &[]).contains("HF_HUB_OFFLINE"));
    let endpoint = model(&[("HF_ENDPOINT", "http://mirror.example:8080/hf")], &[]).hub_endpoint;
    assert_eq!(endpoint, "http://mirror.example:8080/hf");
    assert!(refusal("", &[("HF_ENDPOINT", "mirror")], &[]).contains("environment variable HF_ENDPOINT"));
}

#[test]
fn of_a_token_and_a_file_with_one_the_stronger_layer_holds() {
    let both = |file: &str, env: &[(&str, &str)], set: &[&str]| {
        let model = try_load(file, env, set).unwrap().model;
        (model.hub_token.expose().to_owned(), model.hub_token_file)
    };
    let (token, file) = ("hf_abc".to_owned(), "/t".to_owned());
    assert_eq!(
        both("", &[("HF_TOKEN", "hf_abc"), ("HF_TOKEN_PATH", "/t")], &[]),
        (token.clone(), String::new())
    );
    assert_eq!(
        both("[model]\nhub_token_file = \"/t\"\n", &[("HF_TOKEN", "hf_abc")], &[]),
        (token, String::new())
    );
    assert_eq!(
        both("", &[("HF_TOKEN", "hf_abc")], &["model.hub_token_file=/t"]),
        (String::new(), file)
    );
}
