//! What can be wrong with a configuration. Every message is one line: where, which key, which value, what is right.

use std::fmt;

use thiserror::Error;

/// Where a value came from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// The field's default.
    Default,
    /// A line of the configuration file.
    File {
        /// The file, as it was named.
        path: String,
        /// Line, counted from 1.
        line: usize,
    },
    /// An environment variable.
    Environment {
        /// The variable's name.
        name: String,
    },
    /// A `--set` argument.
    Argument {
        /// The key as it was given; the value is left out, it may be a secret.
        key: String,
    },
}

impl Origin {
    /// How strong it is: of two values the one with the higher rank holds.
    pub(crate) fn rank(&self) -> u8 {
        match self {
            Self::Default => 0,
            Self::File { .. } => 1,
            Self::Environment { .. } => 2,
            Self::Argument { .. } => 3,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{path}:{line}"),
            Self::Environment { name } => write!(f, "environment variable {}", line(name)),
            Self::Argument { key } => write!(f, "--set {}", line(key)),
        }
    }
}

/// A value as it was given.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    /// Where it stands.
    pub origin: Origin,
    /// `section.field`.
    pub key: String,
    /// The value in one short line; secrets hidden.
    pub value: String,
}

/// Why a configuration was refused.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("--config {path}: {reason}; give the path of a TOML file of at most {max_bytes} bytes")]
    Unreadable {
        /// The file, as it was named.
        path: String,
        /// What the system said.
        reason: String,
        /// Largest file that is read.
        max_bytes: u64,
    },
    /// The file is not TOML.
    #[error("{origin}: not valid TOML: {reason}")]
    Syntax {
        /// File and line.
        origin: Origin,
        /// What the parser said.
        reason: String,
    },
    /// A key, section or variable that does not exist.
    #[error("{origin}: unknown {what} `{}`; {hint}", line(.name))]
    Unknown {
        /// Where it stands.
        origin: Origin,
        /// "section", "key" or "setting".
        what: &'static str,
        /// The name that was given.
        name: String,
        /// What was probably meant, or what exists.
        hint: String,
    },
    /// A value of the wrong type or out of range.
    #[error("{}: {} = {} is not valid; expected {expected}", .setting.origin, .setting.key, .setting.value)]
    Value {
        /// What was given.
        setting: Box<Setting>,
        /// What would be right.
        expected: String,
    },
    /// Two values that cannot both hold.
    #[error(
        "{}: {} = {} contradicts {} = {} ({}); {expected}",
        .first.origin, .first.key, .first.value, .second.key, .second.value, .second.origin
    )]
    Contradiction {
        /// The value to point at.
        first: Box<Setting>,
        /// The value it contradicts.
        second: Box<Setting>,
        /// What would be right.
        expected: String,
    },
    /// A `--set` argument without the form `section.field=value`.
    #[error("--set {}: write --set section.field=value, for example --set engine.threads=2", line(.argument))]
    Argument {
        /// The argument's part before any `=`.
        argument: String,
    },
    /// The checked values do not form a configuration: a fault of this crate.
    #[error("the checked configuration cannot be read back: {reason}")]
    Internal {
        /// What the deserialiser said.
        reason: String,
    },
}

/// Longest piece of a given value that an error repeats, in characters.
const MAX_SHOWN_CHARS: usize = 80;

/// A name that was given, as a part of one line: control characters escaped, of bounded length.
fn line(text: &str) -> String {
    let mut line: String = text.chars().take(MAX_SHOWN_CHARS).flat_map(escaped).collect();
    if text.chars().count() > MAX_SHOWN_CHARS {
        line.push_str("...");
    }
    line
}

fn escaped(c: char) -> impl Iterator<Item = char> {
    let (escape, plain) = if c.is_control() {
        (Some(c.escape_default()), None)
    } else {
        (None, Some(c))
    };
    escape.into_iter().flatten().chain(plain)
}

/// `text` as one line of bounded length, quoted.
pub(crate) fn shown(text: &str) -> String {
    if text.chars().count() <= MAX_SHOWN_CHARS {
        return format!("{text:?}");
    }
    let head: String = text.chars().take(MAX_SHOWN_CHARS).collect();
    format!("{head:?}...")
}
