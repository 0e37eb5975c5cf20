//! The text side of a model directory.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;
use tokenizers::Tokenizer;

use super::bytes::{ByteRule, TokenTable};
use super::hash;
use super::template::ChatTemplate;
use super::tokenizer::TextTokenizer;
use super::{GenerationDefaults, TextModel};
use crate::directory::{ModelDirectory, parse_json};
use crate::error::ModelFilesError;
use crate::files::ModelFiles;

/// Token ids are table indices; the largest known vocabulary is a sixteenth of this.
const MAX_TOKEN_ID: u32 = 1 << 22;

/// `model_type` of `config.json`.
pub(crate) fn architecture(directory: &ModelDirectory) -> Result<String, ModelFilesError> {
    match directory.config().get("model_type") {
        Some(Value::String(name)) => Ok(name.clone()),
        found => Err(wrong(
            directory,
            "config.json",
            "model_type",
            found,
            "a string, as \"llama\"",
        )),
    }
}

fn wrong(directory: &ModelDirectory, file: &str, key: &str, found: Option<&Value>, wanted: &str) -> ModelFilesError {
    let path = directory.path().join(file);
    match found {
        Some(value) => {
            let shown: String = value.to_string().chars().take(80).collect();
            ModelFilesError::invalid(&path, format!("key `{key}` is {shown}; {wanted} would be right"))
        }
        None => ModelFilesError::invalid(&path, format!("key `{key}` is missing; {wanted} would be right")),
    }
}

pub(crate) fn load(files: &ModelFiles, directory: &ModelDirectory) -> Result<TextModel, ModelFilesError> {
    let path = directory.tokenizer_path();
    let text = directory.read_tokenizer()?;
    let json = parse_json(&path, &text)?;
    let rule = decoder_rule(&path, json.get("decoder").unwrap_or(&Value::Null))?;
    let mut tokenizer: Tokenizer = text
        .parse()
        .map_err(|error| ModelFilesError::invalid(&path, format!("not a tokenizer: {error}")))?;
    // A saved truncation or padding setting would silently cut or lengthen prompts.
    tokenizer.with_padding(None);
    tokenizer
        .with_truncation(None)
        .map_err(|error| ModelFilesError::invalid(&path, error.to_string()))?;
    let (prefix, suffix) = surrounding(&path, &tokenizer)?;
    let table = token_table(&path, &tokenizer, rule)?;
    let tokenizer = TextTokenizer::new(tokenizer, table, rule, prefix.clone(), suffix);

    let bos = special_text(directory, "bos_token")?;
    let eos = special_text(directory, "eos_token")?;
    let bos_token_id = bos.as_deref().and_then(|text| tokenizer.token_id(text));
    let chat_template = template_source(directory)?
        .map(|source| ChatTemplate::new(&source, bos.as_deref().unwrap_or(""), eos.as_deref().unwrap_or("")));
    let size = |key: &str| match directory.config().get(key).and_then(Value::as_u64) {
        Some(size) if (1..=u64::from(u32::MAX)).contains(&size) => Ok(size as usize),
        _ => Err(wrong(
            directory,
            "config.json",
            key,
            directory.config().get(key),
            "an integer from 1 to 4294967295",
        )),
    };
    Ok(TextModel {
        eos_token_ids: end_tokens(directory, eos.as_deref().and_then(|text| tokenizer.token_id(text)))?,
        bos_token_id,
        add_bos: bos_token_id.is_some_and(|id| prefix.contains(&id)),
        chat_template,
        vocab_size: size("vocab_size")?,
        max_position_embeddings: files.positions(false)?,
        architecture: architecture(directory)?,
        name: files.name()?,
        tokenizer_hash: hash::of_tokenizer_json(&json),
        generation_defaults: generation_defaults(directory)?,
        tokenizer,
    })
}

/// What the decoder section of `tokenizer.json` means for single tokens.
fn decoder_rule(path: &Path, decoder: &Value) -> Result<ByteRule, ModelFilesError> {
    let kind = |value: &Value| value.get("type").and_then(Value::as_str).unwrap_or("none").to_string();
    let refuse = |what: &str| {
        let known = "ByteLevel, or a Sequence of Replace ▁ by a space, ByteFallback, Fuse and Strip of leading spaces";
        let message = format!("key `decoder` has {what}, which is not supported; {known} would be right");
        Err(ModelFilesError::invalid(path, message))
    };
    let steps = match kind(decoder).as_str() {
        "ByteLevel" => return Ok(ByteRule::ByteLevel),
        "Sequence" => decoder
            .get("decoders")
            .and_then(Value::as_array)
            .map_or(&[][..], Vec::as_slice),
        other => return refuse(&format!("type {other:?}")),
    };
    let mut strip_leading_spaces = 0;
    let (mut replaces, mut byte_fallback) = (false, false);
    for (index, step) in steps.iter().enumerate() {
        match kind(step).as_str() {
            "ByteLevel" if steps.len() == 1 => return Ok(ByteRule::ByteLevel),
            "Replace" if step["pattern"]["String"] == "▁" && step["content"] == " " => replaces = true,
            "ByteFallback" => byte_fallback = true,
            "Fuse" => {}
            "Strip" if index + 1 == steps.len() && step["content"] == " " && step["stop"] == 0 => {
                strip_leading_spaces = step["start"]
                    .as_u64()
                    .and_then(|count| count.try_into().ok())
                    .unwrap_or(0);
            }
            other => return refuse(&format!("step {index}, {other} {step}")),
        }
    }
    if replaces {
        Ok(ByteRule::Sentence {
            strip_leading_spaces,
            byte_fallback,
        })
    } else {
        refuse("no step that replaces ▁")
    }
}

