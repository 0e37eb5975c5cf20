//! How byte-level BPE cuts text into pieces before merging, by the name GGUF gives the rule (`tokenizer.ggml.pre`).
//!
//! The names are those of llama.cpp (`convert_hf_to_gguf_update.py` gives them, `src/llama-vocab.cpp` reads them); the rules
//! behind them are those of the models' own `tokenizer.json`, where llama.cpp writes a simpler pattern for its own engine.

use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

/// How text is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// GPT-2's pattern.
    Gpt2,
    /// Punctuation runs first, then GPT-2's pattern, numbers in threes: what files without a rule's name get.
    Default,
    /// Every digit alone, then GPT-2's pattern: SmolLM, StarCoder, Granite (`refact`), Command R.
    Digits,
    /// The pattern of cl100k and Llama 3: numbers in threes.
    Llama3,
    /// Qwen2's pattern: every digit alone.
    Qwen2,
    /// The pattern of o200k: words are cut where small letters are followed by capital ones, contractions stay at their word.
    Gpt4o,
    /// Mistral's Tekken: as o200k, without contractions, every digit alone.
    Tekken,
    /// DeepSeek LLM: lines, words of cased letters, punctuation, CJK, digits.
    DeepSeekLlm,
    /// DeepSeek Coder: lines, words, punctuation, CJK, digits.
    DeepSeekCoder,
    /// DeepSeek V3 and R1: numbers in threes, CJK, then words with their marks.
    DeepSeekV3,
}

/// A rule this product knows, with what goes with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PreTokenizer {
    cut: Cut,
    /// Text is normalised to NFC first.
    nfc: bool,
    /// A piece that is a vocabulary entry is taken whole.
    ignores_merges: bool,
    /// A begin-of-text token is put in front when the file does not say.
    adds_bos: bool,
}

impl PreTokenizer {
    const fn of(cut: Cut) -> Self {
        Self {
            cut,
            nfc: false,
            ignores_merges: false,
            adds_bos: false,
        }
    }

    const fn nfc(cut: Cut) -> Self {
        Self {
            nfc: true,
            ..Self::of(cut)
        }
    }

    /// Whole entries, and a begin-of-text token.
    const fn whole(cut: Cut) -> Self {
        Self {
            ignores_merges: true,
            adds_bos: true,
            ..Self::of(cut)
        }
    }
}

