//! A stand-in for a hub: it speaks as much of the protocol as a download needs, leads large files to a second address (as the
//! hub does to its CDN), counts what it sends, and fails as told.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use ring::digest::{Algorithm, SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Files from this size on are led to the CDN, in bytes.
const LARGE: usize = 64 << 10;
/// Longest head of a request, in bytes.
const MAX_HEAD: usize = 16 << 10;
/// What makes the links to the CDN valuable.
pub const SIGNATURE: &str = "signed-for-an-hour";

/// Something that goes wrong with an answer.
#[derive(Clone, Debug)]
pub enum Fault {
    /// This status and these headers, without a body.
    Status(u16, Vec<(&'static str, String)>),
    /// The connection ends after so many bytes of the body.
    Cut(usize),
    /// After so many bytes nothing comes until [`Hub::go_on`].
    Pause(usize),
    /// All bytes come, whatever range was asked for.
    IgnoreRange,
    /// So many bytes are announced, in place of those that come.
    Announce(usize),
    /// One byte is another one.
    Spoil,
    /// A byte more than there is, its number not announced.
    Longer,
}

/// A request that came.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Whether it came to the CDN.
    pub cdn: bool,
    /// `GET` or `HEAD`.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// First byte of the range that was asked for.
    pub from: Option<usize>,
    /// The header `authorization`.
    pub authorization: Option<String>,
    /// Bytes of the body that were sent.
    pub sent: usize,
}

/// A repository at one commit.
type Files = BTreeMap<String, Arc<[u8]>>;

#[derive(Default)]
struct State {
    /// By repository and commit.
    commits: BTreeMap<(String, String), Files>,
    /// By repository and branch or tag.
    refs: BTreeMap<(String, String), String>,
    token: Option<String>,
    plain_list: bool,
    more_in_list: Vec<Value>,
    faults: Vec<(String, Fault)>,
    seen: Vec<Seen>,
}

/// The stand-in; ends with the runtime it was started on.
pub struct Hub {
    /// Its address, as `model.hub_endpoint` takes it.
    pub url: String,
    state: Arc<Mutex<State>>,
    going: watch::Sender<bool>,
}

/// What an answer consists of.
#[derive(Default)]
struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Arc<[u8]>,
}

/// The connection's side of the stand-in.
#[derive(Clone)]
struct Door {
    cdn: bool,
    cdn_url: String,
    state: Arc<Mutex<State>>,
    going: watch::Receiver<bool>,
}

fn hex(algorithm: &'static Algorithm, bytes: &[u8]) -> String {
    digest(algorithm, bytes)
        .as_ref()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// The name of a file in a cache: SHA-256 if it is large, Git's SHA-1 if not.
pub fn checksum(bytes: &[u8]) -> String {
    if bytes.len() >= LARGE {
        return hex(&SHA256, bytes);
    }
    let header = format!("blob {}\0", bytes.len());
    hex(&SHA1_FOR_LEGACY_USE_ONLY, &[header.as_bytes(), bytes].concat())
}

impl Hub {
    /// Starts it, without repositories.
    pub async fn start() -> Result<Self> {
        let state = Arc::<Mutex<State>>::default();
        let (going, receiver) = watch::channel(false);
        let hub = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let cdn = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let (url, cdn_url) = (
            format!("http://{}", hub.local_addr()?),
            format!("http://{}", cdn.local_addr()?),
        );
        for (listener, is_cdn) in [(hub, false), (cdn, true)] {
            let door = Door {
                cdn: is_cdn,
                cdn_url: cdn_url.clone(),
                state: Arc::clone(&state),
                going: receiver.clone(),
            };
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let door = door.clone();
                    // A client that goes away is what many tests are about.
                    tokio::spawn(async move { door.serve(stream).await.ok() });
                }
            });
        }
        Ok(Self { url, state, going })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a commit (40 times `digit`) of a repository, to which the branch `main` points from now on.
    pub fn publish(&self, repository: &str, digit: char, files: &[(&str, &[u8])]) -> String {
        let commit = digit.to_string().repeat(40);
        let files = files
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), Arc::from(*bytes)))
            .collect();
        let mut state = self.state();
        state.commits.insert((repository.to_owned(), commit.clone()), files);
        state
            .refs
            .insert((repository.to_owned(), "main".to_owned()), commit.clone());
        commit
    }

    /// Adds a directory's files, as [`Self::publish`] does.
    pub fn publish_directory(&self, repository: &str, digit: char, path: &std::path::Path) -> Result<String> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(path)? {
            let path = entry?.path();
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .context("UTF-8")?
                .to_owned();
            files.push((name, std::fs::read(path)?));
        }
        let files: Vec<(&str, &[u8])> = files.iter().map(|(n, b)| (n.as_str(), b.as_slice())).collect();
        Ok(self.publish(repository, digit, &files))
    }

    /// Makes a branch or tag.
    pub fn point(&self, repository: &str, name: &str, commit: &str) {
        let key = (repository.to_owned(), name.to_owned());
        self.state().refs.insert(key, commit.to_owned());
    }

    /// Lets in only those who send this token.
    pub fn require(&self, token: &str) {
        self.state().token = Some(token.to_owned());
    }

    /// Lists names only, as hubs do that know no more.
    pub fn list_plainly(&self) {
        self.state().plain_list = true;
    }

    /// Lists a file that is not there.
    pub fn list_also(&self, entry: Value) {
        self.state().more_in_list.push(entry);
    }

    /// The next answer to a request whose path contains `part` goes wrong. Several faults take turns.
    pub fn fault(&self, part: &str, fault: Fault) {
        self.state().faults.push((part.to_owned(), fault));
    }

    /// Ends pauses, those to come included.
    pub fn go_on(&self) {
        self.going.send_replace(true);
    }

    /// All requests so far; those that are being answered, too.
    pub fn seen(&self) -> Vec<Seen> {
        self.state().seen.clone()
    }

    /// The requests whose path contains `part`.
    pub fn seen_of(&self, part: &str) -> Vec<Seen> {
        self.seen()
            .into_iter()
            .filter(|seen| seen.path.contains(part))
            .collect()
    }

    /// Forgets the requests so far.
    pub fn forget(&self) {
        self.state().seen.clear();
    }
}

