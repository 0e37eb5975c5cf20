//! Ports for servers that will be started in a moment.
//!
//! A port that the system hands out for `:0` comes from the range of which outgoing connections take theirs, and may be
//! taken by one of them before the server binds it. So ports are counted up below that range, from a random one on: no two
//! clusters of a process get the same, and those of two processes hardly ever.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, bail};

/// Below 32768, where the system's own range begins.
const FIRST: u16 = 12_000;
const COUNT: u16 = 20_000;

/// The standard library's hashers begin at a random state.
static NEXT: LazyLock<AtomicU64> = LazyLock::new(|| AtomicU64::new(RandomState::new().build_hasher().finish()));

/// A TCP port on loopback that nobody uses.
pub fn free_tcp() -> Result<u16> {
    free(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok())
}

/// A UDP port on loopback that nobody uses.
pub fn free_udp() -> Result<u16> {
    free(|port| UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).is_ok())
}

fn free(is_free: impl Fn(u16) -> bool) -> Result<u16> {
    for _ in 0..COUNT {
        let next = NEXT.fetch_add(1, Ordering::Relaxed) % u64::from(COUNT);
        let port = FIRST + u16::try_from(next).unwrap_or_default();
        if is_free(port) {
            return Ok(port);
        }
    }
    bail!("no free port from {FIRST} to {}", FIRST + COUNT - 1)
}
