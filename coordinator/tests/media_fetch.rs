//! Media are fetched from where they may be fetched, and nobody else ever sees a connection. The names and public
//! addresses of these tests exist only in their own network, which leads them to listeners on this machine.

mod http_support;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use config::MediaConfig;
use coordinator::http::error::Family;
use coordinator::http::media::failure;
use coordinator::media::fetch::{FetchError, Fetcher, Network, SystemNetwork};
use coordinator::media::policy::{MediaKind, Policy, Refusal, Source};
use coordinator::media::spool::{Spool, SpoolError};
use futures_util::future::BoxFuture;
use http_support::client::post;
use http_support::start_with;
use rustls::crypto::ring;
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;

/// A listener that counts its visitors and says the same to each.
struct Host {
    address: SocketAddr,
    visitors: Arc<AtomicUsize>,
}

fn host(answer: impl Into<Vec<u8>>) -> Host {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let visitors = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&visitors);
    let answer = answer.into();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a visitor");
            counted.fetch_add(1, Ordering::SeqCst);
            let mut request = [0; 1_024];
            let _read = stream.read(&mut request).is_ok();
            let _sent = stream.write_all(&answer).is_ok();
        }
    });
    Host { address, visitors }
}

impl Host {
    fn visitors(&self) -> usize {
        self.visitors.load(Ordering::SeqCst)
    }
}

/// Names with their addresses, one after the other, and where addresses really lead.
struct Made {
    names: Mutex<BTreeMap<String, Vec<&'static str>>>,
    places: BTreeMap<&'static str, SocketAddr>,
    asked: AtomicUsize,
}

#[derive(Clone)]
struct Net(Arc<Made>);

impl Network for Net {
    fn resolve(&self, host: String, port: u16) -> BoxFuture<'static, std::io::Result<Vec<SocketAddr>>> {
        self.0.asked.fetch_add(1, Ordering::SeqCst);
        let mut names = self.0.names.lock().expect("not poisoned");
        let known = names.get_mut(&host).map(|answers| {
            if answers.len() > 1 {
                answers.remove(0)
            } else {
                answers[0]
            }
        });
        let addresses = known
            .unwrap_or(&host)
            .split(' ')
            .map(|address| SocketAddr::new(address.parse().expect("an address"), port));
        let addresses = addresses.collect();
        Box::pin(async move { Ok(addresses) })
    }

    fn connect(&self, address: SocketAddr) -> BoxFuture<'static, std::io::Result<tokio::net::TcpStream>> {
        // An address that nobody made leads where it says: a connection that must not be would be seen.
        let place = self
            .0
            .places
            .get(address.ip().to_string().as_str())
            .copied()
            .unwrap_or(address);
        Box::pin(tokio::net::TcpStream::connect(place))
    }
}

fn made(names: &[(&str, &[&'static str])], places: &[(&'static str, &Host)]) -> Net {
    Net(Arc::new(Made {
        names: Mutex::new(
            names
                .iter()
                .map(|(name, answers)| ((*name).to_owned(), answers.to_vec()))
                .collect(),
        ),
        places: places.iter().map(|(address, host)| (*address, host.address)).collect(),
        asked: AtomicUsize::new(0),
    }))
}

fn policy() -> Arc<Policy> {
    Arc::new(Policy::new(&MediaConfig {
        allowed_domains: vec!["pictures.example".to_owned(), "other.example".to_owned()],
        max_image_bytes: 10,
        ..MediaConfig::default()
    }))
}

fn trust_nobody() -> Arc<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().expect("versions");
    Arc::new(
        builder
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth(),
    )
}

fn fetch(network: &Net, url: &str) -> Result<Vec<u8>, FetchError> {
    fetch_to(network, MediaKind::Image, url, 1)
}

/// With room for so many requests.
fn fetch_to(network: &Net, kind: MediaKind, url: &str, requests: usize) -> Result<Vec<u8>, FetchError> {
    let Source::Remote(remote) = policy().check(kind, url)? else {
        panic!("{url} is remote")
    };
    let folder = tempfile::tempdir().expect("a folder");
    let config = MediaConfig {
        download_dir: folder.path().to_str().expect("UTF-8").to_owned(),
        max_video_bytes: 1 << 32,
        ..MediaConfig::default()
    };
    let spool = Arc::new(Spool::new(&config, requests));
    let fetcher = Fetcher::new(
        policy(),
        spool,
        network.clone(),
        trust_nobody(),
        Duration::from_millis(700),
    );
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let mut medium = runtime.block_on(fetcher.fetch(kind, remote))?;
    let mut bytes = Vec::new();
    medium.file.read_to_end(&mut bytes).expect("readable");
    assert_eq!(bytes.len() as u64, medium.bytes);
    Ok(bytes)
}

