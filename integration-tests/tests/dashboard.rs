//! The dashboard in a real browser: what it shows of a real cluster, of what clients call their requests, of a node that dies,
//! and of a coordinator that stops and comes back. Pictures of it are left in target/dashboard.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::cluster::{ADMIN_TOKEN, Cluster};
use integration_tests::files::root;
use integration_tests::python::Script;
use integration_tests::trial::spec;
use serde_json::json;

/// A model's name is text, whatever it says.
const NAME: &str = "<img src=x onerror=hacked()>";
/// Longest wait for a process's end.
const END: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_dashboard_shows_what_happens() -> Result<()> {
    let spec = spec(2, 1).set(format!("model.model_name={NAME}"));
    let mut cluster = Cluster::start(spec).await?;
    let pictures = root().join("target/dashboard");
    std::fs::create_dir_all(&pictures)?;
    let reference = json!({
        "url": cluster.url(), "admin": cluster.admin_url(), "token": ADMIN_TOKEN, "model": NAME,
        "nodes": ["prefill-0", "prefill-1", "decode-0"], "pictures": pictures,
    });
    let mut script = Script::start("node", "dashboard.mjs", cluster.dir(), &reference)?;
    script.wait_for("now prefill-1 dies")?;
    cluster.kill("prefill-1")?;
    script.wait_for("now the coordinator stops")?;
    cluster.terminate("coordinator", END)?;
    script.wait_for("now the coordinator starts")?;
    cluster.start_coordinator()?;
    let passed = script.finish()?;
    ensure!(passed == 13, "{passed} cases");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_an_admin_plane_the_page_says_how_to_have_one_and_nothing_else() -> Result<()> {
    let spec = spec(1, 1).set("admin.listen=").set("admin.tokens=[]");
    let cluster = Cluster::start(spec).await?;
    let answer = reqwest::get(format!("{}/dashboard", cluster.url())).await?;
    ensure!(answer.status() == 200, "{}", answer.status());
    let policy = answer.headers().get("content-security-policy").context("no policy")?;
    ensure!(policy.to_str()?.contains("default-src 'none'"), "{policy:?}");
    let text = answer.text().await?;
    ensure!(text.contains("[admin]") && text.contains("tokens = "), "{text}");
    for secret in ["prefill-0", "decode-0", "127.0.0.1:7700/nodes"] {
        ensure!(!text.contains(secret), "{secret} in {text}");
    }
    for path in [
        "/status",
        "/nodes",
        "/debug/requests",
        "/debug/decisions/1",
        "/dashboard/main.js",
    ] {
        let answer = reqwest::get(format!("{}{path}", cluster.url())).await?;
        ensure!(answer.status() == 404, "{path}: {}", answer.status());
    }
    Ok(())
}
