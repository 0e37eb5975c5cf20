//! Tokenizers from GGUF metadata: small files, right and wrong.

use std::io::Write as _;

use tempfile::NamedTempFile;

use super::text_of;
use crate::files::ModelFiles;
use crate::gguf::testing::{Builder, Put};
use crate::text::TextModel;

/// The characters of byte-level BPE for ASCII letters and a space, two merges, and the special tokens of a chat model.
const TOKENS: [&str; 10] = [
    "<|bos|>",
    "<|eot_id|>",
    "a",
    "b",
    "c",
    "Ġ",
    "ab",
    "Ġab",
    "[PAD9]",
    "<tool>",
];
const KINDS: [u32; 10] = [3, 3, 1, 1, 1, 1, 1, 1, 5, 4];

fn strings(texts: &[&str]) -> Put {
    Put::Strs(texts.iter().map(ToString::to_string).collect())
}

fn base(pre: &str) -> Builder {
    Builder::new()
        .put("general.architecture", "llama")
        .put("llama.context_length", 128)
        .put("tokenizer.ggml.model", "gpt2")
        .put("tokenizer.ggml.pre", pre)
        .put("tokenizer.ggml.tokens", strings(&TOKENS))
        .put("tokenizer.ggml.token_type", Put::U32s(KINDS.into()))
        .put("tokenizer.ggml.merges", strings(&["a b", "Ġ ab"]))
        .put("tokenizer.ggml.bos_token_id", 0)
}

/// The same file with another value for one key; `None` takes the key out.
fn with(mut builder: Builder, key: &str, value: Option<Put>) -> Builder {
    builder.metadata.retain(|(known, _)| known != key);
    match value {
        Some(value) => builder.put(key, value),
        None => builder,
    }
}

fn write(builder: &Builder) -> NamedTempFile {
    let mut file = NamedTempFile::with_suffix(".gguf").unwrap();
    file.write_all(&builder.build()).unwrap();
    file
}

fn load(builder: &Builder) -> Result<TextModel, String> {
    text_of(write(builder).path())
}

#[test]
fn a_small_file_is_read_in_full() {
    let text = load(
        &base("gpt-2")
            .put("general.name", "Small One")
            .put("general.sampling.top_k", 40),
    )
    .unwrap();
    assert_eq!(text.tokenizer.encode("ab ab").unwrap(), [6, 7]);
    assert_eq!(text.tokenizer.encode("<|bos|>a<tool>c").unwrap(), [0, 2, 9, 4]);
    assert_eq!(text.tokenizer.decode(&[0, 6, 7, 9, 8, 1], true), "ab ab<tool>");
    assert_eq!(text.tokenizer.decode(&[0, 6, 8], false), "<|bos|>ab[PAD9]");
    assert_eq!(text.tokenizer.vocab_size(), 10);
    assert_eq!((text.vocab_size, text.max_position_embeddings), (10, 128));
    assert_eq!((text.architecture.as_str(), text.name.as_str()), ("llama", "Small One"));
    assert_eq!(text.bos_token_id, Some(0));
    assert!(!text.add_bos);
    assert_eq!(text.eos_token_ids, [1], "an end-of-turn token is known by its name");
    assert!(text.chat_template.is_none());
    assert_eq!(text.generation_defaults.top_k, Some(40));
    assert_eq!(text.generation_defaults.temperature, None);
}

