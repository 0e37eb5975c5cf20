//! The process's one UDP port: links to and from other processes, mutually authenticated.
//!
//! Life of an incoming link: `Incoming` -> (too many handshakes pending: refused; many: the address must prove itself) ->
//! handshake with deadline -> role and plane checked against [`accepted_roles`] -> handed out by [`QuicEndpoint::accept`].
//! What fails on the way is counted, logged and dropped; it delays nobody else.

mod accept;
mod settings;
mod tls;

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use config::{ClusterConfig, TransferConfig};
use protocol::ids::{NodeId, Role};
use protocol::{ALPN_CONTROL, ALPN_KV};
use quinn::crypto::rustls::HandshakeData;
use quinn::{Connection, ConnectionError, Endpoint, TokioRuntime, TransportConfig, TransportErrorCode, VarInt};
use rustls_pki_types::CertificateDer;
use thiserror::Error;
use tokio::sync::{Mutex, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

pub use accept::{AcceptStats, MEASURES, METRIC_HANDSHAKES};
use tls::{Dialling, listening};

use crate::authority::SERVER_NAME;
use crate::identity::{Identity, IdentityError, Peer};

/// Codes of closed connections and reset streams.
pub mod code {
    use quinn::VarInt;

    /// The process stops, or the link is no longer needed.
    pub const CLOSED: VarInt = VarInt::from_u32(0);
    /// The job or handoff was cancelled.
    pub const CANCELLED: VarInt = VarInt::from_u32(1);
    /// The peer's role, node or plane does not fit.
    pub const WRONG_PEER: VarInt = VarInt::from_u32(2);
    /// The peer broke the protocol.
    pub const PROTOCOL: VarInt = VarInt::from_u32(3);
    /// No task took the link in time.
    pub const BUSY: VarInt = VarInt::from_u32(4);
    /// The receiver withdrew what it had granted.
    pub const REVOKED: VarInt = VarInt::from_u32(5);
    /// The receiver refused; the reason comes as a message.
    pub const REFUSED: VarInt = VarInt::from_u32(6);
    /// A newer link of the same node is there.
    pub const REPLACED: VarInt = VarInt::from_u32(7);
}

/// QUIC carries TLS alerts as error codes from here on (RFC 9001, section 4.8).
const TLS_ALERTS: u64 = 0x100;
/// Accepted links that wait for [`QuicEndpoint::accept`].
const ACCEPT_QUEUE: usize = 64;
/// Longest wait for peers to acknowledge the close of all connections.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// The plane of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Alpn {
    /// `baton-ctl/1`: membership and jobs.
    Control,
    /// `baton-kv/1`: KV blocks.
    Kv,
}

impl Alpn {
    /// All planes.
    pub const ALL: [Self; 2] = [Self::Control, Self::Kv];

    /// The ALPN identifier.
    pub fn as_bytes(self) -> &'static [u8] {
        match self {
            Self::Control => ALPN_CONTROL,
            Self::Kv => ALPN_KV,
        }
    }
}

impl fmt::Display for Alpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(self.as_bytes()))
    }
}

/// Roles that may dial a process of role `own` on a plane. Empty: the plane is not offered.
pub fn accepted_roles(own: Role, alpn: Alpn) -> &'static [Role] {
    match (own, alpn) {
        (Role::Coordinator, Alpn::Control) => &[Role::Prefill, Role::Decode, Role::Both],
        (Role::Decode | Role::Both, Alpn::Kv) => &[Role::Prefill, Role::Both],
        (Role::Coordinator, Alpn::Kv)
        | (Role::Decode | Role::Both, Alpn::Control)
        | (Role::Prefill, Alpn::Control | Alpn::Kv) => &[],
    }
}

/// Whom a dialled address must turn out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expect {
    /// The role.
    pub role: Role,
    /// The name; `None`: any name.
    pub node: Option<NodeId>,
}