impl State {
    fn answer(&self, seen: &Seen, cdn_url: &str) -> Answer {
        let path = seen.path.split('?').next().unwrap_or_default().replace("%2F", "/");
        if seen.cdn {
            let file = path.strip_prefix("/cdn/").unwrap_or_default();
            let found = self
                .commits
                .values()
                .find_map(|files| files.values().find(|b| checksum(b) == file));
            return found.map_or_else(|| refusal(404, ""), |bytes| content(bytes, Vec::new()));
        }
        if let Some(token) = &self.token {
            match &seen.authorization {
                None => return refusal(401, "RepoNotFound"),
                Some(given) if *given != format!("Bearer {token}") => return refusal(401, ""),
                Some(_) => {}
            }
        }
        if let Some(rest) = path.strip_prefix("/api/models/") {
            return match rest.split_once("/revision/") {
                Some((repository, revision)) => self.list(repository, revision),
                None => refusal(404, ""),
            };
        }
        // Some small files are led to another path of the hub.
        let (path, led) = match path.strip_prefix("/api/resolve-cache") {
            Some(rest) => (rest.to_owned(), true),
            None => (path, false),
        };
        let parts = path
            .split_once("/resolve/")
            .and_then(|(r, rest)| Some((r, rest.split_once('/')?)));
        let Some((repository, (commit, file))) = parts else {
            return refusal(404, "");
        };
        let key = (repository.trim_start_matches('/').to_owned(), commit.to_owned());
        let Some(bytes) = self.commits.get(&key).and_then(|files| files.get(file)) else {
            return refusal(404, "EntryNotFound");
        };
        let sum = format!("\"{}\"", checksum(bytes));
        let mut headers = vec![("x-repo-commit", commit.to_owned())];
        if bytes.len() >= LARGE {
            let to = format!(
                "{cdn_url}/cdn/{}?signature={SIGNATURE}&name={file}",
                sum.trim_matches('"')
            );
            headers.extend([
                ("x-linked-etag", sum),
                ("x-linked-size", bytes.len().to_string()),
                ("etag", "\"of-the-pointer\"".to_owned()),
                ("location", to),
            ]);
        } else if file == "tokenizer.json" && !led {
            headers.push(("location", format!("/api/resolve-cache{path}")));
        } else {
            headers.push(("etag", sum));
            return content(bytes, headers);
        }
        Answer {
            status: if led { 302 } else { 307 },
            headers,
            ..Answer::default()
        }
    }

    fn list(&self, repository: &str, revision: &str) -> Answer {
        if !self.commits.keys().any(|(known, _)| known == repository) {
            return refusal(404, "RepoNotFound");
        }
        let named = self.refs.get(&(repository.to_owned(), revision.to_owned()));
        let commit = named.cloned().unwrap_or_else(|| revision.to_owned());
        let Some(files) = self.commits.get(&(repository.to_owned(), commit.clone())) else {
            return refusal(404, "RevisionNotFound");
        };
        let entry = |(name, bytes): (&String, &Arc<[u8]>)| {
            let (size, sum) = (bytes.len(), checksum(bytes));
            match (self.plain_list, size >= LARGE) {
                (true, _) => json!({ "rfilename": name }),
                (false, false) => json!({ "rfilename": name, "size": size, "blobId": sum }),
                (false, true) => json!({ "rfilename": name, "size": size, "blobId": "f".repeat(40),
                    "lfs": { "sha256": sum, "size": size, "pointerSize": 127 } }),
            }
        };
        let siblings: Vec<Value> = files
            .iter()
            .map(entry)
            .chain(self.more_in_list.iter().cloned())
            .collect();
        let text = json!({ "id": repository, "sha": commit, "siblings": siblings }).to_string();
        content(text.as_bytes(), Vec::new())
    }
}

