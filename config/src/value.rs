//! From what was written to a checked value of the field's kind.

use std::net::SocketAddr;

use toml::Value;
use toml::de::{DeInteger, DeValue};

use crate::error::shown;
use crate::field::{Kind, Text};
use crate::types::Secret;

/// A value that a field refuses.
#[derive(Debug, PartialEq)]
pub(crate) struct Refused {
    /// The value, in one short line.
    pub(crate) value: String,
    /// What would be right.
    pub(crate) expected: String,
}

/// A value of the file, checked against `kind`.
pub(crate) fn from_file(kind: Kind, value: &DeValue<'_>) -> Result<Value, Refused> {
    let refuse = || Refused {
        value: describe(kind, value),
        expected: expected(kind),
    };
    match (kind, value) {
        (Kind::Bool, DeValue::Boolean(value)) => Ok(Value::Boolean(*value)),
        (Kind::Int { .. }, DeValue::Integer(digits)) => integer(kind, whole_number(digits)).ok_or_else(refuse),
        (Kind::Text(_) | Kind::Choice(_), DeValue::String(text)) => word(kind, text).ok_or_else(refuse),
        (Kind::List { item, min_items }, DeValue::Array(values)) => {
            let mut items = Vec::new();
            for value in values {
                items.push(value.get_ref().as_str().ok_or_else(refuse)?.to_owned());
            }
            list(item, min_items, items)
        }
        _ => Err(refuse()),
    }
}

/// A value of a variable or an argument, checked against `kind`. Lists are separated by commas or written as in TOML.
pub(crate) fn from_text(kind: Kind, text: &str) -> Result<Value, Refused> {
    let refuse = || Refused {
        value: describe_text(kind, text),
        expected: expected(kind),
    };
    match kind {
        Kind::Bool => text.trim().parse().map(Value::Boolean).map_err(|_| refuse()),
        Kind::Int { .. } => integer(kind, text.trim().replace('_', "").parse().ok()).ok_or_else(refuse),
        Kind::Text(_) | Kind::Choice(_) => word(kind, text).ok_or_else(refuse),
        Kind::List { .. } if text.trim_start().starts_with('[') => {
            let parsed = DeValue::parse(text.trim()).map_err(|_| refuse())?;
            from_file(kind, parsed.get_ref())
        }
        Kind::List { item, min_items } => {
            let items = if text.trim().is_empty() {
                Vec::new()
            } else {
                text.split(',').map(str::trim).collect()
            };
            list(item, min_items, items.into_iter().map(str::to_owned).collect())
        }
    }
}

/// What `kind` accepts, in words.
pub(crate) fn expected(kind: Kind) -> String {
    match kind {
        Kind::Bool => "true or false".to_owned(),
        Kind::Int { min, max } => format!("a whole number from {min} to {max}"),
        Kind::Text(rule) => text_rule(rule).to_owned(),
        Kind::List { item, min_items: 0 } => format!("a list of strings, each {}", text_rule(item)),
        Kind::List { item, min_items } => {
            format!("a list of at least {min_items} string, each {}", text_rule(item))
        }
        Kind::Choice(words) => format!("one of {}", words.join(", ")),
    }
}

fn text_rule(rule: Text) -> &'static str {
    match rule {
        Text::Any => "a string without control characters",
        Text::NonEmpty => "a string that is not empty, without control characters",
        Text::BindAddress => "IP:port, for example 127.0.0.1:7600, or [::]:7600 for every address",
        Text::OptionalBindAddress => "IP:port, for example 127.0.0.1:9100, or empty",
        Text::DialAddress => "host:port with a port from 1 to 65535, for example node-3.example:7600",
        Text::OptionalDialAddress => "host:port with a port from 1 to 65535, for example node-3.example:7600, or empty",
        Text::HttpUrl => {
            "http://host:port or https://host:port without a path, for example https://etcd-0.example:2379"
        }
        Text::ModelPath => {
            "a path, or hf://ORG/NAME or hf://ORG/NAME/FILE.gguf, followed by @REVISION or not, in letters, digits and . _ -"
        }
        Text::Url => "http://HOST or https://HOST, with :PORT and /PATH or without",
        Text::CollectorUrl => "http://host:port without a path, for example http://127.0.0.1:4318, or empty",
        Text::NodeName => "a name of up to 64 letters, digits, '.', '_' or '-', or empty",
        Text::Adapter => {
            "name=path, the name of 1 to 256 letters, digits or any of . - _ /, not \"None\", and in the list once"
        }
        Text::Cores => "CPU cores such as 0,2-3, each once and below 1024, or empty",
        Text::Token => "visible ASCII characters, or none, not the placeholder of a printed configuration",
        Text::Secret => "at least 16 visible ASCII characters, not the placeholder of a printed configuration",
    }
}

