//! The words of an enum for logs and metrics. One table gives the word of each variant and the list of all words, so that the
//! list has every variant, or does not compile.

/// See the head of the file; stands in an `impl` of the enum.
macro_rules! words {
    ($($variant:ident => $word:literal),+ $(,)?) => {
        /// All words, in the order of their table.
        pub const WORDS: &'static [&'static str] = &[$($word),+];

        /// Its word in logs and metrics.
        pub const fn as_str(&self) -> &'static str {
            match self {
                $(Self::$variant { .. } => $word),+
            }
        }
    };
}

pub(crate) use words;