/// What the tokenizer's post-processor puts around a text: learned from an empty one and checked on a short one.
fn surrounding(path: &Path, tokenizer: &Tokenizer) -> Result<(Vec<u32>, Vec<u32>), ModelFilesError> {
    let ids = |text: &str, special: bool| {
        tokenizer
            .encode_fast(text, special)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| ModelFilesError::invalid(path, format!("encoding {text:?} fails: {error}")))
    };
    let plain = ids("a", false)?;
    let whole = ids("a", true)?;
    let at = whole.windows(plain.len().max(1)).position(|window| window == plain);
    match at {
        Some(at) if !plain.is_empty() => Ok((whole[..at].to_vec(), whole[at + plain.len()..].to_vec())),
        _ => Err(ModelFilesError::invalid(
            path,
            "key `post_processor` changes the tokens of a text; one that only puts tokens around it would be right",
        )),
    }
}

fn token_table(path: &Path, tokenizer: &Tokenizer, rule: ByteRule) -> Result<TokenTable, ModelFilesError> {
    let vocabulary = tokenizer.get_vocab(true);
    let added = tokenizer.get_added_tokens_decoder();
    let mut by_id: HashMap<u32, &str> = HashMap::new();
    let mut end = 0;
    for (entry, &id) in &vocabulary {
        if id >= MAX_TOKEN_ID {
            let message = format!("token {entry:?} has id {id}; an id below {MAX_TOKEN_ID} would be right");
            return Err(ModelFilesError::invalid(path, message));
        }
        end = end.max(id + 1);
        by_id.insert(id, entry);
    }
    let mut table = TokenTable::default();
    for id in 0..end {
        match (added.get(&id), by_id.get(&id)) {
            (Some(token), _) => rule.push_added(&mut table, &token.content, token.special),
            (None, Some(entry)) => rule.push(&mut table, entry),
            // A gap in the ids: no text, like the ids after the end.
            (None, None) => table.push(&[], true),
        }
    }
    Ok(table)
}

/// `bos_token` and the like: a string, an object with `content`, null or nothing.
fn special_text(directory: &ModelDirectory, key: &str) -> Result<Option<String>, ModelFilesError> {
    let value = directory.tokenizer_config().and_then(|config| config.get(key));
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => match other.get("content").and_then(Value::as_str) {
            Some(text) => Ok(Some(text.to_string())),
            None => Err(wrong(
                directory,
                "tokenizer_config.json",
                key,
                value,
                "a string or an object with `content`",
            )),
        },
    }
}

/// Text of the chat template: `chat_template.jinja` wins over `tokenizer_config.json`.
fn template_source(directory: &ModelDirectory) -> Result<Option<String>, ModelFilesError> {
    if let Some(source) = directory.chat_template() {
        return Ok(Some(source.to_string()));
    }
    let file = "tokenizer_config.json";
    let value = directory
        .tokenizer_config()
        .and_then(|config| config.get("chat_template"));
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(other) => {
            let named = other
                .as_array()
                .into_iter()
                .flatten()
                .find(|entry| entry["name"] == "default");
            match named.and_then(|entry| entry["template"].as_str()) {
                Some(source) => Ok(Some(source.to_string())),
                None => Err(wrong(
                    directory,
                    file,
                    "chat_template",
                    value,
                    "a string or a list with a `default` entry",
                )),
            }
        }
    }
}

/// End tokens: `generation_config.json` decides, else `config.json`, else the tokenizer's end-of-text token.
fn end_tokens(directory: &ModelDirectory, tokenizer_eos: Option<u32>) -> Result<Vec<u32>, ModelFilesError> {
    let key = "eos_token_id";
    let places = [
        ("generation_config.json", directory.generation_config()),
        ("config.json", Some(directory.config())),
    ];
    for (file, config) in places {
        let value = config.and_then(|config| config.get(key));
        let list: Vec<&Value> = match value {
            None | Some(Value::Null) => continue,
            Some(Value::Array(list)) => list.iter().collect(),
            Some(one) => vec![one],
        };
        let ids: Option<Vec<u32>> = list.iter().map(|id| id.as_u64()?.try_into().ok()).collect();
        let mut ids = ids.ok_or_else(|| wrong(directory, file, key, value, "a token id or a list of token ids"))?;
        ids.sort_unstable();
        ids.dedup();
        return Ok(ids);
    }
    Ok(tokenizer_eos.into_iter().collect())
}

fn generation_defaults(directory: &ModelDirectory) -> Result<GenerationDefaults, ModelFilesError> {
    let Some(config) = directory.generation_config() else {
        return Ok(GenerationDefaults::default());
    };
    let number = |key: &str| match config.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64() {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(directory, "generation_config.json", key, Some(value), "a number")),
        },
    };
    let top_k = match number("top_k")? {
        Some(k) if k >= 0.0 && k <= f64::from(u32::MAX) && k.fract() == 0.0 => Some(k as u32),
        None => None,
        Some(_) => {
            return Err(wrong(
                directory,
                "generation_config.json",
                "top_k",
                config.get("top_k"),
                "a whole number from 0 on",
            ));
        }
    };
    Ok(GenerationDefaults {
        temperature: number("temperature")?.map(|value| value as f32),
        top_k,
        top_p: number("top_p")?.map(|value| value as f32),
    })
}
