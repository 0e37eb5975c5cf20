//! The text side of model directories.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{copy_of_tiny, text_of, tiny};
use crate::files::{ModelFiles, Source};

fn edit(directory: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = directory.join(file);
    let mut json: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(&path, json.to_string()).unwrap();
}

#[test]
fn the_tiny_checkpoint_is_read_in_full() {
    let text = tiny();
    assert_eq!((text.vocab_size, text.max_position_embeddings), (512, 512));
    assert_eq!((text.architecture.as_str(), text.name.as_str()), ("llama", "llama"));
    assert_eq!(text.eos_token_ids, [1]);
    assert_eq!((text.bos_token_id, text.add_bos), (Some(0), false));
    assert_eq!(text.tokenizer.vocab_size(), 485);
    assert!(text.chat_template.unwrap().problem().is_none());
}

#[test]
fn config_and_weights_are_handed_out() {
    let directory = copy_of_tiny();
    let files = ModelFiles::open(directory.path()).unwrap();
    assert_eq!(files.architecture().unwrap(), "llama");
    let Source::Directory(opened) = files.source() else {
        panic!("a directory")
    };
    assert_eq!(opened.config()["hidden_size"], 64);
    assert_eq!(opened.weight_files(), [directory.path().join("model.safetensors")]);
    assert!(opened.weight_map().is_empty());

    fs::write(directory.path().join("part-1.safetensors"), [0]).unwrap();
    fs::write(directory.path().join("part-2.safetensors"), [0]).unwrap();
    let index =
        json!({"weight_map": {"a": "part-2.safetensors", "b": "part-1.safetensors", "c": "part-2.safetensors"}});
    fs::write(directory.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let files = ModelFiles::open(directory.path()).unwrap();
    let Source::Directory(opened) = files.source() else {
        panic!("a directory")
    };
    let names: Vec<_> = opened
        .weight_files()
        .iter()
        .map(|path| path.file_name().unwrap().to_str().unwrap())
        .collect();
    assert_eq!(names, ["part-1.safetensors", "part-2.safetensors"]);
    assert_eq!(opened.weight_map()["b"], directory.path().join("part-1.safetensors"));
}

#[test]
fn end_tokens_come_from_the_first_place_that_names_them() {
    let directory = copy_of_tiny();
    let ends = || text_of(directory.path()).map(|text| text.eos_token_ids);
    let write = |json: Value| fs::write(directory.path().join("generation_config.json"), json.to_string()).unwrap();
    write(json!({"eos_token_id": [7, 1, 7]}));
    assert_eq!(ends().unwrap(), [1, 7]);
    write(json!({"eos_token_id": 9}));
    assert_eq!(ends().unwrap(), [9]);
    write(json!({"temperature": 0.5}));
    assert_eq!(ends().unwrap(), [1], "config.json");
    edit(directory.path(), "config.json", |config| {
        config["eos_token_id"] = Value::Null
    });
    edit(directory.path(), "tokenizer_config.json", |config| {
        config["eos_token"] = json!({"content": "<unk>"})
    });
    assert_eq!(ends().unwrap(), [2], "the tokenizer's own");
    write(json!({"eos_token_id": "x"}));
    assert!(
        ends()
            .unwrap_err()
            .contains("key `eos_token_id` is \"x\"; a token id or a list of token ids")
    );
}

#[test]
fn generation_defaults_are_read() {
    let directory = copy_of_tiny();
    let write = |json: Value| fs::write(directory.path().join("generation_config.json"), json.to_string()).unwrap();
    write(json!({"temperature": 0.7, "top_k": 20, "top_p": null}));
    let defaults = text_of(directory.path()).unwrap().generation_defaults;
    assert_eq!(
        (defaults.temperature, defaults.top_k, defaults.top_p),
        (Some(0.7), Some(20), None)
    );
    write(json!({"top_k": -1}));
    assert!(
        text_of(directory.path())
            .unwrap_err()
            .contains("key `top_k` is -1; a whole number from 0 on")
    );
    write(json!({"top_p": "high"}));
    assert!(
        text_of(directory.path())
            .unwrap_err()
            .contains("key `top_p` is \"high\"; a number")
    );
}

#[test]
fn saved_truncation_and_padding_do_not_touch_prompts() {
    let directory = copy_of_tiny();
    edit(directory.path(), "tokenizer.json", |json| {
        json["truncation"] = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = json!({"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": null,
                                 "pad_id": 1, "pad_type_id": 0, "pad_token": "</s>"});
    });
    let text = text_of(directory.path()).unwrap();
    assert_eq!(
        text.tokenizer.encode("abc").unwrap().len(),
        tiny().tokenizer.encode("abc").unwrap().len()
    );
    assert_eq!(
        text.tokenizer_hash,
        tiny().tokenizer_hash,
        "what is not used does not count"
    );
}

#[test]
fn the_hash_sees_the_tokenizer_and_not_its_spelling() {
    let directory = copy_of_tiny();
    let hash = || ModelFiles::open(directory.path()).unwrap().tokenizer_hash().unwrap();
    assert_eq!(hash(), tiny().tokenizer_hash);
    let path = directory.path().join("tokenizer.json");
    let json: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    fs::write(&path, serde_json::to_string_pretty(&json).unwrap()).unwrap();
    assert_eq!(hash(), tiny().tokenizer_hash, "white space");
    edit(directory.path(), "tokenizer.json", |json| {
        json["added_tokens"][1]["special"] = json!(false)
    });
    assert_ne!(hash(), tiny().tokenizer_hash, "a special flag");
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    type Damage = Box<dyn Fn(&Path)>;
    let remove = |name: &'static str| -> Damage { Box::new(move |at: &Path| fs::remove_file(at.join(name)).unwrap()) };
    let write = |name: &'static str, text: &'static str| -> Damage {
        Box::new(move |at: &Path| fs::write(at.join(name), text).unwrap())
    };
    let set = |file: &'static str, key: &'static str, value: Value| -> Damage {
        Box::new(move |at: &Path| edit(at, file, |json| json[key] = value.clone()))
    };
    let index = "model.safetensors.index.json";
    let cases: Vec<(Damage, &str)> = vec![
        (remove("config.json"), "holds no config.json"),
        (remove("tokenizer.json"), "tokenizer.json: No such file"),
        (
            remove("model.safetensors"),
            "neither model.safetensors nor model.safetensors.index.json",
        ),
        (write("config.json", "{"), "config.json: not valid JSON: EOF"),
        (write("config.json", "[]"), "no JSON object at its top level"),
        (
            write("tokenizer.json", "{\"decoder\": {\"type\": \"ByteLevel\"}}"),
            "tokenizer.json: not a tokenizer",
        ),
        (
            set("config.json", "model_type", Value::Null),
            "key `model_type` is null; a string",
        ),
        (
            set("config.json", "vocab_size", json!(0)),
            "key `vocab_size` is 0; an integer from 1",
        ),
        (
            set("config.json", "max_position_embeddings", json!("x")),
            "key `max_position_embeddings` is \"x\"",
        ),
        (
            set("tokenizer_config.json", "bos_token", json!(5)),
            "key `bos_token` is 5; a string or an object",
        ),
        (
            write(index, "{\"weight_map\": {\"a\": \"../x\"}}"),
            "weight_map.a is \"../x\"; a plain file name",
        ),
        (
            write(index, "{\"weight_map\": {\"a\": \"x\"}}"),
            "that file is not in this directory",
        ),
        (write(index, "{\"weight_map\": {}}"), "weight_map is empty"),
        (write(index, "{}"), "missing field `weight_map`"),
    ];
    for (damage, expected) in cases {
        let directory = copy_of_tiny();
        damage(directory.path());
        let error = text_of(directory.path()).unwrap_err();
        assert!(error.contains(expected), "{error:?} should contain {expected:?}");
    }
    assert!(
        text_of(Path::new("/nonexistent/model.gguf"))
            .unwrap_err()
            .contains("/nonexistent/model.gguf: No such file")
    );
    let empty = tempfile::NamedTempFile::with_suffix(".gguf").unwrap();
    assert!(text_of(empty.path()).unwrap_err().contains("the file is empty"));
}

#[test]
fn a_token_id_beyond_reason_is_refused() {
    let directory = copy_of_tiny();
    edit(directory.path(), "tokenizer.json", |json| {
        json["model"]["vocab"]["zz"] = json!(4_000_000_000_u32)
    });
    assert!(
        text_of(directory.path())
            .unwrap_err()
            .contains("token \"zz\" has id 4000000000; an id below 4194304")
    );
}
