//! Typed, range-checked access to the members of an object. `null` equals absent; unknown members are ignored; a known
//! one given twice is refused, because the two readers of it might disagree.

use std::borrow::Cow;

use thiserror::Error;

use super::raw::{Kind, Raw, shorten};

/// A field that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{field}` {problem}")]
pub struct FieldError {
    /// The field, with its path: `parameters.top_p`.
    pub field: String,
    /// What it is and what would be right.
    pub problem: String,
}

impl FieldError {
    /// `field` has `value`, but must be `expected`.
    pub fn wrong(field: impl Into<String>, value: Raw<'_>, expected: impl AsRef<str>) -> Self {
        Self {
            field: field.into(),
            problem: format!("is {}, but must be {}", value.shown(), expected.as_ref()),
        }
    }

    /// `field` breaks a rule that is told in a sentence without a subject: "must not be ...".
    pub fn rule(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            problem: problem.into(),
        }
    }
}

/// The known members of an object.
#[derive(Debug)]
pub struct Fields<'a> {
    /// What stands before a name in messages: "" or "parameters.".
    path: &'static str,
    known: &'static [&'static str],
    values: Vec<Option<Raw<'a>>>,
}

/// Bounds of a float. A value that is not finite is outside every range.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    low: f64,
    low_included: bool,
    high: f64,
    high_included: bool,
}

impl Range {
    /// From `low` to `high`, both included.
    pub const fn from_to(low: f64, high: f64) -> Self {
        Self {
            low,
            low_included: true,
            high,
            high_included: true,
        }
    }

    /// Greater than `low`, at most `high`.
    pub const fn above_to(low: f64, high: f64) -> Self {
        Self {
            low,
            low_included: false,
            high,
            high_included: true,
        }
    }

    /// Greater than `low`, less than `high`.
    pub const fn between(low: f64, high: f64) -> Self {
        Self {
            low,
            low_included: false,
            high,
            high_included: false,
        }
    }

    /// Greater than `low`.
    pub const fn above(low: f64) -> Self {
        Self::above_to(low, f64::MAX)
    }

    /// At least `low`.
    pub const fn from(low: f64) -> Self {
        Self::from_to(low, f64::MAX)
    }

    fn contains(self, value: f64) -> bool {
        let above = if self.low_included {
            value >= self.low
        } else {
            value > self.low
        };
        let below = if self.high_included {
            value <= self.high
        } else {
            value < self.high
        };
        value.is_finite() && above && below
    }

    fn words(self) -> String {
        let low = if self.low_included { "at least" } else { "greater than" };
        let high = if self.high_included { "at most" } else { "less than" };
        if self.high == f64::MAX {
            format!("a number {low} {}", self.low)
        } else {
            format!("a number {low} {} and {high} {}", self.low, self.high)
        }
    }
}