#[test]
fn nobody_is_asked_while_the_disk_lacks_the_room_that_is_kept_free() {
    let pictures = host("HTTP/1.1 200 OK\r\n\r\nabcd");
    let network = made(&[("pictures.example", &["9.9.9.9"])], &[("9.9.9.9", &pictures)]);
    let error = fetch_to(&network, MediaKind::Image, "http://pictures.example/a.png", 1 << 30)
        .expect_err("no disk is that large");
    assert!(matches!(error, FetchError::Spool(SpoolError::Full { .. })), "{error}");
    assert_eq!((pictures.visitors(), network.0.asked.load(Ordering::SeqCst)), (0, 0));
    let told = failure("inputs[0].image_url", &error);
    assert_eq!(told.status(Family::Tgi).as_u16(), 503, "{told:?}");
    let refused = failure("inputs[0].image_url", &FetchError::Refused(Refusal::Deceiving));
    assert_eq!(
        (
            refused.status(Family::Tgi).as_u16(),
            refused.status(Family::OpenAi).as_u16()
        ),
        (422, 400)
    );
}

#[test]
fn an_allowed_host_is_asked_once() {
    let pictures = host("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabcd");
    let network = made(
        &[("pictures.example", &["9.9.9.9", "127.0.0.1"])],
        &[("9.9.9.9", &pictures)],
    );
    assert_eq!(
        fetch(&network, "http://pictures.example/a.png").expect("fetched"),
        b"abcd"
    );
    assert_eq!(
        (pictures.visitors(), network.0.asked.load(Ordering::SeqCst)),
        (1, 1),
        "resolved once"
    );
}

#[test]
fn a_large_answer_is_stored_whole() {
    let film: Vec<u8> = (0..1_000_003_u32).flat_map(u32::to_le_bytes).collect();
    let films = host([b"HTTP/1.1 200 OK\r\n\r\n".to_vec(), film.clone()].concat());
    let network = made(&[("pictures.example", &["9.9.9.9"])], &[("9.9.9.9", &films)]);
    let found = fetch_to(&network, MediaKind::Video, "http://pictures.example/a.mp4", 1).expect("fetched");
    assert!(found == film, "{} bytes instead of {}", found.len(), film.len());
}

#[test]
fn a_name_that_leads_inside_is_never_visited() {
    let canary = host("HTTP/1.1 200 OK\r\n\r\nsecret");
    let port = canary.address.port();
    let url = format!("http://pictures.example:{port}/");
    for inside in ["127.0.0.1", "9.9.9.9 127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.1"] {
        let name: &'static str = inside;
        let network = made(&[("pictures.example", &[name])], &[("9.9.9.9", &canary)]);
        let refused = fetch(&network, &url);
        assert!(
            matches!(refused, Err(FetchError::Refused(Refusal::NotPublic(_)))),
            "{inside}: {refused:?}"
        );
    }
    assert_eq!(canary.visitors(), 0);
}

