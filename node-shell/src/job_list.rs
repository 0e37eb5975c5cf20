//! The jobs a node has, by name: an audit tells of those too of which the engine has nothing (yet, or any more).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use engine::owners::{JobName, Origin};

/// All jobs that run.
#[derive(Debug, Default)]
pub struct JobList {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    jobs: BTreeMap<u64, Origin>,
}

/// A job while it runs. Dropped, the job is over.
#[derive(Debug)]
pub struct Listed {
    list: Arc<JobList>,
    number: u64,
}

impl JobList {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is a single insert or remove: a panic leaves no half of it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A job begins.
    pub fn enter(self: &Arc<Self>, now: Instant, name: &Arc<JobName>) -> Listed {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        let origin = Origin {
            since: Some(now),
            job: Some(Arc::clone(name)),
        };
        state.jobs.insert(number, origin);
        Listed {
            list: Arc::clone(self),
            number,
        }
    }

    /// The jobs that run.
    pub fn all(&self) -> Vec<Origin> {
        self.lock().jobs.values().cloned().collect()
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.list.lock().jobs.remove(&self.number);
    }
}
