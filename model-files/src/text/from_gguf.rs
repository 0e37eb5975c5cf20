//! The text side of a GGUF file.

use std::collections::BTreeMap;

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, Tokenizer};

use super::bytes::{ByteRule, TokenTable};
use super::hash;
use super::pre_tokenizer::PreTokenizer;
use super::sentence_piece::{self, Piece};
use super::template::ChatTemplate;
use super::tokenizer::TextTokenizer;
use super::{GenerationDefaults, TextModel};
use crate::error::ModelFilesError;
use crate::files::ModelFiles;
use crate::gguf::{GgufFile, GgufProblem, Value};

pub(crate) const KEY_MODEL: &str = "tokenizer.ggml.model";
pub(crate) const KEY_PRE: &str = "tokenizer.ggml.pre";
pub(crate) const KEY_TOKENS: &str = "tokenizer.ggml.tokens";
pub(crate) const KEY_TYPES: &str = "tokenizer.ggml.token_type";
pub(crate) const KEY_SCORES: &str = "tokenizer.ggml.scores";
pub(crate) const KEY_MERGES: &str = "tokenizer.ggml.merges";
pub(crate) const KEY_BOS: &str = "tokenizer.ggml.bos_token_id";
pub(crate) const KEY_EOS: &str = "tokenizer.ggml.eos_token_id";
pub(crate) const KEY_ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
pub(crate) const KEY_ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
pub(crate) const KEY_UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const KEY_REMOVE_SPACES: &str = "tokenizer.ggml.remove_extra_whitespaces";
pub(crate) const KEY_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";

/// Keys of tokens that end a turn or a message, beside the end-of-text token.
const MORE_END_KEYS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];
/// Names of end-of-turn tokens: older converters wrote no key for them.
const END_OF_TURN_NAMES: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"];

/// Added tokens of Phi-3 that leave the white space after them alone; see [`takes_white_space`].
const PLAIN_PHI3_TOKENS: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// Longest piece of a SentencePiece vocabulary; the longest known ones are a tenth of this. All ways to cut each in two are
/// looked at.
const MAX_PIECE_BYTES: usize = 512;

/// What `tokenizer.ggml.token_type` says of a token (ids of the GGUF specification).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    fn from_id(id: u64) -> Option<Self> {
        Some(match id {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }

    /// Not part of the text.
    fn is_special(self) -> bool {
        matches!(self, Self::Unknown | Self::Control | Self::Unused)
    }
}

/// The two families of tokenizers.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Byte-level BPE, with the rule that cuts text in pieces.
    Bytes(PreTokenizer),
    /// SentencePiece. `prefix`: a space is put in front of a text.
    Sentence { prefix: bool },
}

impl Kind {
    fn rule(self) -> ByteRule {
        match self {
            Self::Bytes(_) => ByteRule::ByteLevel,
            Self::Sentence { prefix } => ByteRule::Sentence {
                strip_leading_spaces: usize::from(prefix),
                byte_fallback: true,
            },
        }
    }

    /// Whether a begin-of-text token is put in front when the file does not say.
    fn adds_bos_by_default(self) -> bool {
        match self {
            Self::Bytes(pre) => pre.adds_bos_by_default(),
            Self::Sentence { .. } => true,
        }
    }
}

struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    kinds: Vec<TokenKind>,
}