#[test]
fn begin_and_end_tokens_follow_the_flags() {
    let encode = |builder: &Builder| load(builder).unwrap().tokenizer.encode("ab").unwrap();
    assert_eq!(
        encode(&base("llama-bpe")),
        [0, 6],
        "Llama 3 adds its begin token when the file is silent"
    );
    let flag = |builder, on: bool| with(builder, "tokenizer.ggml.add_bos_token", Some(on.into()));
    assert_eq!(encode(&flag(base("llama-bpe"), false)), [6]);
    assert_eq!(encode(&flag(base("gpt-2"), true)), [0, 6]);
    let both = flag(base("gpt-2"), true)
        .put("tokenizer.ggml.add_eos_token", true)
        .put("tokenizer.ggml.eos_token_id", 1);
    assert_eq!(encode(&both), [0, 6, 1]);
    let text = load(&both).unwrap();
    assert_eq!(text.tokenizer.encode_plain("ab").unwrap(), [6]);
    assert!(text.add_bos);
    let without = with(flag(base("gpt-2"), true), "tokenizer.ggml.bos_token_id", None);
    assert!(
        load(&without)
            .unwrap_err()
            .contains("`tokenizer.ggml.add_bos_token` is true")
    );
}

#[test]
fn all_end_keys_count_once() {
    let text = load(
        &base("gpt-2")
            .put("tokenizer.ggml.eos_token_id", 4)
            .put("tokenizer.ggml.eot_token_id", 1)
            .put("tokenizer.ggml.eom_token_id", 4),
    );
    assert_eq!(text.unwrap().eos_token_ids, [1, 4]);
}

#[test]
fn llama3_takes_known_words_whole() {
    // "abc" is in the vocabulary but no merge leads to it.
    let tokens = ["<|bos|>", "a", "b", "c", "abc"];
    let builder = |pre: &str| {
        let builder = with(base(pre), "tokenizer.ggml.tokens", Some(strings(&tokens)));
        let builder = with(
            builder,
            "tokenizer.ggml.token_type",
            Some(Put::U32s(vec![3, 1, 1, 1, 1])),
        );
        let builder = with(builder, "tokenizer.ggml.merges", Some(strings(&[])));
        with(builder, "tokenizer.ggml.add_bos_token", Some(false.into()))
    };
    assert_eq!(
        load(&builder("llama-bpe")).unwrap().tokenizer.encode("abc").unwrap(),
        [4]
    );
    assert_eq!(
        load(&builder("gpt-2")).unwrap().tokenizer.encode("abc").unwrap(),
        [1, 2, 3]
    );
}

#[test]
fn qwen2_normalises_before_it_splits() {
    // é as one character is the bytes c3 a9; as e and an accent it is 65 cc 81.
    let tokens = ["<|bos|>", "e", "Ã", "©", "Ì", "\u{123}", "Ã©"];
    let builder = |pre: &str| {
        let builder = with(base(pre), "tokenizer.ggml.tokens", Some(strings(&tokens)));
        let builder = with(
            builder,
            "tokenizer.ggml.token_type",
            Some(Put::U32s(vec![3, 1, 1, 1, 1, 1, 1])),
        );
        with(builder, "tokenizer.ggml.merges", Some(strings(&["Ã ©"])))
    };
    for text in ["é", "e\u{301}"] {
        assert_eq!(load(&builder("qwen2")).unwrap().tokenizer.encode(text).unwrap(), [6]);
    }
    assert_eq!(
        load(&builder("gpt-2")).unwrap().tokenizer.encode("e\u{301}").unwrap(),
        [1, 4, 5]
    );
}

