//! What holds for every path: statuses, shapes, headers, limits of bodies, keys, probes.

mod http_support;

use std::io::{Read, Write};

use config::Secret;
use http_support::backend::Script;
use http_support::client::{connect, exchange, get, post, post_bytes, read_all, request};
use http_support::model::bytes;
use http_support::{start, start_with};
use protocol::ids::Role;
use serde_json::json;

#[test]
fn unknown_paths_and_wrong_methods_are_json_in_the_family_shape() {
    let front = start();
    for path in ["/nothing", "/generate/", "/tokenize/", "/v2/models"] {
        let answer = post(front.address, path, "{}");
        assert_eq!(answer.status, 404, "{path}");
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.json()["error_type"], "validation", "{path}");
    }
    for path in ["/v1/nothing", "/v1", "/v1/embeddings", "/v1/completions/x"] {
        let answer = post(front.address, path, "{}");
        assert_eq!(answer.status, 404, "{path}");
        assert_eq!(answer.json()["error"]["type"], "NotFoundError", "{path}");
    }
    let embeddings = post(front.address, "/v1/embeddings", "{}");
    assert_eq!(
        embeddings.json()["error"]["message"],
        "not supported yet: /v1/embeddings"
    );
    for (method, path, allow) in [
        ("GET", "/generate", "POST, OPTIONS"),
        ("PUT", "/generate_stream", "POST, OPTIONS"),
        ("DELETE", "/", "GET, HEAD, POST, OPTIONS"),
        ("GET", "/v1/completions", "POST, OPTIONS"),
        ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
    ] {
        let answer = request(front.address, method, path, "");
        assert_eq!(answer.status, 405, "{method} {path}");
        assert_eq!(answer.header("allow"), Some(allow));
        assert!(answer.json().get("error").is_some());
    }
}

#[test]
fn media_types() {
    let front = start();
    let with = |path: &str, headers: &str| {
        let body = "{\"inputs\":\"a\"}";
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n{body}",
            body.len()
        );
        exchange(front.address, head.as_bytes())
    };
    for fine in [
        "",
        "content-type: application/json\r\n",
        "content-type: Application/JSON; charset=utf-8; x=y\r\n",
    ] {
        assert_eq!(with("/generate", fine).status, 200, "{fine}");
    }
    for wrong in [
        "content-type: text/plain\r\n",
        "content-type: application/x-www-form-urlencoded\r\n",
        "content-type: application/jsonx\r\n",
        "content-encoding: gzip\r\n",
    ] {
        assert_eq!(with("/generate", wrong).status, 415, "{wrong}");
        let answer = with("/v1/completions", wrong);
        assert_eq!(
            (answer.status, &answer.json()["error"]["code"]),
            (415, &json!(415)),
            "{wrong}"
        );
    }
}

#[test]
fn bodies_over_the_limit_are_413_however_they_are_sent() {
    let front = start();
    let big = format!("{{\"inputs\":\"{}\"}}", "a".repeat(1 << 20));
    for (path, pointer) in [("/generate", "/error_type"), ("/v1/completions", "/error/message")] {
        let answer = post(front.address, path, &big);
        assert_eq!(answer.status, 413, "{path}");
        assert!(answer.json().pointer(pointer).is_some());
        // Announced only: the server does not wait for what it will not read.
        let head = format!("POST {path} HTTP/1.1\r\nhost: t\r\ncontent-length: 99999999999\r\n\r\n");
        assert_eq!(exchange(front.address, head.as_bytes()).status, 413);
        // Not announced.
        let mut chunked = format!("POST {path} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n").into_bytes();
        for part in big.as_bytes().chunks(60_000) {
            chunked.extend_from_slice(format!("{:x}\r\n", part.len()).as_bytes());
            chunked.extend_from_slice(part);
            chunked.extend_from_slice(b"\r\n");
        }
        chunked.extend_from_slice(b"0\r\n\r\n");
        let mut stream = connect(front.address);
        // The server may close before everything is sent.
        let _sent = stream.write_all(&chunked).is_ok();
        assert_eq!(read_all(&mut stream).status, 413);
    }
    let fits = format!(
        "{{\"inputs\":\"{}\",\"parameters\":{{\"truncate\":5}}}}",
        "a".repeat((1 << 20) - 50)
    );
    assert_eq!(post(front.address, "/generate", &fits).status, 200);
}

