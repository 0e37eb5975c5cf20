//! Where the time of a request went.
//!
//! ```text
//!  submitted    prompt sent   first row    first tokens   KV is there   first row     last token
//!      |  queue     | prefill queue | prefill  |   transfer    | decode queue |  decode   |
//! ```
//!
//! A request is in exactly one phase at any time, so the phases add up to the whole. What passes between two facts is known by
//! the coordinator's clock; how a node's part splits into waiting and computing is the node's word, bounded by what passed
//! here. What a request does again after a failure adds to the same phases. The HTTP layer puts what comes before the
//! submission into `queue`, and what comes behind the last token into `client write`.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::request::State;

/// A part of a request's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It waits in the coordinator: to be read and checked, for nodes with room, for a reservation.
    Queue,
    /// It waits on the node that computes its prompt.
    PrefillQueue,
    /// Its prompt is computed; with what the job and the first token take on their way.
    Prefill,
    /// First tokens are out, the KV is not there yet: what users feel of the transfer.
    Transfer,
    /// It waits on the node that generates, or for another one when that was lost.
    DecodeQueue,
    /// It generates.
    Decode,
    /// All tokens are there, and not yet with the client's connection.
    ClientWrite,
}

impl Phase {
    /// All of them, in their order.
    pub const ALL: [Self; 7] = [
        Self::Queue,
        Self::PrefillQueue,
        Self::Prefill,
        Self::Transfer,
        Self::DecodeQueue,
        Self::Decode,
        Self::ClientWrite,
    ];

    /// The phase's word in metrics, headers and records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::PrefillQueue => "prefill_queue",
            Self::Prefill => "prefill",
            Self::Transfer => "exposed_transfer",
            Self::DecodeQueue => "decode_queue",
            Self::Decode => "decode",
            Self::ClientWrite => "client_write",
        }
    }

    /// The phase of a request in `state`; `None` once it is over.
    fn of(state: &State) -> Option<Self> {
        match state {
            State::Queued | State::Reserving { .. } => Some(Self::Queue),
            State::Prefilling { .. } | State::Local { .. } => Some(Self::Prefill),
            State::Transferring { .. } => Some(Self::Transfer),
            State::Stranded => Some(Self::DecodeQueue),
            State::Resuming { .. } | State::Decoding { .. } => Some(Self::Decode),
            State::Finished => None,
        }
    }

    /// Where time goes that a node says was waiting.
    fn before(self) -> Option<Self> {
        match self {
            Self::Prefill => Some(Self::PrefillQueue),
            Self::Decode => Some(Self::DecodeQueue),
            Self::Queue | Self::PrefillQueue | Self::Transfer | Self::DecodeQueue | Self::ClientWrite => None,
        }
    }
}

/// How long each phase took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseTimes([Duration; Phase::ALL.len()]);

impl PhaseTimes {
    /// Of one phase.
    pub fn of(&self, phase: Phase) -> Duration {
        self.0[phase as usize]
    }

    /// Adds to a phase.
    pub fn add(&mut self, phase: Phase, time: Duration) {
        self.0[phase as usize] += time;
    }

    /// All of them.
    pub fn sum(&self) -> Duration {
        self.0.iter().sum()
    }
}

/// As an object with a field `<phase>_us` for each, in microseconds.
impl Serialize for PhaseTimes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(Phase::ALL.len()))?;
        for phase in Phase::ALL {
            map.serialize_entry(&format!("{}_us", phase.as_str()), &(self.of(phase).as_micros() as u64))?;
        }
        map.end()
    }
}

/// A phase of one attempt, from when to when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The phase.
    pub phase: Phase,
    /// Number of the attempt, from 1; 0 before the first.
    pub attempt: u32,
    /// Its beginning.
    pub from: Instant,
    /// Its end.
    pub to: Instant,
}

/// Follows one request.
#[derive(Debug)]
pub struct PhaseTracker {
    times: PhaseTimes,
    phase: Phase,
    since: Instant,
    /// The node of this phase has said how long it waited.
    told: bool,
    attempt: u32,
    /// One after the other without gaps, if somebody wants to know.
    stretches: Option<Vec<Stretch>>,
    /// When the first stretch began.
    arrived: Instant,
}

impl PhaseTracker {
    /// A request that has just been submitted.
    pub fn new(now: Instant) -> Self {
        Self {
            times: PhaseTimes::default(),
            phase: Phase::Queue,
            since: now,
            told: false,
            attempt: 0,
            stretches: None,
            arrived: now,
        }
    }

    /// Writes down when each phase was, too. The wait for its submission counts from `arrived` there.
    pub fn write_down(&mut self, arrived: Instant) {
        self.arrived = arrived.min(self.since);
        self.stretches = Some(Vec::new());
    }

    /// The next attempt begins.
    pub fn next_attempt(&mut self) {
        self.attempt += 1;
    }

    /// What was written down.
    pub fn stretches(&mut self) -> Vec<Stretch> {
        self.stretches.take().unwrap_or_default()
    }

    /// The request is in `state` now.
    pub fn follow(&mut self, now: Instant, state: &State) {
        match Phase::of(state) {
            Some(phase) if phase == self.phase => {}
            Some(phase) => {
                self.settle(now);
                self.phase = phase;
                self.told = false;
            }
            None => self.settle(now),
        }
    }

