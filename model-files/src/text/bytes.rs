//! The bytes each token stands for.

/// Which rule turns a vocabulary entry's text into bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ByteRule {
    /// Byte-level BPE (GPT-2 and its heirs): every character of an entry stands for one byte.
    ByteLevel,
    /// SentencePiece: `▁` is a space, `<0x0A>` is a byte, all else is itself.
    Sentence {
        /// How many leading spaces a whole decoded text loses (the tokenizer put them there).
        strip_leading_spaces: usize,
        /// `<0x0A>` is a byte. (Else it is itself.)
        byte_fallback: bool,
    },
}

impl ByteRule {
    /// The bytes of an ordinary (not added) vocabulary entry.
    pub(crate) fn bytes(self, entry: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => {
                let mapped: Option<Vec<u8>> = entry.chars().map(byte_of_char).collect();
                // An entry with a character outside the map was never made of bytes: it stands for itself.
                mapped.unwrap_or_else(|| entry.as_bytes().to_vec())
            }
            Self::Sentence { .. } => match self.fallback_byte(entry) {
                Some(byte) => vec![byte],
                None => entry.replace('▁', " ").into_bytes(),
            },
        }
    }

    /// The byte that stands where a character was no piece, if the entry is one.
    fn fallback_byte(self, entry: &str) -> Option<u8> {
        match self {
            Self::Sentence {
                byte_fallback: true, ..
            } => fallback_byte(entry),
            _ => None,
        }
    }

    /// Adds an ordinary vocabulary entry to a table.
    pub(crate) fn push(self, table: &mut TokenTable, entry: &str) {
        match self.fallback_byte(entry) {
            Some(byte) => table.push_fallback(byte),
            None => table.push(&self.bytes(entry), false),
        }
    }

    /// Adds an added token: its own text, in which a SentencePiece decoder still turns `▁` into a space.
    pub(crate) fn push_added(self, table: &mut TokenTable, content: &str, special: bool) {
        match self {
            Self::ByteLevel => table.push(content.as_bytes(), special),
            Self::Sentence { .. } => table.push(content.replace('▁', " ").as_bytes(), special),
        }
    }
}

/// The byte of `<0x0A>`, if the entry has that form.
fn fallback_byte(entry: &str) -> Option<u8> {
    let digits = entry.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

/// True for the bytes that byte-level BPE writes as the character of the same number; the others are numbered from 256 on.
const fn is_kept(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// Byte for each character of byte-level BPE; `-1` where there is none. The 68 bytes that are not kept come after 255.
static BYTE_OF_CHAR: [i16; 256 + 68] = {
    let mut table = [-1; 256 + 68];
    let mut moved = 256;
    let mut byte = 0;
    while byte < 256 {
        if is_kept(byte as u8) {
            table[byte] = byte as i16;
        } else {
            table[moved] = byte as i16;
            moved += 1;
        }
        byte += 1;
    }
    table
};

fn byte_of_char(character: char) -> Option<u8> {
    let index = usize::try_from(u32::from(character)).ok()?;
    BYTE_OF_CHAR.get(index).and_then(|&byte| u8::try_from(byte).ok())
}

/// What a token is to a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sort {
    /// Part of the text.
    Text,
    /// A byte of a character that is no piece.
    Fallback,
    /// Not part of the text.
    Special,
}

/// Bytes and sort of every token id.
#[derive(Debug, Default)]
pub(crate) struct TokenTable {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    sorts: Vec<Sort>,
}

impl TokenTable {
    /// Adds the next id.
    pub(crate) fn push(&mut self, bytes: &[u8], special: bool) {
        self.add(bytes, if special { Sort::Special } else { Sort::Text });
    }

    fn push_fallback(&mut self, byte: u8) {
        self.add(&[byte], Sort::Fallback);
    }

    fn add(&mut self, bytes: &[u8], sort: Sort) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len());
        self.sorts.push(sort);
    }

    /// Number of ids.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of `id`; none for an id outside the vocabulary (a model's output may be padded).
    pub(crate) fn get(&self, id: u32) -> &[u8] {
        let Ok(index) = usize::try_from(id) else { return &[] };
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start..end]
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.sort(id) == Some(Sort::Special)
    }

    /// True for a byte of a character that is no piece.
    pub(crate) fn is_fallback(&self, id: u32) -> bool {
        self.sort(id) == Some(Sort::Fallback)
    }

    fn sort(&self, id: u32) -> Option<Sort> {
        usize::try_from(id)
            .ok()
            .and_then(|index| self.sorts.get(index).copied())
    }
}