fn refusal(status: u16, code: &'static str) -> Answer {
    let headers = if code.is_empty() {
        Vec::new()
    } else {
        vec![
            ("x-error-code", code.to_owned()),
            ("x-error-message", format!("{code}, in words")),
        ]
    };
    Answer {
        status,
        headers,
        ..Answer::default()
    }
}

fn content(bytes: &[u8], headers: Vec<(&'static str, String)>) -> Answer {
    Answer {
        status: 200,
        headers,
        body: Arc::from(bytes),
    }
}

impl Door {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn serve(mut self, mut stream: TcpStream) -> Result<()> {
        let seen = self.read(&mut stream).await?;
        let (answer, fault, number) = {
            let mut state = self.state();
            let at = state.faults.iter().position(|(part, _)| seen.path.contains(part));
            let fault = at.map(|at| state.faults.remove(at).1);
            let answer = state.answer(&seen, &self.cdn_url);
            state.seen.push(seen.clone());
            (answer, fault, state.seen.len() - 1)
        };
        let Answer {
            mut status,
            mut headers,
            body,
        } = answer;
        let mut body = body.to_vec();
        if let Some(Fault::Status(other, more)) = &fault {
            (status, headers, body) = (*other, more.clone(), Vec::new());
        }
        if matches!(fault, Some(Fault::Spoil)) {
            body[0] ^= 1;
        }
        let ranged = !matches!(fault, Some(Fault::IgnoreRange)) && status == 200;
        if let Some(from) = seen.from.filter(|_| ranged) {
            let range = format!("bytes {from}-{}/{}", body.len() - 1, body.len());
            headers.push(("content-range", range));
            status = 206;
            body.drain(..from);
        }
        match fault {
            Some(Fault::Longer) => body.push(0),
            Some(Fault::Announce(length)) => headers.push(("content-length", length.to_string())),
            _ => headers.push(("content-length", body.len().to_string())),
        }
        let mut head = format!("HTTP/1.1 {status} x\r\nconnection: close\r\n");
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).await?;
        if seen.method == "HEAD" {
            return Ok(());
        }
        self.send(&mut stream, &body, fault, number).await
    }

    async fn send(&mut self, stream: &mut TcpStream, body: &[u8], fault: Option<Fault>, number: usize) -> Result<()> {
        let stop = match fault {
            Some(Fault::Cut(at) | Fault::Pause(at)) => at.min(body.len()),
            _ => body.len(),
        };
        let (mut first, rest) = body.split_at(stop);
        self.pieces(stream, first, number).await?;
        if let Some(Fault::Cut(_)) = fault {
            return Ok(());
        }
        if !rest.is_empty() {
            // A client that goes away ends the pause, too.
            let mut byte = [0];
            tokio::select! {
                gone = stream.read(&mut byte) => { gone?; return Ok(()) }
                _ = self.going.wait_for(|going| *going) => {}
            }
            first = rest;
            self.pieces(stream, first, number).await?;
        }
        stream.shutdown().await?;
        Ok(())
    }

    async fn pieces(&self, stream: &mut TcpStream, bytes: &[u8], number: usize) -> Result<()> {
        for piece in bytes.chunks(16 << 10) {
            stream.write_all(piece).await?;
            if let Some(seen) = self.state().seen.get_mut(number) {
                seen.sent += piece.len();
            }
        }
        Ok(())
    }

    async fn read(&self, stream: &mut TcpStream) -> Result<Seen> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") && head.len() < MAX_HEAD {
            head.push(stream.read_u8().await?);
        }
        let head = String::from_utf8(head)?;
        let mut lines = head.lines();
        let mut words = lines.next().context("no request line")?.split(' ');
        let header = |name: &str| {
            let mut found = head.lines().filter_map(|line| line.split_once(": "));
            found
                .find(|(key, _)| key.eq_ignore_ascii_case(name))
                .map(|(_, value)| value.to_owned())
        };
        let range = header("range").and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        Ok(Seen {
            cdn: self.cdn,
            method: words.next().context("no method")?.to_owned(),
            path: words.next().context("no path")?.to_owned(),
            from: range,
            authorization: header("authorization"),
            sent: 0,
        })
    }
}
