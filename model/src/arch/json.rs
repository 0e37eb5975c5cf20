//! Typed access to a JSON object; `null` counts as absent.

use serde_json::Value;

use super::{ArchError, value_error};

#[derive(Clone, Copy)]
pub(super) struct Reader<'a>(pub(super) &'a Value);

impl<'a> Reader<'a> {
    fn read<T>(&self, key: &str, right: &str, parse: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, ArchError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => parse(value).map(Some).ok_or_else(|| value_error(key, value, right)),
        }
    }

    /// The value, unless it is absent or `null`.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there, be it with `null`.
    pub(super) fn names(&self, key: &str) -> bool {
        self.0.get(key).is_some()
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, ArchError> {
        self.read(key, "a whole number, 0 or above", |v| {
            v.as_u64().and_then(|n| usize::try_from(n).ok())
        })
    }

    pub(super) fn require(&self, key: &str) -> Result<usize, ArchError> {
        self.size(key)?
            .ok_or_else(|| value_error(key, "(missing)", "in config.json"))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ArchError> {
        self.read(key, "a number", Value::as_f64)
    }

    pub(super) fn float(&self, key: &str, default: f32) -> Result<f32, ArchError> {
        Ok(self.number(key)?.map_or(default, |number| number as f32))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ArchError> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ArchError> {
        self.read(key, "a string", Value::as_str)
    }

    pub(super) fn list<T>(
        &self,
        key: &str,
        right: &str,
        parse: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ArchError> {
        self.read(key, right, |value| value.as_array()?.iter().map(&parse).collect())
    }
}
