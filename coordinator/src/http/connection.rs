//! What actix does not watch on a connection: a client that takes no bytes, and a request head that never ends on a
//! connection that has served before.
//!
//! The connection's socket is kept a second time, so that a watcher can shut it down from outside of the dispatcher, which
//! is blocked on that very socket. The dispatcher then ends, and with it everything it owns: the handler, the answer's
//! body, and thereby the request on every node.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::Extensions;
use actix_web::rt;
use actix_web::web::Bytes;
use runtime::clock::Clock;
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

impl ConnectionLimits {
    /// `keep_alive` and `head`: how long an unused connection stays open, and how long a request head may take.
    pub fn new(keep_alive: Duration, head: Duration, stalled: Duration) -> Self {
        let idle = keep_alive + head;
        let look = (idle.min(stalled) / 4).clamp(Duration::from_millis(20), Duration::from_secs(5));
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
    watcher: RefCell<Option<JoinHandle<()>>>,
}

impl Connection {
    /// Starts watching a new connection; for `HttpServer::on_connect`. A socket that cannot be kept twice (no file
    /// descriptors left) is not watched.
    pub fn watch(io: &dyn Any, data: &mut Extensions, limits: ConnectionLimits, clock: Clock) {
        let Some(stream) = io.downcast_ref::<rt::net::TcpStream>() else {
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
    loop {
        sleep(limits.look).await;
        let Some(connection) = connection.upgrade() else {
            return;
        };
        if connection.is_overdue(limits) {
            tracing::debug!(phase = ?connection.phase.get(), "a client connection is given up");
            // An error means that the socket is closed already.
            let _closed = connection.socket.shutdown(Shutdown::Both).is_ok();
            return;
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
