//! Text from tokens: whole, and token by token.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;

use super::{fixture_json, tiny, with_tokenizer_json};
use crate::text::TextTokenizer;
use crate::text::bytes::ByteRule;

static TINY: LazyLock<TextTokenizer> = LazyLock::new(|| tiny().tokenizer);
static SENTENCE: LazyLock<TextTokenizer> = LazyLock::new(|| with_tokenizer_json(&sentence_json(true)).unwrap());

/// A SentencePiece vocabulary as Llama 2's: byte tokens 3..259, then pieces.
fn sentence_json(strip: bool) -> serde_json::Value {
    let mut vocabulary = serde_json::Map::new();
    for entry in ["<unk>", "<s>", "</s>"] {
        vocabulary.insert(entry.into(), vocabulary.len().into());
    }
    for byte in 0..=255_u8 {
        vocabulary.insert(format!("<0x{byte:02X}>"), vocabulary.len().into());
    }
    for entry in ["▁", "a", "b", "▁a", "ab", "▁ab", "▁▁", "é"] {
        vocabulary.insert(entry.into(), vocabulary.len().into());
    }
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if strip {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "normalized": false, "single_word": false,
               "lstrip": false, "rstrip": false})
    };
    json!({
        "version": "1.0",
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocabulary,
                  "merges": [["▁", "a"], ["a", "b"], ["▁a", "b"], ["▁", "▁"]]},
    })
}

fn stream(tokenizer: &TextTokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut decoder = tokenizer.incremental(skip_special);
    let mut text = String::new();
    for &id in ids {
        text.push_str(&decoder.push(id));
        assert!(
            decoder.pending().len() <= 3,
            "more than the begin of one character is held back"
        );
        assert!(
            std::str::from_utf8(decoder.pending()).is_err_and(|error| error.error_len().is_none())
                || decoder.pending().is_empty()
        );
    }
    text.push_str(&decoder.finish());
    text
}

fn all_bytes(tokenizer: &TextTokenizer, ids: &[u32], skip_special: bool) -> Vec<u8> {
    let shown = ids.iter().filter(|&&id| !(skip_special && tokenizer.is_special(id)));
    shown.flat_map(|&id| tokenizer.token_bytes(id).to_vec()).collect()
}

fn one_replacement_per_byte(bytes: &[u8]) -> String {
    let parts = bytes.utf8_chunks();
    parts
        .map(|part| part.valid().to_owned() + &"\u{fffd}".repeat(part.invalid().len()))
        .collect()
}

#[test]
fn encoding_and_decoding_agree_with_hugging_face() {
    let cases = fixture_json("llama-text.json");
    for case in cases["encode"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(TINY.encode(text).unwrap(), ids, "{text:?}");
    }
    for case in cases["decode"].as_array().unwrap() {
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(TINY.decode(&ids, false), case["text"].as_str().unwrap(), "{ids:?}");
        assert_eq!(TINY.decode(&ids, true), case["visible"].as_str().unwrap(), "{ids:?}");
    }
}

#[test]
fn every_byte_has_one_character_in_byte_level_vocabularies() {
    // The rule, restated: printable Latin-1 stands for itself, the rest is numbered from 256 on in order of the byte.
    let mut next = 256;
    for byte in 0..=255_u8 {
        let printable = matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let character = if printable {
            char::from(byte)
        } else {
            char::from_u32(next).unwrap()
        };
        next += u32::from(!printable);
        assert_eq!(ByteRule::ByteLevel.bytes(&character.to_string()), [byte]);
    }
    assert_eq!(ByteRule::ByteLevel.bytes("Ġthe"), b" the");
    assert_eq!(ByteRule::ByteLevel.bytes("Ċ"), b"\n");
    assert_eq!(
        ByteRule::ByteLevel.bytes("<｜x｜>"),
        "<｜x｜>".as_bytes(),
        "no character outside the map is lost"
    );
}

#[test]
fn characters_come_out_whole_and_as_early_as_they_can() {
    let bytes: Vec<u32> = "é😀x".bytes().map(|byte| 3 + u32::from(byte)).collect();
    let mut decoder = SENTENCE.incremental(true);
    let parts: Vec<String> = bytes.iter().map(|&id| decoder.push(id)).collect();
    assert_eq!(parts, ["", "é", "", "", "", "😀", "x"]);
    assert_eq!(decoder.finish(), "");
}

#[test]
fn invalid_bytes_of_sentence_piece_become_one_replacement_each() {
    let push_all = |bytes: &[u8]| {
        let mut decoder = SENTENCE.incremental(true);
        let parts: Vec<String> = bytes.iter().map(|&byte| decoder.push(3 + u32::from(byte))).collect();
        (parts, decoder.finish())
    };
    // A character cut by a letter is proven invalid by the letter.
    assert_eq!(
        push_all(b"\xe4\xbdA"),
        (
            vec![String::new(), String::new(), "\u{fffd}\u{fffd}A".into()],
            String::new()
        )
    );
    // A byte that begins nothing is invalid at once.
    assert_eq!(push_all(b"\xff"), (vec!["\u{fffd}".into()], String::new()));
    // An incomplete tail is proven invalid by the end.
    assert_eq!(
        push_all(b"\xf0\x9f\x98"),
        (vec![String::new(); 3], "\u{fffd}".repeat(3))
    );
    // What is out is out: a text of the whole sequence has no é, as all its bytes are one run.
    assert_eq!(push_all(b"\xc3\xa9\xff").0.concat(), "é\u{fffd}");
    let ids = b"\xc3\xa9\xff".map(|byte| 3 + u32::from(byte));
    assert_eq!(SENTENCE.decode(&ids, true), "\u{fffd}".repeat(3));
}