/// Names of the rules, as converters write them. The vocabularies of Qwen2, Command R and GPT-NeoX (OLMo 1, MPT) are over NFC.
const NAMES: &[(&str, PreTokenizer)] = &[
    ("default", PreTokenizer::of(Cut::Default)),
    ("gpt-2", PreTokenizer::of(Cut::Gpt2)),
    ("gpt2", PreTokenizer::of(Cut::Gpt2)),
    ("phi-2", PreTokenizer::of(Cut::Gpt2)),
    ("olmo", PreTokenizer::nfc(Cut::Gpt2)),
    ("mpt", PreTokenizer::nfc(Cut::Gpt2)),
    ("smollm", PreTokenizer::of(Cut::Digits)),
    ("starcoder", PreTokenizer::of(Cut::Digits)),
    ("refact", PreTokenizer::of(Cut::Digits)),
    ("command-r", PreTokenizer::nfc(Cut::Digits)),
    ("llama-bpe", PreTokenizer::whole(Cut::Llama3)),
    ("llama3", PreTokenizer::whole(Cut::Llama3)),
    ("llama-v3", PreTokenizer::whole(Cut::Llama3)),
    // OLMo 2 and Phi-4 have the pattern, and with it the name, of DBRX.
    ("dbrx", PreTokenizer::of(Cut::Llama3)),
    ("smaug-bpe", PreTokenizer::of(Cut::Llama3)),
    ("qwen2", PreTokenizer::nfc(Cut::Qwen2)),
    ("deepseek-r1-qwen", PreTokenizer::nfc(Cut::Qwen2)),
    ("gpt-4o", PreTokenizer::of(Cut::Gpt4o)),
    ("llama4", PreTokenizer::of(Cut::Gpt4o)),
    ("tekken", PreTokenizer::whole(Cut::Tekken)),
    ("deepseek-llm", PreTokenizer::of(Cut::DeepSeekLlm)),
    ("deepseek-coder", PreTokenizer::of(Cut::DeepSeekCoder)),
    ("deepseek-v3", PreTokenizer::of(Cut::DeepSeekV3)),
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
        self.ignores_merges
    }

    /// Whether a begin-of-text token is put in front when the file does not say.
    pub(crate) fn adds_bos_by_default(self) -> bool {
        self.adds_bos
    }

    pub(crate) fn normalizer(self) -> Option<NormalizerWrapper> {
        self.nfc.then_some(NormalizerWrapper::NFC(NFC))
    }

    /// Builds the rule.
    pub(crate) fn build(self) -> Result<PreTokenizerWrapper, String> {
        let digits = || PreTokenizerWrapper::Digits(Digits::new(true));
        let mut steps = match self.cut {
            Cut::Gpt2 => return Ok(gpt2()),
            Cut::Digits => return Ok(PreTokenizerWrapper::Sequence(Sequence::new(vec![digits(), gpt2()]))),
            Cut::Default => vec![
                split(r"[\p{P}\$\+<=>\^~\|]+")?,
                split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")?,
                split(r"\p{N}+")?,
                split(r"[0-9][0-9][0-9]")?,
            ],
            Cut::Llama3 => vec![split(&cl100k(r"\p{N}{1,3}"))?],
            Cut::Qwen2 => vec![split(&cl100k(r"\p{N}"))?],
            Cut::Gpt4o => vec![split(&o200k(&format!("{CONTRACTIONS}?"), r"\p{N}{1,3}"))?],
            Cut::Tekken => vec![split(&o200k("", r"\p{N}"))?],
            Cut::DeepSeekLlm => vec![
                split(r"[\r\n]")?,
                split(&format!(r"\s?{CASED}"))?,
                split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+")?,
                split(r"\s+$")?,
                split(CJK)?,
                digits(),
            ],
            Cut::DeepSeekCoder => vec![
                split(r"[\r\n]")?,
                split(r"\s?\p{L}+")?,
                split(r"\s?\p{P}+")?,
                split(CJK)?,
                digits(),
            ],
            Cut::DeepSeekV3 => vec![
                split(r"\p{N}{1,3}")?,
                split("[一-龥\u{3040}-ゟ゠-ヿ]+")?,
                split(&deepseek_v3())?,
            ],
        };
        steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false)));
        Ok(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
    }
}

const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";

/// Han up to the year 1993, and whatever lies between: the class as DeepSeek's files have it.
const CJK: &str = "[一-龥\u{800}-一가-\u{d7ff}]+";

/// Letters that have case, as DeepSeek LLM's file lists them; characters that Unicode normalisation would change are written
/// as numbers.
const CASED: &str = r"[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1f7d}ᾀ-ᾴᾶ-ᾼ\x{1fbe}ῂ-ῄῆ-ῌῐ-\x{1fd3}ῖ-\x{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";

fn gpt2() -> PreTokenizerWrapper {
    PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, true))
}

/// The pattern family of cl100k, with the part that cuts numbers.
fn cl100k(numbers: &str) -> String {
    let words = r"[^\r\n\p{L}\p{N}]?\p{L}+";
    let rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    format!("{CONTRACTIONS}|{words}|{numbers}|{rest}")
}

/// The pattern family of o200k, with what may follow a word and the part that cuts numbers.
fn o200k(after: &str, numbers: &str) -> String {
    let before = r"[^\r\n\p{L}\p{N}]?";
    let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
    let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";
    let rest = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    format!("{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}|{numbers}|{rest}")
}

fn deepseek_v3() -> String {
    let marked = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##;
    let words = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+";
    format!(r"{marked}|{words}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
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