#[test]
fn redirects_are_judged_like_the_first_reference() {
    let canary = host("HTTP/1.1 200 OK\r\n\r\nsecret");
    let port = canary.address.port();
    let inside = [
        format!("http://127.0.0.1:{port}/"),
        format!("http://localhost:{port}/"),
        format!("//127.0.0.1:{port}/"),
        format!("http://unknown.example:{port}/"),
        "file:///data/multimodal_inputs/a.png".to_owned(),
        "data:image/png;base64,AAAA".to_owned(),
    ];
    for location in inside {
        let pictures = host(format!("HTTP/1.1 302 Found\r\nLocation: {location}\r\n\r\n"));
        let network = made(&[("pictures.example", &["9.9.9.9"])], &[("9.9.9.9", &pictures)]);
        let refused = fetch(&network, "http://pictures.example/");
        assert!(
            matches!(refused, Err(FetchError::Refused(_))),
            "{location}: {refused:?}"
        );
        assert_eq!(pictures.visitors(), 1);
    }
    // The second name is allowed, but leads inside.
    let pictures = host(format!(
        "HTTP/1.1 302 Found\r\nLocation: http://other.example:{port}/\r\n\r\n"
    ));
    let names: &[(&str, &[&'static str])] = &[("pictures.example", &["9.9.9.9"]), ("other.example", &["127.0.0.1"])];
    let network = made(names, &[("9.9.9.9", &pictures)]);
    let refused = fetch(&network, "http://pictures.example/");
    assert!(
        matches!(refused, Err(FetchError::Refused(Refusal::NotPublic(_)))),
        "{refused:?}"
    );
    assert_eq!(canary.visitors(), 0);

    let other = host("HTTP/1.1 200 OK\r\n\r\nhere");
    let pictures = host("HTTP/1.1 301 Moved\r\nLocation: http://other.example/x.png\r\n\r\n");
    let names: &[(&str, &[&'static str])] = &[("pictures.example", &["9.9.9.9"]), ("other.example", &["8.8.8.8"])];
    let network = made(names, &[("9.9.9.9", &pictures), ("8.8.8.8", &other)]);
    assert_eq!(fetch(&network, "http://pictures.example/").expect("led on"), b"here");
    let circle = host("HTTP/1.1 301 Moved\r\nLocation: /again\r\n\r\n");
    let network = made(&[("pictures.example", &["9.9.9.9"])], &[("9.9.9.9", &circle)]);
    assert!(matches!(
        fetch(&network, "http://pictures.example/"),
        Err(FetchError::Redirects)
    ));
    assert_eq!(circle.visitors(), 4);
}

#[test]
fn answers_are_bounded_whatever_they_say() {
    for (answer, expected) in [
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n01234567890",
            "it has more than 10 bytes",
        ),
        ("HTTP/1.1 404 Not Found\r\n\r\n", "the host answers with status 404"),
        ("nonsense\r\n\r\n", "the host gives no usable answer"),
        ("HTTP/1.1 200", "the host gives no usable answer"),
    ] {
        let pictures = host(answer);
        let network = made(&[("pictures.example", &["9.9.9.9"])], &[("9.9.9.9", &pictures)]);
        let error = fetch(&network, "http://pictures.example/").expect_err(answer);
        assert_eq!(error.to_string(), expected);
    }
    let endless = host(["HTTP/1.1 200 OK\r\nx: ".to_owned(), "y".repeat(100_000)].concat());
    let network = made(&[("pictures.example", &["9.9.9.9"])], &[("9.9.9.9", &endless)]);
    assert!(matches!(
        fetch(&network, "http://pictures.example/"),
        Err(FetchError::Answer)
    ));
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let place = Host {
        address: silent.local_addr().expect("bound"),
        visitors: Arc::default(),
    };
    let network = made(&[("pictures.example", &["9.9.9.9"])], &[("9.9.9.9", &place)]);
    assert!(matches!(
        fetch(&network, "http://pictures.example/"),
        Err(FetchError::Slow)
    ));
}

#[test]
fn a_host_that_nobody_vouches_for_is_not_believed() {
    let pictures = host("HTTP/1.1 200 OK\r\n\r\nabcd");
    let network = made(&[("pictures.example", &["9.9.9.9"])], &[("9.9.9.9", &pictures)]);
    let refused = fetch(&network, "https://pictures.example/");
    assert!(matches!(refused, Err(FetchError::Unreachable(_))), "{refused:?}");
}

#[test]
fn the_systems_network_resolves_and_connects() {
    let here = host("HTTP/1.1 200 OK\r\n\r\n");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let (addresses, connected) = runtime.block_on(async {
        let addresses = SystemNetwork.resolve("127.0.0.1".to_owned(), here.address.port()).await;
        (
            addresses.expect("resolved"),
            SystemNetwork.connect(here.address).await.is_ok(),
        )
    });
    assert_eq!((addresses, connected), (vec![here.address], true));
}

#[test]
fn a_text_model_refuses_media_and_visits_nobody() {
    let canary = host("HTTP/1.1 200 OK\r\n\r\nsecret");
    let local = format!("http://127.0.0.1:{}/a.png", canary.address.port());
    let front =
        start_with(|config| config.media.allowed_domains = vec!["127.0.0.1".to_owned(), "pictures.example".to_owned()]);
    let refused = |item: serde_json::Value| {
        let body = json!({ "inputs": [{ "type": "text", "text": "a" }, item] });
        let answer = post(front.address, "/generate", body.to_string());
        assert_eq!(answer.status, 422, "{}", answer.text());
        answer.json()["error"].as_str().expect("a message").to_owned()
    };
    let why = |url: &str| refused(json!({ "type": "image_url", "image_url": url }));
    let text_only = "`inputs[1].type` is \"image_url\", but must be \"text\": this model reads text only";
    assert!(why("http://pictures.example/a.png").ends_with(text_only));
    assert!(why(&local).ends_with("is not public"), "{}", why(&local));
    assert!(why("http://elsewhere.example/").contains("media.allowed_domains"));
    assert!(why("file:///etc/passwd").contains("media.local_root"));
    let object = refused(json!({ "type": "video_url", "video_url": { "url": "http://localhost/" } }));
    assert!(object.contains("internal"), "{object}");
    assert!(refused(json!({ "type": "audio_url" })).contains("`inputs[1].audio_url` is missing"));
    assert!(refused(json!({ "type": "audio_url", "audio_url": 5 })).contains("`inputs[1].audio_url` is 5"));
    assert_eq!((canary.visitors(), front.backend.count()), (0, 0));
}
