//! Calls that a client may send twice: those with an `Idempotency-Key`.
//!
//! Life of such a call:
//! 1. The first one runs as any other. What its requests say is kept in a *log* each; the answer is made from the logs.
//! 2. The client is gone: the call goes on for `coordinator.reattach_ms`, and is cancelled if nobody comes back by then.
//! 3. The same call comes again, running or ended not longer ago than that: it is answered from the same logs, from the
//!    beginning, and no node computes anything again.
//! 4. Later, or at another coordinator, it is served again, with the same seed: seeds that the client does not give follow
//!    from the key. So the answer is the same one.
//!
//! A key belongs to a client's API key. Another body under a key that is known is an error.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt};
use runtime::clock::Clock;
use tokio::sync::watch;
use tokio::time::sleep_until;

use super::backend::Events;
use super::caller::IdempotencyKey;
use super::error::{ApiError, ErrorKind};
use crate::core::queue::Tenant;
use crate::core::types::{ClientEvent, ServeError, ServeErrorKind};

/// Most calls that are remembered once they have ended; the oldest are forgotten first.
const MAX_ENDED: usize = 1_024;

/// Whose call it is, and the client's word for it.
type CallName = (Tenant, Arc<str>);
/// All of them.
type Calls = HashMap<CallName, Arc<Call>>;

/// The calls with a key that run, or ended lately.
pub struct Attachments {
    calls: Mutex<Calls>,
    keep: Duration,
    clock: Clock,
}

/// A call and what its requests have said.
struct Call {
    fingerprint: u128,
    logs: Vec<Log>,
    readers: watch::Sender<usize>,
    ended: Mutex<Option<Instant>>,
}

/// What a request has said so far.
struct Log {
    events: Mutex<Vec<ClientEvent>>,
    /// How many there are.
    length: watch::Sender<usize>,
}

/// What is to be done with a call.
pub enum Attached {
    /// It runs, or has ended lately: its answer so far, and what comes.
    Known(Vec<Events>),
    /// Nothing is known of it: to be run, and its events given to [`Recorder::record`].
    New(Recorder),
}

/// Keeps what a new call says. Dropped before [`Recorder::record`] (the call was refused), it forgets the call.
pub struct Recorder {
    calls: Arc<Attachments>,
    name: CallName,
    call: Arc<Call>,
    recorded: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under a lock is a single one.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Attachments {
    /// No calls. `keep`: how long one waits for its client, and is remembered after its end.
    pub fn new(keep: Duration, clock: Clock) -> Arc<Self> {
        Arc::new(Self {
            calls: Mutex::new(HashMap::new()),
            keep,
            clock,
        })
    }

    /// Finds the call of `key`, or makes one with `requests` requests.
    ///
    /// # Errors
    /// The key stands for another body.
    pub fn attach(
        self: &Arc<Self>,
        tenant: Tenant,
        key: &IdempotencyKey,
        requests: usize,
    ) -> Result<Attached, ApiError> {
        let name = (tenant, Arc::clone(&key.name));
        let mut calls = lock(&self.calls);
        if let Some(call) = calls.get(&name) {
            if call.fingerprint != key.fingerprint || call.logs.len() != requests {
                return Err(ApiError {
                    kind: ErrorKind::Invalid,
                    message: "the header `idempotency-key` was sent with another request before; it names one request \
                              only"
                        .to_owned(),
                    param: Some("idempotency-key".to_owned()),
                });
            }
            return Ok(Attached::Known(Call::read(call)));
        }
        self.forget_oldest(&mut calls);
        let log = || Log {
            events: Mutex::new(Vec::new()),
            length: watch::Sender::new(0),
        };
        let call = Arc::new(Call {
            fingerprint: key.fingerprint,
            logs: (0..requests).map(|_| log()).collect(),
            readers: watch::Sender::new(0),
            ended: Mutex::new(None),
        });
        calls.insert(name.clone(), Arc::clone(&call));
        Ok(Attached::New(Recorder {
            calls: Arc::clone(self),
            name,
            call,
            recorded: false,
        }))
    }

    fn forget_oldest(&self, calls: &mut Calls) {
        let ended = |call: &Call| *lock(&call.ended);
        if calls.values().filter(|call| ended(call).is_some()).count() < MAX_ENDED {
            return;
        }
        let oldest = calls.iter().filter_map(|(name, call)| Some((ended(call)?, name)));
        if let Some(name) = oldest.min_by_key(|(at, _)| *at).map(|(_, name)| name.clone()) {
            calls.remove(&name);
        }
    }

    fn forget(&self, name: &CallName, call: &Arc<Call>) {
        let mut calls = lock(&self.calls);
        if calls.get(name).is_some_and(|known| Arc::ptr_eq(known, call)) {
            calls.remove(name);
        }
    }

    /// Calls that are known.
    pub fn len(&self) -> usize {
        lock(&self.calls).len()
    }

    /// True if no call is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Recorder {
    /// Takes the events of the call's requests; those that come back are the client's.
    pub fn record(mut self, events: Vec<Events>) -> Vec<Events> {
        self.recorded = true;
        let read = Call::read(&self.call);
        let (calls, call, name) = (Arc::downgrade(&self.calls), Arc::clone(&self.call), self.name.clone());
        let (keep, clock) = (self.calls.keep, self.calls.clock);
        // Ends with the call, or once its client has been gone for long; then, after `keep`, the call is forgotten.
        tokio::spawn(async move {
            let answered = call.run(events, keep, clock).await;
            // A call that failed is not remembered: sent again, it is tried again.
            if answered {
                *lock(&call.ended) = Some(clock.now());
                sleep_until((clock.now() + keep).into()).await;
            }
            if let Some(calls) = Weak::upgrade(&calls) {
                calls.forget(&name, &call);
            }
        });
        read
    }
}

impl Recorder {
    /// The call was not taken. Whoever has attached meanwhile hears why.
    pub fn refuse(self, error: &ServeError) {
        self.calls.forget(&self.name, &self.call);
        self.call.fail(error);
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if !self.recorded {
            self.calls.forget(&self.name, &self.call);
            self.call.fail(&given_up());
        }
    }
}

fn given_up() -> ServeError {
    ServeError::new(ServeErrorKind::Unavailable, "the request was given up; send it again")
}

impl Call {
    /// Ends what has not ended.
    fn fail(&self, error: &ServeError) {
        for log in &self.logs {
            if !lock(&log.events).last().is_some_and(ClientEvent::is_last) {
                log.push(ClientEvent::Failed(error.clone()));
            }
        }
    }

