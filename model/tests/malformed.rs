//! Safetensors files and indexes that are cut, lie or contradict themselves: each is refused, and the message names the file
//! and the tensor or key.

mod support;

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};
use support::checkpoint::{Checkpoint, Element, temporary};
use support::{Setup, tiny_llama};

const NAME: &str = "model.layers.1.mlp.up_proj.weight";

fn refused(path: &Path, words: &[&str]) {
    let message = match Setup::quantised().load_with(path, &[]) {
        Ok(_) => panic!("loaded, but must be refused for {words:?}"),
        Err(error) => error.to_string(),
    };
    eprintln!("{message}");
    for word in words {
        assert!(message.contains(word), "{message:?} does not name {word:?}");
    }
}

/// Header and data of a file.
struct File {
    header: Map<String, Value>,
    data: Vec<u8>,
}

impl File {
    fn tiny() -> Self {
        let bytes = fs::read(tiny_llama().join("model.safetensors")).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        Self {
            header: serde_json::from_slice(&bytes[8..8 + length]).unwrap(),
            data: bytes[8 + length..].to_vec(),
        }
    }

    fn offsets(&self, name: &str) -> (u64, u64) {
        let list = &self.header[name]["data_offsets"];
        (list[0].as_u64().unwrap(), list[1].as_u64().unwrap())
    }

    /// The tensor behind `name`.
    fn next(&self, name: &str) -> String {
        let (_, end) = self.offsets(name);
        let found = self.header.iter().find(|(_, tensor)| tensor["data_offsets"][0] == end);
        found.unwrap().0.clone()
    }
}

/// A file with this text as its header.
fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// The tiny model with these bytes as its weights.
fn with_bytes(bytes: &[u8], words: &[&str]) {
    let (_keep, path) = temporary("model");
    Checkpoint::tiny().write_directory(&path, Element::F32);
    fs::write(path.join("model.safetensors"), bytes).unwrap();
    refused(&path, &[&["model.safetensors"], words].concat());
}

fn changed(change: impl FnOnce(&mut File), words: &[&str]) {
    let mut file = File::tiny();
    change(&mut file);
    with_bytes(&raw(&Value::Object(file.header).to_string(), &file.data), words);
}

#[test]
fn headers_that_lie_about_themselves_are_named() {
    let file = File::tiny();
    let good = raw(&Value::Object(file.header.clone()).to_string(), &file.data);
    for length in [u64::MAX, 1 << 62, 100_000_001] {
        let bytes = [&length.to_le_bytes()[..], &good[8..]].concat();
        with_bytes(&bytes, &["header\'s length", &length.to_string(), "100000000"]);
    }
    let bytes = [&99_000_000_u64.to_le_bytes()[..], &good[8..]].concat();
    with_bytes(&bytes, &["header\'s length", "99000000", "left in the file"]);
    with_bytes(&good[..5], &["5 bytes", "8 bytes"]);
    for (header, words) in [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "an object of tensors"),
        ("{\"x\": 5}", "tensor x"),
        (
            "{\"x\": {\"dtype\": \"F32\", \"shape\": [1]}}",
            "tensor x: missing field `data_offsets`",
        ),
        (
            "{\"x\": {\"shape\": [1], \"data_offsets\": [0, 4]}}",
            "tensor x: missing field `dtype`",
        ),
        (
            "{\"x\": {\"dtype\": \"F32\", \"shape\": [-1], \"data_offsets\": [0, 4]}}",
            "tensor x",
        ),
        (
            "{\"x\": {\"dtype\": \"F32\", \"shape\": [1], \"data_offsets\": [0, 4, 8]}}",
            "tensor x",
        ),
        (
            "{\"x\": {\"dtype\": \"F32\", \"shape\": [1,1,1,1,1,1,1,1,1], \"data_offsets\": [0, 4]}}",
            "more than 8 dimensions",
        ),
    ] {
        with_bytes(&raw(header, &[0; 4]), &[words]);
    }
    // The same tensor twice in one header, at the same place.
    let text = Value::Object(file.header.clone()).to_string();
    let twice = format!("{},\"{NAME}\":{}}}", &text[..text.len() - 1], file.header[NAME]);
    with_bytes(&raw(&twice, &file.data), &[NAME, "twice"]);
}

