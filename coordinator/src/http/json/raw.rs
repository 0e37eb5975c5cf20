//! A JSON value as a piece of a checked body.

use std::borrow::Cow;

/// A value whose syntax [`super::scan::check`] has accepted, without surrounding whitespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Raw<'a>(&'a str);

/// What a value is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool,
    /// A number.
    Number,
    /// A string.
    String,
    /// A list.
    List,
    /// An object.
    Object,
}

/// Longest value, in characters, that an error message shows.
const SHOWN_CHARS: usize = 60;

impl Raw<'static> {
    /// `null`.
    pub const NULL: Self = Self("null");
    /// An object without members.
    pub const EMPTY_OBJECT: Self = Self("{}");
}

impl<'a> Raw<'a> {
    /// Wraps the text of one value. Only the scanner and the iterators below call this.
    pub(super) fn checked(text: &'a str) -> Self {
        Self(text)
    }

    /// The value as it was sent.
    pub fn text(self) -> &'a str {
        self.0
    }

    /// What the value is.
    pub fn kind(self) -> Kind {
        match self.0.as_bytes().first() {
            Some(b'n') => Kind::Null,
            Some(b't' | b'f') => Kind::Bool,
            Some(b'"') => Kind::String,
            Some(b'[') => Kind::List,
            Some(b'{') => Kind::Object,
            _ => Kind::Number,
        }
    }

    /// The characters of a string, escapes resolved; `None` for other kinds.
    pub fn string(self) -> Option<Cow<'a, str>> {
        (self.kind() == Kind::String).then(|| unescape(&self.0[1..self.0.len() - 1]))
    }

    /// The members of an object, in order, repeated names included; empty for other kinds.
    pub fn members(self) -> Members<'a> {
        let rest = if self.kind() == Kind::Object {
            &self.0[1..self.0.len() - 1]
        } else {
            ""
        };
        Members(Items(rest.trim_ascii_start()))
    }

    /// The elements of a list, in order; empty for other kinds.
    pub fn elements(self) -> Items<'a> {
        let rest = if self.kind() == Kind::List {
            &self.0[1..self.0.len() - 1]
        } else {
            ""
        };
        Items(rest.trim_ascii_start())
    }

    /// The value as an error message shows it: cut to a line, nothing that could break a log or an event stream.
    pub fn shown(self) -> String {
        match self.kind() {
            Kind::List if self.elements().next().is_none() => "an empty list".to_owned(),
            Kind::List => "a list".to_owned(),
            Kind::Object => "an object".to_owned(),
            // Inside a checked string control characters are escaped already, except DEL and those above ASCII.
            Kind::Null | Kind::Bool | Kind::Number | Kind::String => shorten(self.0),
        }
    }
}

/// `text`, cut to [`SHOWN_CHARS`] characters, control characters escaped.
pub fn shorten(text: &str) -> String {
    let mut shown = String::new();
    for (index, character) in text.chars().enumerate() {
        if index == SHOWN_CHARS {
            shown.push('…');
            break;
        }
        if character.is_control() || matches!(character, '\u{2028}' | '\u{2029}') {
            shown.extend(character.escape_unicode());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Iterator over the elements of a list.
#[derive(Clone, Debug)]
pub struct Items<'a>(&'a str);

impl<'a> Items<'a> {
    /// Takes the value at the front and what separates it from the next.
    fn take(&mut self) -> Raw<'a> {
        let end = end_of_value(self.0.as_bytes());
        let (value, rest) = self.0.split_at(end);
        self.0 = rest.trim_ascii_start();
        if let Some(rest) = self.0.strip_prefix([',', ':']) {
            self.0 = rest.trim_ascii_start();
        }
        Raw(value)
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Raw<'a>;

    fn next(&mut self) -> Option<Raw<'a>> {
        (!self.0.is_empty()).then(|| self.take())
    }
}

/// Iterator over the members of an object.
#[derive(Clone, Debug)]
pub struct Members<'a>(Items<'a>);

impl<'a> Iterator for Members<'a> {
    type Item = (Cow<'a, str>, Raw<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let name = self.0.next()?.string()?;
        Some((name, self.0.next()?))
    }
}

/// Where the value at the start of a checked text ends.
fn end_of_value(bytes: &[u8]) -> usize {
    match bytes.first() {
        Some(b'"') => end_of_string(bytes, 0),
        Some(b'[' | b'{') => end_of_container(bytes),
        _ => bytes
            .iter()
            .position(|byte| matches!(byte, b',' | b':' | b']' | b'}' | b' ' | b'\t' | b'\n' | b'\r'))
            .unwrap_or(bytes.len()),
    }
}

