//! One file: from what is there of it to the whole.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use config::HubReference;
use reqwest::header::{CONTENT_LENGTH, CONTENT_RANGE};
use reqwest::{Response, StatusCode};

use crate::cache::Repository;
use crate::client::Client;
use crate::digest::{Checksum, Digest};
use crate::error::HubError;
use crate::lock::{self, Lock};
use crate::progress::{Progress, Share};
use crate::retry::{Tries, Trouble};

/// Bytes that are written at once.
const PIECE: usize = 256 << 10;
/// Bytes that are read again in one go: a process that is told to end waits for that long.
const AT_ONCE: u64 = 64 << 20;
/// A try that got so many bytes further is none that failed.
const MIN_PROGRESS: u64 = 1 << 20;
/// What a process that fetches waits at most between two tries, and a little more.
const OWNERS_PAUSE: Duration = Duration::from_secs(40);

/// A file that is needed.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// Its path in the repository.
    pub(crate) path: String,
    /// In bytes.
    pub(crate) size: u64,
    /// Its name in the cache.
    pub(crate) checksum: Checksum,
}

/// What all files of a fetch have in common.
pub(crate) struct Source {
    pub(crate) client: Client,
    pub(crate) reference: HubReference,
    pub(crate) commit: String,
    pub(crate) repository: Repository,
}

/// Fetches a file, unless it is there, and links it into the commit's folder.
pub(crate) async fn fetch(source: Arc<Source>, wanted: Wanted, progress: Arc<Progress>) -> Result<(), HubError> {
    let repository = &source.repository;
    let mut share = Share::of(&progress);
    if !repository.has(&wanted.checksum, wanted.size) {
        let unfinished = repository.unfinished(&wanted.checksum);
        let client = &source.client;
        let patience = (client.patience() + OWNERS_PAUSE).saturating_mul(client.tries());
        let lock = lock::acquire(&repository.lock(&wanted.checksum), &unfinished, patience, &mut share).await?;
        // Whoever had the lock may have fetched it.
        if !repository.has(&wanted.checksum, wanted.size) {
            write(&source, &wanted, lock, unfinished, &mut share).await?;
        }
    }
    share.set(wanted.size);
    repository.link(&source.commit, &wanted.path, &wanted.checksum)
}

async fn write(
    source: &Source,
    wanted: &Wanted,
    lock: Lock,
    unfinished: PathBuf,
    share: &mut Share,
) -> Result<(), HubError> {
    let what = wanted.clone();
    let path = unfinished.clone();
    let sink = aside(&unfinished, move || Sink::open(path, &what, lock)).await?;
    let found = sink.len;
    let mut target = Target {
        at: 0,
        sink: Arc::new(Mutex::new(sink)),
        path: unfinished,
    };
    while target.at < found {
        let from = target.at;
        target.at = target.with(move |sink| sink.look_back(from)).await?;
        share.set(target.at);
    }
    loop {
        receive(source, wanted, &mut target, share).await?;
        let blob = source.repository.blob(&wanted.checksum);
        let sum = target.with(move |sink| sink.finish(&blob)).await?;
        if sum == wanted.checksum.digits() {
            return Ok(());
        }
        // What an earlier process left behind may be at fault (a machine that lost power); else the server is.
        if found == 0 || target.restarted() {
            return Err(HubError::Checksum {
                file: wanted.path.clone(),
                expected: wanted.checksum.to_string(),
                found: sum,
            });
        }
        tracing::warn!(
            file = wanted.path,
            "what was left of an earlier fetch is damaged: beginning again"
        );
        target.restart().await?;
    }
}

/// Receives until all bytes are there.
async fn receive(source: &Source, wanted: &Wanted, target: &mut Target, share: &mut Share) -> Result<(), HubError> {
    let client = &source.client;
    let mut tries = Tries::new(format!("{} from {}", wanted.path, client.name()), client.tries());
    while target.at < wanted.size {
        share.set(target.at);
        let before = target.at;
        if let Err(trouble) = attempt(source, wanted, target, share).await {
            if target.at >= before.saturating_add(MIN_PROGRESS) {
                tries.progressed();
            }
            tokio::time::sleep(tries.failed(trouble)?).await;
        }
    }
    Ok(())
}

/// One request. All bytes that came are written, whatever happens then.
async fn attempt(source: &Source, wanted: &Wanted, target: &mut Target, share: &mut Share) -> Result<(), Trouble> {
    let (client, size) = (&source.client, wanted.size);
    let opened = client
        .open(&source.reference, &source.commit, &wanted.path, target.at)
        .await;
    let mut response = opened?;
    match begins_at(&response, target.at, size) {
        Ok(start) if start == target.at => {}
        // The server does not know ranges: this is the file from its beginning.
        Ok(_) => target.restart().await?,
        Err(why) => {
            target.restart().await?;
            return Err(Trouble::again(why));
        }
    }
    let missing = size - target.at;
    let length = header(&response, CONTENT_LENGTH.as_str()).and_then(|digits| digits.parse::<u64>().ok());
    if let Some(length) = length.filter(|length| *length != missing) {
        return Err(Trouble::again(format!(
            "{length} bytes are announced where {missing} are missing"
        )));
    }
    let mut buffer = Vec::with_capacity(PIECE);
    let outcome = loop {
        match client.more(&mut response).await {
            Ok(Some(bytes)) => {
                buffer.extend_from_slice(&bytes);
                if target.at + buffer.len() as u64 > size {
                    target.restart().await?;
                    return Err(Trouble::again(format!("more than the {size} bytes of the list came")));
                }
                if buffer.len() >= PIECE {
                    target.append(std::mem::take(&mut buffer)).await?;
                    share.set(target.at);
                }
            }
            Ok(None) => break Ok(()),
            Err(trouble) => break Err(trouble),
        }
    };
    target.append(buffer).await?;
    share.set(target.at);
    outcome?;
    if target.at < size {
        return Err(Trouble::again(format!(
            "the connection ended after {} of {size} bytes",
            target.at
        )));
    }
    Ok(())
}

