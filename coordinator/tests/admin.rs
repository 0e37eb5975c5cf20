//! The admin plane over real HTTP, with nodes over real QUIC that do nothing by themselves.

mod fake_node;
mod http_support;

use std::net::SocketAddr;
use std::sync::Arc;

use config::{AdminConfig, Secret};
use coordinator::admin::{self, About};
use coordinator::live::Live;
use fake_node::{Coordinator, request};
use http_support::client::{Response, exchange};
use protocol::blocks::{BlockAudit, BlockOwner, JobKey, JobKind, MAX_BLOCK_OWNERS, OwnerKind};
use protocol::control::{CoordinatorMessage, LoadReport, NodeMessage, WorkDone};
use protocol::ids::{Epoch, RequestId};
use runtime::clock::Clock;
use serde_json::{Value, json};

const TOKEN: &str = "operators-only-0123456789";

async fn ask(address: SocketAddr, method: &str, path: &str, token: &str, body: &str) -> Response {
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\nauthorization: Bearer {token}\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let asked = tokio::task::spawn_blocking(move || exchange(address, request.as_bytes()));
    asked.await.expect("an answer")
}

fn open(coordinator: &Coordinator) -> SocketAddr {
    let config = AdminConfig {
        listen: "127.0.0.1:0".to_owned(),
        tokens: vec![Secret::new("another-token-0123456789"), Secret::new(TOKEN)],
    };
    let about = About {
        node: "c0".to_owned(),
        model: "tiny".to_owned(),
    };
    let live = Arc::new(Live::new(Clock));
    live.sample(&coordinator.handle.status());
    let front = admin::bind(&config, coordinator.handle.clone(), live, about)
        .expect("a port")
        .expect("configured");
    tokio::spawn(front.server);
    front.address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_see_nodes_and_give_them_orders() {
    let (coordinator, _prefill, mut decode) = Coordinator::with_nodes().await;
    let address = open(&coordinator);
    let shown = ask(address, "GET", "/nodes", TOKEN, "").await;
    assert_eq!(shown.status, 200, "{}", shown.text());
    let names: Vec<_> = shown.json()["nodes"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|n| n["node"].clone())
        .collect();
    assert_eq!(names, [json!("p0"), json!("d0")]);
    assert_eq!(shown.json()["ready"], true);

    let drained = ask(address, "POST", "/nodes/d0/drain", TOKEN, "").await;
    assert_eq!(
        (drained.status, &drained.json()["draining"]),
        (202, &json!(true)),
        "{}",
        drained.text()
    );
    assert_eq!(decode.order().await, CoordinatorMessage::Drain { on: true });
    assert_eq!(ask(address, "GET", "/nodes", TOKEN, "").await.json()["ready"], false);
    let one = ask(address, "GET", "/nodes/d0", TOKEN, "").await;
    assert_eq!(
        (&one.json()["node"], &one.json()["role"]),
        (&json!("d0"), &json!("decode"))
    );

    let back = ask(address, "POST", "/nodes/d0/undrain", TOKEN, "").await;
    assert_eq!(back.status, 202);
    assert_eq!(decode.order().await, CoordinatorMessage::Drain { on: false });
    decode
        .report(LoadReport {
            sequence: 1,
            free_blocks: 64,
            oldest_wait_ms: 12,
            done: WorkDone {
                preemptions: 3,
                cache_queried_tokens: 8,
                cache_hit_tokens: 2,
                ..WorkDone::default()
            },
            ..LoadReport::default()
        })
        .await;
    coordinator.until(|status| status.is_ready()).await;
    shows_what_was_reported(&ask(address, "GET", "/nodes", TOKEN, "").await.json());
    let _stream = coordinator.submit(request(0x1f, 3)).await;
    let (_job, _side) = decode.decode().await;
    let why = ask(address, "GET", &format!("/debug/decisions/{:032x}", 0x1f), TOKEN, "").await;
    assert_eq!(why.status, 200, "{}", why.text());
    let first = &why.json()["decisions"][0];
    assert_eq!(
        (&first["prefill"], &first["decode"]),
        (&json!("p0"), &json!("d0")),
        "{first}"
    );
    assert_eq!(why.json()["request"]["outcome"], "reserving", "{}", why.text());
    let all = ask(address, "GET", "/debug/requests", TOKEN, "").await.json();
    assert_eq!(all["running"].as_array().map(Vec::len), Some(1), "{all}");
    assert_eq!(all["ended"], json!([]), "{all}");
}

/// Pools and nodes: the prefill node has reported nothing, the decode node something.
fn shows_what_was_reported(all: &Value) {
    let (pool, node) = (&all["pools"][0], &all["nodes"][0]);
    assert_eq!((&pool["role"], &pool["nodes"]), (&json!("prefill"), &json!(1)), "{all}");
    assert_eq!(
        (&node["node"], &node["cache_hit_rate"]),
        (&json!("p0"), &json!(null)),
        "{all}"
    );
    let (pool, node) = (&all["pools"][1], &all["nodes"][1]);
    for shown in [pool, node] {
        assert_eq!(
            (&shown["role"], &shown["oldest_wait_ms"]),
            (&json!("decode"), &json!(12)),
            "{all}"
        );
        assert_eq!(
            (&shown["cache_hit_rate"], &shown["free_blocks"]),
            (&json!(0.25), &json!(64)),
            "{all}"
        );
        assert!(shown["tokens_per_second"].is_f64(), "{all}");
    }
    assert_eq!(node["preemptions"], 3, "{all}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_done_is_said_and_strangers_stay_out() {
    let (coordinator, _prefill, _decode) = Coordinator::with_nodes().await;
    let address = open(&coordinator);
    for token in ["", "wrong-token-0123456789012", &TOKEN[..20]] {
        for (method, path) in [
            ("GET", "/nodes"),
            ("GET", "/status?since=0"),
            ("GET", "/debug/blocks"),
            ("POST", "/nodes/d0/drain"),
            ("GET", "/nothing"),
        ] {
            let refused = ask(address, method, path, token, "").await;
            assert_eq!(refused.status, 401, "{method} {path}");
            assert!(
                refused.json()["error"]
                    .as_str()
                    .is_some_and(|text| text.contains("token"))
            );
        }
    }
    for (method, path, body, status, says) in [
        ("GET", "/nodes/d7", "", 404, "d7"),
        ("POST", "/nodes/d7/drain", "", 404, "d7"),
        ("GET", "/nothing", "", 404, "/nothing"),
        ("GET", "/debug/decisions/1f", "", 404, "1f"),
        ("GET", "/debug/requests?most=0", "", 400, "most=0"),
        ("GET", "/debug/requests?least=1", "", 400, "least"),
        ("GET", "/status?since=-1", "", 400, "since=-1"),
        ("GET", "/status?until=3", "", 400, "until=3"),
        ("GET", "/dashboard/other.js", "", 404, "no such file"),
        ("GET", "/dashboard?token=x", "", 400, "no query"),
        ("GET", "/debug/blocks?node=d0", "", 400, "node=d0"),
        ("POST", "/nodes/d0/drain?move=true", "", 400, "move=true"),
        (
            "GET",
            "/debug/decisions/0000000000000000000000000000002a",
            "",
            404,
            "2a",
        ),
        ("POST", "/nodes/d0/drain", r#"{"mvoe": true}"#, 400, "mvoe"),
        ("POST", "/nodes/d0/drain", r#"{"move": 1}"#, 400, "move"),
        ("POST", "/nodes/d0/role", r#"{"role": "boss"}"#, 400, "boss"),
        ("POST", "/nodes/d0/role", "", 400, "prefill"),
        ("POST", "/nodes/d0/role", "[", 400, "role"),
        ("POST", "/nodes/d0/role", r#"{"role": "prefill"}"#, 409, "certificate"),
    ] {
        let answer = ask(address, method, path, TOKEN, body).await;
        assert_eq!(answer.status, status, "{method} {path} {body}: {}", answer.text());
        let error = answer.json()["error"].as_str().expect("a message").to_owned();
        assert!(error.contains(says), "{method} {path} {body}: {error}");
    }
}

/// A node's answer to question `number`: these requests' first decode attempts have two blocks each, of 100.
fn blocks(number: u64, requests: &[u128]) -> BlockAudit {
    let owner = |request: &u128| BlockOwner {
        job: Some(JobKey {
            request: RequestId(*request),
            epoch: Epoch(1),
            kind: JobKind::Decode,
        }),
        elsewhere: None,
        kind: OwnerKind::Sequence,
        parts: 1,
        blocks: 2,
        counted_blocks: 2,
        age_ms: Some(20),
    };
    let owned = 2 * requests.len() as u32;
    BlockAudit {
        number,
        total_blocks: 100,
        free_blocks: 100_u32.saturating_sub(owned),
        owned_blocks: owned,
        owners: requests.iter().map(owner).collect(),
        ..BlockAudit::default()
    }
}

/// Answers the next question whose the node's blocks are.
async fn tell_blocks(node: &mut fake_node::Node, requests: &[u128]) {
    let CoordinatorMessage::ReportBlocks { number } = node.order().await else {
        panic!("another order")
    };
    node.say(&NodeMessage::Blocks(blocks(number, requests))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_are_audited_and_what_does_not_agree_is_named() {
    let (coordinator, mut prefill, mut decode) = Coordinator::with_nodes().await;
    let address = open(&coordinator);
    let _stream = coordinator.submit(request(0x1f, 3)).await;
    let (_job, _side) = decode.decode().await;

    let (answer, ()) = tokio::join!(ask(address, "GET", "/debug/blocks", TOKEN, ""), async {
        tell_blocks(&mut prefill, &[]).await;
        tell_blocks(&mut decode, &[0x1f]).await;
    });
    assert_eq!(answer.status, 200, "{}", answer.text());
    let report = answer.json();
    assert_eq!(
        (&report["complete"], &report["agrees"]),
        (&json!(true), &json!(true)),
        "{report}"
    );
    assert_eq!(report["nodes"][0]["owners"][0]["request"], format!("{:032x}", 0x1f));
    assert_eq!(report["nodes"][0]["blocks"]["owned"], 2);

    // One job too many, one too few; the prefill node does not answer.
    let (answer, ()) = tokio::join!(ask(address, "GET", "/debug/blocks", TOKEN, ""), async {
        for _ in 0..3 {
            tell_blocks(&mut decode, &[0x2a]).await;
        }
    });
    let report = answer.json();
    assert_eq!(
        (&report["complete"], &report["agrees"]),
        (&json!(false), &json!(false)),
        "{report}"
    );
    let node = &report["nodes"][0];
    assert_eq!(node["orphans"][0]["request"], format!("{:032x}", 0x2a), "{report}");
    assert_eq!(node["missing"][0]["request"], format!("{:032x}", 0x1f), "{report}");
    assert_eq!(report["nodes"][1]["node"], "p0");
    assert_eq!(report["nodes"][1]["silent"], "it did not answer in time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_answers_more_than_it_may_is_sent_away() {
    let (coordinator, _prefill, mut decode) = Coordinator::with_nodes().await;
    let many = vec![0x2a; MAX_BLOCK_OWNERS + 1];
    decode.say(&NodeMessage::Blocks(blocks(0, &many))).await;
    coordinator.until(|status| status.nodes.len() == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_has_the_last_minutes_and_the_page_has_all_it_loads() {
    let (coordinator, _prefill, _decode) = Coordinator::with_nodes().await;
    let address = open(&coordinator);
    let status = ask(address, "GET", "/status", TOKEN, "").await.json();
    assert_eq!(
        (&status["coordinator"]["node"], &status["coordinator"]["model"]),
        (&json!("c0"), &json!("tiny")),
        "{status}"
    );
    assert_eq!(
        (&status["ready"], &status["gone"]),
        (&json!(true), &json!([])),
        "{status}"
    );
    assert_eq!(
        status["recent"]["ttft_ms"],
        json!({"p50": null, "p90": null, "p99": null, "count": 0})
    );
    assert!(status["series"].is_null(), "{status}");
    let series = ask(address, "GET", "/status?since=0", TOKEN, "").await.json()["series"].clone();
    assert_eq!((&series["first"], &series["next"]), (&json!(0), &json!(1)), "{series}");
    assert_eq!(
        series["kv_used"]["prefill"].as_array().map(Vec::len),
        Some(1),
        "{series}"
    );
    assert_eq!(series["kv_used"]["both"], json!([null]), "{series}");
    let none = ask(address, "GET", "/status?since=1", TOKEN, "").await.json()["series"].clone();
    assert_eq!((&none["next"], &none["queued"]), (&json!(1), &json!([])), "{none}");

    // Nothing on the page is secret: it needs no token. It asks for one.
    let page = ask(address, "GET", "/dashboard", "", "").await;
    let policy = page.header("content-security-policy").expect("a policy").to_owned();
    assert!(
        policy.contains("default-src 'none'") && policy.contains("trusted-types 'none'"),
        "{policy}"
    );
    assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
    let text = page.text();
    let loaded: Vec<&str> = text.split('"').filter(|part| part.starts_with("dashboard/")).collect();
    assert!(loaded.len() >= 4 && !text.contains("http"), "{text}");
    let scripts = [
        "charts.js",
        "dom.js",
        "nodes.js",
        "record.js",
        "requests.js",
        "server.js",
    ];
    let scripts = scripts.iter().map(|name| format!("dashboard/{name}"));
    for path in loaded.iter().map(|path| (*path).to_owned()).chain(scripts) {
        let file = ask(address, "GET", &format!("/{path}"), "", "").await;
        assert_eq!(file.status, 200, "{path}");
        assert_eq!(file.header("content-security-policy"), Some(policy.as_str()), "{path}");
        assert_eq!(file.header("x-content-type-options"), Some("nosniff"), "{path}");
        assert!(!file.text().contains("innerHTML"), "{path}");
    }
}

#[tokio::test]
async fn without_an_address_there_is_no_admin_plane() {
    let coordinator = Coordinator::start().await;
    let live = Arc::new(Live::new(Clock));
    let none = admin::bind(
        &AdminConfig::default(),
        coordinator.handle.clone(),
        live,
        About::default(),
    );
    assert!(none.expect("nothing to bind").is_none());
}