#[test]
fn wrong_files_are_refused_by_key() {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let u32s = |numbers: &[u32]| Some(Put::U32s(numbers.into()));
    let cases: Vec<(&str, Option<Put>, &str)> = vec![
        ("model", None, "key `tokenizer.ggml.model` is missing"),
        ("model", Some("llama".into()), "key `tokenizer.ggml.scores` is missing"),
        (
            "model",
            Some("bert".into()),
            "is the string \"bert\"; \"gpt2\" or \"llama\" would be right",
        ),
        (
            "pre",
            Some("chameleon".into()),
            "the string \"chameleon\"; one of the known rules: default",
        ),
        ("pre", Some(7.into()), "is the u32 7; a string would be right"),
        ("tokens", None, "key `tokenizer.ggml.tokens` is missing"),
        ("tokens", Some(strings(&[])), "an empty array"),
        (
            "tokens",
            Some(Put::U32s(vec![1])),
            "is an array of 1 u32; an array of strings",
        ),
        (
            "tokens",
            Some(strings(&["a", "b", "a"])),
            "key `tokenizer.ggml.token_type` is an array of 10 numbers; one per token, 3",
        ),
        ("token_type", None, "key `tokenizer.ggml.token_type` is missing"),
        ("token_type", u32s(&[7; 10]), "1 (normal) to 6 (byte)"),
        ("merges", None, "key `tokenizer.ggml.merges` is missing"),
        (
            "merges",
            Some("a b".into()),
            "is the string \"a b\"; an array of strings",
        ),
        ("merges", Some(strings(&["ab"])), "\"ab\" at index 0"),
        ("merges", Some(strings(&["a x"])), "does not fit the vocabulary"),
        (
            "bos_token_id",
            Some(10.into()),
            "is 10; a token id below 10 would be right",
        ),
        ("eos_token_id", Some("1".into()), "is the string \"1\"; an integer"),
        ("add_bos_token", Some(1.into()), "is the u32 1; a bool"),
        ("add_space_prefix", Some(true.into()), "false for a \"gpt2\" vocabulary"),
        ("model", Some("t5".into()), "is the string \"t5\""),
    ];
    for (name, value, expected) in cases {
        let error = load(&with(base("gpt-2"), &key(name), value)).unwrap_err();
        assert!(
            error.contains(expected) && error.contains(".gguf"),
            "{name}: {error:?} should contain {expected:?}"
        );
    }
    let twice = with(
        base("gpt-2"),
        &key("tokens"),
        Some(strings(&["x", "a", "a", "b", "c", "d", "ab", "Ġab", "Ġ", "y"])),
    );
    assert!(load(&twice).unwrap_err().contains("\"a\" twice, at 1 and 2"));
    assert!(
        load(&with(base("gpt-2"), "llama.context_length", None))
            .unwrap_err()
            .contains("llama.context_length")
    );
}

#[test]
fn the_hash_changes_with_everything_that_changes_tokens() {
    let hash = |builder: &Builder| {
        ModelFiles::open(write(builder).path())
            .unwrap()
            .tokenizer_hash()
            .unwrap()
    };
    let first = hash(&base("gpt-2"));
    assert_eq!(
        first,
        hash(&base("gpt-2").put("general.name", "other").data(100)),
        "the rest of the file does not count"
    );
    assert_eq!(first, load(&base("gpt-2")).unwrap().tokenizer_hash);
    let changed = |name: &str, value: Put| hash(&with(base("gpt-2"), &format!("tokenizer.ggml.{name}"), Some(value)));
    let mut tokens = TOKENS;
    tokens.swap(2, 3);
    let mut kinds = KINDS;
    kinds[9] = 1;
    let others = [
        hash(&base("llama-bpe")),
        changed("tokens", strings(&tokens)),
        changed("token_type", Put::U32s(kinds.into())),
        changed("merges", strings(&["Ġ ab", "a b"])),
        changed("merges", strings(&["a b"])),
        changed("add_bos_token", true.into()),
        changed("bos_token_id", 1.into()),
        changed("eos_token_id", 1.into()),
    ];
    let mut all: Vec<u64> = others.into_iter().chain([first]).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 9, "every change gives another hash");
}

#[test]
fn the_architecture_counts_where_it_changes_tokens() {
    let of = |architecture: &str| {
        let builder = with(sentence(None), "general.architecture", Some(architecture.into()));
        let key = format!("{architecture}.context_length");
        let model = load(&with(builder, &key, Some(128.into()))).unwrap();
        let ids = model.tokenizer.encode_plain("<tool> \n a").unwrap();
        (ids.len(), model.tokenizer_hash)
    };
    let ((llama, first), (phi, second)) = (of("llama"), of("phi3"));
    assert!(phi < llama, "the added tokens of Phi-3 take the white space after them");
    assert_ne!(first, second);
    assert_eq!(of("gemma"), (llama, first), "other architectures change nothing");
}

