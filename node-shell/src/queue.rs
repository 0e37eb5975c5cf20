//! The way into the engine thread: a bounded queue of commands, and a return box for what must never be refused.
//!
//! Commands may be refused when the queue is full (the job answers `Overloaded`). Returns — cancels, releases — may not:
//! each gives back something that was granted earlier, so their number is bounded by the grants.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Sending half; cheap to clone.
pub(crate) struct Inbox<C, R> {
    shared: Arc<Shared<C, R>>,
}

struct Shared<C, R> {
    state: Mutex<State<C, R>>,
    arrived: Condvar,
    capacity: usize,
}

struct State<C, R> {
    commands: VecDeque<C>,
    returns: Vec<R>,
    closed: bool,
}

/// The command was not taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The queue is full.
    Full,
    /// The engine thread has ended.
    Closed,
}

impl<C, R> Clone for Inbox<C, R> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<C, R> Inbox<C, R> {
    /// A queue of at most `capacity` commands.
    pub(crate) fn new(capacity: usize) -> Self {
        let state = State {
            commands: VecDeque::with_capacity(capacity),
            returns: Vec::new(),
            closed: false,
        };
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                arrived: Condvar::new(),
                capacity,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<C, R>> {
        // A panic while the lock was held leaves a queue that is still a queue.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a command.
    pub(crate) fn push(&self, command: C) -> Result<(), Refused> {
        let mut state = self.lock();
        if state.closed {
            return Err(Refused::Closed);
        }
        if state.commands.len() >= self.shared.capacity {
            return Err(Refused::Full);
        }
        state.commands.push_back(command);
        drop(state);
        self.shared.arrived.notify_one();
        Ok(())
    }

    /// Gives something back. Never refused; after the end of the engine thread there is nothing left to give back to.
    pub(crate) fn give_back(&self, item: R) {
        let mut state = self.lock();
        if !state.closed {
            state.returns.push(item);
        }
        drop(state);
        self.shared.arrived.notify_one();
    }

    /// No further commands; the taker is told that the queue is closed once it has taken what is there.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.shared.arrived.notify_one();
    }

    /// Moves everything that has arrived into `commands` and `returns`. Blocks while there is nothing and `wait` is set.
    /// Returns false once the queue is closed and empty.
    pub(crate) fn take(&self, commands: &mut Vec<C>, returns: &mut Vec<R>, wait: bool) -> bool {
        let mut state = self.lock();
        while wait && state.commands.is_empty() && state.returns.is_empty() && !state.closed {
            state = self.shared.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        commands.extend(state.commands.drain(..));
        returns.append(&mut state.returns);
        !(state.closed && commands.is_empty() && returns.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_bounded_and_returns_are_not() {
        let inbox = Inbox::<u32, u32>::new(2);
        assert_eq!(inbox.push(1), Ok(()));
        assert_eq!(inbox.push(2), Ok(()));
        assert_eq!(inbox.push(3), Err(Refused::Full));
        for i in 0..100 {
            inbox.give_back(i);
        }
        let (mut commands, mut returns) = (Vec::new(), Vec::new());
        assert!(inbox.take(&mut commands, &mut returns, true));
        assert_eq!(commands, [1, 2]);
        assert_eq!(returns.len(), 100);
        assert_eq!(inbox.push(4), Ok(()));
    }

    #[test]
    fn close_is_seen_after_what_came_before_it() {
        let inbox = Inbox::<u32, u32>::new(2);
        assert_eq!(inbox.push(1), Ok(()));
        inbox.close();
        assert_eq!(inbox.push(2), Err(Refused::Closed));
        let (mut commands, mut returns) = (Vec::new(), Vec::new());
        assert!(inbox.take(&mut commands, &mut returns, true));
        assert_eq!(commands, [1]);
        commands.clear();
        assert!(!inbox.take(&mut commands, &mut returns, true));
    }

    #[test]
    fn a_sleeping_taker_is_woken_by_a_return() {
        let inbox = Inbox::<u32, u32>::new(2);
        let taker = {
            let inbox = inbox.clone();
            std::thread::spawn(move || {
                let (mut commands, mut returns) = (Vec::new(), Vec::new());
                inbox.take(&mut commands, &mut returns, true);
                returns
            })
        };
        inbox.give_back(7);
        assert_eq!(taker.join().expect("the taker ends"), [7]);
    }
}
