//! From `[transfer]` and `[cluster]` to quinn's and the socket's settings, with the rules that bind them.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use config::{ClusterConfig, TransferConfig};
use quinn::congestion::CubicConfig;
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{EndpointConfig, IdleTimeout, MtuDiscoveryConfig, ServerConfig, TransportConfig};
use socket2::{Domain, Protocol, Socket, Type};

use super::{LinkError, accept, varint};

/// quinn cuts one send into up to 10 datagrams, and the kernel takes 65,507 bytes a send. Larger datagrams with GSO make
/// sends fail, which looks like a path that drops large packets.
const GSO_MAX_DATAGRAM: u16 = 6_550;
/// What every IP path carries with QUIC.
const MIN_DATAGRAM: u16 = 1_200;
/// Largest payload accepted even if this side sends smaller ones: a full Ethernet frame.
const MIN_RECEIVE: u16 = 1_472;
/// Streams a peer may have open on a link: more than the jobs of any node.
const MAX_STREAMS: u32 = 4_096;
/// Round trips inside a cluster are short: a lost handshake packet is repeated after 3 times this, not after a second.
const INITIAL_RTT: Duration = Duration::from_millis(100);
/// After a suspected drop of the path's MTU, larger datagrams are tried again this soon.
const BLACK_HOLE_COOLDOWN: Duration = Duration::from_secs(5);

fn check(transfer: &TransferConfig) -> Result<(), LinkError> {
    let datagram = transfer.datagram_bytes;
    if transfer.gso && datagram > GSO_MAX_DATAGRAM {
        return Err(LinkError::Setting {
            field: "gso",
            value: "true".to_owned(),
            rule: format!("datagram_bytes = {datagram} needs gso = false, or at most {GSO_MAX_DATAGRAM} bytes"),
        });
    }
    // No datagram is sent that does not fit into the congestion window.
    let least = 2 * u64::from(datagram);
    if transfer.initial_window_bytes < least {
        return Err(LinkError::Setting {
            field: "initial_window_bytes",
            value: transfer.initial_window_bytes.to_string(),
            rule: format!("at least {least}: two datagrams of datagram_bytes = {datagram}"),
        });
    }
    Ok(())
}

/// Settings of every connection, dialled or accepted.
pub(super) fn transport(cluster: &ClusterConfig, transfer: &TransferConfig) -> Result<TransportConfig, LinkError> {
    check(transfer)?;
    // Probing finds what the path carries, up to `datagram_bytes`, within some round trips of the handshake.
    let mut discovery = MtuDiscoveryConfig::default();
    discovery
        .upper_bound(transfer.datagram_bytes)
        .black_hole_cooldown(BLACK_HOLE_COOLDOWN);
    let mut cubic = CubicConfig::default();
    cubic.initial_window(transfer.initial_window_bytes);
    let mut config = TransportConfig::default();
    config
        .initial_mtu(MIN_DATAGRAM)
        .mtu_discovery_config(Some(discovery))
        .congestion_controller_factory(Arc::new(cubic))
        .enable_segmentation_offload(transfer.gso)
        .stream_receive_window(varint(transfer.window_bytes))
        .receive_window(varint(transfer.window_bytes))
        .send_window(transfer.window_bytes)
        .max_concurrent_bidi_streams(MAX_STREAMS.into())
        .max_concurrent_uni_streams(0u32.into())
        .datagram_receive_buffer_size(None)
        .initial_rtt(INITIAL_RTT)
        .max_idle_timeout(Some(IdleTimeout::from(varint(cluster.idle_timeout_ms))))
        .keep_alive_interval(Some(Duration::from_millis(cluster.keep_alive_ms)));
    Ok(config)
}

/// Settings of the endpoint: it must accept the datagrams that its peers may send.
pub(super) fn endpoint(transfer: &TransferConfig) -> Result<EndpointConfig, LinkError> {
    let mut config = EndpointConfig::default();
    let largest = transfer.datagram_bytes.max(MIN_RECEIVE);
    config.max_udp_payload_size(largest).map_err(|e| LinkError::Setting {
        field: "datagram_bytes",
        value: transfer.datagram_bytes.to_string(),
        rule: e.to_string(),
    })?;
    Ok(config)
}

/// Settings of the listening side.
pub(super) fn server(tls: QuicServerConfig, transport: &Arc<TransportConfig>) -> ServerConfig {
    let mut config = ServerConfig::with_crypto(Arc::new(tls));
    config
        .transport_config(Arc::clone(transport))
        // Addresses of nodes do not change; a link that moves is a link to distrust.
        .migration(false)
        .max_incoming(accept::MAX_PENDING)
        .incoming_buffer_size(64 << 10)
        .incoming_buffer_size_total(16 << 20);
    config
}

/// A bound UDP socket with large buffers: with the system's default, bursts of large datagrams are lost even on loopback.
pub(super) fn socket(address: SocketAddr, transfer: &TransferConfig) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    let wanted = transfer.socket_buffer_bytes;
    socket.set_recv_buffer_size(wanted)?;
    socket.set_send_buffer_size(wanted)?;
    // Linux reports twice what it grants.
    let (receive, send) = (socket.recv_buffer_size()? / 2, socket.send_buffer_size()? / 2);
    if receive < wanted || send < wanted {
        tracing::info!(
            wanted,
            receive,
            send,
            "the system limits UDP buffers: raise net.core.rmem_max and net.core.wmem_max for full KV bandwidth"
        );
    }
    socket.bind(&address.into())?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}