#[test]
fn all_bodies_together_are_bounded() {
    let front = start_with(|config| config.limits.max_queued_bytes = 1 << 20);
    let body = format!(
        "{{\"inputs\":\"{}\",\"parameters\":{{\"truncate\":5}}}}",
        "a".repeat(700_000)
    );
    let first = post_bytes("/generate", body.as_bytes());
    // Two at once are too much, whichever of them is read further; they may also just miss each other.
    let refused = (0..200).find_map(|_| {
        let mut slow = connect(front.address);
        let _sent = slow.write_all(&first[..first.len() - 10]).is_ok();
        let other = post(front.address, "/generate", &body);
        let _sent = slow.write_all(&first[first.len() - 10..]).is_ok();
        let answers = [other, read_all(&mut slow)];
        assert!(answers.iter().any(|answer| answer.status == 200));
        answers.into_iter().find(|answer| answer.status != 200)
    });
    let refused = refused.expect("there is room for one and a half");
    assert_eq!(
        (refused.status, &refused.json()["error_type"]),
        (429, &json!("overloaded"))
    );
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(
        post(front.address, "/generate", &body).status,
        200,
        "the memory is given back"
    );
}

#[test]
fn a_client_may_ask_whether_to_send_its_body() {
    let front = start();
    let body = "{\"inputs\":\"a\"}";
    let mut stream = connect(front.address);
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: t\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).expect("sent");
    let mut go_on = [0; 25];
    stream.read_exact(&mut go_on).expect("an interim answer");
    assert_eq!(&go_on, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).expect("sent");
    assert_eq!(read_all(&mut stream).status, 200);
}

#[test]
fn a_prompt_over_the_character_limit_is_refused() {
    let front = start_with(|config| config.limits.max_input_chars = 10);
    let with = |inputs: &str| post(front.address, "/generate", format!("{{\"inputs\":\"{inputs}\"}}"));
    assert_eq!(
        with(&"\u{1f600}".repeat(10)).status,
        200,
        "characters count, not bytes or UTF-16 units"
    );
    let answer = with(&"é".repeat(11));
    assert_eq!(answer.status, 422);
    assert!(
        answer
            .text()
            .contains("`inputs` has 11 characters, but must have at most 10"),
        "{}",
        answer.text()
    );
}

#[test]
fn request_ids_are_echoed_or_made() {
    let front = start();
    let given = request(front.address, "GET", "/info", "x-request-id: mine-7\r\n");
    assert_eq!(given.header("x-request-id"), Some("mine-7"));
    let made = get(front.address, "/nothing")
        .header("x-request-id")
        .map(str::to_owned)
        .expect("an id");
    assert_eq!(made.len(), 32);
    assert_ne!(
        Some(made.as_str()),
        get(front.address, "/nothing").header("x-request-id")
    );
    let long = request(
        front.address,
        "GET",
        "/info",
        &format!("x-request-id: {}\r\n", "x".repeat(300)),
    );
    assert_eq!(long.header("x-request-id").map(str::len), Some(32));
}

#[test]
fn the_cluster_knows_a_request_by_the_id_the_client_was_told() {
    let front = start();
    let answer = post(front.address, "/generate", "{\"inputs\":\"a\"}");
    assert_eq!(
        answer.header("x-request-id"),
        Some(front.backend.last().id.to_string().as_str())
    );
    let answer = post(
        front.address,
        "/v1/completions",
        "{\"model\":\"tiny\",\"prompt\":\"a\"}",
    )
    .json();
    assert_eq!(answer["id"], format!("endpoint_common_{}", front.backend.last().id));
}

#[test]
fn any_origin_may_ask() {
    let front = start();
    let preflight = request(
        front.address,
        "OPTIONS",
        "/v1/completions",
        "origin: http://x\r\naccess-control-request-method: POST\r\n",
    );
    assert_eq!(preflight.status, 204);
    assert_eq!(
        preflight.header("access-control-allow-methods"),
        Some("GET, POST, OPTIONS")
    );
    assert!(
        preflight
            .header("access-control-allow-headers")
            .is_some_and(|headers| headers.contains("content-type"))
    );
    for answer in [preflight, get(front.address, "/info"), get(front.address, "/nothing")] {
        assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
    }
}

