use super::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn listing(names: &[&str]) -> Listing {
    let siblings: Vec<String> = names
        .iter()
        .map(|name| format!("{{\"rfilename\":{}}}", serde_json::to_string(name).unwrap()))
        .collect();
    Listing::read(format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{}]}}", siblings.join(",")).as_bytes()).unwrap()
}

fn reference(text: &str) -> HubReference {
    HubReference::parse(text).unwrap()
}

#[test]
fn the_list_tells_sizes_and_checksums() {
    let sha = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
    let answer = format!(
        r#"{{"sha":"{COMMIT}","siblings":[
        {{"rfilename":"a","size":6,"blobId":"ce013625030ba8dba906f756967f9e9ca394464a"}},
        {{"rfilename":"b","size":6,"blobId":"{COMMIT}","lfs":{{"sha256":"{sha}","size":6,"pointerSize":127}}}},
        {{"rfilename":"c"}}],"gated":false}}"#
    );
    let listing = Listing::read(answer.as_bytes()).unwrap();
    let whole = |name: &str| {
        listing.files[name]
            .whole()
            .map(|(size, sum)| (size, sum.digits().to_owned()))
    };
    assert_eq!(
        whole("a"),
        Some((6, "ce013625030ba8dba906f756967f9e9ca394464a".to_owned()))
    );
    assert_eq!(whole("b"), Some((6, sha.to_owned())), "of the file, not of its pointer");
    assert_eq!(whole("c"), None);
    assert!(Listing::read(br#"{"sha":"main","siblings":[]}"#).is_err());
    assert!(Listing::read(b"<html>").is_err());
}

#[test]
fn only_what_the_loader_reads_is_fetched() {
    let listing = listing(&[
        ".gitattributes",
        "README.md",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "special_tokens_map.json",
        "model.safetensors",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "original/tokenizer.model",
        "consolidated.safetensors",
        "tokenizer/../../evil",
    ]);
    let text = listing.text(&reference("hf://a/b"), true).unwrap();
    assert_eq!(
        text,
        [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    assert_eq!(
        listing.weights(&reference("hf://a/b"), None).unwrap(),
        ["model.safetensors"]
    );
}

#[test]
fn paths_that_lead_elsewhere_are_left_out() {
    let wrong = ["/etc/passwd", "../x", "a/../x", "a//x", "./x", "", "a\\b", "a\nb", ".."];
    assert!(listing(&wrong).files.is_empty());
    assert_eq!(listing(&["a/b.gguf", "..c"]).files.len(), 2);
}

#[test]
fn the_index_says_which_weights() {
    let listing = listing(&[
        "config.json",
        INDEX,
        "m-1.safetensors",
        "m-2.safetensors",
        "m-3.safetensors",
    ]);
    let reference = reference("hf://a/b");
    assert_eq!(listing.text(&reference, true).unwrap(), ["config.json", INDEX]);
    assert_eq!(listing.text(&reference, false).unwrap(), ["config.json"]);
    let of = |index: &str| {
        listing
            .weights(&reference, Some(index.as_bytes()))
            .map_err(|e| e.to_string())
    };
    let two = r#"{"weight_map":{"x":"m-2.safetensors","y":"m-1.safetensors","z":"m-2.safetensors"}}"#;
    assert_eq!(of(two).unwrap(), ["m-1.safetensors", "m-2.safetensors"]);
    let missing = of(r#"{"weight_map":{"x":"m-4.safetensors"}}"#).unwrap_err();
    assert!(
        missing.contains("no file m-4.safetensors") && missing.contains("m-3.safetensors"),
        "{missing}"
    );
    let outside = of(r#"{"weight_map":{"x":"../m-1.safetensors"}}"#).unwrap_err();
    assert!(outside.contains("no plain file name"), "{outside}");
    assert!(of("{").is_err());
}

#[test]
fn what_is_no_model_directory_is_told_from_one() {
    let text = |listing: &Listing, weights| listing.text(&reference("hf://a/b"), weights).map_err(|e| e.to_string());
    let gguf = text(&listing(&["x.gguf", "README.md"]), true).unwrap_err();
    assert!(gguf.contains("hf://a/b/x.gguf"), "{gguf}");
    assert!(
        text(&listing(&["README.md"]), true)
            .unwrap_err()
            .contains("config.json")
    );
    let bin = listing(&["config.json", "pytorch_model.bin"]);
    assert!(text(&bin, true).unwrap_err().contains("neither model.safetensors"));
    assert!(text(&bin, false).is_ok(), "who needs no weights misses none");
}

#[test]
fn gguf_files_come_with_all_their_parts() {
    let parts = [
        "q/m-00001-of-00003.gguf",
        "q/m-00002-of-00003.gguf",
        "q/m-00003-of-00003.gguf",
    ];
    assert_eq!(gguf_parts(parts[1]), parts);
    for whole in [
        "m.gguf",
        "m-1-of-2.gguf",
        "m-00001-of-00000.gguf",
        "m-00001-of-99999.gguf",
        "m-of-00002.gguf",
    ] {
        assert_eq!(gguf_parts(whole), [whole]);
    }
    let listing = listing(&[parts[0], parts[2]]);
    let error = listing
        .text(&reference("hf://a/b/q/m-00001-of-00003.gguf@v1"), true)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(parts[1]) && error.contains("in v1; there are q/m-00001"),
        "{error}"
    );
}
