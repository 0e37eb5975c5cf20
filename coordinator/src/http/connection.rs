//! What actix does not watch on a connection: a client that takes no bytes, a request head that never ends on a connection
//! that has served before, and a client that piles up requests while one is being answered (the dispatcher then neither
//! reads, so it would not notice the client's end, nor sleeps).
//!
//! The connection's socket is kept a second time, so that a watcher can look at it and shut it down from outside of the
//! dispatcher. The dispatcher then ends, and with it everything it owns: the handler, the answer's body, and thereby the
//! request on every node.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use actix_tls::accept::rustls_0_23::TlsStream;
use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::Extensions;
use actix_web::rt;
use actix_web::web::Bytes;
use runtime::clock::Clock;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// How long a connection may do nothing.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// From one answer to the next whole request head.
    pub idle: Duration,
    /// From a piece of an answer until the client has taken it.
    pub stalled: Duration,
    /// How often a connection is looked at.
    pub look: Duration,
}

/// A connection whose client has unread bytes waiting at so many looks in a row, while it waits for an answer, is ended.
const MAX_LOOKS_UNREAD: u32 = 2;

impl ConnectionLimits {
    /// `keep_alive` and `head`: how long an unused connection stays open, and how long a request head may take.
    pub fn new(keep_alive: Duration, head: Duration, stalled: Duration) -> Self {
        let idle = keep_alive + head;
        let look = (idle.min(stalled) / 4).clamp(Duration::from_millis(20), Duration::from_secs(1));
        Self { idle, stalled, look }
    }
}

/// What a connection waits for.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// For the client's next request.
    Idle { since: Instant },
    /// For us: a request is being read or answered, and all that we had to say is said.
    Working,
    /// For the client to take a piece of the answer.
    Sending { since: Instant },
}

/// One client connection, as its watcher sees it.
pub struct Connection {
    socket: TcpStream,
    clock: Clock,
    phase: Cell<Phase>,
    given_up: Cell<bool>,
    ended: Notify,
    watcher: RefCell<Option<JoinHandle<()>>>,
}

impl Connection {
    /// Starts watching a new connection; for `HttpServer::on_connect`. A socket that cannot be kept twice (no file
    /// descriptors left) is not watched.
    pub fn watch(io: &dyn Any, data: &mut Extensions, limits: ConnectionLimits, clock: Clock) {
        let encrypted = io.downcast_ref::<TlsStream<rt::net::TcpStream>>();
        let plain = io.downcast_ref::<rt::net::TcpStream>();
        let Some(stream) = plain.or_else(|| encrypted.map(|stream| stream.get_ref().0)) else {
            return;
        };
        let Ok(descriptor) = stream.as_fd().try_clone_to_owned() else {
            tracing::warn!("no file descriptor left to watch a connection with");
            return;
        };
        let connection = Rc::new(Self {
            socket: TcpStream::from(descriptor),
            clock,
            phase: Cell::new(Phase::Idle { since: clock.now() }),
            given_up: Cell::new(false),
            ended: Notify::new(),
            watcher: RefCell::new(None),
        });
        let watcher = rt::spawn(watch(Rc::downgrade(&connection), limits));
        *connection.watcher.borrow_mut() = Some(watcher);
        data.insert(connection);
    }

    /// A request has arrived.
    pub fn working(&self) {
        self.phase.set(Phase::Working);
    }

    fn sending(&self) {
        self.phase.set(Phase::Sending {
            since: self.clock.now(),
        });
    }

    fn idle(&self) {
        self.phase.set(Phase::Idle {
            since: self.clock.now(),
        });
    }

    /// Returns when the connection is given up. A handler that waits for something else must stop then.
    pub async fn given_up(&self) {
        let ended = self.ended.notified();
        if !self.given_up.get() {
            ended.await;
        }
    }

    fn give_up(&self) {
        tracing::debug!(phase = ?self.phase.get(), "a client connection is given up");
        self.given_up.set(true);
        self.ended.notify_waiters();
        // An error means that the socket is closed already.
        let _closed = self.socket.shutdown(Shutdown::Both).is_ok();
    }

    /// True if the client has sent what the dispatcher does not read, although it could: it reads on while a request is
    /// being answered, until it has buffered more than any honest client sends ahead.
    fn has_unread(&self) -> bool {
        matches!(self.phase.get(), Phase::Working) && self.socket.peek(&mut [0]).is_ok_and(|bytes| bytes > 0)
    }

    fn is_overdue(&self, limits: ConnectionLimits) -> bool {
        let now = self.clock.now();
        match self.phase.get() {
            Phase::Idle { since } => now - since > limits.idle,
            Phase::Sending { since } => now - since > limits.stalled,
            Phase::Working => false,
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(watcher) = self.watcher.take() {
            watcher.abort();
        }
    }
}

async fn watch(connection: Weak<Connection>, limits: ConnectionLimits) {
    let mut looks_unread = 0;
    loop {
        sleep(limits.look).await;
        let Some(connection) = connection.upgrade() else {
            return;
        };
        looks_unread = if connection.has_unread() { looks_unread + 1 } else { 0 };
        if looks_unread >= MAX_LOOKS_UNREAD || connection.is_overdue(limits) {
            return connection.give_up();
        }
    }
}

/// An answer's body that tells its connection what it waits for.
pub struct WatchedBody {
    inner: BoxBody,
    connection: Option<Rc<Connection>>,
}

impl WatchedBody {
    /// Watches `inner` on its way out over `connection`.
    pub fn new(inner: BoxBody, connection: Option<Rc<Connection>>) -> Self {
        Self { inner, connection }
    }
}

impl MessageBody for WatchedBody {
    type Error = <BoxBody as MessageBody>::Error;

    fn size(&self) -> BodySize {
        self.inner.size()
    }

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
        if self
            .connection
            .as_ref()
            .is_some_and(|connection| connection.given_up.get())
        {
            return Poll::Ready(Some(Err("the connection is given up".into())));
        }
        let polled = Pin::new(&mut self.inner).poll_next(cx);
        if let Some(connection) = &self.connection {
            match polled {
                // Being asked means that there is room to send; nothing to give means that the next move is ours.
                Poll::Pending => connection.working(),
                Poll::Ready(Some(_)) => connection.sending(),
                Poll::Ready(None) => {}
            }
        }
        polled
    }
}

impl Drop for WatchedBody {
    fn drop(&mut self) {
        if let Some(connection) = &self.connection {
            connection.idle();
        }
    }
}
