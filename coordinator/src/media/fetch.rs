//! Gets a medium from another host.
//!
//! A name is resolved once; every address it has must be public, and the connection goes to one of those that were
//! judged, so that a name that changes its mind in between gains nothing. A redirect is a new reference and is judged
//! like the first one. The answer is read up to the limit, whatever it says about its own length, and goes to a file
//! without a name: a few large ones at a time would fill the memory. Nobody is asked for anything while the disk lacks the
//! room that is kept free.

use std::future::Future;
use std::io::{self, Seek, Write};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::Medium;
use super::policy::{MediaKind, Policy, Refusal, Remote, Source};
use super::spool::{Spool, SpoolError};

/// Most redirects.
const MAX_REDIRECTS: usize = 3;
/// Longest head of an answer, in bytes.
const MAX_HEAD: usize = 16_384;
/// Bytes asked for at once.
const PIECE: usize = 16_384;
/// Bytes that are written at once.
const WRITTEN_AT_ONCE: usize = 262_144;

/// Why there is no medium.
#[derive(Debug, Error)]
pub enum FetchError {
    /// The policy says no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The host cannot be found or reached.
    #[error("the host cannot be reached")]
    Unreachable(#[source] io::Error),
    /// The host does not speak as it should.
    #[error("the host gives no usable answer")]
    Answer,
    /// The host says no.
    #[error("the host answers with status {0}")]
    Status(u16),
    /// It redirects too often.
    #[error("there are more than {MAX_REDIRECTS} redirects")]
    Redirects,
    /// It takes too long.
    #[error("it takes too long")]
    Slow,
    /// There is no room for it.
    #[error(transparent)]
    Spool(#[from] SpoolError),
}

/// A future that may move between threads.
type Doing<T> = Pin<Box<dyn Future<Output = io::Result<T>> + Send>>;

/// What reaches other hosts: the system's network, or one that tests make.
pub trait Network: Send + Sync {
    /// All addresses of a name.
    fn resolve(&self, host: String, port: u16) -> Doing<Vec<SocketAddr>>;
    /// A connection.
    fn connect(&self, address: SocketAddr) -> Doing<TcpStream>;
}

/// The system's resolver and network.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemNetwork;

impl Network for SystemNetwork {
    fn resolve(&self, host: String, port: u16) -> Doing<Vec<SocketAddr>> {
        Box::pin(async move { Ok(lookup_host((host, port)).await?.collect()) })
    }

    fn connect(&self, address: SocketAddr) -> Doing<TcpStream> {
        Box::pin(TcpStream::connect(address))
    }
}

/// Fetches what a policy allows.
pub struct Fetcher<N> {
    policy: Arc<Policy>,
    spool: Arc<Spool>,
    network: N,
    tls: Arc<ClientConfig>,
    patience: Duration,
}

/// An answer's head.
struct Head {
    status: u16,
    location: Option<String>,
}

impl<N: Network> Fetcher<N> {
    /// `spool`: where media go. `tls`: whom to trust. `patience`: longest time for one medium, redirects included.
    pub fn new(policy: Arc<Policy>, spool: Arc<Spool>, network: N, tls: Arc<ClientConfig>, patience: Duration) -> Self {
        Self {
            policy,
            spool,
            network,
            tls,
            patience,
        }
    }

    /// A medium that [`Policy::check`] has let through.
    ///
    /// # Errors
    /// There is no room for it, an address or a redirect is refused, the host fails, or it sends too much or too slowly.
    pub async fn fetch(&self, kind: MediaKind, remote: Remote) -> Result<Medium, FetchError> {
        let all = timeout(self.patience, self.follow(kind, remote)).await;
        all.map_err(|_| FetchError::Slow)?
    }

    async fn follow(&self, kind: MediaKind, mut remote: Remote) -> Result<Medium, FetchError> {
        let spool = Arc::clone(&self.spool);
        aside(move || spool.check()).await?;
        for _ in 0..=MAX_REDIRECTS {
            let address = self.address(&remote).await?;
            let stream = self.network.connect(address).await.map_err(FetchError::Unreachable)?;
            let (head, body) = if remote.tls {
                let name = ServerName::try_from(remote.host.clone()).map_err(|_| FetchError::Answer)?;
                let connector = TlsConnector::from(Arc::clone(&self.tls));
                let stream = connector.connect(name, stream).await.map_err(FetchError::Unreachable)?;
                self.exchange(stream, &remote, kind).await?
            } else {
                self.exchange(stream, &remote, kind).await?
            };
            match (head.status, head.location) {
                (200, _) => return body.ok_or(FetchError::Answer),
                (301 | 302 | 303 | 307 | 308, Some(location)) => remote = self.redirected(kind, &remote, &location)?,
                (status, _) => return Err(FetchError::Status(status)),
            }
        }
        Err(FetchError::Redirects)
    }

    /// The address to connect to: the first one, if all that the name has are public.
    async fn address(&self, remote: &Remote) -> Result<SocketAddr, FetchError> {
        let found = self.network.resolve(remote.host.clone(), remote.port).await;
        let addresses = found.map_err(FetchError::Unreachable)?;
        for address in &addresses {
            self.policy.address(address.ip())?;
        }
        addresses
            .first()
            .copied()
            .ok_or_else(|| FetchError::Unreachable(io::Error::other("the name has no address")))
    }

    /// Where a redirect leads, if the policy lets it.
    fn redirected(&self, kind: MediaKind, from: &Remote, location: &str) -> Result<Remote, FetchError> {
        let scheme = if from.tls { "https" } else { "http" };
        let url = if location.starts_with("//") {
            format!("{scheme}:{location}")
        } else if location.starts_with('/') {
            let host = if from.host.contains(':') {
                format!("[{}]", from.host)
            } else {
                from.host.clone()
            };
            format!("{scheme}://{host}:{}{location}", from.port)
        } else {
            location.to_owned()
        };
        match self.policy.check(kind, &url)? {
            Source::Remote(remote) => Ok(remote),
            // A host does not lead to this machine's files.
            Source::Local(_) | Source::Inline(_) => Err(Refusal::Scheme.into()),
        }
    }

    async fn exchange(
        &self,
        mut stream: impl AsyncRead + AsyncWrite + Unpin,
        remote: &Remote,
        kind: MediaKind,
    ) -> Result<(Head, Option<Medium>), FetchError> {
        // The older version has no chunks: the body is what comes until the end.
        let request = format!(
            "GET {} HTTP/1.0\r\nhost: {}\r\naccept: */*\r\nconnection: close\r\n\r\n",
            remote.target, remote.host
        );
        stream
            .write_all(request.as_bytes())
            .await
            .map_err(FetchError::Unreachable)?;
        let mut bytes = Vec::new();
        let end = loop {
            if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
                break end;
            }
            if bytes.len() > MAX_HEAD || !more(&mut stream, &mut bytes).await? {
                return Err(FetchError::Answer);
            }
        };
        let head = head(&bytes[..end]).ok_or(FetchError::Answer)?;
        let body = if head.status == 200 {
            Some(
                self.store(stream, bytes.split_off(end + 4), self.policy.max_bytes(kind))
                    .await?,
            )
        } else {
            None
        };
        Ok((head, body))
    }

    /// Puts `first` and whatever follows it into a file.
    async fn store(&self, mut stream: impl AsyncRead + Unpin, first: Vec<u8>, most: u64) -> Result<Medium, FetchError> {
        let spool = Arc::clone(&self.spool);
        let mut file = aside(move || spool.file()).await?;
        let (mut piece, mut bytes, mut open) = (first, 0, true);
        loop {
            while open && piece.len() < WRITTEN_AT_ONCE {
                open = more(&mut stream, &mut piece).await?;
            }
            bytes += piece.len() as u64;
            if bytes > most {
                return Err(Refusal::TooLarge(most).into());
            }
            (file, piece) = aside(move || {
                file.write_all(&piece)?;
                piece.clear();
                if !open {
                    file.rewind()?;
                }
                Ok((file, piece))
            })
            .await?;
            if !open {
                return Ok(Medium { file, bytes });
            }
        }
    }
}

/// Does what waits for the disk, on a thread for that.
async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SpoolError> + Send + 'static,
) -> Result<T, SpoolError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| SpoolError::Disk(io::Error::other(error)))?
}

/// Reads more; false at the end. A TLS connection that ends without a goodbye may have been cut: that is no end.
async fn more(stream: &mut (impl AsyncRead + Unpin), bytes: &mut Vec<u8>) -> Result<bool, FetchError> {
    let mut piece = [0; PIECE];
    let count = stream.read(&mut piece).await.map_err(FetchError::Unreachable)?;
    bytes.extend_from_slice(&piece[..count]);
    Ok(count > 0)
}

fn head(bytes: &[u8]) -> Option<Head> {
    let text = std::str::from_utf8(bytes).ok()?;
    let mut lines = text.split("\r\n");
    let (version, rest) = lines.next()?.split_once(' ')?;
    if !version.starts_with("HTTP/1.") {
        return None;
    }
    let status = rest.get(..3)?.parse().ok()?;
    let location = lines
        .filter_map(|line| line.split_once(':'))
        .find_map(|(name, value)| name.eq_ignore_ascii_case("location").then(|| value.trim().to_owned()));
    Some(Head { status, location })
}