impl<'a> Fields<'a> {
    /// Reads the members of `object` that `known` names. `path` stands before their names in messages.
    ///
    /// # Errors
    /// A known member given twice.
    pub fn of_object(object: Raw<'a>, path: &'static str, known: &'static [&'static str]) -> Result<Self, FieldError> {
        let mut values = vec![None; known.len()];
        for (name, value) in object.members() {
            let Some(index) = known.iter().position(|known| *known == name) else {
                continue;
            };
            if values[index].replace(value).is_some() {
                return Err(FieldError::rule(
                    format!("{path}{name}"),
                    "is given twice, but must be given once",
                ));
            }
        }
        Ok(Self { path, known, values })
    }

    /// The full name of a field.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// The member called `name`, unless it is absent or null. `name` must be one of the known names.
    pub fn get(&self, name: &str) -> Option<Raw<'a>> {
        let index = self.known.iter().position(|known| *known == name);
        debug_assert!(index.is_some(), "`{name}` is read but not declared");
        index
            .and_then(|index| self.values[index])
            .filter(|value| value.kind() != Kind::Null)
    }

    fn wrong(&self, name: &str, value: Raw<'_>, expected: impl AsRef<str>) -> FieldError {
        FieldError::wrong(self.path(name), value, expected)
    }

    /// The error of a field that is absent or null.
    pub fn missing(&self, name: &str, expected: &str) -> FieldError {
        FieldError::rule(self.path(name), format!("is missing: it must be {expected}"))
    }

    /// A value of the given kind.
    fn kind(&self, name: &str, kind: Kind, expected: &str) -> Result<Option<Raw<'a>>, FieldError> {
        match self.get(name) {
            Some(value) if value.kind() != kind => Err(self.wrong(name, value, expected)),
            value => Ok(value),
        }
    }

    /// `true` or `false`.
    ///
    /// # Errors
    /// Anything else.
    pub fn bool(&self, name: &str) -> Result<Option<bool>, FieldError> {
        let value = self.kind(name, Kind::Bool, "true or false")?;
        Ok(value.map(|value| value.text() == "true"))
    }

    /// An integer from `low` to `high`.
    ///
    /// # Errors
    /// Anything else, floats with an integral value included.
    pub fn int(&self, name: &str, low: i64, high: i64) -> Result<Option<i64>, FieldError> {
        self.parsed(
            name,
            || format!("an integer from {low} to {high}"),
            |text| text.parse::<i64>().ok().filter(|value| (low..=high).contains(value)),
        )
    }

    /// An integer from `low` to 2^64 - 1, exactly.
    ///
    /// # Errors
    /// Anything else.
    pub fn u64_from(&self, name: &str, low: u64) -> Result<Option<u64>, FieldError> {
        self.parsed(
            name,
            || format!("an integer from {low} to {}", u64::MAX),
            |text| {
                // "-0" is the integer 0.
                let text = if text == "-0" { "0" } else { text };
                text.parse::<u64>().ok().filter(|value| *value >= low)
            },
        )
    }

    /// A number in `range`; integers are numbers.
    ///
    /// # Errors
    /// Anything else, numbers too large for a double included.
    pub fn float(&self, name: &str, range: Range) -> Result<Option<f64>, FieldError> {
        self.parsed(
            name,
            || range.words(),
            |text| text.parse::<f64>().ok().filter(|value| range.contains(*value)),
        )
    }

    fn parsed<T>(
        &self,
        name: &str,
        expected: impl Fn() -> String,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, FieldError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let parsed = if value.kind() == Kind::Number {
            parse(value.text())
        } else {
            None
        };
        parsed.map(Some).ok_or_else(|| self.wrong(name, value, expected()))
    }

    /// A string; may be empty.
    ///
    /// # Errors
    /// Anything else.
    pub fn string(&self, name: &str, expected: &str) -> Result<Option<Cow<'a, str>>, FieldError> {
        let value = self.kind(name, Kind::String, expected)?;
        Ok(value.and_then(Raw::string))
    }

    /// A list.
    ///
    /// # Errors
    /// Anything else.
    pub fn list(&self, name: &str, expected: &str) -> Result<Option<Raw<'a>>, FieldError> {
        self.kind(name, Kind::List, expected)
    }

    /// An object whose names are the client's.
    ///
    /// # Errors
    /// Anything else.
    pub fn object_raw(&self, name: &str, expected: &str) -> Result<Option<Raw<'a>>, FieldError> {
        self.kind(name, Kind::Object, expected)
    }

    /// An object, read with [`Fields::of_object`].
    ///
    /// # Errors
    /// Anything else.
    pub fn object(
        &self,
        name: &str,
        path: &'static str,
        known: &'static [&'static str],
    ) -> Result<Option<Self>, FieldError> {
        let value = self.kind(name, Kind::Object, "an object")?;
        value.map(|value| Self::of_object(value, path, known)).transpose()
    }

    /// Stop strings: a string, or a list of strings; an empty list is none. `prefix_limits` bound them.
    ///
    /// # Errors
    /// Other types, empty strings, too many or too long ones.
    pub fn stop_strings(&self, name: &str, limits: StopLimits) -> Result<Vec<String>, FieldError> {
        let Some(value) = self.get(name) else {
            return Ok(Vec::new());
        };
        let expected = limits.words();
        let strings = match value.kind() {
            Kind::String => vec![value],
            Kind::List => value.elements().take(limits.strings.saturating_add(1)).collect(),
            Kind::Null | Kind::Bool | Kind::Number | Kind::Object => return Err(self.wrong(name, value, expected)),
        };
        if strings.len() > limits.strings {
            let problem = format!("has more than {} strings, but must be {expected}", limits.strings);
            return Err(FieldError::rule(self.path(name), problem));
        }
        let mut total = 0;
        let mut stops = Vec::with_capacity(strings.len());
        for raw in strings {
            let Some(stop) = raw.string() else {
                let problem = format!("contains {}, but must be {expected}", raw.shown());
                return Err(FieldError::rule(self.path(name), problem));
            };
            let chars = stop.chars().count();
            total += chars;
            if chars == 0 || chars > limits.chars {
                let problem = format!("contains a string of {chars} characters, but must be {expected}");
                return Err(FieldError::rule(self.path(name), problem));
            }
            stops.push(stop.into_owned());
        }
        if total > limits.total_chars {
            let problem = format!("has {total} characters together, but must be {expected}");
            return Err(FieldError::rule(self.path(name), problem));
        }
        Ok(stops)
    }
}

/// How many stop strings of which length a request may have; lengths in Unicode characters.
#[derive(Clone, Copy, Debug)]
pub struct StopLimits {
    /// Most strings.
    pub strings: usize,
    /// Longest string.
    pub chars: usize,
    /// All strings together.
    pub total_chars: usize,
}

