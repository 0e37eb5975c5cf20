//! A bad network between processes: a UDP relay that loses, delays and cuts.
//!
//! Kernels of test machines often lack `netem`, and rules of a firewall would concern everybody; a relay needs neither.
//! Every peer that sends to it gets a socket of its own towards the target, so the target sees as many peers as there are.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::net::UdpSocket;
use tokio::task::JoinHandle;

use crate::random::Random;

/// Largest UDP payload.
const LARGEST: usize = 65_536;

/// What the network does to packets. May change at any time.
#[derive(Debug, Default)]
pub struct Weather {
    loss_per_mille: AtomicU32,
    delay_us: AtomicU64,
    cut: AtomicBool,
}

impl Weather {
    /// So many of a thousand packets are lost.
    pub fn lose(&self, per_mille: u32) {
        self.loss_per_mille.store(per_mille, Ordering::Relaxed);
    }

    /// Every packet takes so long, each way.
    pub fn delay(&self, by: Duration) {
        self.delay_us.store(by.as_micros() as u64, Ordering::Relaxed);
    }

    /// Nothing gets through, or everything again.
    pub fn cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::Relaxed);
    }

    fn is_lost(&self, random: &mut Random) -> bool {
        self.cut.load(Ordering::Relaxed) || random.below(1_000) < u64::from(self.loss_per_mille.load(Ordering::Relaxed))
    }

    fn latency(&self) -> Duration {
        Duration::from_micros(self.delay_us.load(Ordering::Relaxed))
    }
}

/// A relay; ends when it is dropped.
#[derive(Debug)]
pub struct Relay {
    /// Where peers send to.
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Relay {
    /// Relays to `target`, through `weather`. Losses follow from `seed`.
    pub async fn start(target: SocketAddr, weather: Arc<Weather>, seed: u64) -> Result<Self> {
        let front = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
            .await
            .context("a relay's port")?;
        let address = front.local_addr()?;
        let task = tokio::spawn(relay(Arc::new(front), target, weather, seed));
        Ok(Self { address, task })
    }
}

async fn relay(front: Arc<UdpSocket>, target: SocketAddr, weather: Arc<Weather>, seed: u64) {
    let mut random = Random::new(seed);
    // Aborted with this task.
    let mut returns = tokio::task::JoinSet::new();
    let mut peers: HashMap<SocketAddr, Arc<UdpSocket>> = HashMap::new();
    let mut packet = vec![0; LARGEST];
    loop {
        // Errors are those of packets sent earlier (nobody listens there now): weather, too.
        let Ok((length, peer)) = front.recv_from(&mut packet).await else {
            continue;
        };
        let socket = match peers.get(&peer) {
            Some(socket) => Arc::clone(socket),
            None => {
                let Ok(socket) = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await else {
                    continue;
                };
                let socket = Arc::new(socket);
                peers.insert(peer, Arc::clone(&socket));
                let back = (Arc::clone(&socket), Arc::clone(&front), Arc::clone(&weather));
                returns.spawn(answers(back, peer, random.bits()));
                socket
            }
        };
        if !weather.is_lost(&mut random) {
            pass(socket, target, &packet[..length], weather.latency()).await;
        }
    }
}

/// What the target sends back to one peer.
async fn answers(
    (socket, front, weather): (Arc<UdpSocket>, Arc<UdpSocket>, Arc<Weather>),
    peer: SocketAddr,
    seed: u64,
) {
    let mut random = Random::new(seed);
    let mut packet = vec![0; LARGEST];
    loop {
        let Ok((length, _)) = socket.recv_from(&mut packet).await else {
            continue;
        };
        if !weather.is_lost(&mut random) {
            pass(Arc::clone(&front), peer, &packet[..length], weather.latency()).await;
        }
    }
}

async fn pass(socket: Arc<UdpSocket>, to: SocketAddr, packet: &[u8], latency: Duration) {
    if latency.is_zero() {
        // A packet that cannot be sent is lost.
        let _sent = socket.send_to(packet, to).await;
        return;
    }
    let packet = packet.to_vec();
    // Bounded by what the senders' congestion control has under way.
    tokio::spawn(async move {
        tokio::time::sleep(latency).await;
        let _sent = socket.send_to(&packet, to).await;
    });
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    async fn echo() -> SocketAddr {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let address = socket.local_addr().expect("bound");
        tokio::spawn(async move {
            let mut packet = [0; 64];
            while let Ok((length, peer)) = socket.recv_from(&mut packet).await {
                let _sent = socket.send_to(&packet[..length], peer).await;
            }
        });
        address
    }

    async fn ping(socket: &UdpSocket, relay: SocketAddr, within: Duration) -> bool {
        socket.send_to(b"ping", relay).await.expect("sent");
        let mut packet = [0; 64];
        timeout(within, socket.recv_from(&mut packet)).await.is_ok()
    }

    #[tokio::test]
    async fn packets_pass_get_late_get_lost_and_pass_again() {
        let weather = Arc::new(Weather::default());
        let relay = Relay::start(echo().await, Arc::clone(&weather), 7)
            .await
            .expect("a relay");
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        assert!(ping(&socket, relay.address, SOON).await);
        weather.delay(Duration::from_millis(100));
        assert!(
            !ping(&socket, relay.address, Duration::from_millis(150)).await,
            "100 ms each way"
        );
        let mut packet = [0; 64];
        timeout(SOON, socket.recv_from(&mut packet))
            .await
            .expect("late")
            .expect("a packet");
        weather.delay(Duration::ZERO);
        weather.cut(true);
        assert!(!ping(&socket, relay.address, Duration::from_millis(100)).await);
        weather.cut(false);
        assert!(ping(&socket, relay.address, SOON).await);
        weather.lose(500);
        let mut passed = 0;
        for _ in 0..100 {
            passed += u32::from(ping(&socket, relay.address, Duration::from_millis(10)).await);
        }
        // Half of them on the way there, half of the rest on the way back.
        assert!((5..60).contains(&passed), "{passed} of 100");
    }
}