impl Expect {
    fn fits(&self, found: &Peer) -> bool {
        found.role.may_act_as(self.role) && self.node.as_ref().is_none_or(|node| *node == found.node)
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.node {
            Some(node) => write!(f, "{} {node}", self.role),
            None => write!(f, "any {}", self.role),
        }
    }
}

/// An authenticated connection.
///
/// TLS lets the dialling side finish first: after `connect` the listening side may still turn the link down. It then
/// closes the connection, and the first use of a stream fails with the reason.
#[derive(Clone, Debug)]
pub struct Link {
    /// The connection. Its last clone closes it.
    pub connection: Connection,
    /// Who is at the other end: verified.
    pub peer: Peer,
    /// The plane.
    pub alpn: Alpn,
}

/// Why there is no link, or no endpoint.
#[derive(Debug, Error)]
pub enum LinkError {
    /// A new certificate is for somebody else.
    #[error("the new certificate is for {found}, this process is {expected}")]
    OtherIdentity {
        /// Who this process is.
        expected: String,
        /// Who the certificate names.
        found: String,
    },
    /// Settings that do not fit each other.
    #[error("transfer.{field} = {value} does not fit: {rule}")]
    Setting {
        /// Field of `[transfer]`.
        field: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        rule: String,
    },
    /// The identity gives no TLS configuration.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The UDP port cannot be opened.
    #[error("cannot listen on UDP {address}: {reason}")]
    Bind {
        /// The configured address.
        address: String,
        /// What the system says.
        reason: String,
    },
    /// The address is not `host:port`, or the host has no address that this port can reach.
    #[error("cannot resolve {address}: {reason}")]
    Address {
        /// The address.
        address: String,
        /// What is wrong.
        reason: String,
    },
    /// No answer in time.
    #[error("no link to {address} ({alpn}) within {after_ms} ms")]
    Timeout {
        /// The address.
        address: String,
        /// The plane.
        alpn: Alpn,
        /// The deadline, in milliseconds.
        after_ms: u64,
    },
    /// The handshake failed: wrong CA, wrong plane, nobody there.
    #[error("no link to {address} ({alpn}): {reason}")]
    Handshake {
        /// The address.
        address: String,
        /// The plane.
        alpn: Alpn,
        /// What failed.
        reason: String,
    },
    /// Somebody else is there.
    #[error("{address} ({alpn}) is {found}, expected {expected}")]
    WrongPeer {
        /// The address.
        address: String,
        /// The plane.
        alpn: Alpn,
        /// Who was expected.
        expected: String,
        /// Who is there.
        found: String,
    },
}

/// The process's QUIC endpoint. Dropping it stops accepting; links that exist live on until their last handle goes.
pub struct QuicEndpoint {
    endpoint: Endpoint,
    peer: Peer,
    transport: Arc<TransportConfig>,
    /// TLS of links that this side dials.
    dialling: RwLock<Dialling>,
    links: Mutex<mpsc::Receiver<Link>>,
    acceptor: Arc<accept::Acceptor>,
    connect_timeout: Duration,
    stop: CancellationToken,
}

impl QuicEndpoint {
    /// Opens UDP `listen` (`host:port`, port 0: any) and begins to accept on the planes that the identity's role offers.
    /// Must run on a tokio runtime.
    pub async fn bind(
        identity: Arc<Identity>,
        listen: &str,
        cluster: &ClusterConfig,
        transfer: &TransferConfig,
    ) -> Result<Self, LinkError> {
        let transport = Arc::new(settings::transport(cluster, transfer)?);
        let dialling = RwLock::new(Dialling::new(&identity, &transport)?);
        let server = listening(&identity, &transport)?;
        let own = identity.peer().role;
        let bind_error = |reason: String| LinkError::Bind {
            address: listen.to_owned(),
            reason,
        };
        let address = resolve(listen).await?[0];
        let socket = settings::socket(address, transfer).map_err(|e| bind_error(e.to_string()))?;
        let endpoint = Endpoint::new(settings::endpoint(transfer)?, server, socket, Arc::new(TokioRuntime))
            .map_err(|e| bind_error(e.to_string()))?;

        let stop = CancellationToken::new();
        let (sender, links) = mpsc::channel(ACCEPT_QUEUE);
        let connect_timeout = Duration::from_millis(cluster.connect_timeout_ms);
        let acceptor = Arc::new(accept::Acceptor::new(own, connect_timeout, sender));
        tokio::spawn(Arc::clone(&acceptor).run(endpoint.clone(), stop.clone()));
        let links = Mutex::new(links);
        Ok(Self {
            endpoint,
            peer: identity.peer().clone(),
            transport,
            dialling,
            links,
            acceptor,
            connect_timeout,
            stop,
        })
    }