impl StopLimits {
    fn words(self) -> String {
        let chars = self.chars.min(self.total_chars);
        let count = if self.strings == usize::MAX {
            String::new()
        } else {
            format!("at most {} ", self.strings)
        };
        format!(
            "a string of 1 to {chars} characters, or a list of {count}such strings with at most {} characters together",
            self.total_chars
        )
    }
}

/// An element of a list that must be something else.
pub fn wrong_element(field: &str, index: usize, value: Raw<'_>, expected: &str) -> FieldError {
    FieldError::wrong(format!("{field}[{index}]"), value, expected)
}

/// A string value in a message: quoted, cut, escaped.
pub fn quoted(text: &str) -> String {
    format!("\"{}\"", shorten(text))
}

#[cfg(test)]
mod tests {
    use super::super::scan::check;
    use super::*;

    const KNOWN: &[&str] = &["a", "b"];

    fn fields(body: &str) -> Fields<'_> {
        Fields::of_object(check(body.as_bytes()).expect("valid"), "p.", KNOWN).expect("no repeats")
    }

    #[test]
    fn null_is_absent_and_unknown_is_ignored() {
        let fields = fields(r#"{"a":null,"z":1,"z":2}"#);
        assert_eq!(fields.bool("a"), Ok(None));
        assert_eq!(fields.int("b", 0, 1), Ok(None));
    }

    #[test]
    fn a_known_name_given_twice_is_refused_however_it_is_spelled() {
        let raw = check(br#"{"a":1,"\u0061":2}"#).expect("valid");
        let error = Fields::of_object(raw, "p.", KNOWN).expect_err("twice");
        assert_eq!(error.to_string(), "`p.a` is given twice, but must be given once");
    }

    #[test]
    fn integers_are_exact() {
        let int = |value: &str| {
            fields(&format!("{{\"a\":{value}}}"))
                .u64_from("a", 0)
                .map_err(|error| error.to_string())
        };
        assert_eq!(int("18446744073709551615"), Ok(Some(u64::MAX)));
        assert_eq!(int("0"), Ok(Some(0)));
        assert_eq!(int("-0"), Ok(Some(0)));
        for bad in ["18446744073709551616", "-1", "1.0", "1e3", "true", "\"1\"", "[1]", "{}"] {
            let error = int(bad).expect_err(bad);
            assert!(error.starts_with("`p.a` is "), "{error}");
            assert!(
                error.ends_with("but must be an integer from 0 to 18446744073709551615"),
                "{error}"
            );
        }
        let small = |value: &str| fields(&format!("{{\"a\":{value}}}")).int("a", -1, 5).ok();
        assert_eq!(small("-1"), Some(Some(-1)));
        assert_eq!(small("6"), None);
        assert_eq!(small("99999999999999999999999999"), None);
    }

    #[test]
    fn floats_take_integers_and_refuse_what_is_not_finite() {
        let float = |value: &str, range| {
            fields(&format!("{{\"a\":{value}}}"))
                .float("a", range)
                .map_err(|error| error.to_string())
        };
        assert_eq!(float("1", Range::between(0.0, 2.0)), Ok(Some(1.0)));
        assert_eq!(float("0.5e0", Range::above(0.0)), Ok(Some(0.5)));
        assert_eq!(float("2", Range::above_to(0.0, 2.0)), Ok(Some(2.0)));
        assert_eq!(
            float("1e999", Range::from(0.0)),
            Err("`p.a` is 1e999, but must be a number at least 0".to_owned())
        );
        assert_eq!(
            float("1.0", Range::between(1e-6, 1.0)),
            Err("`p.a` is 1.0, but must be a number greater than 0.000001 and less than 1".to_owned())
        );
        for bad in ["\"0.5\"", "true", "[]", "-1e999"] {
            assert!(float(bad, Range::from_to(-2.0, 2.0)).is_err(), "{bad}");
        }
    }

    #[test]
    fn stop_strings_are_bounded() {
        let limits = StopLimits {
            strings: 2,
            chars: 3,
            total_chars: 5,
        };
        let stops = |value: &str| fields(&format!("{{\"a\":{value}}}")).stop_strings("a", limits).ok();
        assert_eq!(stops("null"), Some(vec![]));
        assert_eq!(stops("[]"), Some(vec![]));
        assert_eq!(stops("\"ab\\n\""), Some(vec!["ab\n".to_owned()]));
        assert_eq!(stops("[\"é\",\"b\"]"), Some(vec!["é".to_owned(), "b".to_owned()]));
        for bad in [
            "\"\"",
            "[\"\"]",
            "[1]",
            "1",
            "true",
            "{}",
            "\"abcd\"",
            "[\"a\",\"b\",\"c\"]",
            "[\"abc\",\"abc\"]",
            "[null]",
        ] {
            assert_eq!(stops(bad), None, "{bad}");
        }
    }
}
