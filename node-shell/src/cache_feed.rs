//! What the prefix cache holds, on its way from the engine thread to the coordinators.
//!
//! The engine thread leaves changes in a box that nobody holds for longer than it takes to move a list. Whoever tells a
//! coordinator empties it first, into a set of all names and a log of the latest changes; each reader has its place in the
//! log. One that is new, or further behind than the log reaches, is given the whole set again. Box and log hold at most as
//! many changes as the pool has blocks; so a box that overflows is replaced by all names at a cost that its changes have
//! paid for.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::engine::Engine;
use engine::event::CacheEvent;
use protocol::control::{CacheChange, MAX_CACHE_NAMES};

/// The names of all cached blocks of a node, and how they change.
pub(crate) struct CacheFeed {
    arrived: Mutex<Arrived>,
    known: Mutex<Known>,
    /// Most changes that the box or the log holds.
    most: usize,
}

/// The box.
#[derive(Default)]
struct Arrived {
    /// Everything there was, if the changes before it are not all there.
    all: Option<Vec<u64>>,
    /// What has changed since.
    changes: Vec<CacheEvent>,
}

struct Known {
    names: HashSet<u64>,
    log: VecDeque<CacheEvent>,
    /// Changes before the log's first one.
    start: u64,
}

/// The values are changed step by step, each of which leaves them usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CacheFeed {
    /// Of a pool of `total_blocks` blocks whose cache is empty.
    pub(crate) fn new(total_blocks: usize) -> Arc<Self> {
        Self::with_bound(total_blocks.max(MAX_CACHE_NAMES))
    }

    fn with_bound(most: usize) -> Arc<Self> {
        Arc::new(Self {
            arrived: Mutex::default(),
            known: Mutex::new(Known {
                names: HashSet::new(),
                log: VecDeque::new(),
                start: 0,
            }),
            most,
        })
    }

    /// Takes over what has changed in the cache of `engine`. Called on the engine thread.
    pub(crate) fn take(&self, engine: &mut Engine) {
        if !engine.has_cache_changes() {
            return;
        }
        let mut arrived = lock(&self.arrived);
        let complete = engine.take_cache_changes(&mut arrived.changes);
        if !complete || arrived.changes.len() > self.most {
            arrived.changes.clear();
            arrived.all = Some(engine.cached_names().collect());
        }
    }

    /// What is known now.
    fn known(&self) -> MutexGuard<'_, Known> {
        let mut known = lock(&self.known);
        let Arrived { all, changes } = std::mem::take(&mut *lock(&self.arrived));
        if let Some(all) = all {
            // What lies between is not known: no reader goes on from there.
            known.start += known.log.len() as u64 + 1;
            known.log.clear();
            known.names = all.into_iter().collect();
        }
        for change in changes {
            match change {
                CacheEvent::Added(name) => known.names.insert(name),
                CacheEvent::Removed(name) => known.names.remove(&name),
            };
            known.log.push_back(change);
        }
        let excess = known.log.len().saturating_sub(self.most);
        known.log.drain(..excess);
        known.start += excess as u64;
        known
    }
}

/// Tells one coordinator.
pub(crate) struct CacheReader {
    feed: Arc<CacheFeed>,
    /// Changes told so far.
    sequence: u64,
    /// Changes of the log that it need not be told; `None` before the first snapshot.
    place: Option<u64>,
    /// What is left of a snapshot.
    snapshot: Vec<u64>,
}

impl CacheReader {
    /// For a coordinator that knows nothing.
    pub(crate) fn new(feed: Arc<CacheFeed>) -> Self {
        Self {
            feed,
            sequence: 0,
            place: None,
            snapshot: Vec::new(),
        }
    }

    /// The next thing to tell; `None` if the coordinator knows everything.
    pub(crate) fn next(&mut self) -> Option<CacheChange> {
        let feed = Arc::clone(&self.feed);
        let known = feed.known();
        let end = known.start + known.log.len() as u64;
        let change = match self.place.filter(|place| *place >= known.start) {
            None => {
                self.place = Some(end);
                self.snapshot = known.names.iter().copied().collect();
                CacheChange {
                    reset: true,
                    added: self.piece(),
                    ..CacheChange::default()
                }
            }
            Some(_) if !self.snapshot.is_empty() => CacheChange {
                added: self.piece(),
                ..CacheChange::default()
            },
            Some(place) if place < end => {
                let told = (end - place).min(MAX_CACHE_NAMES as u64);
                self.place = Some(place + told);
                // The log is in memory: its indices are of machine size.
                let from = (place - known.start) as usize;
                net(known.log.range(from..from + told as usize))
            }
            Some(_) => return None,
        };
        self.sequence += 1;
        Some(CacheChange {
            sequence: self.sequence,
            ..change
        })
    }

    fn piece(&mut self) -> Vec<u64> {
        let rest = self.snapshot.len().saturating_sub(MAX_CACHE_NAMES);
        self.snapshot.split_off(rest)
    }
}

/// What changes come to: a block that came and went, or went and came, has not changed.
fn net<'a>(changes: impl Iterator<Item = &'a CacheEvent>) -> CacheChange {
    // By name: was it added first, is it there last.
    let mut names: HashMap<u64, (bool, bool)> = HashMap::new();
    for change in changes {
        let (name, there) = match *change {
            CacheEvent::Added(name) => (name, true),
            CacheEvent::Removed(name) => (name, false),
        };
        names.entry(name).or_insert((there, there)).1 = there;
    }
    let mut change = CacheChange::default();
    for (name, (first, last)) in names {
        match (first, last) {
            (true, true) => change.added.push(name),
            (false, false) => change.removed.push(name),
            (true, false) | (false, true) => {}
        }
    }
    change
}