    /// The bound address; its port is the real one.
    pub fn local_addr(&self) -> Result<SocketAddr, LinkError> {
        self.endpoint.local_addr().map_err(|e| LinkError::Bind {
            address: "bound socket".to_owned(),
            reason: e.to_string(),
        })
    }

    /// Who this process is.
    pub fn identity(&self) -> &Peer {
        &self.peer
    }

    /// Shows another certificate of the same role and name from now on, and trusts the CA that comes with it. Links that
    /// exist go on; handshakes in progress end as they began.
    ///
    /// # Errors
    /// The certificate is for another role or name, or gives no TLS configuration; then nothing changes.
    pub fn replace_identity(&self, identity: &Identity) -> Result<(), LinkError> {
        if *identity.peer() != self.peer {
            return Err(LinkError::OtherIdentity {
                expected: self.peer.to_string(),
                found: identity.peer().to_string(),
            });
        }
        let dialling = Dialling::new(identity, &self.transport)?;
        let server = listening(identity, &self.transport)?;
        *self.dialling.write().unwrap_or_else(PoisonError::into_inner) = dialling;
        self.endpoint.set_server_config(server);
        Ok(())
    }

    /// Dials `address` (`host:port`) on a plane and checks who is there. Ends within `cluster.connect_timeout_ms`.
    pub async fn connect(&self, address: &str, alpn: Alpn, expect: Expect) -> Result<Link, LinkError> {
        match timeout(self.connect_timeout, self.dial(address, alpn, &expect)).await {
            Ok(result) => result,
            Err(_) => Err(LinkError::Timeout {
                address: address.to_owned(),
                alpn,
                after_ms: u64::try_from(self.connect_timeout.as_millis()).unwrap_or(u64::MAX),
            }),
        }
    }

    async fn dial(&self, address: &str, alpn: Alpn, expect: &Expect) -> Result<Link, LinkError> {
        let local_is_v4 = self.local_addr()?.is_ipv4();
        let remote = resolve(address)
            .await?
            .into_iter()
            .find(|a| a.is_ipv4() == local_is_v4)
            .ok_or_else(|| {
                let family = if local_is_v4 { "IPv4" } else { "IPv6" };
                LinkError::Address {
                    address: address.to_owned(),
                    reason: format!("no {family} address, as this port needs"),
                }
            })?;
        let failed = |reason: String| LinkError::Handshake {
            address: address.to_owned(),
            alpn,
            reason,
        };
        let config = self.dialling.read().unwrap_or_else(PoisonError::into_inner).of(alpn);
        let connection = self
            .endpoint
            .connect_with(config, remote, SERVER_NAME)
            .map_err(|e| failed(e.to_string()))?
            .await
            .map_err(|e| failed(describe(&e)))?;
        let peer = peer_of(&connection).map_err(|e| failed(e.to_string()))?;
        if !expect.fits(&peer) {
            let (expected, found) = (expect.to_string(), peer.to_string());
            let error = LinkError::WrongPeer {
                address: address.to_owned(),
                alpn,
                expected,
                found,
            };
            connection.close(code::WRONG_PEER, error.to_string().as_bytes());
            return Err(error);
        }
        Ok(Link { connection, peer, alpn })
    }