pub(crate) fn load(files: &ModelFiles, file: &GgufFile) -> Result<TextModel, ModelFilesError> {
    let architecture = file.require_string("general.architecture")?;
    let vocabulary = read_vocabulary(file)?;
    let kind = read_kind(file)?;
    let bos_token_id = token_id(file, KEY_BOS, &vocabulary)?;
    let eos_token_id = token_id(file, KEY_EOS, &vocabulary)?;
    let add_bos = file.bool(KEY_ADD_BOS)?.unwrap_or_else(|| kind.adds_bos_by_default());
    let prefix = around(file, KEY_ADD_BOS, add_bos, KEY_BOS, bos_token_id)?;
    let add_eos = file.bool(KEY_ADD_EOS)?.unwrap_or(false);
    let suffix = around(file, KEY_ADD_EOS, add_eos, KEY_EOS, eos_token_id)?;
    let (tokenizer, table) = build(file, &vocabulary, kind)?;

    let text_of = |id: Option<u32>| id.map_or("", |id| vocabulary.tokens[id as usize]);
    let chat_template = file
        .string("tokenizer.chat_template")?
        .map(|source| ChatTemplate::new(source, text_of(bos_token_id), text_of(eos_token_id)));
    Ok(TextModel {
        tokenizer: TextTokenizer::new(tokenizer, table, kind.rule(), prefix, suffix),
        eos_token_ids: end_tokens(file, &vocabulary, eos_token_id)?,
        bos_token_id,
        add_bos,
        chat_template,
        vocab_size: vocabulary.tokens.len(),
        max_position_embeddings: files.positions(false)?,
        architecture: architecture.to_string(),
        name: files.name()?,
        tokenizer_hash: hash::of_gguf(file)?,
        generation_defaults: GenerationDefaults {
            temperature: file.f32("general.sampling.temp")?,
            top_k: file.u32("general.sampling.top_k")?,
            top_p: file.f32("general.sampling.top_p")?,
        },
    })
}

fn kind_error(file: &GgufFile, key: &str, found: impl Into<String>, wanted: impl Into<String>) -> ModelFilesError {
    file.error(GgufProblem::Kind {
        key: key.into(),
        found: found.into(),
        wanted: wanted.into(),
    })
}

fn read_vocabulary(file: &GgufFile) -> Result<Vocabulary<'_>, ModelFilesError> {
    let tokens = file
        .array(KEY_TOKENS, "an array of strings", Value::as_str)?
        .ok_or_else(|| file.error(GgufProblem::MissingKey(KEY_TOKENS.into())))?;
    if tokens.is_empty() {
        return Err(kind_error(
            file,
            KEY_TOKENS,
            "an empty array",
            "an array with one string per token",
        ));
    }
    let wanted = "an array with a number from 1 (normal) to 6 (byte) per token";
    let kinds = file
        .array(KEY_TYPES, wanted, |value| TokenKind::from_id(value.as_u64()?))?
        .ok_or_else(|| file.error(GgufProblem::MissingKey(KEY_TYPES.into())))?;
    if kinds.len() != tokens.len() {
        let found = format!("an array of {} numbers", kinds.len());
        return Err(kind_error(
            file,
            KEY_TYPES,
            found,
            format!("one per token, {}", tokens.len()),
        ));
    }
    Ok(Vocabulary { tokens, kinds })
}

fn read_kind(file: &GgufFile) -> Result<Kind, ModelFilesError> {
    match file.require_string(KEY_MODEL)? {
        "gpt2" => {}
        "llama" => {
            if file.bool(KEY_REMOVE_SPACES)?.unwrap_or(false) {
                return Err(kind_error(
                    file,
                    KEY_REMOVE_SPACES,
                    "true",
                    "false for a \"llama\" vocabulary",
                ));
            }
            return Ok(Kind::Sentence {
                prefix: file.bool(KEY_SPACE_PREFIX)?.unwrap_or(true),
            });
        }
        other => {
            let wanted = "\"gpt2\" or \"llama\"";
            return Err(kind_error(file, KEY_MODEL, format!("the string {other:?}"), wanted));
        }
    }
    if file.bool(KEY_SPACE_PREFIX)?.unwrap_or(false) {
        return Err(kind_error(
            file,
            KEY_SPACE_PREFIX,
            "true",
            "false for a \"gpt2\" vocabulary",
        ));
    }
    let name = file.string(KEY_PRE)?.unwrap_or("default");
    PreTokenizer::from_name(name)
        .map(Kind::Bytes)
        .map_err(|wanted| kind_error(file, KEY_PRE, format!("the string {name:?}"), wanted))
}

/// True if added tokens take the white space after them: those of Phi-3. The file has no key for that; llama.cpp knows these
/// models by their name (the end of `llama_vocab::impl::load` in `src/llama-vocab.cpp`), here it is the architecture, with the
/// kind of vocabulary that no later model of it has.
pub(crate) fn takes_white_space(file: &GgufFile) -> Result<bool, ModelFilesError> {
    Ok(file.require_string(KEY_MODEL)? == "llama" && file.string("general.architecture")? == Some("phi3"))
}