/// `at`: the opening quote. Returns the place after the closing one.
fn end_of_string(bytes: &[u8], at: usize) -> usize {
    let mut at = at + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

fn end_of_container(bytes: &[u8]) -> usize {
    let (mut at, mut depth) = (0, 0_usize);
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                at = end_of_string(bytes, at);
                continue;
            }
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            return at;
        }
    }
    bytes.len()
}

/// Resolves the escapes of a checked string's inside.
fn unescape(inside: &str) -> Cow<'_, str> {
    let Some(first) = inside.find('\\') else {
        return Cow::Borrowed(inside);
    };
    let mut text = String::with_capacity(inside.len());
    text.push_str(&inside[..first]);
    let mut rest = &inside[first..];
    while let Some(escape) = rest.strip_prefix('\\') {
        let mut characters = escape.chars();
        rest = match characters.next() {
            Some('u') => push_unicode(&escape[1..], &mut text),
            Some(letter) => {
                text.push(match letter {
                    'b' => '\u{8}',
                    'f' => '\u{c}',
                    'n' => '\n',
                    'r' => '\r',
                    't' => '\t',
                    same => same,
                });
                characters.as_str()
            }
            None => "",
        };
        let plain = rest.find('\\').unwrap_or(rest.len());
        text.push_str(&rest[..plain]);
        rest = &rest[plain..];
    }
    Cow::Owned(text)
}

/// Reads what follows `\u` and returns what follows it. The scanner has paired the surrogates.
fn push_unicode<'a>(digits: &'a str, text: &mut String) -> &'a str {
    let unit = |digits: &str| u32::from_str_radix(digits.get(..4).unwrap_or_default(), 16).unwrap_or(0xfffd);
    let high = unit(digits);
    if (0xd800..=0xdbff).contains(&high) {
        let low = unit(digits.get(6..).unwrap_or_default());
        let code = 0x10000 + ((high - 0xd800) << 10) + (low.saturating_sub(0xdc00) & 0x3ff);
        text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
        digits.get(10..).unwrap_or_default()
    } else {
        text.push(char::from_u32(high).unwrap_or(char::REPLACEMENT_CHARACTER));
        digits.get(4..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::super::scan::check;
    use super::*;

    /// Rebuilds a serde_json value through the iterators.
    fn rebuilt(raw: Raw<'_>) -> Value {
        match raw.kind() {
            Kind::Null => Value::Null,
            Kind::Bool => Value::Bool(raw.text() == "true"),
            Kind::Number => serde_json::from_str(raw.text()).expect("a number"),
            Kind::String => Value::String(raw.string().expect("a string").into_owned()),
            Kind::List => raw.elements().map(rebuilt).collect(),
            Kind::Object => raw
                .members()
                .map(|(name, value)| (name.into_owned(), rebuilt(value)))
                .collect(),
        }
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            "[\\PC\"\\\\\n\t\u{0}\u{1f600}\\[\\]{},:]{0,12}".prop_map(Value::String),
        ];
        leaf.prop_recursive(4, 32, 5, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::Array),
                proptest::collection::vec(("[a-z\"\\\\ ]{0,4}", inner), 0..5)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn reads_what_was_written(value in json(), pretty in any::<bool>()) {
            let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.expect("JSON");
            prop_assert_eq!(rebuilt(check(text.as_bytes()).expect("valid")), value);
        }
    }

    #[test]
    fn resolves_every_escape() {
        let raw = check(br#""\"\\\/\b\f\n\r\t\u0041\u00e9\ud83d\ude00\u0000.""#).expect("valid");
        assert_eq!(
            raw.string().as_deref(),
            Some("\"\\/\u{8}\u{c}\n\r\tA\u{e9}\u{1f600}\u{0}.")
        );
    }

    #[test]
    fn shows_values_on_one_short_line() {
        let shown = |text: &str| check(text.as_bytes()).expect("valid").shown();
        assert_eq!(shown("1.50"), "1.50");
        assert_eq!(shown("[]"), "an empty list");
        assert_eq!(shown("[1]"), "a list");
        assert_eq!(shown("{}"), "an object");
        assert_eq!(shown("\"a\\nb\""), "\"a\\nb\"");
        assert_eq!(shown("\"\u{85}\u{2028}\""), "\"\\u{85}\\u{2028}\"");
        let long = shown(&format!("\"{}\"", "é".repeat(100)));
        assert_eq!(long.chars().count(), 61);
        assert!(long.ends_with('…'));
    }
}
