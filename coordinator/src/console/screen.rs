//! What is written where. A reader that has gone away (`coordinator nodes | head -1`) is no error.

use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};

use serde_json::Value;

use super::Trouble;
use super::client::Answer;
use super::format::plain;

/// Goes to the upper left corner and clears what is below it.
const HOME: &str = "\x1b[H\x1b[J";
/// Clears the whole screen and what was above it.
const CLEAR: &str = "\x1b[2J";

/// Standard output.
pub(super) struct Screen {
    terminal: bool,
    begun: bool,
}

impl Screen {
    /// Nothing has been written yet.
    pub(super) fn new() -> Self {
        Self {
            terminal: stdout().is_terminal(),
            begun: false,
        }
    }

    /// Writes a text.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn write(&mut self, text: &str) -> Result<(), Trouble> {
        let mut out = stdout().lock();
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.map_err(|error| match error.kind() {
            ErrorKind::BrokenPipe => Trouble::Unread,
            _ => Trouble::Wrong(format!("cannot write: {error}")),
        })
    }

    /// Writes an answer: as it came, or for people.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(super) fn show(&mut self, answer: &Answer, json: bool, text: fn(&Value) -> String) -> Result<(), Trouble> {
        if json {
            self.write(&format!("{}\n", answer.text))
        } else {
            self.write(&text(&answer.value))
        }
    }

    /// The same in place of what was written last, in a terminal; elsewhere below it, after an empty line.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(super) fn show_again(
        &mut self,
        answer: &Answer,
        json: bool,
        text: fn(&Value) -> String,
    ) -> Result<(), Trouble> {
        let before = match (json, self.terminal, self.begun) {
            (true, ..) | (false, false, false) => "",
            (false, true, false) => CLEAR,
            (false, true, true) => HOME,
            (false, false, true) => "\n",
        };
        let home = if self.terminal && !json && !self.begun {
            HOME
        } else {
            ""
        };
        self.write(before)?;
        self.write(home)?;
        self.begun = true;
        self.show(answer, json, text)
    }
}

/// One line for whoever started the process.
pub(super) fn complain(what: &str) {
    note(&format!("coordinator: {}", plain(what, 1_000)));
}

/// A line beside the answer.
pub(super) fn note(line: &str) {
    // Nobody can be told that nobody can be told.
    let _written = writeln!(stderr().lock(), "{line}").is_ok();
}