fn token_id(file: &GgufFile, key: &str, vocabulary: &Vocabulary<'_>) -> Result<Option<u32>, ModelFilesError> {
    match file.u32(key)? {
        Some(id) if id as usize >= vocabulary.tokens.len() => {
            let wanted = format!("a token id below {}", vocabulary.tokens.len());
            Err(kind_error(file, key, format!("{id}"), wanted))
        }
        id => Ok(id),
    }
}

/// The tokens to put before or after a text.
fn around(
    file: &GgufFile,
    flag_key: &str,
    flag: bool,
    id_key: &str,
    id: Option<u32>,
) -> Result<Vec<u32>, ModelFilesError> {
    match (flag, id) {
        (false, _) => Ok(Vec::new()),
        (true, Some(id)) => Ok(vec![id]),
        (true, None) => Err(kind_error(
            file,
            flag_key,
            "true",
            format!("false, or a value for `{id_key}`"),
        )),
    }
}

fn end_tokens(file: &GgufFile, vocabulary: &Vocabulary<'_>, eos: Option<u32>) -> Result<Vec<u32>, ModelFilesError> {
    let mut ids: Vec<u32> = eos.into_iter().collect();
    for key in MORE_END_KEYS {
        ids.extend(token_id(file, key, vocabulary)?);
    }
    for (id, (token, &kind)) in (0..).zip(vocabulary.tokens.iter().zip(&vocabulary.kinds)) {
        if kind == TokenKind::Control && END_OF_TURN_NAMES.contains(token) {
            ids.push(id);
        }
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn read_merges(file: &GgufFile) -> Result<Vec<(String, String)>, ModelFilesError> {
    let value = file
        .get(KEY_MERGES)
        .ok_or_else(|| file.error(GgufProblem::MissingKey(KEY_MERGES.into())))?;
    let Some(array) = value.as_array() else {
        return Err(kind_error(file, KEY_MERGES, value.describe(), "an array of strings"));
    };
    let mut merges = Vec::new();
    for (index, value) in array.iter().enumerate() {
        // The left half may itself begin with a space, so the first byte is not looked at.
        let halves = value.as_str().and_then(|merge| {
            let cut = merge.char_indices().skip(1).find(|&(_, character)| character == ' ')?.0;
            Some((merge[..cut].to_string(), merge[cut + 1..].to_string()))
        });
        let Some(halves) = halves else {
            let found = format!("{} at index {index}", value.describe());
            return Err(kind_error(
                file,
                KEY_MERGES,
                found,
                "an array of two entries with a space between them",
            ));
        };
        merges.push(halves);
    }
    Ok(merges)
}

/// The pieces that text can become, each with its score.
fn read_pieces<'a>(
    file: &GgufFile,
    vocabulary: &Vocabulary<'a>,
    runs: &'a BTreeMap<u32, String>,
) -> Result<Vec<Piece<'a>>, ModelFilesError> {
    let wanted = "an array with a float per token";
    let scores = file
        .array(KEY_SCORES, wanted, |value| {
            value.as_f64().filter(|score| !score.is_nan())
        })?
        .ok_or_else(|| file.error(GgufProblem::MissingKey(KEY_SCORES.into())))?;
    if scores.len() != vocabulary.tokens.len() {
        let found = format!("an array of {} numbers", scores.len());
        let wanted = format!("one per token, {}", vocabulary.tokens.len());
        return Err(kind_error(file, KEY_SCORES, found, wanted));
    }
    let mut tokens = vocabulary.tokens.iter().enumerate();
    if let Some((id, token)) = tokens.find(|(_, token)| token.len() > MAX_PIECE_BYTES) {
        let found = format!("a token of {} bytes at index {id}", token.len());
        let wanted = format!("tokens of at most {MAX_PIECE_BYTES} bytes");
        return Err(kind_error(file, KEY_TOKENS, found, wanted));
    }
    let tokens = (0..).zip(vocabulary.tokens.iter().zip(&vocabulary.kinds).zip(scores));
    let normal = tokens.filter(|(_, ((_, kind), _))| **kind == TokenKind::Normal);
    let normal = normal.map(|(id, ((&text, _), score))| Piece {
        text,
        id,
        score: score as f32,
    });
    let runs = runs.iter().map(|(&id, text)| Piece {
        text,
        id,
        score: f32::INFINITY,
    });
    Ok(normal.chain(runs).collect())
}