#[test]
fn tensors_that_cannot_be_where_they_say_are_named() {
    let set = |key: &'static str, value: Value| move |file: &mut File| file.header[NAME][key] = value;
    changed(set("dtype", "F99".into()), &[NAME, "\"F99\""]);
    changed(set("dtype", "I64".into()), &[NAME, "I64", "data_offsets"]);
    changed(
        set("shape", json!([1_u64 << 63, 4])),
        &[NAME, "9223372036854775808", "no file"],
    );
    changed(set("shape", json!([u64::MAX, u64::MAX])), &[NAME, "no file"]);
    changed(
        set("shape", json!([64, 161])),
        &[NAME, "[64, 161]", "takes 41216 bytes", "hold 40960"],
    );
    changed(set("data_offsets", json!([8, 4])), &[NAME, "[8, 4]"]);
    changed(
        set("data_offsets", json!([0, u64::MAX])),
        &[NAME, "18446744073709551615", "cut or damaged"],
    );
    let shifted = |by: i64| {
        move |file: &mut File| {
            let (start, end) = file.offsets(NAME);
            let moved = [start as i64 + by, end as i64 + by];
            file.header[NAME]["data_offsets"] = json!(moved);
        }
    };
    let next = File::tiny().next(NAME);
    changed(shifted(-64), &[NAME, "overlap"]);
    changed(shifted(64), &[NAME, "belong to no tensor"]);
    changed(|file| drop(file.header.remove(NAME)), &[&next, "belong to no tensor"]);
    changed(
        |file| file.data.extend([0; 12]),
        &["the last ones of the file", "belong to no tensor"],
    );
    changed(
        |file| file.data.truncate(1_000),
        &["cut or damaged", "1000 bytes of data"],
    );
}

/// A type that the format has, and that is no weight's.
#[test]
fn types_that_are_no_weights_are_named() {
    let mut file = File::tiny();
    file.header[NAME]["dtype"] = "I32".into();
    let (_keep, path) = temporary("model");
    Checkpoint::tiny().write_directory(&path, Element::F32);
    let bytes = raw(&Value::Object(file.header).to_string(), &file.data);
    fs::write(path.join("model.safetensors"), bytes).unwrap();
    refused(&path, &[NAME, "I32", "F32, F16 and BF16"]);
}

/// The tiny model in two files with an index, changed.
fn sharded(change: impl FnOnce(&Path, &mut Value), words: &[&str]) {
    let (_keep, path) = temporary("model");
    let checkpoint = Checkpoint::tiny();
    let mut map = Map::new();
    for (place, layer) in [("a.safetensors", true), ("b.safetensors", false)] {
        let mut part = checkpoint.clone();
        part.tensors
            .retain(|name, _| name.starts_with("model.layers.1") == layer);
        part.write_directory(&path, Element::F32);
        fs::rename(path.join("model.safetensors"), path.join(place)).unwrap();
        map.extend(part.tensors.keys().map(|name| (name.clone(), place.into())));
    }
    let mut index = json!({"weight_map": map});
    change(&path, &mut index);
    fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
    if words.is_empty() {
        Setup::quantised().load(&path);
    } else {
        refused(&path, words);
    }
}

#[test]
fn indexes_that_lie_are_named() {
    let key = format!("weight_map.{NAME}");
    let to = |place: &'static str| move |_: &Path, index: &mut Value| index["weight_map"][NAME] = place.into();
    sharded(|_, _| (), &[]);
    for outside in [
        "../a.safetensors",
        "/etc/passwd",
        "x/../a.safetensors",
        "",
        ".",
        "..",
        "sub/a.safetensors",
    ] {
        sharded(to(outside), &["index.json", &key, "plain file name"]);
    }
    sharded(
        to("c.safetensors"),
        &["index.json", &key, "c.safetensors", "not in this directory"],
    );
    sharded(
        to("b.safetensors"),
        &["index.json", &key, "b.safetensors", "no such tensor"],
    );
    sharded(to("config.json"), &["config.json", "header"]);
    sharded(
        |_, index| index["weight_map"]["x.weight"] = "a.safetensors".into(),
        &["weight_map.x.weight", "no such tensor"],
    );
    sharded(
        |_, index| index["weight_map"] = json!({}),
        &["index.json", "weight_map is empty"],
    );
    sharded(|_, index| index["weight_map"] = json!([1]), &["index.json", "JSON"]);
    sharded(|_, index| index["weight_map"][NAME] = 5.into(), &["index.json", "JSON"]);
    sharded(
        |path, index| {
            fs::copy(path.join("a.safetensors"), path.join("c.safetensors")).unwrap();
            index["weight_map"]["model.layers.1.input_layernorm.weight"] = "c.safetensors".into();
        },
        &["c.safetensors", "model.layers.1.", "is also in", "a.safetensors"],
    );
    sharded(
        |path, _| fs::write(path.join("a.safetensors"), b"").unwrap(),
        &["a.safetensors", "empty"],
    );
}