#[test]
fn keys_are_asked_for_where_some_are_configured() {
    let open = start();
    assert_eq!(
        request(open.address, "GET", "/info", "authorization: Bearer\r\n").status,
        200,
        "ignored without keys"
    );
    let front = start_with(|config| config.coordinator.api_keys = vec![Secret::new("0123456789abcdef")]);
    for headers in [
        "",
        "authorization: Bearer\r\n",
        "authorization: Bearer wrong\r\n",
        "authorization: Basic 0123456789abcdef\r\n",
    ] {
        for path in ["/info", "/v1/models", "/nothing"] {
            let answer = request(front.address, "GET", path, headers);
            assert_eq!(answer.status, 401, "{path} {headers}");
            assert_eq!(
                answer.json()["error"]["type"],
                "AuthenticationError",
                "OpenAI's shape on every path"
            );
            assert!(!answer.text().contains("0123456789abcdef"));
        }
    }
    assert_eq!(post(front.address, "/generate", "{\"inputs\":\"a\"}").status, 401);
    assert_eq!(front.backend.count(), 0);
    let key = "authorization: Bearer 0123456789abcdef\r\n";
    assert_eq!(request(front.address, "GET", "/v1/models", key).status, 200);
    for path in ["/health", "/metrics", "/ping", "/"] {
        assert_eq!(get(front.address, path).status, 200, "{path} stays open");
    }
    assert_eq!(request(front.address, "OPTIONS", "/generate", "").status, 204);
}

#[test]
fn health_says_whether_requests_would_be_worked_on() {
    let front = start();
    for path in ["/health", "/ping", "/"] {
        let answer = get(front.address, path);
        assert_eq!((answer.status, answer.body.len()), (200, 0), "{path}");
        assert_eq!(request(front.address, "HEAD", path, "").status, 200, "{path}");
    }
    front
        .backend
        .status_is(|status| status.nodes.retain(|node| node.role == Role::Prefill));
    for path in ["/health", "/ping", "/"] {
        let answer = get(front.address, path);
        assert_eq!(answer.status, 503, "{path}");
        assert_eq!(
            answer.json(),
            json!({ "error": "unhealthy", "error_type": "healthcheck" })
        );
    }
}

