//! Server-sent events out of bytes that come in pieces of any size.

/// Longest event, and longest line; more is no event stream.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// Splits a stream into events, by the rules of the HTML standard. Identifiers and retry times are not of interest here.
#[derive(Debug, Default)]
pub struct Parser {
    /// A line that is not complete.
    line: Vec<u8>,
    /// Data of the event so far, and whether there was any.
    data: Vec<u8>,
    has_data: bool,
    name: Vec<u8>,
    /// The last line ended with a carriage return: a line feed that follows belongs to it.
    after_return: bool,
    begun: bool,
}

/// A part of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item<'a> {
    /// An event.
    Event {
        /// Its name; empty where there is none.
        name: &'a [u8],
        /// Its data.
        data: &'a [u8],
    },
    /// A line that is no event, without the colon (and the space) before it.
    Comment(&'a [u8]),
}

/// An event that is longer than any real one.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event has more than {MAX_EVENT_BYTES} bytes")]
pub struct TooLong;

impl Parser {
    /// Takes the next piece; calls `take` with each event, and each comment, that is complete.
    pub fn push(&mut self, mut piece: &[u8], mut take: impl FnMut(Item<'_>)) -> Result<(), TooLong> {
        if self.after_return && piece.first() == Some(&b'\n') {
            piece = &piece[1..];
        }
        if !piece.is_empty() {
            self.after_return = false;
        }
        while let Some(end) = piece.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            let (line, rest) = piece.split_at(end);
            piece = match rest {
                [b'\r', b'\n', more @ ..] => more,
                [b'\r'] => {
                    self.after_return = true;
                    &[]
                }
                [_, more @ ..] => more,
                [] => &[],
            };
            if self.line.is_empty() {
                self.end_of_line(line, &mut take)?;
            } else {
                let mut whole = std::mem::take(&mut self.line);
                whole.extend_from_slice(line);
                self.end_of_line(&whole, &mut take)?;
                // Its memory is used again.
                whole.clear();
                self.line = whole;
            }
        }
        self.line.extend_from_slice(piece);
        if self.line.len() > MAX_EVENT_BYTES {
            Err(TooLong)
        } else {
            Ok(())
        }
    }

    /// Whether the stream may end here: no event has begun.
    pub fn is_at_rest(&self) -> bool {
        self.line.is_empty() && !self.has_data
    }

    fn end_of_line(&mut self, mut line: &[u8], take: &mut impl FnMut(Item<'_>)) -> Result<(), TooLong> {
        if !self.begun {
            self.begun = true;
            line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
        }
        if line.is_empty() {
            if self.has_data {
                take(Item::Event {
                    name: &self.name,
                    data: &self.data,
                });
            }
            self.name.clear();
            self.data.clear();
            self.has_data = false;
            return Ok(());
        }
        let colon = line.iter().position(|byte| *byte == b':').unwrap_or(line.len());
        let (field, value) = line.split_at(colon);
        let value = value.strip_prefix(b":").unwrap_or(value);
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => {
                if self.data.len() + value.len() > MAX_EVENT_BYTES {
                    return Err(TooLong);
                }
                if self.has_data {
                    self.data.push(b'\n');
                }
                self.has_data = true;
                self.data.extend_from_slice(value);
            }
            b"event" => {
                self.name.clear();
                self.name.extend_from_slice(value);
            }
            b"" => take(Item::Comment(value)),
            // A field of no interest.
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(pieces: &[&[u8]]) -> (Vec<(String, String)>, bool) {
        let (mut parser, mut found) = (Parser::default(), Vec::new());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        for piece in pieces {
            parser
                .push(piece, |item| {
                    found.push(match item {
                        Item::Event { name, data } => (text(name), text(data)),
                        Item::Comment(comment) => (":".to_owned(), text(comment)),
                    });
                })
                .expect("short");
        }
        (found, parser.is_at_rest())
    }

    const STREAM: &str = "\u{feff}data: {\"a\":1}\n\n: comment\r\ndata:two\r\ndata: lines\r\n\r\nevent: error\rdata: ä€😀\r\rid: 7\n\
                          retry: 3\n\nnothing\ndata\n\ndata: [DONE]\n\n";

    fn expected() -> Vec<(String, String)> {
        [
            ("", "{\"a\":1}"),
            (":", "comment"),
            ("", "two\nlines"),
            ("error", "ä€😀"),
            ("", ""),
            ("", "[DONE]"),
        ]
        .map(|(name, data)| (name.to_owned(), data.to_owned()))
        .to_vec()
    }

    #[test]
    fn split_at_every_byte_and_into_single_bytes() {
        let bytes = STREAM.as_bytes();
        assert_eq!(events(&[bytes]), (expected(), true));
        for cut in 0..=bytes.len() {
            let (left, right) = bytes.split_at(cut);
            assert_eq!(events(&[left, right]), (expected(), true), "cut at {cut}");
            assert_eq!(
                events(&[left, b"", right]),
                (expected(), true),
                "cut at {cut}, nothing between"
            );
        }
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(events(&single), (expected(), true));
    }

    #[test]
    fn what_is_not_complete_is_no_event() {
        for text in ["data: x", "data: x\n", "da", "data: a\n\ndata: x\n"] {
            let (found, rest) = events(&[text.as_bytes()]);
            assert!(
                found.iter().all(|(_, data)| data != "x") && !rest,
                "{text:?}: {found:?}"
            );
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut parser = Parser::default();
        let piece = vec![b'x'; 1 << 20];
        let mut last = Ok(());
        for _ in 0..17 {
            last = parser.push(&piece, |_| {});
        }
        assert_eq!(last, Err(TooLong));
    }
}