    /// Writes down what the requests say until all have ended, or the client has stayed away, which cancels them. True if
    /// they were answered.
    async fn run(&self, events: Vec<Events>, patience: Duration, clock: Clock) -> bool {
        let numbered = events.into_iter().enumerate();
        let numbered = numbered.map(|(number, events)| events.map(move |event| (number, event)));
        let mut all = stream::select_all(numbered);
        let mut readers = self.readers.subscribe();
        let mut answered = true;
        // Until when the client may stay away; tokens that come meanwhile change nothing about it.
        let mut until: Option<Instant> = None;
        loop {
            until = match *readers.borrow_and_update() {
                0 => until.or_else(|| clock.now().checked_add(patience)),
                _ => None,
            };
            let gone = async {
                match until {
                    Some(until) => sleep_until(until.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                event = all.next() => match event {
                    Some((number, event)) => {
                        answered &= !matches!(event, ClientEvent::Failed(_));
                        self.logs[number].push(event);
                    }
                    None => {
                        self.fail(&given_up());
                        return answered;
                    }
                },
                // The sender is a part of the call, which is here.
                _ = readers.changed() => {}
                () = gone => {
                    if *self.readers.borrow() == 0 {
                        self.fail(&given_up());
                        return false;
                    }
                }
            }
        }
    }

    /// Everything that the requests have said and will say.
    fn read(call: &Arc<Self>) -> Vec<Events> {
        let reader = |number| -> Events {
            let cursor = Cursor::new(Arc::clone(call), number);
            Box::pin(stream::unfold(cursor, |mut cursor| async move {
                let event = cursor.next().await?;
                Some((event, cursor))
            }))
        };
        (0..call.logs.len()).map(reader).collect()
    }
}

impl Log {
    fn push(&self, event: ClientEvent) {
        let mut events = lock(&self.events);
        events.push(event);
        self.length.send_replace(events.len());
    }
}

/// A reader of a log.
struct Cursor {
    call: Arc<Call>,
    number: usize,
    at: usize,
    length: watch::Receiver<usize>,
    ended: bool,
}

impl Cursor {
    fn new(call: Arc<Call>, number: usize) -> Self {
        call.readers.send_modify(|readers| *readers += 1);
        let length = call.logs[number].length.subscribe();
        Self {
            call,
            number,
            at: 0,
            length,
            ended: false,
        }
    }

    /// The next event; `None` behind the last one.
    async fn next(&mut self) -> Option<ClientEvent> {
        if self.ended {
            return None;
        }
        let at = self.at;
        self.length.wait_for(|length| *length > at).await.ok()?;
        let event = lock(&self.call.logs[self.number].events).get(at).cloned()?;
        self.at += 1;
        self.ended = event.is_last();
        Some(event)
    }
}

impl Drop for Cursor {
    fn drop(&mut self) {
        self.call.readers.send_modify(|readers| *readers -= 1);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::core::phases::PhaseTimes;

    const KEEP: Duration = Duration::from_millis(40);

    fn key(name: &str, fingerprint: u128) -> IdempotencyKey {
        IdempotencyKey {
            name: name.into(),
            fingerprint,
        }
    }

    fn event(cached_tokens: u32) -> ClientEvent {
        ClientEvent::Prefill {
            cached_tokens,
            prompt_logprobs: None,
            queue_us: 0,
        }
    }

    fn begin(calls: &Arc<Attachments>, name: &str) -> (mpsc::Sender<ClientEvent>, Vec<Events>) {
        let (sender, receiver) = mpsc::channel(16);
        let Ok(Attached::New(recorder)) = calls.attach(Tenant(1), &key(name, 7), 1) else {
            panic!("a new call")
        };
        let events = stream::unfold(receiver, |mut receiver: mpsc::Receiver<ClientEvent>| async move {
            Some((receiver.recv().await?, receiver))
        });
        (sender, recorder.record(vec![Box::pin(events)]))
    }

    fn again(calls: &Arc<Attachments>, name: &str) -> Events {
        match calls.attach(Tenant(1), &key(name, 7), 1) {
            Ok(Attached::Known(mut events)) => events.remove(0),
            Ok(Attached::New(_)) => panic!("{name} is known"),
            Err(error) => panic!("{}", error.message),
        }
    }

    async fn next(events: &mut Events) -> Option<ClientEvent> {
        timeout(Duration::from_secs(5), events.next()).await.expect("in time")
    }

    #[tokio::test]
    async fn a_client_that_comes_back_gets_everything_from_the_beginning() {
        let calls = Attachments::new(KEEP, Clock);
        let (sender, mut first) = begin(&calls, "a");
        sender.send(event(1)).await.expect("taken");
        assert_eq!(next(&mut first[0]).await, Some(event(1)));
        drop(first);
        sender.send(event(2)).await.expect("the call goes on");
        let mut second = again(&calls, "a");
        assert_eq!(next(&mut second).await, Some(event(1)));
        assert_eq!(next(&mut second).await, Some(event(2)));
        // Longer than a client may stay away: it is here.
        sleep(2 * KEEP).await;
        let done = ClientEvent::Done {
            submitted: Clock.now(),
            phases: PhaseTimes::default(),
        };
        sender.send(done.clone()).await.expect("the call goes on");
        assert_eq!(next(&mut second).await, Some(done));
        assert_eq!(next(&mut second).await, None);
        let mut ended = again(&calls, "a");
        assert_eq!(next(&mut ended).await, Some(event(1)));
        drop(sender);
        for _ in 0..200 {
            sleep(KEEP / 4).await;
            if calls.is_empty() {
                return;
            }
        }
        panic!("a call that has ended is forgotten");
    }

    #[tokio::test]
    async fn a_call_whose_client_stays_away_is_cancelled() {
        let calls = Attachments::new(KEEP, Clock);
        let (sender, client) = begin(&calls, "a");
        drop(client);
        timeout(Duration::from_secs(5), sender.closed())
            .await
            .expect("cancelled");
        let (sender, client) = begin(&calls, "c");
        drop(client);
        let talks = async {
            while sender.send(event(1)).await.is_ok() {
                sleep(KEEP / 8).await
            }
        };
        timeout(Duration::from_secs(5), talks)
            .await
            .expect("cancelled, though tokens come");
        let (_sender, client) = begin(&calls, "b");
        sleep(3 * KEEP).await;
        assert_eq!(calls.len(), 1, "whoever waits is not sent away");
        drop(client);
    }

    #[tokio::test]
    async fn a_key_stands_for_one_body_and_one_client() {
        let calls = Attachments::new(KEEP, Clock);
        let (_sender, _client) = begin(&calls, "a");
        let Err(error) = calls.attach(Tenant(1), &key("a", 8), 1) else {
            panic!("another body")
        };
        assert!(error.message.contains("idempotency-key"), "{}", error.message);
        let other = calls.attach(Tenant(2), &key("a", 8), 1);
        assert!(matches!(other, Ok(Attached::New(_))), "another client's key");
    }

    #[tokio::test]
    async fn a_refused_call_is_forgotten_and_whoever_waits_for_it_is_told() {
        let calls = Attachments::new(KEEP, Clock);
        let Ok(Attached::New(recorder)) = calls.attach(Tenant(1), &key("a", 7), 1) else {
            panic!("a new call")
        };
        let mut waiting = again(&calls, "a");
        let full = ServeError::new(ServeErrorKind::Overloaded { retry_after_s: 3 }, "full");
        recorder.refuse(&full);
        assert_eq!(next(&mut waiting).await, Some(ClientEvent::Failed(full)));
        assert!(calls.is_empty());
    }

    #[tokio::test]
    async fn a_call_that_failed_is_tried_again() {
        let calls = Attachments::new(Duration::from_secs(600), Clock);
        let (sender, mut client) = begin(&calls, "a");
        let lost = ClientEvent::Failed(ServeError::new(ServeErrorKind::NodeLost, "lost"));
        sender.send(lost.clone()).await.expect("taken");
        assert_eq!(next(&mut client[0]).await, Some(lost));
        drop(sender);
        timeout(Duration::from_secs(5), async {
            while !calls.is_empty() {
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .expect("forgotten");
    }
}