    /// The node that computes says that the request waited there for `queue` first. Only its first word in a phase counts: later
    /// ones are about the time between steps.
    pub fn waited(&mut self, now: Instant, queue: Duration) {
        let Some(before) = self.phase.before().filter(|_| !self.told) else {
            return;
        };
        self.told = true;
        let queue = queue.min(now.saturating_duration_since(self.since));
        self.times.add(before, queue);
        self.write(before, self.since + queue);
        self.since += queue;
    }

    /// What began where the last stretch ended has lasted until `to`.
    fn write(&mut self, phase: Phase, to: Instant) {
        let (attempt, arrived) = (self.attempt, self.arrived);
        let Some(stretches) = &mut self.stretches else { return };
        let from = stretches.last().map_or(arrived, |last| last.to);
        if from < to {
            stretches.push(Stretch {
                phase,
                attempt,
                from,
                to,
            });
        }
    }

    /// The times up to now.
    pub fn times(&self, now: Instant) -> PhaseTimes {
        let mut times = self.times;
        times.add(self.phase, now.saturating_duration_since(self.since));
        times
    }

    fn settle(&mut self, now: Instant) {
        self.write(self.phase, now);
        self.times = self.times(now);
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::nodes::LegId;
    use crate::core::request::Early;
    use crate::origin::origin;

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    fn prefilling() -> State {
        State::Prefilling {
            prefill: LegId(1),
            decode: Some(LegId(2)),
            early: Early::default(),
        }
    }

    fn decoding() -> State {
        State::Decoding {
            prefill: None,
            decode: LegId(2),
        }
    }

    #[test]
    fn phases_add_up_to_the_whole() {
        let start = origin();
        let mut clock = PhaseTracker::new(start);
        clock.follow(start + ms(3), &State::Queued);
        clock.follow(start + ms(5), &prefilling());
        clock.waited(start + ms(25), ms(8));
        let transferring = State::Transferring {
            prefill: None,
            decode: LegId(2),
        };
        clock.follow(start + ms(25), &transferring);
        // What a node says of tokens that are under way before the commit is not about this phase.
        clock.waited(start + ms(26), ms(1));
        clock.follow(start + ms(27), &decoding());
        clock.waited(start + ms(31), ms(3));
        clock.waited(start + ms(36), ms(4));
        clock.follow(start + ms(41), &State::Finished);
        let times = clock.times(start + ms(41));
        let all: Vec<u64> = Phase::ALL
            .iter()
            .map(|phase| times.of(*phase).as_millis() as u64)
            .collect();
        assert_eq!(all, [5, 8, 12, 2, 3, 11, 0]);
        assert_eq!(times.sum(), ms(41));
    }

    #[test]
    fn what_is_done_again_adds_to_the_same_phases() {
        let start = origin();
        let mut clock = PhaseTracker::new(start);
        clock.follow(start + ms(1), &prefilling());
        clock.follow(start + ms(11), &State::Queued);
        clock.follow(start + ms(13), &prefilling());
        // The second attempt waits on its node, too; nobody can have waited longer than it was there.
        clock.waited(start + ms(17), ms(1_000));
        clock.follow(start + ms(17), &decoding());
        clock.follow(start + ms(20), &State::Stranded);
        clock.follow(start + ms(26), &State::Resuming { decode: LegId(7) });
        clock.waited(start + ms(30), ms(2));
        clock.follow(start + ms(30), &decoding());
        let times = clock.times(start + ms(33));
        let all: Vec<u64> = Phase::ALL
            .iter()
            .map(|phase| times.of(*phase).as_millis() as u64)
            .collect();
        assert_eq!(all, [3, 4, 10, 0, 8, 8, 0]);
        assert_eq!(times.sum(), ms(33));
    }

    #[test]
    fn stretches_lie_one_behind_the_other_and_name_their_attempts() {
        let start = origin();
        let mut clock = PhaseTracker::new(start + ms(2));
        clock.write_down(start);
        clock.next_attempt();
        clock.follow(start + ms(3), &prefilling());
        clock.waited(start + ms(9), ms(4));
        clock.follow(start + ms(10), &State::Queued);
        clock.next_attempt();
        clock.follow(start + ms(12), &prefilling());
        clock.follow(start + ms(15), &decoding());
        clock.waited(start + ms(16), ms(0));
        clock.follow(start + ms(20), &State::Finished);
        let told: Vec<_> = clock
            .stretches()
            .into_iter()
            .map(|s| {
                (
                    s.phase.as_str(),
                    s.attempt,
                    (s.from - start).as_millis(),
                    (s.to - start).as_millis(),
                )
            })
            .collect();
        let expected = [
            ("queue", 1, 0, 3),
            ("prefill_queue", 1, 3, 7),
            ("prefill", 1, 7, 10),
            ("queue", 2, 10, 12),
            ("prefill", 2, 12, 15),
            ("decode", 2, 15, 20),
        ];
        assert_eq!(told, expected);
        assert_eq!(clock.times(start + ms(20)).sum(), ms(18), "times count from submission");
    }

    #[test]
    fn times_are_told_in_microseconds() {
        let mut times = PhaseTimes::default();
        times.add(Phase::Transfer, Duration::from_nanos(1_500_999));
        let json = serde_json::to_value(times).expect("plain data");
        assert_eq!(json["exposed_transfer_us"], 1_500);
        assert_eq!(json["client_write_us"], 0);
        assert_eq!(json.as_object().map(|fields| fields.len()), Some(7));
    }
}
