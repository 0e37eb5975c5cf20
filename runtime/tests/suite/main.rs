//! Tests of the process plumbing over real sockets on loopback.

mod framing;
mod identity;
mod links;
mod process;
mod renewal;
mod strangers;

use std::sync::Arc;
use std::time::Duration;

use config::{ClusterConfig, TransferConfig};
use protocol::ids::{NodeId, Role};
use runtime::authority::CertificateAuthority;
use runtime::identity::Identity;
use runtime::quic::{Alpn, Expect, Link, QuicEndpoint};

/// Far longer than anything here takes: a wait that reaches it has failed.
const PATIENCE: Duration = Duration::from_secs(20);

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not happen within {PATIENCE:?}"),
    }
}

/// Waits until `condition` holds.
async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    soon(what, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

fn authority() -> CertificateAuthority {
    CertificateAuthority::generate().expect("an authority")
}

fn identity(authority: &CertificateAuthority, role: Role, node: &str) -> Arc<Identity> {
    let issued = authority.issue(role, &NodeId(node.to_owned())).expect("a certificate");
    Arc::new(issued.identity().expect("an identity"))
}

async fn endpoint(identity: Arc<Identity>) -> QuicEndpoint {
    endpoint_with(identity, ClusterConfig::default(), TransferConfig::default()).await
}

async fn endpoint_with(identity: Arc<Identity>, cluster: ClusterConfig, transfer: TransferConfig) -> QuicEndpoint {
    QuicEndpoint::bind(identity, "127.0.0.1:0", &cluster, &transfer)
        .await
        .expect("an endpoint")
}

fn address(endpoint: &QuicEndpoint) -> String {
    endpoint.local_addr().expect("bound").to_string()
}

fn any(role: Role) -> Expect {
    Expect { role, node: None }
}

/// A prefill node's link to a decode node, both ends.
struct Pair {
    prefill: QuicEndpoint,
    decode: QuicEndpoint,
    dialled: Link,
    accepted: Link,
}

async fn pair_with(cluster: ClusterConfig, transfer: TransferConfig) -> Pair {
    let ca = authority();
    let prefill = endpoint_with(identity(&ca, Role::Prefill, "p0"), cluster.clone(), transfer.clone()).await;
    let decode = endpoint_with(identity(&ca, Role::Decode, "d0"), cluster, transfer).await;
    let dialled = prefill
        .connect(&address(&decode), Alpn::Kv, any(Role::Decode))
        .await
        .expect("a link");
    let accepted = soon("accept", decode.accept()).await.expect("a link");
    Pair {
        prefill,
        decode,
        dialled,
        accepted,
    }
}

async fn pair() -> Pair {
    pair_with(ClusterConfig::default(), TransferConfig::default()).await
}
