//! A cluster of two prefill nodes, two decode nodes and two coordinators, under load while everything that can happen to
//! it happens: kills, freezes, cuts, losses, delays.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use reqwest::Client;
use runtime::clock::Clock;

use crate::ask::Ask;
use crate::cluster::{Cluster, ClusterSpec, metric};
use crate::load::{HANGS_AFTER, Known, Running, Tally};
use crate::random::Random;
use crate::trial::{IDLE_WITHIN, pause, spec};
use crate::vitals::idle_within;

/// After the last fault everything that is still under way ends within this time.
const SETTLES_WITHIN: Duration = Duration::from_secs(15);

/// What happens, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How often each node is killed and started again.
    pub kills: usize,
    /// How often each coordinator is killed and started again.
    pub coordinator_kills: usize,
    /// How often each node is frozen, and for how long.
    pub freezes: usize,
    /// How long a freeze lasts.
    pub frozen: Duration,
    /// How often the links of each node are cut, for a time that lets them be given up.
    pub cuts: usize,
    /// How long all links lose 5 % of their packets and take 50 ms longer.
    pub bad_weather: Duration,
    /// Streams that run meanwhile, on both coordinators together.
    pub streams: usize,
}

/// A cluster in trouble.
pub struct Upheaval {
    cluster: Cluster,
    client: Client,
    known: Arc<Known>,
    random: Random,
    streams: usize,
}

/// Times from a node's return to the first exact answer to a request sent after it.
#[derive(Debug, Default)]
pub struct Recovery(Vec<Duration>);

impl Recovery {
    /// Prints median and maximum.
    fn print(&mut self, of: &str) -> Result<()> {
        self.0.sort();
        let (p50, max) = (self.0.get(self.0.len() / 2), self.0.last());
        let (p50, max) = p50.zip(max).context("no kills")?;
        eprintln!(
            "first exact answer after {of}, {} times: p50 {p50:?}, max {max:?}",
            self.0.len()
        );
        Ok(())
    }
}

impl Upheaval {
    /// The cluster, at rest, and requests with known answers: half of them for two choices, with stop strings and seeds.
    pub async fn begin(plan: &Plan, seed: u64) -> Result<Self> {
        let spec = ClusterSpec {
            coordinators: 2,
            relayed: true,
            ..spec(2, 2)
        };
        // What a cut or a freeze of a node costs its clients must fit in their patience.
        let spec = spec
            .set("limits.max_concurrent_requests=2048")
            .set("limits.max_queued_requests=1024");
        let cluster = Cluster::start(spec).await?;
        let client = Client::new();
        let mut random = Random::new(seed);
        let mut asks = Ask::mixed(&mut random, 16, 100, (1, 200));
        asks.extend((0..16).map(|_| {
            let (words, tokens) = (random.between(1, 100), random.between(2, 200));
            Ask::demanding(&mut random, words, tokens)
        }));
        let known = Arc::new(Known::learn(&client, &cluster.url(), asks).await?);
        Ok(Self {
            cluster,
            client,
            known,
            random,
            streams: plan.streams,
        })
    }

    fn load(&self) -> [Running; 2] {
        [0, 1].map(|i| self.known.load(&self.client, &self.cluster.url_of(i), self.streams / 2))
    }

    async fn end(&self, loads: [Running; 2], what: &str) -> Result<[Tally; 2]> {
        self.end_without(None, loads, what).await
    }

    /// As `end`, where a coordinator was killed: the connections of its clients may have ended.
    async fn end_without(&self, killed: Option<usize>, loads: [Running; 2], what: &str) -> Result<[Tally; 2]> {
        let [first, second] = loads;
        let tallies = [first.stop().await?, second.stop().await?];
        for (i, tally) in tallies.iter().enumerate() {
            eprintln!("{what}: {tally}");
            tally.honest(killed == Some(i)).with_context(|| what.to_owned())?;
            ensure!(tally.slowest() < HANGS_AFTER, "{what}: {tally}");
        }
        Ok(tallies)
    }

    /// Kills each node and starts it again, `times` times.
    pub async fn kills(&mut self, times: usize) -> Result<Recovery> {
        let mut recovery = Recovery::default();
        for node in self.cluster.node_names() {
            let loads = self.load();
            let mut back: Vec<Instant> = Vec::new();
            for _ in 0..times {
                pause(self.random.between(200, 700)).await;
                self.cluster.kill(&node)?;
                pause(self.random.between(0, 1_500)).await;
                let (role, number) = node.rsplit_once('-').context("a node's name")?;
                self.cluster.start_node(role, number.parse()?)?;
                self.cluster.ready().await?;
                back.push(Clock.now());
            }
            pause(500).await;
            let tallies = self.end(loads, &format!("{node} killed {times} times")).await?;
            for at in back {
                let first = tallies.iter().filter_map(|tally| tally.first_exact_after(at)).min();
                recovery.0.push(first.context("no exact answer after a restart")?);
            }
        }
        Ok(recovery)
    }