/// At which byte an answer to a request for those from `asked` on begins.
fn begins_at(response: &Response, asked: u64, size: u64) -> Result<u64, String> {
    if response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
        return Err(format!("the server has no bytes from {asked} on"));
    }
    if response.status() != StatusCode::PARTIAL_CONTENT {
        return Ok(0);
    }
    let range = header(response, CONTENT_RANGE.as_str()).unwrap_or_default();
    let right = range.strip_prefix("bytes ").and_then(|range| {
        let (bytes, total) = range.split_once('/')?;
        let (first, _) = bytes.split_once('-')?;
        let whole = total == "*" || total.parse() == Ok(size);
        (whole && first.parse() == Ok(asked)).then_some(())
    });
    match right {
        Some(()) => Ok(asked),
        None => Err(format!(
            "the bytes from {asked} of {size} on were asked for, {range:?} came"
        )),
    }
}

fn header<'a>(response: &'a Response, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Where the bytes go; files are written and hashed on threads for that.
struct Target {
    sink: Arc<Mutex<Sink>>,
    path: PathBuf,
    /// Bytes that are there.
    at: u64,
}

impl Target {
    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Sink) -> io::Result<T> + Send + 'static,
    ) -> Result<T, HubError> {
        let sink = Arc::clone(&self.sink);
        aside(&self.path, move || {
            work(&mut sink.lock().unwrap_or_else(PoisonError::into_inner))
        })
        .await
    }

    async fn append(&mut self, bytes: Vec<u8>) -> Result<(), HubError> {
        self.at = self.with(move |sink| sink.append(&bytes)).await?;
        Ok(())
    }

    async fn restart(&mut self) -> Result<(), HubError> {
        self.with(Sink::restart).await?;
        self.at = 0;
        Ok(())
    }

    fn restarted(&self) -> bool {
        self.sink.lock().unwrap_or_else(PoisonError::into_inner).restarted
    }
}

async fn aside<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, HubError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| HubError::Runtime(io::Error::other(error)))?
        .map_err(HubError::disk(path))
}

/// An unfinished file. Holds the lock, so that nobody else writes while the last piece is being written.
struct Sink {
    file: File,
    path: PathBuf,
    digest: Digest,
    checksum: Checksum,
    size: u64,
    len: u64,
    /// It has no bytes of an earlier process (any more).
    restarted: bool,
    /// It has been deleted.
    gone: bool,
    lock: Lock,
}

impl Sink {
    /// Opens it, and adds up what is there.
    fn open(path: PathBuf, wanted: &Wanted, lock: Lock) -> io::Result<Self> {
        let file = options().open(&path)?;
        let mut sink = Self {
            len: file.metadata()?.len(),
            file,
            path,
            digest: Digest::new(&wanted.checksum, wanted.size),
            checksum: wanted.checksum.clone(),
            size: wanted.size,
            restarted: false,
            gone: false,
            lock,
        };
        if sink.len > sink.size {
            sink.restart()?;
        }
        Ok(sink)
    }

    /// Adds up more of what an earlier process has left. Returns how much has been.
    fn look_back(&mut self, from: u64) -> io::Result<u64> {
        let mut buffer = vec![0; PIECE];
        let mut at = from;
        while at < self.len && at < from + AT_ONCE {
            let left = usize::try_from(self.len - at).unwrap_or(PIECE).min(PIECE);
            self.file.read_exact(&mut buffer[..left])?;
            self.digest.update(&buffer[..left]);
            at += left as u64;
        }
        Ok(at)
    }

    /// Returns the new length.
    fn append(&mut self, bytes: &[u8]) -> io::Result<u64> {
        self.file.write_all(bytes)?;
        self.digest.update(bytes);
        self.len += bytes.len() as u64;
        Ok(self.len)
    }

    fn restart(&mut self) -> io::Result<()> {
        if self.gone {
            self.file = options().open(&self.path)?;
            self.gone = false;
        }
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.digest = Digest::new(&self.checksum, self.size);
        self.len = 0;
        self.restarted = true;
        Ok(())
    }

    /// Gives the file its name if the checksum is right, deletes it if not. Returns the checksum.
    fn finish(&mut self, blob: &Path) -> io::Result<String> {
        let sum = self.digest.digits();
        if sum == self.checksum.digits() {
            if !self.lock.holds()? {
                return Err(io::Error::other(
                    "another process got the lock of this file at the same time: this file system keeps no locks, so let \
                     one process fetch the model before others start",
                ));
            }
            // Its name says that it is whole, also after the machine has lost power.
            self.file.sync_all()?;
            std::fs::rename(&self.path, blob)?;
        } else {
            std::fs::remove_file(&self.path)?;
            self.gone = true;
        }
        Ok(sum)
    }
}

fn options() -> std::fs::OpenOptions {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options
}
