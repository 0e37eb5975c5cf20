//! `scripts/bench memory`: resident memory of a prefill and a decode node, as started and with the KV pool used.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use integration_tests::client::post_ok;
use integration_tests::cluster::{Cluster, ClusterSpec, metric};
use integration_tests::ports;
use reqwest::Client;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::report::measured;

const NODES: [&str; 2] = ["prefill", "decode"];
const PARTS: [&str; 5] = ["weights", "embedding", "tables", "kv_pool", "other"];
/// The pool counts as used when this share of it is resident.
const USED: f64 = 0.95;
/// Requests that are sent at once to fill the pools, and how often at most.
const AT_ONCE: usize = 8;
const TRIES: usize = 6;
/// Nodes publish their memory this often, and a little later.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(12);

/// Arguments of `scripts/bench memory`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// GGUF file or model directory; scripts/bench names the default model.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Size of each node's KV pool, in tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(512..=100_000_000))]
    kv_pool_tokens: u32,
    /// Another setting of the nodes, SECTION.FIELD=VALUE; may be repeated.
    #[arg(long, value_name = "SETTING")]
    set: Vec<String>,
    /// Write all figures to a file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<()> {
    measured(args.json.as_deref(), measure(args))
}

async fn measure(args: &Args) -> Result<Value> {
    let mut spec = ClusterSpec::pair(args.model.clone()).set(format!("engine.kv_pool_tokens={}", args.kv_pool_tokens));
    spec.settings.extend(args.set.iter().cloned());
    let mut cluster = Cluster::without_nodes(spec)?;
    cluster.start_coordinator()?;
    let pages = [ports::free_tcp()?, ports::free_tcp()?];
    for (name, port) in NODES.iter().zip(pages) {
        let listen = format!("node.metrics_listen=127.0.0.1:{port}");
        cluster.start_process(&format!("{name}-0"), &format!("{name}-node"), &[&listen])?;
    }
    cluster.ready().await?;
    println!("MiB, {} KV tokens        resident  {}", args.kv_pool_tokens, head());
    let mut found = json!({ "kv_pool_tokens": args.kv_pool_tokens });
    for (name, port) in NODES.iter().zip(pages) {
        let memory = read(port).await?;
        println!("{name:<8} as started       {}", memory.to_text());
        found[*name]["as_started"] = memory.to_json();
    }
    let used = fill(&cluster, args.kv_pool_tokens as usize, pages).await?;
    for (name, memory) in NODES.iter().zip(&used) {
        println!("{name:<8} pool used        {}", memory.to_text());
        found[*name]["pool_used"] = memory.to_json();
    }
    for memory in &used {
        if memory.share() < USED {
            println!(
                "only {:.0} % of a pool was used by {} requests",
                100.0 * memory.share(),
                TRIES * AT_ONCE
            );
        }
    }
    Ok(found)
}

fn head() -> String {
    PARTS.map(|part| format!("{part:>10}")).concat() + "  huge pages"
}

/// What a node says about its memory, in bytes.
struct Memory {
    parts: [f64; 5],
    huge_pages: f64,
    pool: f64,
}

impl Memory {
    /// Share of the pool that is resident.
    fn share(&self) -> f64 {
        self.parts[3] / self.pool
    }

    fn to_text(&self) -> String {
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let parts = self.parts.map(|part| format!("{:>10.1}", mib(part))).concat();
        format!(
            "{:>10.1}  {parts}{:>12.1}",
            mib(self.parts.iter().sum()),
            mib(self.huge_pages)
        )
    }

    fn to_json(&self) -> Value {
        let mut value = json!({
            "resident": self.parts.iter().sum::<f64>(),
            "huge_pages": self.huge_pages,
            "kv_pool_size": self.pool,
        });
        for (part, bytes) in PARTS.iter().zip(self.parts) {
            value[*part] = json!(bytes);
        }
        value
    }
}

async fn read(port: u16) -> Result<Memory> {
    let page = reqwest::get(format!("http://127.0.0.1:{port}/metrics"))
        .await?
        .error_for_status()?
        .text()
        .await?;
    let value = |name: &str, labels: &[&str]| {
        metric(&page, name, labels).with_context(|| format!("{name} is not published: this system does not say"))
    };
    let mut parts = [0.0; 5];
    for (bytes, part) in parts.iter_mut().zip(PARTS) {
        *bytes = value("baton_memory_bytes", &[&format!("part=\"{part}\"")])?;
    }
    Ok(Memory {
        parts,
        huge_pages: value("baton_memory_huge_pages_bytes", &[])?,
        pool: value("baton_kv_pool_bytes", &[])?,
    })
}

/// Sends prompts until the pools of both nodes have been used.
async fn fill(cluster: &Cluster, pool_tokens: usize, pages: [u16; 2]) -> Result<Vec<Memory>> {
    let client = Client::new();
    // Together three quarters of the pool: all of it would make requests wait for each other.
    let words = (pool_tokens * 3 / 4 / AT_ONCE).min(4000);
    let mut last = Vec::new();
    for attempt in 0..TRIES {
        let mut asked = JoinSet::new();
        for i in 0..AT_ONCE {
            let (client, url) = (client.clone(), format!("{}/generate", cluster.url()));
            let text = format!("{attempt} {i} {}", "and so on ".repeat(words / 3));
            asked.spawn(async move {
                let body = json!({"inputs": text, "parameters": {"max_new_tokens": 64, "details": true}});
                post_ok(&client, &url, &body).await
            });
        }
        while let Some(answer) = asked.join_next().await {
            answer??;
        }
        last = published(pages).await?;
        if last.iter().all(|memory| memory.share() >= USED) {
            break;
        }
    }
    ensure!(last.len() == NODES.len(), "every node has been asked");
    Ok(last)
}

/// What the nodes say once they have published again.
async fn published(pages: [u16; 2]) -> Result<Vec<Memory>> {
    tokio::time::sleep(PUBLISHED_WITHIN).await;
    let mut all = Vec::new();
    for port in pages {
        let memory = read(port).await?;
        if memory.pool <= 0.0 {
            bail!("a node without a KV pool");
        }
        all.push(memory);
    }
    Ok(all)
}