#[test]
fn finish_leaves_the_decoder_as_new() {
    let mut decoder = SENTENCE.incremental(true);
    assert_eq!(decoder.push(3 + 0xe4), "");
    assert_eq!(decoder.finish(), "\u{fffd}");
    assert_eq!(decoder.finish(), "");
    let letter = SENTENCE.token_id("a").unwrap();
    assert_eq!(decoder.push(letter), "a");
}

#[test]
fn leading_spaces_are_kept() {
    // " 'm" and " a" as first generated tokens: nothing trims them, nothing joins them to a word before.
    for text in [" 'm", "  x", " and"] {
        let ids = TINY.encode(text).unwrap();
        assert_eq!(stream(&TINY, &ids, true), text);
        assert_eq!(TINY.decode(&ids, true), text);
    }
    let piece = SENTENCE.token_id("▁ab").unwrap();
    assert_eq!(
        SENTENCE.incremental(true).push(piece),
        " ab",
        "generated text continues a prompt"
    );
    assert_eq!(
        SENTENCE.decode(&[piece], true),
        "ab",
        "a whole text loses the space its tokenizer put there"
    );
    assert_eq!(
        SENTENCE.decode(&[SENTENCE.token_id("▁▁").unwrap(), piece], true),
        "  ab"
    );
    let keeps = with_tokenizer_json(&sentence_json(false)).unwrap();
    assert_eq!(keeps.decode(&[piece], true), " ab");
}

#[test]
fn sentence_piece_texts_come_back() {
    assert_eq!(
        SENTENCE.encode("ab a").unwrap()[0],
        1,
        "the post-processor's begin token"
    );
    assert_eq!(
        SENTENCE.encode_plain("ab").unwrap(),
        [SENTENCE.token_id("▁ab").unwrap()]
    );
    for text in ["ab a", "a", " a", "😀 ab", "a\nb", "日本"] {
        assert_eq!(SENTENCE.decode(&SENTENCE.encode(text).unwrap(), true), text);
        assert_eq!(SENTENCE.decode(&SENTENCE.encode_plain(text).unwrap(), true), text);
    }
}

#[test]
fn special_tokens_are_shown_or_dropped() {
    let ids = TINY.encode("<s>a</s>").unwrap();
    assert_eq!(ids, [0, 67, 1]);
    assert_eq!(TINY.decode(&ids, false), "<s>a</s>");
    assert_eq!(TINY.decode(&ids, true), "a");
    assert_eq!(stream(&TINY, &ids, false), "<s>a</s>");
    assert_eq!(stream(&TINY, &ids, true), "a");
    assert!(TINY.is_special(1) && !TINY.is_special(67));
    assert_eq!(TINY.token_text(1), "</s>");
    // A dropped special token does not cut the character around it.
    let around = [3 + 0xc3, 2, 3 + 0xa9];
    assert_eq!(stream(&SENTENCE, &around, true), "é");
    assert_eq!(stream(&SENTENCE, &around, false), "\u{fffd}</s>\u{fffd}");
}

#[test]
fn ids_outside_the_vocabulary_add_nothing() {
    let size = TINY.vocab_size() as u32;
    for id in [size, 511, u32::MAX] {
        assert_eq!(TINY.token_bytes(id), b"");
        assert!(!TINY.is_special(id));
        assert_eq!(TINY.decode(&[id, 67], false), "a");
        assert_eq!(stream(&TINY, &[id, 67], true), "a");
    }
}

#[test]
fn decoders_that_are_not_understood_are_refused() {
    for (decoder, what) in [
        (
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            "type \"WordPiece\"",
        ),
        (
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
            "type \"Metaspace\"",
        ),
        (serde_json::Value::Null, "type \"none\""),
        (
            json!({"type": "Sequence", "decoders": [{"type": "CTC", "pad_token": "", "word_delimiter_token": "|", "cleanup": true}]}),
            "step 0, CTC",
        ),
        (
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}]}),
            "no step that replaces ▁",
        ),
    ] {
        let mut json = sentence_json(true);
        json["decoder"] = decoder;
        let error = with_tokenizer_json(&json).unwrap_err();
        assert!(error.contains(what) && error.contains("tokenizer.json"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn parts_make_the_whole(ids in prop::collection::vec(0_u32..500, 0..60), skip in any::<bool>()) {
        let text = stream(&TINY, &ids, skip);
        prop_assert_eq!(&text, &TINY.decode(&ids, skip));
        prop_assert_eq!(text, String::from_utf8_lossy(&all_bytes(&TINY, &ids, skip)).into_owned());
    }

    #[test]
    fn parts_make_the_whole_with_byte_fallback(ids in prop::collection::vec(0_u32..270, 0..60), skip in any::<bool>()) {
        let text = stream(&SENTENCE, &ids, skip);
        let expected = one_replacement_per_byte(&all_bytes(&SENTENCE, &ids, skip));
        prop_assert_eq!(&text, &expected);
        // The whole differs in runs of byte tokens alone, and there by their valid characters alone.
        let whole = SENTENCE.decode(&ids, skip);
        if !expected.contains('\u{fffd}') {
            prop_assert_eq!(&whole, expected.strip_prefix(' ').unwrap_or(&expected));
        }
    }

    #[test]
    fn any_text_comes_back(text in "\\PC{0,40}") {
        // Written-out special tokens become their ids and back, so they come back too.
        let ids = TINY.encode(&text).unwrap();
        prop_assert_eq!(TINY.decode(&ids, false), text.clone());
        prop_assert_eq!(stream(&TINY, &ids, false), text);
    }
}