/// A SentencePiece vocabulary: special tokens, bytes, letters, and pieces of them.
fn sentence(prefix: Option<bool>) -> Builder {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>", "<tool>"].map(str::to_owned).into();
    let mut kinds = vec![2, 3, 3, 4];
    let mut scores = vec![0.0_f32; 4];
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    kinds.extend([6; 256]);
    scores.extend([0.0; 256]);
    let pieces = ["▁", "a", "b", "c", "é", "ab", "bc", "▁a", "▁ab", "abc", "▁▁"];
    for (i, piece) in pieces.iter().enumerate() {
        tokens.push((*piece).to_owned());
        kinds.push(1);
        scores.push(-(i as f32));
    }
    let scores = scores.iter().flat_map(|score| score.to_le_bytes());
    let mut raw = 6_u32.to_le_bytes().to_vec();
    raw.extend((tokens.len() as u64).to_le_bytes());
    raw.extend(scores);
    let texts: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let builder = Builder::new()
        .put("general.architecture", "llama")
        .put("llama.context_length", 128)
        .put("tokenizer.ggml.model", "llama")
        .put("tokenizer.ggml.tokens", strings(&texts))
        .put("tokenizer.ggml.token_type", Put::U32s(kinds))
        .put("tokenizer.ggml.scores", Put::Raw(9, raw))
        .put("tokenizer.ggml.bos_token_id", 1)
        .put("tokenizer.ggml.unknown_token_id", 0);
    match prefix {
        Some(prefix) => builder.put("tokenizer.ggml.add_space_prefix", prefix),
        None => builder,
    }
}

#[test]
fn sentence_piece_vocabularies_merge_by_score_and_fall_back_to_bytes() {
    let (first, byte) = (260, 4);
    let model = load(&sentence(Some(false))).unwrap();
    let ids = |text: &str| model.tokenizer.encode(text).unwrap();
    // "ab" is better than "bc", which is better than "abc"; "abc" is made of "ab" and "c".
    assert_eq!(ids("abc"), [1, first + 9]);
    assert_eq!(ids("bc"), [1, first + 6]);
    // "ab" goes before "▁a", so "▁" is left for "▁ab".
    assert_eq!(ids(" ab"), [1, first + 8]);
    assert_eq!(ids("  b"), [1, first + 10, first + 2]);
    assert_eq!(ids("é"), [1, first + 4]);
    assert_eq!(ids("ü"), [1, byte + 0xc3, byte + 0xbc]);
    assert_eq!(ids("a<tool>b</s>"), [1, first + 1, 3, first + 2, 2]);
    for text in ["abc é ü\n", "  leading", "a<tool>b", "😀"] {
        assert_eq!(
            model
                .tokenizer
                .decode(&model.tokenizer.encode_plain(text).unwrap(), false),
            text
        );
    }
    assert!(model.add_bos && model.eos_token_ids.is_empty());

    let with_prefix = load(&sentence(None)).unwrap();
    assert_eq!(with_prefix.tokenizer.encode("ab").unwrap(), [1, first + 8]);
    let ids = with_prefix.tokenizer.encode_plain("ab c").unwrap();
    assert_eq!(with_prefix.tokenizer.decode(&ids, false), "ab c");

    let removes = sentence(None).put("tokenizer.ggml.remove_extra_whitespaces", true);
    let error = load(&removes).unwrap_err();
    assert!(
        error.contains("`tokenizer.ggml.remove_extra_whitespaces` is true"),
        "{error}"
    );
    let scores = Put::U32s(vec![1, 2]);
    let error = load(&with(sentence(None), "tokenizer.ggml.scores", Some(scores))).unwrap_err();
    assert!(
        error.contains("tokenizer.ggml.scores") && error.contains("one per token, 271"),
        "{error}"
    );
}
