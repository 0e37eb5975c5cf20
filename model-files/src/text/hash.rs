//! The tokenizer's identity: equal hashes mean equal tokens for equal text and equal text for equal tokens.

use serde_json::Value as Json;
use xxhash_rust::xxh3::Xxh3;

use super::from_gguf::{
    KEY_ADD_BOS, KEY_ADD_EOS, KEY_BOS, KEY_EOS, KEY_MERGES, KEY_MODEL, KEY_PRE, KEY_SCORES, KEY_SPACE_PREFIX,
    KEY_TOKENS, KEY_TYPES, KEY_UNKNOWN, takes_white_space,
};
use crate::directory::parse_json;
use crate::error::ModelFilesError;
use crate::files::Source;
use crate::gguf::{GgufFile, Value};

/// Hash of the tokenizer of either form, without building it.
pub(crate) fn tokenizer_hash(source: &Source) -> Result<u64, ModelFilesError> {
    match source {
        Source::Gguf(file) => of_gguf(file),
        Source::Directory(directory) => Ok(of_tokenizer_json(&parse_json(
            &directory.tokenizer_path(),
            &directory.read_tokenizer()?,
        )?)),
    }
}

/// Hash over the tokenizer keys of a GGUF file, absent ones included.
pub(crate) fn of_gguf(file: &GgufFile) -> Result<u64, ModelFilesError> {
    file.require_string(KEY_MODEL)?;
    let mut hasher = Hasher::new("gguf");
    for key in [
        KEY_MODEL,
        KEY_PRE,
        KEY_TOKENS,
        KEY_TYPES,
        KEY_SCORES,
        KEY_MERGES,
        KEY_BOS,
        KEY_EOS,
        KEY_UNKNOWN,
        KEY_ADD_BOS,
        KEY_ADD_EOS,
        KEY_SPACE_PREFIX,
    ] {
        hasher.text(key);
        match file.get(key) {
            Some(value) => hasher.gguf(&value),
            None => hasher.tag(b'-'),
        }
    }
    if takes_white_space(file)? {
        hasher.text("added tokens take the white space after them");
    }
    Ok(hasher.0.digest())
}

/// Hash over `tokenizer.json`, independent of its white space and the order of its keys; saved truncation and padding
/// settings do not count, they are not used.
pub(crate) fn of_tokenizer_json(json: &Json) -> u64 {
    let mut hasher = Hasher::new("tokenizer.json");
    for key in [
        "added_tokens",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "model",
    ] {
        hasher.text(key);
        hasher.json(json.get(key).unwrap_or(&Json::Null));
    }
    hasher.0.digest()
}

/// Writes values so that different values never give the same bytes: every part has a tag and a length.
struct Hasher(Xxh3);

impl Hasher {
    fn new(form: &str) -> Self {
        let mut hasher = Self(Xxh3::new());
        hasher.text("baton tokenizer 1");
        hasher.text(form);
        hasher
    }

    fn tag(&mut self, tag: u8) {
        self.0.update(&[tag]);
    }

    fn number(&mut self, tag: u8, bits: u64) {
        self.tag(tag);
        self.0.update(&bits.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(b's', text.len() as u64);
        self.0.update(text.as_bytes());
    }

    fn gguf(&mut self, value: &Value<'_>) {
        match value {
            Value::Bool(flag) => self.number(b'b', u64::from(*flag)),
            Value::String(text) => self.text(text),
            Value::Array(array) => {
                self.number(b'a', array.len());
                for element in array.iter() {
                    self.gguf(&element);
                }
            }
            // Widths differ between converters and mean nothing: 2 is 2.
            number => match (number.as_u64(), number.as_f64()) {
                (Some(integer), _) => self.number(b'u', integer),
                (None, Some(float)) => self.number(b'f', float.to_bits()),
                (None, None) => self.text(&number.describe()),
            },
        }
    }

    fn json(&mut self, value: &Json) {
        match value {
            Json::Null => self.tag(b'-'),
            Json::Bool(flag) => self.number(b'b', u64::from(*flag)),
            Json::Number(number) => match (number.as_u64(), number.as_f64()) {
                (Some(integer), _) => self.number(b'u', integer),
                (None, float) => self.number(b'f', float.unwrap_or(f64::NAN).to_bits()),
            },
            Json::String(text) => self.text(text),
            Json::Array(list) => {
                self.number(b'a', list.len() as u64);
                for element in list {
                    self.json(element);
                }
            }
            Json::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                entries.sort_unstable_by_key(|(key, _)| key.as_str());
                self.number(b'o', entries.len() as u64);
                for (key, element) in entries {
                    self.text(key);
                    self.json(element);
                }
            }
        }
    }
}
