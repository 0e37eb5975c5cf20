//! The clients of open requests: their events go into a bounded queue each, and the driver never waits for them.
//!
//! A client is given up, and its request cancelled, when it is gone; when its queue is full, that is, when it is
//! `stream_buffer_tokens` events behind; or when events wait for it and it has taken none for
//! `client_stall_timeout_ms`. Only time in which this process ran counts: after a long pause of its own (a stopped or
//! starved process) the HTTP side gets its chance to take what waits before anybody is given up.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use protocol::ids::RequestId;
use tokio::sync::mpsc;

use crate::core::types::ClientEvent;

/// The reason of a cancel whose client is gone.
pub(super) const GONE: &str = "the client is gone";
/// The reason of a cancel whose client is too far behind.
const BEHIND: &str = "the client does not keep up with its events";
/// The reason of a cancel whose client has stopped reading.
const STALLED: &str = "the client has stopped reading";

/// Longest time between two looks that counts as a client's silence; looks are taken more often.
const LONGEST_LOOK: Duration = Duration::from_millis(250);

struct Client {
    events: mpsc::Sender<ClientEvent>,
    sent: u64,
    /// Events taken at the last look.
    taken: u64,
    /// For how long events have waited for it and it has taken none.
    silence: Duration,
}

impl Client {
    fn waiting(&self) -> u64 {
        (self.events.max_capacity() - self.events.capacity()) as u64
    }
}

pub(super) struct Clients {
    open: HashMap<RequestId, Client>,
    stall_timeout: Duration,
    /// When clients were last looked at.
    looked: Instant,
}

impl Clients {
    pub(super) fn new(now: Instant, stall_timeout: Duration) -> Self {
        Self {
            open: HashMap::new(),
            stall_timeout,
            looked: now,
        }
    }

    pub(super) fn add(&mut self, id: RequestId, events: mpsc::Sender<ClientEvent>) {
        self.open.insert(
            id,
            Client {
                events,
                sent: 0,
                taken: 0,
                silence: Duration::ZERO,
            },
        );
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Hands an event on. An error is the reason for which the request is to be cancelled.
    pub(super) fn deliver(&mut self, id: RequestId, event: ClientEvent) -> Result<(), &'static str> {
        let last = event.is_last();
        let Some(client) = self.open.get_mut(&id) else {
            return Ok(());
        };
        // The last place is kept for the last event.
        if !last && client.events.capacity() == 1 {
            return Err(BEHIND);
        }
        client.sent += 1;
        let result = match client.events.try_send(event) {
            Ok(()) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(BEHIND),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(GONE),
        };
        if last {
            self.open.remove(&id);
            return Ok(());
        }
        result
    }

    /// Looks for clients to give up, with the reasons.
    pub(super) fn sweep(&mut self, now: Instant) -> Vec<(RequestId, &'static str)> {
        let mut given_up = Vec::new();
        let passed = now.saturating_duration_since(self.looked).min(LONGEST_LOOK);
        self.looked = now;
        for (id, client) in &mut self.open {
            if client.events.is_closed() {
                given_up.push((*id, GONE));
                continue;
            }
            let waiting = client.waiting();
            let taken = client.sent - waiting;
            if waiting == 0 || taken != client.taken {
                client.taken = taken;
                client.silence = Duration::ZERO;
                continue;
            }
            client.silence += passed;
            if client.silence >= self.stall_timeout {
                given_up.push((*id, STALLED));
            }
        }
        given_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::types::{ServeError, ServeErrorKind};
    use crate::origin::origin;

    const STALL: Duration = Duration::from_secs(30);
    const ID: RequestId = RequestId(1);

    fn event() -> ClientEvent {
        ClientEvent::Prefill {
            cached_tokens: 0,
            prompt_logprobs: None,
            queue_us: 0,
        }
    }

    fn end() -> ClientEvent {
        ClientEvent::Failed(ServeError::new(ServeErrorKind::Internal, "x"))
    }

    fn start(capacity: usize) -> (Clients, mpsc::Receiver<ClientEvent>, Instant) {
        let now = origin();
        let (events, receiver) = mpsc::channel(capacity);
        let mut clients = Clients::new(now, STALL);
        clients.add(ID, events);
        (clients, receiver, now)
    }

    #[test]
    fn a_client_that_falls_behind_is_given_up_and_still_gets_the_end() {
        let (mut clients, mut receiver, _) = start(3);
        assert_eq!(clients.deliver(ID, event()), Ok(()));
        assert_eq!(clients.deliver(ID, event()), Ok(()));
        assert_eq!(clients.deliver(ID, event()), Err(BEHIND));
        assert_eq!(clients.deliver(ID, end()), Ok(()));
        assert_eq!(clients.len(), 0);
        let got: Vec<_> = std::iter::from_fn(|| receiver.try_recv().ok()).collect();
        assert_eq!(got, [event(), event(), end()]);
    }

    /// Looks often until `time` has passed; says who was given up.
    fn watch(clients: &mut Clients, now: &mut Instant, time: Duration) -> Vec<(RequestId, &'static str)> {
        let (look, mut given_up) = (Duration::from_millis(100), Vec::new());
        for _ in 0..time.as_millis() / look.as_millis() {
            *now += look;
            given_up.extend(clients.sweep(*now));
        }
        given_up
    }

    #[test]
    fn a_client_that_takes_nothing_is_given_up_after_the_timeout_and_not_before() {
        let (mut clients, mut receiver, mut now) = start(9);
        assert_eq!(watch(&mut clients, &mut now, STALL * 2), [], "there is nothing to take");
        clients.deliver(ID, event()).expect("room");
        clients.deliver(ID, event()).expect("room");
        assert_eq!(watch(&mut clients, &mut now, STALL / 2), []);
        receiver.try_recv().expect("an event");
        assert_eq!(watch(&mut clients, &mut now, STALL), [], "it has taken one");
        let look = Duration::from_millis(100);
        assert_eq!(watch(&mut clients, &mut now, look), [(ID, STALLED)]);
    }

    #[test]
    fn a_pause_of_this_process_is_no_silence_of_its_clients() {
        let (mut clients, mut receiver, mut now) = start(9);
        clients.deliver(ID, event()).expect("room");
        now += STALL * 3;
        assert_eq!(clients.sweep(now), [], "nobody could take it");
        receiver.try_recv().expect("an event");
        clients.deliver(ID, event()).expect("room");
        now += STALL * 3;
        assert_eq!(clients.sweep(now), []);
        assert_eq!(watch(&mut clients, &mut now, STALL - LONGEST_LOOK), []);
        let given_up = watch(&mut clients, &mut now, LONGEST_LOOK * 2);
        assert_eq!(given_up.first(), Some(&(ID, STALLED)));
    }

    #[test]
    fn a_client_that_is_gone_is_found() {
        let (mut clients, receiver, now) = start(9);
        drop(receiver);
        assert_eq!(clients.sweep(now), [(ID, GONE)]);
        assert_eq!(clients.deliver(ID, event()), Err(GONE));
    }
}
