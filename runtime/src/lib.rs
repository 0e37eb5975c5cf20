//! Process plumbing that all three processes share: QUIC links, TLS identity, telemetry, clock, shutdown.
//!
//! Nothing here knows what is served: no requests, no tokens, no KV.
//!
//! Life of a link:
//! 1. [`authority::CertificateAuthority`] gives every process a certificate that names its role and node;
//! 2. [`identity::Identity`] loads it together with the cluster's CA;
//! 3. [`quic::QuicEndpoint::bind`] opens the process's one UDP port;
//! 4. `connect` on one side, `accept` on the other: TLS 1.3 with certificates of both, ALPN selects the plane;
//! 5. both sides read the peer's role and node from the verified certificate and refuse what does not fit;
//! 6. [`framing`] carries [`protocol`] messages over the link's streams;
//! 7. idle timeout, reset or close ends it: every reader and writer gets an error.

pub mod authority;
pub mod clock;
pub mod framing;
pub mod identity;
pub mod measure;
pub mod quic;
pub mod renewal;
pub mod shutdown;
pub mod telemetry;
pub mod traces;