#[cfg(test)]
mod tests {
    use protocol::window::Groups;

    use super::*;
    use engine::fake::{ScriptedModel, ScriptedRunner};
    use engine::limits::EngineLimits;
    use engine::runner::NoObserver;
    use engine::sequence::SequenceSpec;
    use std::collections::BTreeSet;
    use std::time::Duration;

    /// A coordinator that does as it is told.
    #[derive(Default)]
    struct Listener {
        names: BTreeSet<u64>,
        heard: u64,
        resets: usize,
    }

    impl Listener {
        fn hear(&mut self, reader: &mut CacheReader) {
            while let Some(change) = reader.next() {
                assert_eq!(change.sequence, self.heard + 1);
                assert!(change.added.len() + change.removed.len() <= MAX_CACHE_NAMES);
                self.heard += 1;
                if change.reset {
                    self.names.clear();
                    self.resets += 1;
                }
                self.names.extend(change.added);
                self.names.retain(|name| !change.removed.contains(name));
            }
        }
    }

    struct Machine {
        engine: Engine,
        runner: ScriptedRunner,
    }

    impl Machine {
        fn new(blocks: usize) -> Self {
            let limits = EngineLimits {
                total_blocks: blocks,
                block_tokens: 4,
                max_num_seqs: 8,
                max_batch_tokens: 64,
                prefill_chunk_tokens: 64,
                mixed_prefill_tokens: 64,
                mixed_prefill_time: Duration::ZERO,
                max_seq_len: blocks * 4,
                prefix_cache: true,
                groups: Groups::ONE,
            };
            Self {
                engine: Engine::new(limits).expect("the limits are consistent"),
                runner: ScriptedRunner::new(ScriptedModel::new(1000), blocks, 4),
            }
        }

        /// Computes a prompt of `len` tokens and one more.
        fn serve(&mut self, salt: u32, len: u32) {
            let spec = SequenceSpec::greedy((0..len).map(|i| (salt * 7 + i) % 1000).collect(), 1);
            self.engine.add(spec).expect("there is room");
            let mut events = Vec::new();
            let mut step = || self.engine.step(&mut self.runner, &mut NoObserver, &mut events);
            while step().expect("the runner works").is_some() {}
        }

        fn names(&self) -> BTreeSet<u64> {
            self.engine.cached_names().collect()
        }
    }

    #[test]
    fn who_listens_knows_what_is_cached_whenever_he_comes() {
        let mut machine = Machine::new(32);
        let feed = CacheFeed::new(32);
        let (mut early, mut first) = (CacheReader::new(Arc::clone(&feed)), Listener::default());
        first.hear(&mut early);
        assert_eq!((first.heard, first.resets), (1, 1), "an empty cache is told too");
        for salt in 0..12 {
            machine.serve(salt, 3 + salt * 5);
            feed.take(&mut machine.engine);
            if salt % 3 == 0 {
                first.hear(&mut early);
                assert_eq!(first.names, machine.names());
            }
        }
        let (mut late, mut second) = (CacheReader::new(Arc::clone(&feed)), Listener::default());
        second.hear(&mut late);
        first.hear(&mut early);
        assert_eq!(second.names, machine.names());
        assert_eq!(first.names, machine.names());
        assert_eq!((first.resets, second.resets), (1, 1));
        let heard = first.heard;
        first.hear(&mut early);
        assert_eq!(first.heard, heard, "nothing is new");
    }

    #[test]
    fn who_is_too_far_behind_hears_everything_again() {
        let mut machine = Machine::new(32);
        let feed = CacheFeed::with_bound(10);
        let (mut slow, mut listener) = (CacheReader::new(Arc::clone(&feed)), Listener::default());
        let (mut quick, mut other) = (CacheReader::new(Arc::clone(&feed)), Listener::default());
        listener.hear(&mut slow);
        for salt in 0..6 {
            machine.serve(salt * 100, 21);
            feed.take(&mut machine.engine);
            other.hear(&mut quick);
        }
        assert_eq!((&other.names, other.resets), (&machine.names(), 1));
        listener.hear(&mut slow);
        assert_eq!((&listener.names, listener.resets), (&machine.names(), 2));
        // Nobody empties the box: it overflows, and the log does not connect with what comes.
        for salt in 6..14 {
            machine.serve(salt * 100, 21);
            feed.take(&mut machine.engine);
        }
        assert!(lock(&feed.arrived).all.is_some());
        other.hear(&mut quick);
        assert_eq!((&other.names, other.resets), (&machine.names(), 2));
    }

    #[test]
    fn a_large_cache_is_told_in_pieces_and_changes_meanwhile_come_after_it() {
        let feed = CacheFeed::new(10_000);
        lock(&feed.arrived).changes = (0..10_000).map(CacheEvent::Added).collect();
        let mut reader = CacheReader::new(Arc::clone(&feed));
        let first = reader.next().expect("a snapshot");
        assert!(first.reset && first.added.len() == MAX_CACHE_NAMES);
        lock(&feed.arrived).changes = (0..5_000).map(CacheEvent::Removed).collect();
        let mut listener = Listener {
            names: first.added.into_iter().collect(),
            heard: 1,
            resets: 1,
        };
        listener.hear(&mut reader);
        assert_eq!(listener.names, (5_000..10_000).collect());
        assert_eq!((listener.heard, listener.resets), (5, 1));
    }

    #[test]
    fn what_comes_and_goes_is_not_told() {
        let changes = [
            CacheEvent::Added(1),
            CacheEvent::Removed(2),
            CacheEvent::Added(3),
            CacheEvent::Removed(1),
            CacheEvent::Added(2),
            CacheEvent::Removed(4),
        ];
        let change = net(changes.iter());
        assert_eq!((change.added, change.removed), (vec![3], vec![4]));
    }
}
