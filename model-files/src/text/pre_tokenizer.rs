//! How byte-level BPE cuts text into pieces before merging, by the name GGUF gives the rule (`tokenizer.ggml.pre`).

use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

/// The rules this product knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PreTokenizer {
    /// GPT-2's pattern.
    Gpt2,
    /// Punctuation runs first, then GPT-2's pattern, numbers in threes: what files without a rule's name get.
    Default,
    /// Every digit alone, then GPT-2's pattern.
    SmolLm,
    /// Llama 3's pattern: numbers in threes.
    Llama3,
    /// Qwen2's pattern: every digit alone; text is normalised to NFC.
    Qwen2,
}

/// Names of the rules, as converters write them.
const NAMES: &[(&str, PreTokenizer)] = &[
    ("default", PreTokenizer::Default),
    ("gpt-2", PreTokenizer::Gpt2),
    ("gpt2", PreTokenizer::Gpt2),
    ("phi-2", PreTokenizer::Gpt2),
    ("olmo", PreTokenizer::Gpt2),
    ("mpt", PreTokenizer::Gpt2),
    ("smollm", PreTokenizer::SmolLm),
    ("starcoder", PreTokenizer::SmolLm),
    ("refact", PreTokenizer::SmolLm),
    ("command-r", PreTokenizer::SmolLm),
    ("llama-bpe", PreTokenizer::Llama3),
    ("llama3", PreTokenizer::Llama3),
    ("llama-v3", PreTokenizer::Llama3),
    ("qwen2", PreTokenizer::Qwen2),
    ("deepseek-r1-qwen", PreTokenizer::Qwen2),
];

impl PreTokenizer {
    /// The rule called `name`; the error lists the known names.
    pub(crate) fn from_name(name: &str) -> Result<Self, String> {
        NAMES
            .iter()
            .find(|(known, _)| *known == name)
            .map(|&(_, rule)| rule)
            .ok_or_else(|| {
                let known: Vec<&str> = NAMES.iter().map(|&(known, _)| known).collect();
                format!("one of the known rules: {}", known.join(", "))
            })
    }

    /// True if a piece that is a vocabulary entry is taken whole, without merging.
    pub(crate) fn ignores_merges(self) -> bool {
        self == Self::Llama3
    }

    /// Whether a begin-of-text token is put in front when the file does not say.
    pub(crate) fn adds_bos_by_default(self) -> bool {
        self == Self::Llama3
    }

    pub(crate) fn normalizer(self) -> Option<NormalizerWrapper> {
        (self == Self::Qwen2).then(|| NormalizerWrapper::NFC(NFC))
    }

    /// Builds the rule.
    pub(crate) fn build(self) -> Result<PreTokenizerWrapper, String> {
        let plain = || PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false));
        let gpt2 = || PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, true));
        let steps = match self {
            Self::Gpt2 => vec![gpt2()],
            Self::SmolLm => vec![PreTokenizerWrapper::Digits(Digits::new(true)), gpt2()],
            Self::Default => vec![
                split(r"[\p{P}\$\+<=>\^~\|]+")?,
                split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")?,
                split(r"\p{N}+")?,
                split(r"[0-9][0-9][0-9]")?,
                plain(),
            ],
            Self::Llama3 => vec![split(&cl100k(r"\p{N}{1,3}"))?, plain()],
            Self::Qwen2 => vec![split(&cl100k(r"\p{N}"))?, plain()],
        };
        Ok(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
    }
}

/// The pattern family of cl100k, with the part that cuts numbers.
fn cl100k(numbers: &str) -> String {
    let contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)";
    let words = r"[^\r\n\p{L}\p{N}]?\p{L}+";
    let rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    format!("{contractions}|{words}|{numbers}|{rest}")
}

fn split(pattern: &str) -> Result<PreTokenizerWrapper, String> {
    Split::new(
        SplitPattern::Regex(pattern.into()),
        SplitDelimiterBehavior::Isolated,
        false,
    )
    .map(PreTokenizerWrapper::Split)
    .map_err(|error| format!("pattern {pattern:?} does not compile: {error}"))
}
