//! Parts that belong together are one file; what is missing or contradicts itself is named.

use std::fs;
use std::path::Path;

use super::super::testing::{Builder, Put};
use super::super::{GgmlType, GgufFile};
use super::PartName;
use crate::ModelFiles;

fn u16(number: u16) -> Put {
    Put::Raw(2, number.to_le_bytes().into())
}

fn i32(number: i32) -> Put {
    Put::Raw(5, number.to_le_bytes().into())
}

/// Part `number` (from 0) of three; each has a tensor of eight floats of its own.
fn part(number: u16) -> Builder {
    let mut builder = Builder::new()
        .put("split.no", u16(number))
        .put("split.count", u16(3))
        .put("split.tensors.count", i32(3))
        .tensor(&format!("tensor.{number}"), &[8], GgmlType::F32, u64::from(number) * 32)
        .data(96 + 32);
    if number == 0 {
        builder = builder.put("general.architecture", "llama");
    }
    builder
}

fn name(number: u16) -> String {
    format!("tiny-{:05}-of-00003.gguf", number + 1)
}

/// Writes three parts, changed, and opens the `given`-th.
fn open(given: u16, change: impl Fn(u16, Builder) -> Option<Builder>) -> (tempfile::TempDir, Result<GgufFile, String>) {
    let directory = tempfile::tempdir().unwrap();
    for number in 0..3 {
        if let Some(builder) = change(number, part(number)) {
            fs::write(directory.path().join(name(number)), builder.build()).unwrap();
        }
    }
    let opened = GgufFile::open(&directory.path().join(name(given)));
    (directory, opened.map_err(|error| error.to_string()))
}

fn refused(given: u16, change: impl Fn(u16, Builder) -> Option<Builder>, words: &[&str]) {
    let (_keep, opened) = open(given, change);
    let message = opened.unwrap_err();
    for word in words {
        assert!(message.contains(word), "{message:?} does not name {word:?}");
    }
}

fn without(key: &str, mut builder: Builder) -> Builder {
    builder.metadata.retain(|(name, _)| name != key);
    builder
}

#[test]
fn any_part_and_a_directory_with_them_stand_for_the_model() {
    for given in 0..3 {
        let (directory, file) = open(given, |_, builder| Some(builder));
        let file = file.unwrap();
        assert_eq!(file.path().file_name().unwrap(), name(0).as_str());
        assert_eq!(file.require_string("general.architecture").unwrap(), "llama");
        assert_eq!(file.paths().count(), 3);
        let sizes = fs::read_dir(directory.path()).unwrap();
        let sizes = sizes.map(|entry| entry.unwrap().metadata().unwrap().len());
        assert_eq!(file.file_bytes(), sizes.sum::<u64>());
        for number in 0..3 {
            let tensor = file.tensor(&format!("tensor.{number}")).unwrap();
            let bytes = file.tensor_bytes(tensor);
            assert_eq!((bytes.len(), tensor.part), (32, number));
            let part = fs::read(directory.path().join(name(number as u16))).unwrap();
            let at = part.len() - 128 + 32 * number;
            assert_eq!(bytes, &part[at..at + 32]);
        }
        let files = ModelFiles::open(directory.path()).unwrap();
        assert_eq!(files.architecture().unwrap(), "llama");
        let files = ModelFiles::open(directory.path().join(name(given))).unwrap();
        assert_eq!(files.name().unwrap(), "tiny");
        assert_eq!(files.weight_bytes(), file.file_bytes());
    }
}

#[test]
fn missing_parts_are_named() {
    let but = |gone: &'static [u16]| move |number, builder| (!gone.contains(&number)).then_some(builder);
    refused(0, but(&[2]), &[&name(0), "3 parts", &name(2)]);
    refused(2, but(&[0, 1]), &[&name(2), "2 are not", &name(0), &name(1)]);
    let (directory, _) = open(2, but(&[0, 1]));
    let message = ModelFiles::open(directory.path()).unwrap_err().to_string();
    assert!(message.contains(&name(0)), "{message}");
}

#[test]
fn keys_that_contradict_each_other_are_named() {
    let put = |which: u16, key: &'static str, value: Put| {
        move |number: u16, builder: Builder| {
            let builder = if number == which {
                without(key, builder).put(key, value.clone())
            } else {
                builder
            };
            Some(builder)
        }
    };
    refused(
        0,
        put(0, "split.count", u16(4)),
        &[&name(0), "split.count", "is 4", "3"],
    );
    refused(
        0,
        put(1, "split.count", u16(4)),
        &[&name(1), "split.count", "is 4", "3"],
    );
    refused(1, put(0, "split.no", u16(1)), &[&name(0), "split.no", "is 1", "0"]);
    refused(0, put(2, "split.no", "two".into()), &[&name(2), "split.no", "two", "2"]);
    refused(
        0,
        put(1, "split.tensors.count", i32(4)),
        &[&name(1), "split.tensors.count", "is 4", "3"],
    );
    refused(
        0,
        |_, b| Some(without("split.tensors.count", b)),
        &[&name(0), "split.tensors.count", "missing", "3"],
    );
    refused(
        0,
        |n, b| Some(if n == 1 { without("split.count", b) } else { b }),
        &[&name(1), "split.count", "missing"],
    );
    let four = |_, b| Some(without("split.tensors.count", b).put("split.tensors.count", i32(4)));
    refused(0, four, &[&name(0), "split.tensors.count", "is 4", "3"]);
    let same = |_, mut b: Builder| {
        b.tensors[0].name = "same".to_owned();
        Some(b)
    };
    refused(0, same, &[&name(1), "`same`", "earlier part"]);
}

#[test]
fn a_part_under_another_name_and_several_models_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("model.gguf"), part(0).build()).unwrap();
    let message = GgufFile::open(&at("model.gguf")).unwrap_err().to_string();
    assert!(
        message.contains("split.count") && message.contains("-of-00003.gguf"),
        "{message}"
    );
    fs::write(at("other.gguf"), part(0).build()).unwrap();
    let message = ModelFiles::open(directory.path()).unwrap_err().to_string();
    assert!(
        message.contains("2 models") && message.contains("other.gguf"),
        "{message}"
    );
}

#[test]
fn names_of_parts_are_read() {
    let read = |name: &str| PartName::read(Path::new(name)).map(|part| (part.stem.to_owned(), part.number, part.count));
    assert_eq!(read("/m/a-b-00002-of-00003.gguf"), Some(("a-b".to_owned(), 2, 3)));
    for other in [
        "a.gguf",
        "a-00000-of-00003.gguf",
        "a-00004-of-00003.gguf",
        "a-2-of-3.gguf",
        "a-+0002-of-00003.gguf",
        "a-00002-of-00003.bin",
        "00002-of-00003.gguf",
    ] {
        assert_eq!(read(other), None, "{other}");
    }
}