    /// The next authenticated link; `None` once the endpoint is closed, or if the role accepts no links and it closes.
    /// Cancel-safe. One task at a time gets the next link.
    pub async fn accept(&self) -> Option<Link> {
        let mut links = self.links.lock().await;
        tokio::select! {
            biased;
            () = self.stop.cancelled() => None,
            link = links.recv() => link,
        }
    }

    /// What became of incoming handshakes so far.
    pub fn accept_stats(&self) -> AcceptStats {
        self.acceptor.stats()
    }

    /// Closes all connections, saying why, and waits a moment until the peers have been told.
    pub async fn close(&self, reason: &str) {
        self.stop.cancel();
        self.endpoint.close(code::CLOSED, reason.as_bytes());
        if timeout(CLOSE_TIMEOUT, self.endpoint.wait_idle()).await.is_err() {
            tracing::debug!("peers did not acknowledge the close in time");
        }
    }
}

impl Drop for QuicEndpoint {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Says in words why a connection ended.
pub fn describe(error: &ConnectionError) -> String {
    match error {
        ConnectionError::ApplicationClosed(close) => {
            format!(
                "closed by the peer: {} (code {})",
                String::from_utf8_lossy(&close.reason),
                close.error_code
            )
        }
        ConnectionError::TimedOut => "the peer fell silent (idle timeout)".to_owned(),
        ConnectionError::TransportError(failure) => with_hint(error, failure.code),
        ConnectionError::ConnectionClosed(close) => with_hint(error, close.error_code),
        ConnectionError::VersionMismatch
        | ConnectionError::Reset
        | ConnectionError::LocallyClosed
        | ConnectionError::CidsExhausted => error.to_string(),
    }
}

/// TLS says what failed; who reads it wants to know what would be right.
fn with_hint(error: &ConnectionError, code: TransportErrorCode) -> String {
    match u64::from(code).checked_sub(TLS_ALERTS).and_then(expectation) {
        Some(expected) => format!("{error} ({expected})"),
        None => error.to_string(),
    }
}

/// What a TLS alert (RFC 8446, section 6) says about what was expected.
fn expectation(alert: u64) -> Option<&'static str> {
    match alert {
        // bad_certificate, unknown_ca, decrypt_error: a signature that does not fit.
        42 | 48 | 51 => Some("expected a certificate of this cluster's CA"),
        45 => Some("the certificate is expired or not valid yet"),
        116 => Some("expected a certificate: every process of the cluster shows one"),
        120 => Some("expected a plane that this process offers to others"),
        _ => None,
    }
}

/// Role and node of the certificate that TLS has verified.
fn peer_of(connection: &Connection) -> Result<Peer, IdentityError> {
    let nothing = || IdentityError::NoPeerName {
        found: "no certificate".to_owned(),
    };
    let chain = connection.peer_identity().ok_or_else(nothing)?;
    let chain = chain
        .downcast::<Vec<CertificateDer<'static>>>()
        .map_err(|_| nothing())?;
    Peer::from_certificate(chain.first().ok_or_else(nothing)?)
}

/// The plane that the handshake agreed on.
fn plane_of(connection: &Connection) -> Option<Alpn> {
    let data = connection.handshake_data()?.downcast::<HandshakeData>().ok()?;
    let protocol = data.protocol?;
    Alpn::ALL.into_iter().find(|alpn| alpn.as_bytes() == protocol)
}

async fn resolve(address: &str) -> Result<Vec<SocketAddr>, LinkError> {
    let failed = |reason: String| LinkError::Address {
        address: address.to_owned(),
        reason,
    };
    let found: Vec<_> = tokio::net::lookup_host(address)
        .await
        .map_err(|e| failed(e.to_string()))?
        .collect();
    if found.is_empty() {
        Err(failed("the name has no address".to_owned()))
    } else {
        Ok(found)
    }
}

/// Converts a count to a QUIC variable-length integer, saturating at its largest value.
fn varint(value: u64) -> VarInt {
    VarInt::from_u64(value).unwrap_or(VarInt::MAX)
}
