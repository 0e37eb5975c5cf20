//! Names that resolve to ever other addresses, from a resolver that does what the test wants.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use config::{DiscoveryConfig, DiscoveryMethod};
use discovery::{Found, Resolve, SystemResolver, find};

/// What each name resolves to; `None`: it fails; absent: it never answers.
#[derive(Clone, Default)]
struct Names(Arc<Mutex<HashMap<String, Option<Vec<SocketAddr>>>>>);

impl Names {
    fn set(&self, name: &str, addresses: Option<&[&str]>) {
        let addresses = addresses.map(|all| all.iter().map(|text| text.parse().expect("an address")).collect());
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.insert(name.to_owned(), addresses);
    }
}

impl Resolve for Names {
    async fn resolve(&self, name: &str) -> io::Result<Vec<SocketAddr>> {
        let answer = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
        match answer {
            Some(Some(addresses)) => Ok(addresses),
            Some(None) => Err(io::Error::other("no such name")),
            None => std::future::pending().await,
        }
    }
}

fn config(names: &[&str]) -> DiscoveryConfig {
    DiscoveryConfig {
        method: DiscoveryMethod::Dns,
        dns_names: names.iter().map(|name| (*name).to_owned()).collect(),
        refresh_ms: 100,
        ..DiscoveryConfig::default()
    }
}

async fn until(found: &mut Found, wanted: &[&str]) {
    let wanted: BTreeSet<String> = wanted.iter().map(|word| (*word).to_owned()).collect();
    let reached = tokio::time::timeout(Duration::from_secs(20), found.wait_for(|now| *now == wanted)).await;
    reached
        .unwrap_or_else(|_| panic!("wanted {wanted:?}"))
        .expect("somebody looks");
}

#[tokio::test]
async fn addresses_follow_the_names_and_failures_change_nothing() {
    let names = Names::default();
    names.set("a:1", Some(&["10.0.0.1:1", "10.0.0.2:1", "[fd00::1]:1"]));
    // "slow:1" never answers, and delays nobody.
    let mut found = find(&config(&["a:1", "slow:1", "b:1"]), &[], true, names.clone()).expect("begun");
    until(&mut found, &["10.0.0.1:1", "10.0.0.2:1"]).await;
    names.set("b:1", Some(&["10.0.0.2:1", "10.0.0.3:1"]));
    // The task of b has asked once, got no answer, and hangs: as a resolver that answers late would.
    names.set("a:1", Some(&["10.0.0.2:1", "10.0.0.9:1"]));
    until(&mut found, &["10.0.0.2:1", "10.0.0.9:1"]).await;
    names.set("a:1", None);
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(found.borrow().len(), 2, "a name that fails keeps what it had");
    names.set("a:1", Some(&[]));
    until(&mut found, &[]).await;
    names.set("a:1", Some(&["10.0.0.4:1"]));
    until(&mut found, &["10.0.0.4:1"]).await;
}

#[tokio::test]
async fn only_addresses_of_the_kind_that_is_dialled_are_taken() {
    let names = Names::default();
    names.set("a:1", Some(&["10.0.0.1:1", "[fd00::1]:1"]));
    let mut found = find(&config(&["a:1"]), &[], false, names).expect("begun");
    until(&mut found, &["[fd00::1]:1"]).await;
}

#[tokio::test]
async fn the_systems_resolver_and_the_list_of_the_configuration() {
    let mut found = find(&config(&["localhost:7600"]), &[], true, SystemResolver).expect("begun");
    until(&mut found, &["127.0.0.1:7600"]).await;
    let listed = ["x.example:1".to_owned(), "y.example:1".to_owned()];
    let mut found = find(&DiscoveryConfig::default(), &listed, true, SystemResolver).expect("begun");
    until(&mut found, &["x.example:1", "y.example:1"]).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(found.has_changed().is_ok(), "the channel stays open");
}
