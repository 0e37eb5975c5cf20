//! A cluster each of whose processes can be scraped.

use std::path::Path;

use anyhow::{Context, Result};
use integration_tests::cluster::{Cluster, ClusterSpec, metric_sum};
use integration_tests::ports::free_tcp;
use reqwest::Client;

/// See the head of the file.
pub(crate) struct Watched {
    pub(crate) cluster: Cluster,
    pub(crate) client: Client,
    /// By node: where its metrics are.
    ports: Vec<(String, u16)>,
}

impl Watched {
    /// Starts one of `spec`.
    pub(crate) async fn start(spec: ClusterSpec) -> Result<Self> {
        let counts = [("prefill", spec.prefill), ("decode", spec.decode)];
        let mut cluster = Cluster::without_nodes(spec)?;
        cluster.start_coordinator()?;
        let mut ports = Vec::new();
        for (role, count) in counts {
            for i in 0..count {
                ports.push((format!("{role}-{i}"), free_tcp()?));
            }
        }
        let mut watched = Self {
            cluster,
            client: Client::new(),
            ports,
        };
        for (node, _) in watched.ports.clone() {
            watched.start_node(&node)?;
        }
        watched.cluster.ready().await?;
        Ok(watched)
    }

    /// Starts a node, for the first time or again.
    pub(crate) fn start_node(&mut self, node: &str) -> Result<()> {
        let (role, _) = node.split_once('-').context("a role")?;
        let listen = format!("node.metrics_listen={}", self.target(node)?);
        self.cluster.start_process(node, &format!("{role}-node"), &[&listen])
    }

    /// `host:port` of the metrics of the coordinator or a node.
    pub(crate) fn target(&self, process: &str) -> Result<String> {
        let node = self.ports.iter().find(|(name, _)| name == process);
        let port = match node {
            Some((_, port)) => *port,
            None if process == "coordinator" => self.cluster.http_port(),
            None => anyhow::bail!("no process {process}"),
        };
        Ok(format!("127.0.0.1:{port}"))
    }

    /// What a process shows.
    pub(crate) async fn page(&self, process: &str) -> Result<String> {
        let url = format!("http://{}/metrics", self.target(process)?);
        Ok(self.client.get(url).send().await?.error_for_status()?.text().await?)
    }

    /// The sum of a metric of the coordinator.
    pub(crate) async fn sum(&self, name: &str) -> Result<u64> {
        Ok(metric_sum(&self.page("coordinator").await?, name) as u64)
    }

    /// The sum of a metric over all nodes.
    pub(crate) async fn sum_of_nodes(&self, name: &str) -> Result<u64> {
        let mut sum = 0;
        for (node, _) in &self.ports {
            sum += metric_sum(&self.page(node).await?, name) as u64;
        }
        Ok(sum)
    }

    /// Waits until `name` on the nodes adds up to `wanted`: what they show may be a step behind what their clients have.
    pub(crate) async fn nodes_reach(&self, name: &str, wanted: u64) -> Result<()> {
        let deadline = runtime::clock::Clock.now() + std::time::Duration::from_secs(10);
        loop {
            let sum = self.sum_of_nodes(name).await?;
            if sum == wanted {
                return Ok(());
            }
            anyhow::ensure!(
                runtime::clock::Clock.now() < deadline,
                "{name} is {sum} on the nodes, and should be {wanted}"
            );
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    /// Writes a process's page to a file.
    pub(crate) async fn save(&self, process: &str, file: &Path) -> Result<String> {
        let page = self.page(process).await?;
        std::fs::write(file, &page)?;
        Ok(page)
    }
}
