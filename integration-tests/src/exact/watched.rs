//! A pair of nodes whose own counters can be read: what a node did, in its own words.

use std::net::TcpListener;

use anyhow::{Result, ensure};

use crate::cluster::{Cluster, ClusterSpec, metric};

/// See the head of the file.
#[derive(Debug)]
pub struct Watched {
    /// The processes.
    pub cluster: Cluster,
    prefill: String,
    decode: String,
}

impl Watched {
    /// Starts a coordinator, one prefill node and one decode node, and waits until they serve.
    pub async fn start(spec: ClusterSpec) -> Result<Self> {
        ensure!(spec.prefill == 1 && spec.decode == 1, "one node of each role");
        let mut cluster = Cluster::without_nodes(spec)?;
        cluster.start_coordinator()?;
        let mut pages = Vec::new();
        for role in ["prefill", "decode"] {
            let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
            let setting = format!("node.metrics_listen={address}");
            cluster.start_process(&format!("{role}-0"), &format!("{role}-node"), &[&setting])?;
            pages.push(format!("http://{address}/metrics"));
        }
        cluster.ready().await?;
        let decode = pages.pop().unwrap_or_default();
        let prefill = pages.pop().unwrap_or_default();
        Ok(Self {
            cluster,
            prefill,
            decode,
        })
    }

    /// A counter of the prefill node. A counter that was never counted up does not exist: it is 0.
    pub async fn prefill_count(&self, name: &str, labels: &[&str]) -> Result<u64> {
        count(&self.prefill, name, labels).await
    }

    /// A counter of the decode node, likewise.
    pub async fn decode_count(&self, name: &str, labels: &[&str]) -> Result<u64> {
        count(&self.decode, name, labels).await
    }
}

async fn count(page: &str, name: &str, labels: &[&str]) -> Result<u64> {
    let page = reqwest::get(page).await?.error_for_status()?.text().await?;
    Ok(metric(&page, name, labels).unwrap_or(0.0) as u64)
}
