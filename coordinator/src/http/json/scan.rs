//! The syntax check of a whole body. RFC 8259, with three bounds that the standard leaves open: the text is UTF-8
//! without a byte order mark, nesting is at most [`MAX_DEPTH`], and `\u` escapes denote whole characters.

use thiserror::Error;

use super::raw::Raw;

/// Deepest nesting of lists and objects.
pub const MAX_DEPTH: usize = 128;

/// Why a body is not JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the body is not valid JSON: {what} at byte {offset}")]
pub struct SyntaxError {
    /// What is wrong.
    pub what: &'static str,
    /// Where, in bytes from the start of the body.
    pub offset: usize,
}

/// Checks `body` and returns its one value.
///
/// # Errors
/// The first offence against the grammar.
pub fn check(body: &[u8]) -> Result<Raw<'_>, SyntaxError> {
    let text = std::str::from_utf8(body).map_err(|error| SyntaxError {
        what: "a byte sequence that is not UTF-8",
        offset: error.valid_up_to(),
    })?;
    let mut scanner = Scanner {
        bytes: text.as_bytes(),
        at: 0,
    };
    scanner.whitespace();
    let start = scanner.at;
    scanner.value(0)?;
    let end = scanner.at;
    scanner.whitespace();
    if scanner.at < scanner.bytes.len() {
        return Err(scanner.error("something after the end of the value"));
    }
    Ok(Raw::checked(&text[start..end]))
}

struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Scanner<'_> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn error(&self, what: &'static str) -> SyntaxError {
        let what = if self.at >= self.bytes.len() {
            "an unexpected end"
        } else {
            what
        };
        SyntaxError { what, offset: self.at }
    }

    fn whitespace(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn value(&mut self, depth: usize) -> Result<(), SyntaxError> {
        match self.peek() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.list(depth),
            Some(b'"') => self.string(),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.word(b"true"),
            Some(b'f') => self.word(b"false"),
            Some(b'n') => self.word(b"null"),
            _ => Err(self.error("something that is not a value")),
        }
    }

    fn word(&mut self, word: &'static [u8]) -> Result<(), SyntaxError> {
        if self.bytes[self.at..].starts_with(word) {
            self.at += word.len();
            Ok(())
        } else {
            Err(SyntaxError {
                what: "something that is not a value",
                offset: self.at,
            })
        }
    }

    fn enter(&mut self, depth: usize) -> Result<(), SyntaxError> {
        if depth >= MAX_DEPTH {
            return Err(self.error("too deep nesting"));
        }
        self.at += 1;
        self.whitespace();
        Ok(())
    }

    fn object(&mut self, depth: usize) -> Result<(), SyntaxError> {
        self.enter(depth)?;
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(());
        }
        loop {
            if self.peek() != Some(b'"') {
                return Err(self.error("a member without a quoted name"));
            }
            self.string()?;
            self.whitespace();
            if self.peek() != Some(b':') {
                return Err(self.error("a member without a colon"));
            }
            self.at += 1;
            self.whitespace();
            self.value(depth + 1)?;
            if self.end_of_item(b'}')? {
                return Ok(());
            }
        }
    }

    fn list(&mut self, depth: usize) -> Result<(), SyntaxError> {
        self.enter(depth)?;
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.value(depth + 1)?;
            if self.end_of_item(b']')? {
                return Ok(());
            }
        }
    }

    /// After an item: true at the end of its container, false after a comma.
    fn end_of_item(&mut self, close: u8) -> Result<bool, SyntaxError> {
        self.whitespace();
        match self.peek() {
            Some(b',') => {
                self.at += 1;
                self.whitespace();
                Ok(false)
            }
            Some(byte) if byte == close => {
                self.at += 1;
                Ok(true)
            }
            _ => Err(self.error("a missing comma or bracket")),
        }
    }

    fn string(&mut self) -> Result<(), SyntaxError> {
        self.at += 1;
        loop {
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(b'\\') => self.escape()?,
                Some(0..=0x1f) => return Err(self.error("a raw control character in a string")),
                Some(_) => self.at += 1,
                None => return Err(self.error("an unexpected end")),
            }
        }
    }

    fn escape(&mut self) -> Result<(), SyntaxError> {
        let start = self.at;
        self.at += 1;
        match self.peek() {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                self.at += 1;
                Ok(())
            }
            Some(b'u') => {
                self.at += 1;
                let lone = SyntaxError {
                    what: "half of a surrogate pair",
                    offset: start,
                };
                match self.hex4()? {
                    0xdc00..=0xdfff => Err(lone),
                    0xd800..=0xdbff => {
                        if !self.bytes[self.at..].starts_with(b"\\u") {
                            return Err(lone);
                        }
                        self.at += 2;
                        if (0xdc00..=0xdfff).contains(&self.hex4()?) {
                            Ok(())
                        } else {
                            Err(lone)
                        }
                    }
                    _ => Ok(()),
                }
            }
            _ => Err(self.error("an unknown escape")),
        }
    }

    fn hex4(&mut self) -> Result<u32, SyntaxError> {
        let mut value = 0;
        for _ in 0..4 {
            let digit = self.peek().and_then(|byte| char::from(byte).to_digit(16));
            let Some(digit) = digit else {
                return Err(self.error("a \\u escape without four hexadecimal digits"));
            };
            value = value * 16 + digit;
            self.at += 1;
        }
        Ok(value)
    }

    fn number(&mut self) -> Result<(), SyntaxError> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
            if matches!(self.peek(), Some(b'0'..=b'9')) {
                return Err(self.error("a number with a leading zero"));
            }
        } else {
            self.digits()?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), SyntaxError> {
        if !matches!(self.peek(), Some(b'0'..=b'9')) {
            return Err(self.error("a number without digits"));
        }
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn what(body: &[u8]) -> &'static str {
        match check(body) {
            Ok(raw) => panic!("accepted {raw:?}"),
            Err(error) => error.what,
        }
    }

    #[test]
    fn accepts_what_json_is() {
        for body in [
            "null",
            " true\n",
            "false",
            "0",
            "-0",
            "12.5e-3",
            "1E+9",
            "1e999",
            "\"\"",
            "\"a\\u0000b\"",
            "\"\\ud83d\\ude00\"",
            "[]",
            "{}",
            "[ 1 , [ ] , { } ]",
            "{\"a\":{\"b\":[null]},\"\":1}",
            "\"\u{7f}\u{1f600}\"",
        ] {
            assert!(check(body.as_bytes()).is_ok(), "{body}");
            assert!(serde_json::from_str::<serde::de::IgnoredAny>(body).is_ok(), "{body}");
        }
    }

    #[test]
    fn names_the_offence() {
        let end = "an unexpected end";
        let cases: [(&[u8], &str); 28] = [
            (b"", end),
            (b"  ", end),
            (b"{", end),
            (b"[1", end),
            (b"\"abc", end),
            (b"{\"a\"", end),
            (b"{\"a\":", end),
            (b"-", end),
            (b"1.", end),
            (b"\"\\", end),
            (b"nul", "something that is not a value"),
            (b"NaN", "something that is not a value"),
            (b"Infinity", "something that is not a value"),
            (b"-Infinity", "a number without digits"),
            (b"'a'", "something that is not a value"),
            (b"\xef\xbb\xbf{}", "something that is not a value"),
            (b"\"\xc4\xe3\"", "a byte sequence that is not UTF-8"),
            (b"{a:1}", "a member without a quoted name"),
            (b"{\"a\":1,}", "a member without a quoted name"),
            (b"{\"a\" 1}", "a member without a colon"),
            (b"[1 2]", "a missing comma or bracket"),
            (b"[1}", "a missing comma or bracket"),
            (b"01", "a number with a leading zero"),
            (b"\"a\nb\"", "a raw control character in a string"),
            (b"\"\\x\"", "an unknown escape"),
            (b"\"\\u12g4\"", "a \\u escape without four hexadecimal digits"),
            (b"\"\\ud800x\"", "half of a surrogate pair"),
            (b"{} x", "something after the end of the value"),
        ];
        for (body, expected) in cases {
            assert_eq!(what(body), expected, "{}", String::from_utf8_lossy(body));
        }
        for lone in [
            "\"\\udc00\"",
            "\"\\ud800\\u0041\"",
            "\"\\ud800\\ud800\"",
            "{\"x\":[\"\\uDfff\"]}",
        ] {
            assert_eq!(what(lone.as_bytes()), "half of a surrogate pair", "{lone}");
        }
    }

    #[test]
    fn nesting_is_bounded() {
        let nested = |depth: usize| [b"[".repeat(depth), b"]".repeat(depth)].concat();
        assert!(check(&nested(MAX_DEPTH)).is_ok());
        assert_eq!(what(&nested(MAX_DEPTH + 1)), "too deep nesting");
        assert_eq!(what(&b"[".repeat(5_000_000)), "too deep nesting");
        assert_eq!(what(&b"{\"a\":".repeat(1_000_000)), "too deep nesting");
    }

    proptest! {
        /// serde_json judges the same texts as valid. It does not look at surrogates in what it ignores: none are made.
        #[test]
        fn agrees_with_serde_json(body in "[\\[\\]{}\",:0-9eE+\\-. tfnrulase\\\\/b\u{e9}]{0,24}") {
            let theirs = serde_json::from_str::<serde::de::IgnoredAny>(&body).is_ok();
            prop_assert_eq!(check(body.as_bytes()).is_ok(), theirs);
        }

        #[test]
        fn never_panics(body in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _judged = check(&body).is_ok();
        }
    }
}