/// User-defined pieces of SentencePiece that are nothing but spaces (Gemma's), by id, as text has them once its spaces are
/// `▁`; converters write them with spaces. They replace that spelling in the vocabulary, where the other is free, and merge
/// before all else: as Hugging Face transformers converts such a vocabulary.
fn space_runs(vocabulary: &Vocabulary<'_>, ids: &mut Vocab) -> BTreeMap<u32, String> {
    let mut runs = BTreeMap::new();
    for (id, (token, &kind)) in (0_u32..).zip(vocabulary.tokens.iter().zip(&vocabulary.kinds)) {
        let is_run = token.len() > 1 && token.bytes().all(|byte| byte == b' ');
        let spelling = "▁".repeat(token.len());
        if kind == TokenKind::UserDefined && is_run && !ids.contains_key(spelling.as_str()) {
            ids.remove(*token);
            ids.insert(spelling.clone(), id);
            runs.insert(id, spelling);
        }
    }
    runs
}

/// The tokens that are found in a text before it is cut.
fn added_tokens(vocabulary: &Vocabulary<'_>, runs: &BTreeMap<u32, String>, takes_white_space: bool) -> Vec<AddedToken> {
    let tokens = (0_u32..).zip(vocabulary.tokens.iter().zip(&vocabulary.kinds));
    let added = tokens.filter(|(_, (token, kind))| {
        let sort = matches!(kind, TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown);
        sort && !token.is_empty()
    });
    added
        .map(|(id, (&token, kind))| {
            let content = runs.get(&id).map_or(token, String::as_str);
            AddedToken::from(content, kind.is_special())
                .normalized(false)
                .rstrip(takes_white_space && !PLAIN_PHI3_TOKENS.contains(&token))
        })
        .collect()
}

fn build(file: &GgufFile, vocabulary: &Vocabulary<'_>, kind: Kind) -> Result<(Tokenizer, TokenTable), ModelFilesError> {
    let mut ids = Vocab::new();
    let mut table = TokenTable::default();
    let rule = kind.rule();
    for (id, (&token, &kind)) in (0_u32..).zip(vocabulary.tokens.iter().zip(&vocabulary.kinds)) {
        if let Some(first) = ids.get(token) {
            if kind != TokenKind::Unused {
                let found = format!("{token:?} twice, at {first} and {id}");
                return Err(kind_error(file, KEY_TOKENS, found, "every token once"));
            }
        } else {
            ids.insert(token.to_string(), id);
        }
        match kind {
            TokenKind::Normal | TokenKind::Byte => rule.push(&mut table, token),
            _ => table.push(token.as_bytes(), kind.is_special()),
        }
    }
    let runs = match kind {
        Kind::Bytes(_) => BTreeMap::new(),
        Kind::Sentence { .. } => space_runs(vocabulary, &mut ids),
    };
    let added = added_tokens(vocabulary, &runs, takes_white_space(file)?);
    let wrong = |what: String| ModelFilesError::invalid(file.path(), what);
    let mut tokenizer = match kind {
        Kind::Bytes(pre) => {
            let model = BPE::builder()
                .vocab_and_merges(ids, read_merges(file)?)
                .ignore_merges(pre.ignores_merges())
                .build()
                .map_err(|error| wrong(format!("key `{KEY_MERGES}` does not fit the vocabulary: {error}")))?;
            let mut tokenizer = Tokenizer::new(model);
            tokenizer.with_normalizer(pre.normalizer());
            tokenizer.with_pre_tokenizer(Some(pre.build().map_err(wrong)?));
            tokenizer
        }
        Kind::Sentence { prefix } => {
            let pieces = read_pieces(file, vocabulary, &runs)?;
            let merges = sentence_piece::merges(&pieces);
            let unknown = token_id(file, KEY_UNKNOWN, vocabulary)?.map(|id| vocabulary.tokens[id as usize]);
            let model = sentence_piece::model(ids, merges, unknown).map_err(wrong)?;
            let mut tokenizer = Tokenizer::new(model);
            tokenizer.with_normalizer(Some(sentence_piece::normalizer(prefix).map_err(wrong)?));
            tokenizer
        }
    };
    tokenizer.add_tokens(&added);
    Ok((tokenizer, table))
}
