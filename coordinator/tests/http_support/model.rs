//! A text model without weights in which every token is a byte.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use model_files::{ModelFiles, TextModel};
use serde_json::{Map, Value, json};

/// Begin of text: put in front of every prompt.
pub const BOS: u32 = 256;
/// End of text.
pub const EOS: u32 = 257;
/// Another special token.
pub const SPECIAL: u32 = 258;
/// Rows of the model's output.
pub const VOCAB: usize = 259;

/// The text side.
pub fn text() -> TextModel {
    static MODEL: OnceLock<TextModel> = OnceLock::new();
    MODEL.get_or_init(load).clone()
}

/// The tokens of a text without special tokens: its bytes.
pub fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn load() -> TextModel {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("tiny-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("a folder for the model");
    let write = |name: &str, value: &Value| fs::write(directory.join(name), value.to_string()).expect("written");
    write(
        "config.json",
        &json!({ "model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": 256 }),
    );
    write(
        "tokenizer_config.json",
        &json!({ "bos_token": "<s>", "eos_token": "</s>" }),
    );
    write("tokenizer.json", &tokenizer());
    fs::write(directory.join("model.safetensors"), b"").expect("written");
    let files = ModelFiles::open(&directory).expect("a model directory");
    let text = TextModel::load(&files).expect("a text model");
    fs::remove_dir_all(&directory).expect("removed");
    text
}

fn tokenizer() -> Value {
    let vocabulary: Map<String, Value> = (0..=255_u32)
        .map(|byte| (byte_character(byte).to_string(), Value::from(byte)))
        .collect();
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true
        })
    };
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(BOS, "<s>"), special(EOS, "</s>"), special(SPECIAL, "<x>")],
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                { "SpecialToken": { "id": "<s>", "type_id": 0 } },
                { "Sequence": { "id": "A", "type_id": 0 } }
            ],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [BOS], "tokens": ["<s>"] } }
        },
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": []
        }
    })
}

/// The character that byte-level tokenizers write for a byte: printable ones stand for themselves, the others follow
/// after U+0100 in order.
fn byte_character(byte: u32) -> char {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let code = if printable(byte) {
        byte
    } else {
        256 + (0..byte).filter(|&lower| !printable(lower)).count() as u32
    };
    char::from_u32(code).expect("below the surrogates")
}