    /// Kills each coordinator and starts it again, `times` times: its clients lose their connections, those of the other
    /// one nothing.
    pub async fn coordinator_kills(&mut self, times: usize) -> Result<Recovery> {
        let mut recovery = Recovery::default();
        for (i, name) in ["coordinator", "coordinator-1"].into_iter().enumerate() {
            let loads = self.load();
            let mut back: Vec<Instant> = Vec::new();
            for _ in 0..times {
                pause(self.random.between(200, 700)).await;
                self.cluster.kill(name)?;
                pause(self.random.between(0, 1_500)).await;
                self.cluster.start_process(name, "coordinator", &[])?;
                back.push(Clock.now());
                self.cluster.ready().await?;
            }
            pause(1_000).await;
            let what = format!("{name} killed {times} times");
            let tallies = self.end_without(Some(i), loads, &what).await?;
            for at in back {
                let first = tallies[i].first_exact_after(at);
                recovery.0.push(first.context("no exact answer after a restart")?);
            }
        }
        Ok(recovery)
    }

    /// Freezes each node, `times` times.
    pub async fn freezes(&mut self, times: usize, frozen: Duration) -> Result<()> {
        for node in self.cluster.node_names() {
            for _ in 0..times {
                let loads = self.load();
                pause(300).await;
                self.cluster.process(&node)?.signal(libc::SIGSTOP);
                tokio::time::sleep(frozen).await;
                self.cluster.process(&node)?.signal(libc::SIGCONT);
                pause(1_000).await;
                self.end(loads, &format!("{node} frozen for {frozen:?}")).await?;
            }
        }
        Ok(())
    }

    /// Cuts the links of each node until they are given up, and heals them, `times` times.
    pub async fn cuts(&mut self, times: usize) -> Result<()> {
        for node in self.cluster.node_names() {
            for _ in 0..times {
                let loads = self.load();
                pause(300).await;
                self.cluster.weather(&node)?.cut(true);
                pause(2_500).await;
                self.cluster.weather(&node)?.cut(false);
                pause(1_500).await;
                self.end(loads, &format!("{node} cut off for 2.5 s")).await?;
            }
        }
        Ok(())
    }

    /// 5 % loss and 50 ms more on all links, for a while.
    pub async fn bad_weather(&mut self, lasts: Duration) -> Result<()> {
        let set = |per_mille, delay| -> Result<()> {
            for node in self.cluster.node_names() {
                let weather = self.cluster.weather(&node)?;
                weather.lose(per_mille);
                weather.delay(delay);
            }
            Ok(())
        };
        set(50, Duration::from_millis(50))?;
        let loads = self.load();
        tokio::time::sleep(lasts).await;
        let tallies = self.end(loads, "5 % loss and 50 ms").await?;
        set(0, Duration::ZERO)?;
        ensure!(tallies.iter().all(|tally| tally.exact() > 0), "nothing gets through");
        Ok(())
    }

    /// Everything of the plan, then rest: no node owns a block, and nodes have not disagreed about a token.
    pub async fn run(mut self, plan: &Plan) -> Result<()> {
        if plan.kills > 0 {
            let mut recovery = self.kills(plan.kills).await?;
            recovery.print("a node's return")?;
        }
        if plan.coordinator_kills > 0 {
            let mut recovery = self.coordinator_kills(plan.coordinator_kills).await?;
            recovery.print("the start of a coordinator")?;
        }
        self.freezes(plan.freezes, plan.frozen).await?;
        self.cuts(plan.cuts).await?;
        if !plan.bad_weather.is_zero() {
            self.bad_weather(plan.bad_weather).await?;
        }
        self.cluster.ready().await?;
        let settled = idle_within(&self.cluster, 4, SETTLES_WITHIN.max(IDLE_WITHIN)).await?;
        eprintln!("idle after {settled:?}");
        for url in [self.cluster.url_of(0), self.cluster.url_of(1)] {
            self.known.check(&self.client, &url, 0).await?;
            let page = self.client.get(format!("{url}/metrics")).send().await?.text().await?;
            let (stalled, moved) = (
                metric(&page, "baton_migration_stall_seconds_sum", &[]).unwrap_or(0.0),
                metric(&page, "baton_migration_stall_seconds_count", &[]).unwrap_or(0.0),
            );
            eprintln!("since its last start: {moved} answers moved, which took {stalled:.3} s in all");
            let disagreements = metric(&page, "baton_token_disagreements_total", &[]).unwrap_or(0.0);
            ensure!(disagreements == 0.0, "{disagreements} tokens differ between nodes");
        }
        Ok(())
    }
}
