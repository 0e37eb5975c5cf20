//! The interface's words.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer};

/// Bytes as the interface wants them.
pub(super) fn encode(text: &str) -> String {
    STANDARD.encode(text)
}

/// The first key after all that begin with `prefix`, encoded; `"\0"`, which means no end, if there is none.
pub(super) fn end_of_prefix(prefix: &str) -> String {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return STANDARD.encode(end);
        }
    }
    STANDARD.encode([0])
}

/// A 64-bit number, which travels as a string; absent, or no number: 0, as the interface leaves zeros out.
pub(super) fn number(text: &Number) -> i64 {
    text.0
}

/// See [`number`].
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Number(i64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Text(String),
            Number(i64),
        }
        match Either::deserialize(deserializer)? {
            Either::Number(number) => Ok(Self(number)),
            Either::Text(text) => text.parse().map(Self).map_err(serde::de::Error::custom),
        }
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct Granted {
    #[serde(rename = "ID")]
    pub(super) id: Number,
    #[serde(rename = "TTL", default)]
    pub(super) ttl: Number,
}

#[derive(Debug, Deserialize)]
pub(super) struct KeptAlive {
    pub(super) result: KeptAliveResult,
}

#[derive(Debug, Deserialize)]
pub(super) struct KeptAliveResult {
    #[serde(rename = "TTL", default)]
    pub(super) ttl: Number,
}

#[derive(Debug, Deserialize)]
pub(super) struct Authenticated {
    pub(super) token: String,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Header {
    #[serde(default)]
    pub(super) revision: Number,
}

#[derive(Debug, Deserialize)]
pub(super) struct RangeAnswer {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct KeyValue {
    #[serde(default)]
    key: String,
    #[serde(default)]
    value: String,
}

impl KeyValue {
    /// Key and value, if both are texts.
    pub(super) fn texts(&self) -> Option<(String, String)> {
        Some((decode(&self.key)?, decode(&self.value)?))
    }
}

fn decode(text: &str) -> Option<String> {
    String::from_utf8(STANDARD.decode(text).ok()?).ok()
}

#[derive(Debug, Deserialize)]
pub(super) struct WatchLine {
    pub(super) result: WatchResult,
}

#[derive(Debug, Deserialize)]
pub(super) struct WatchResult {
    #[serde(default)]
    pub(super) header: Header,
    #[serde(default)]
    pub(super) canceled: bool,
    #[serde(default)]
    pub(super) cancel_reason: String,
    #[serde(default)]
    pub(super) events: Vec<Event>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Event {
    /// `DELETE`; absent or `PUT`: written.
    #[serde(default, rename = "type")]
    pub(super) kind: String,
    pub(super) kv: KeyValue,
}

/// What etcd says when it refuses.
#[derive(Debug, Deserialize)]
pub(super) struct Refusal {
    #[serde(default)]
    message: String,
    #[serde(default)]
    error: String,
}

impl Refusal {
    /// The words of a refusal, in one short line.
    pub(super) fn message(body: &[u8]) -> String {
        let words = match serde_json::from_slice::<Self>(body) {
            Ok(refusal) if !refusal.message.is_empty() => refusal.message,
            Ok(refusal) => refusal.error,
            Err(_) => String::from_utf8_lossy(body).into_owned(),
        };
        words
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .take(200)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_prefix_is_the_first_key_behind_it() {
        let end = |prefix: &str| STANDARD.decode(end_of_prefix(prefix)).expect("base64");
        assert_eq!(end("/a/"), b"/a0");
        assert_eq!(end(""), [0]);
    }

    #[test]
    fn numbers_come_as_strings_or_not_at_all() {
        let granted: Granted = serde_json::from_str(r#"{"ID":"7587869","TTL":"10"}"#).expect("a lease");
        assert_eq!((number(&granted.id), number(&granted.ttl)), (7_587_869, 10));
        let gone: KeptAlive = serde_json::from_str(r#"{"result":{"ID":"7"}}"#).expect("an answer");
        assert_eq!(number(&gone.result.ttl), 0);
        assert!(serde_json::from_str::<Granted>(r#"{"ID":"x"}"#).is_err());
    }

    #[test]
    fn refusals_are_one_short_line() {
        assert_eq!(Refusal::message(br#"{"error":"e","message":"m\nn","code":3}"#), "m n");
        assert_eq!(Refusal::message(br#"{"error":"e"}"#), "e");
        assert_eq!(Refusal::message(&[b'x'; 1_000]).len(), 200);
    }
}