#[test]
fn info_and_models_describe_the_model() {
    let front = start();
    let info = get(front.address, "/info").json();
    assert_eq!(info["model_id"], "tiny");
    assert_eq!(info["max_input_length"], 200);
    assert_eq!(info["max_total_tokens"], 256);
    assert_eq!(info["models"][0]["model_id"], "tiny");
    assert_eq!(info["model_sha"], "00000000000000000000000000000abc");
    assert_eq!(info["max_batch_total_tokens"], 128);
    front.backend.status_is(|status| status.nodes.clear());
    let lonely = get(front.address, "/info").json();
    assert_eq!(
        (&lonely["model_sha"], &lonely["max_batch_total_tokens"]),
        (&json!(null), &json!(0))
    );
    let models = get(front.address, "/v1/models").json();
    assert_eq!(models["object"], "list");
    let ids: Vec<_> = models["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|model| model["id"].clone())
        .collect();
    assert_eq!(ids, ["tiny", "org/tiny-alias"]);
    for id in ["tiny", "org/tiny-alias", "org%2Ftiny-alias"] {
        let model = get(front.address, &format!("/v1/models/{id}"));
        assert_eq!((model.status, &model.json()["object"]), (200, &json!("model")), "{id}");
        assert_eq!(model.json()["max_model_len"], 256);
    }
    let unknown = get(front.address, "/v1/models/other");
    assert_eq!(
        (unknown.status, &unknown.json()["error"]["type"]),
        (404, &json!("NotFoundError"))
    );
}

#[test]
fn metrics_that_are_switched_off_are_not_found() {
    let front = start_with(|config| config.telemetry.metrics = false);
    let answer = get(front.address, "/metrics");
    let said = "metrics are switched off: telemetry.metrics = false";
    assert_eq!((answer.status, &answer.json()["error"]), (404, &json!(said)));
    assert_eq!(post(front.address, "/generate", "{\"inputs\":\"a\"}").status, 200);
}

#[test]
fn metrics_count_what_happened() {
    let front = start();
    assert_eq!(post(front.address, "/generate", "{\"inputs\":\"a\"}").status, 200);
    assert_eq!(post(front.address, "/generate", "{\"inputs\":\"\"}").status, 422);
    front.backend.status_is(|status| status.queued = 5);
    let answer = get(front.address, "/metrics");
    assert!(
        answer
            .header("content-type")
            .is_some_and(|kind| kind.starts_with("text/plain; version=0.0.4"))
    );
    // Other tests of this process count too: the names must be there, with a value.
    for name in [
        "tgi_request_count",
        "tgi_request_success",
        "tgi_request_failure",
        "tgi_request_duration_sum",
        "request_received_total",
        "request_success_total",
        "request_failed_total",
        "baton_time_to_first_token_seconds_bucket",
        "time_to_first_token_seconds_bucket",
        "baton_inter_token_latency_seconds_bucket",
        "time_per_output_token_seconds_count",
        "baton_e2e_request_latency_seconds_count",
        "baton_prompt_tokens_total",
        "generation_tokens_total",
        "tgi_request_generated_tokens_count",
        "baton_nodes",
    ] {
        let text = answer.text();
        let of_name = |line: &&str| line.starts_with(name) && line[name.len()..].starts_with('{');
        let series: Vec<&str> = text.lines().filter(of_name).collect();
        let values = series
            .iter()
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        assert!(values.sum::<f64>() > 0.0, "{name}: {series:?}");
    }
    assert!(answer.text().contains("num_requests_waiting{model_name=\"tiny\"}"));
    assert!(answer.text().contains("err=\"validation\""));
}

#[test]
fn a_connection_serves_many_requests_also_pipelined() {
    let front = start();
    let mut stream = connect(front.address);
    let one = String::from_utf8(post_bytes("/generate", b"{\"inputs\":\"a\"}")).expect("text");
    let kept = one.replace("connection: close\r\n", "");
    stream.write_all(format!("{kept}{kept}{one}").as_bytes()).expect("sent");
    let mut all = String::new();
    stream.read_to_string(&mut all).expect("three answers");
    assert_eq!(all.matches("HTTP/1.1 200 OK").count(), 3);
    assert_eq!(all.matches("{\"generated_text\":\"hello\"}").count(), 3);
}

#[test]
fn garbage_on_the_wire_harms_nobody() {
    let front = start();
    let garbage: [&[u8]; 6] = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: t\r\ncontent-length: abc\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: t\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /generate HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ];
    for bytes in garbage {
        let mut stream = connect(front.address);
        stream.write_all(bytes).expect("sent");
        stream.shutdown(std::net::Shutdown::Write).expect("closed");
        let mut answer = Vec::new();
        // A reset is an answer too.
        let _read = stream.read_to_end(&mut answer).is_ok();
        let status = String::from_utf8_lossy(&answer).into_owned();
        assert!(status.is_empty() || status.starts_with("HTTP/1.1 4"), "{status}");
    }
    let mut huge = connect(front.address);
    let head = format!("GET / HTTP/1.1\r\nhost: t\r\nx: {}\r\n\r\n", "y".repeat(300_000));
    let _sent = huge.write_all(head.as_bytes()).is_ok();
    assert_eq!(post(front.address, "/generate", "{\"inputs\":\"a\"}").status, 200);
}

#[test]
fn a_body_that_ends_early_is_no_request() {
    let front = start();
    let mut stream = connect(front.address);
    stream
        .write_all(b"POST /generate HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\n{\"inputs\":\"a\"}")
        .expect("sent");
    stream.shutdown(std::net::Shutdown::Write).expect("closed");
    let mut rest = Vec::new();
    let _read = stream.read_to_end(&mut rest).is_ok();
    assert_eq!(front.backend.count(), 0);
}

#[test]
fn an_answer_larger_than_any_buffer_arrives_whole() {
    let front = start_with(|config| {
        config.limits.max_input_token_len = 100_000;
        config.limits.max_iter_times = 4;
    });
    front.backend.play(Script::Tokens(bytes("abcde")));
    // The prompt's details are the large part.
    let inputs = "x".repeat(240);
    let body = format!("{{\"inputs\":\"{inputs}\",\"parameters\":{{\"decoder_input_details\":true}}}}");
    let answer = post(front.address, "/generate", body).json();
    assert_eq!(answer["details"]["prefill"].as_array().map(Vec::len), Some(241));
    assert_eq!(answer["details"]["finish_reason"], "length");
    assert_eq!(answer["details"]["generated_tokens"], 5);
}

#[test]
fn http_1_0_gets_a_stream_without_chunks() {
    let front = start();
    let body = "{\"inputs\":\"a\"}";
    for connection in ["", "connection: keep-alive\r\n"] {
        let head = format!(
            "POST /generate_stream HTTP/1.0\r\ncontent-length: {}\r\n{connection}\r\n{body}",
            body.len()
        );
        let answer = exchange(front.address, head.as_bytes());
        assert_eq!((answer.status, answer.header("transfer-encoding")), (200, None));
        assert_eq!(answer.json_events().len(), 6);
    }
}
