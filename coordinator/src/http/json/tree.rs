//! A JSON value that is handed on: to a chat template, or into an answer. Members keep the order in which the client
//! wrote them, because a template shows it to the model.

use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};
use serde_json::Number;

use super::raw::{Kind, Raw};

/// An owned JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Tree {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number that an integer of 64 bits or a double can hold.
    Number(Number),
    /// A string.
    String(String),
    /// A list.
    List(Vec<Self>),
    /// An object, members in order.
    Object(Vec<(String, Self)>),
}

impl Tree {
    /// Copies a checked value. Its nesting is bounded, because the scanner bounds it.
    ///
    /// # Errors
    /// The text of the first number that is too large for a double.
    pub fn of(raw: Raw<'_>) -> Result<Self, String> {
        Ok(match raw.kind() {
            Kind::Null => Self::Null,
            Kind::Bool => Self::Bool(raw.text() == "true"),
            Kind::Number => Self::Number(raw.text().parse().map_err(|_| raw.shown())?),
            Kind::String => Self::String(raw.string().unwrap_or_default().into_owned()),
            Kind::List => Self::List(raw.elements().map(Self::of).collect::<Result<_, _>>()?),
            Kind::Object => Self::Object(
                raw.members()
                    .map(|(name, value)| Ok((name.into_owned(), Self::of(value)?)))
                    .collect::<Result<_, String>>()?,
            ),
        })
    }

    /// The first member called `name`, if this is an object that has one.
    pub fn get(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Object(members) => members
                .iter()
                .find_map(|(known, value)| (known == name).then_some(value)),
            Self::Null | Self::Bool(_) | Self::Number(_) | Self::String(_) | Self::List(_) => None,
        }
    }
}

impl From<&str> for Tree {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl From<String> for Tree {
    fn from(text: String) -> Self {
        Self::String(text)
    }
}

impl Serialize for Tree {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Number(number) => number.serialize(serializer),
            Self::String(text) => serializer.serialize_str(text),
            Self::List(list) => {
                let mut sequence = serializer.serialize_seq(Some(list.len()))?;
                for element in list {
                    sequence.serialize_element(element)?;
                }
                sequence.end()
            }
            Self::Object(members) => {
                let mut map = serializer.serialize_map(Some(members.len()))?;
                for (name, value) in members {
                    map.serialize_entry(name, value)?;
                }
                map.end()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scan::check;
    use super::*;

    #[test]
    fn a_value_is_written_as_it_was_read() {
        for text in [
            r#"{"z":1,"a":[null,true,-2.5,"x\n",{}],"m":{"b":18446744073709551615,"a":1.0}}"#,
            "[]",
            "\"\u{1f600}\"",
        ] {
            let tree = Tree::of(check(text.as_bytes()).expect("valid")).expect("finite");
            assert_eq!(serde_json::to_string(&tree).expect("JSON"), text);
        }
    }

    #[test]
    fn a_number_beyond_a_double_is_named() {
        assert_eq!(Tree::of(check(b"[1,1e999]").expect("valid")), Err("1e999".to_owned()));
    }
}
