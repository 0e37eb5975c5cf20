//! The splitting rules against an independent implementation (Python's `regex` module), and on hostile texts.

use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};

use super::fixture_json;
use crate::text::bytes::ByteRule;
use crate::text::pre_tokenizer::PreTokenizer;

fn split(rule: &str, text: &str) -> Vec<String> {
    let rule = PreTokenizer::from_name(rule).unwrap().build().unwrap();
    let mut pieces = PreTokenizedString::from(text);
    rule.pre_tokenize(&mut pieces).unwrap();
    let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
    let text_of = |piece: &str| String::from_utf8(ByteRule::ByteLevel.bytes(piece)).unwrap();
    splits
        .into_iter()
        .map(|(piece, _, _)| text_of(piece))
        .filter(|piece| !piece.is_empty())
        .collect()
}

#[test]
fn every_rule_splits_as_its_pattern_says() {
    let cases = fixture_json("pre-tokenizer-splits.json");
    assert!(cases.as_array().unwrap().len() > 200);
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        for rule in ["gpt-2", "default", "llama-bpe", "qwen2"] {
            let expected: Vec<String> = serde_json::from_value(case[rule].clone()).unwrap();
            assert_eq!(split(rule, text), expected, "{rule} on {text:?}");
        }
    }
}

#[test]
fn hostile_texts_are_split_without_loss() {
    for part in [" ", "\n", " \n", "a", "1", "!", "'", "é", "😀", "\u{301}", "\t x"] {
        let text = part.repeat(20_000);
        for rule in [
            "gpt-2",
            "default",
            "smollm",
            "llama-bpe",
            "qwen2",
            "gpt-4o",
            "tekken",
            "deepseek-llm",
            "deepseek-coder",
            "deepseek-v3",
        ] {
            assert_eq!(split(rule, &text).concat(), text, "{rule} on many {part:?}");
        }
    }
}

#[test]
fn unknown_rules_are_answered_with_the_known_ones() {
    let error = PreTokenizer::from_name("chameleon").unwrap_err();
    for name in [
        "smollm",
        "gpt-2",
        "default",
        "llama-bpe",
        "qwen2",
        "tekken",
        "deepseek-v3",
    ] {
        assert!(error.contains(name), "{error}");
    }
}
