//! What happened, as a number that two runs can be compared by, and as lines that people read.

use std::fmt;
use std::io::Write;
use std::time::Duration;

use crate::random::mix;

/// See the head of the file.
#[derive(Debug, Default)]
pub struct Trace {
    hash: u64,
    events: u64,
    aloud: bool,
}

impl Trace {
    /// A trace that writes every event to the standard output if it is `aloud`.
    pub fn new(aloud: bool) -> Self {
        Self {
            aloud,
            ..Self::default()
        }
    }

    /// Notes an event: when, of which kind, and what makes it different from others of its kind. `words` describe it.
    pub fn note(&mut self, at: Duration, kind: u64, which: u64, words: fmt::Arguments<'_>) {
        self.events += 1;
        self.hash = mix(self.hash ^ at.as_nanos() as u64);
        self.hash = mix(self.hash ^ kind << 56 ^ which);
        if self.aloud {
            // Whoever reads may have had enough.
            drop(writeln!(std::io::stdout(), "{:>12.6} {words}", at.as_secs_f64()));
        }
    }

    /// True if words are wanted.
    pub fn is_aloud(&self) -> bool {
        self.aloud
    }

    /// Equal for equal runs, and for others with next to no chance.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Events so far.
    pub fn events(&self) -> u64 {
        self.events
    }
}