/// The integer the digits say, if it fits 64 bits.
fn whole_number(digits: &DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(digits.as_str(), digits.radix()).ok()
}

fn integer(kind: Kind, value: Option<i64>) -> Option<Value> {
    let Kind::Int { min, max } = kind else { return None };
    value.filter(|value| (min..=max).contains(value)).map(Value::Integer)
}

fn word(kind: Kind, text: &str) -> Option<Value> {
    let fits = match kind {
        Kind::Text(rule) => text_fits(rule, text),
        Kind::Choice(words) => words.contains(&text),
        Kind::Bool | Kind::Int { .. } | Kind::List { .. } => false,
    };
    fits.then(|| Value::String(text.to_owned()))
}

fn list(item: Text, min_items: usize, items: Vec<String>) -> Result<Value, Refused> {
    let kind = Kind::List { item, min_items };
    let refuse = |value: String| Refused {
        value,
        expected: expected(kind),
    };
    if let Some(bad) = items.iter().find(|text| !text_fits(item, text)) {
        return Err(refuse(format!("[.., {}, ..]", describe_text(kind, bad))));
    }
    let name = |text: &String| crate::adapter(text).map(|(name, _)| name.to_owned());
    let repeats =
        |(i, text): &(usize, &String)| name(text).is_some() && items[..*i].iter().any(|b| name(b) == name(text));
    if item == Text::Adapter
        && let Some((_, twice)) = items.iter().enumerate().find(repeats)
    {
        return Err(refuse(format!("[.., {}, ..]", shown(twice))));
    }
    if items.len() < min_items {
        return Err(refuse("[]".to_owned()));
    }
    Ok(Value::Array(items.into_iter().map(Value::String).collect()))
}

fn text_fits(rule: Text, text: &str) -> bool {
    if text.chars().any(char::is_control) {
        return false;
    }
    match rule {
        Text::Any => true,
        Text::NonEmpty => !text.trim().is_empty(),
        Text::BindAddress => text.parse::<SocketAddr>().is_ok(),
        Text::OptionalBindAddress => text.is_empty() || text.parse::<SocketAddr>().is_ok(),
        Text::DialAddress => is_dial_address(text),
        Text::OptionalDialAddress => text.is_empty() || is_dial_address(text),
        Text::HttpUrl => ["http://", "https://"]
            .iter()
            .any(|scheme| text.strip_prefix(scheme).is_some_and(is_dial_address)),
        Text::ModelPath => crate::hub::is_model_path(text),
        Text::Url => crate::hub::is_url(text),
        Text::CollectorUrl => text.is_empty() || text.strip_prefix("http://").is_some_and(is_dial_address),
        Text::NodeName => text.len() <= 64 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)),
        Text::Adapter => crate::adapter(text).is_some(),
        Text::Cores => crate::types::cores(text).is_some(),
        Text::Token => text.bytes().all(|b| b.is_ascii_graphic()) && text != Secret::HIDDEN,
        Text::Secret => text.len() >= 16 && text.bytes().all(|b| b.is_ascii_graphic()) && text != Secret::HIDDEN,
    }
}

/// Whether a text is `host:port`, the port not 0, the host a name or an address that can be dialled.
pub fn is_dial_address(text: &str) -> bool {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return address.port() != 0 && !address.ip().is_unspecified();
    }
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    // A host of digits and dots alone is a mistyped IPv4 address, not a name.
    let numeric = host.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    host.len() <= 253
        && !numeric
        && host.split('.').all(label)
        && port.bytes().all(|b| b.is_ascii_digit())
        && port.parse::<u16>().is_ok_and(|port| port != 0)
}

fn is_secret(kind: Kind) -> bool {
    let (Kind::Text(rule) | Kind::List { item: rule, .. }) = kind else {
        return false;
    };
    matches!(rule, Text::Secret | Text::Token)
}

fn describe_text(kind: Kind, text: &str) -> String {
    if is_secret(kind) {
        Secret::HIDDEN.to_owned()
    } else {
        shown(text)
    }
}

fn describe(kind: Kind, value: &DeValue<'_>) -> String {
    if is_secret(kind) {
        return Secret::HIDDEN.to_owned();
    }
    match value {
        DeValue::String(text) => shown(text),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(value) => value.to_string(),
        DeValue::Datetime(value) => value.to_string(),
        DeValue::Array(values) => {
            let odd = values.iter().map(toml::Spanned::get_ref).find(|value| !value.is_str());
            odd.map_or_else(
                || "[..]".to_owned(),
                |value| format!("[.., {}, ..]", describe(kind, value)),
            )
        }
        DeValue::Table(_) => "{..}".to_owned(),
    }
}
