//! Every family of tokenizers, from `tokenizer.json` and from a GGUF file's metadata, against Hugging Face's `tokenizers`.
//! `tests/tokenizers/generate.py` made the vocabularies and the expectations, and says what the files hold.

use std::path::{Path, PathBuf};
use std::process::Command;

use model_files::{ModelFiles, TextModel, TextTokenizer};
use serde_json::{Value, json};

use testing::{Builder, Put};

#[path = "../src/gguf/testing.rs"]
#[allow(
    dead_code,
    reason = "the writer of the crate's own tests; this one writes no tensors"
)]
mod testing;

/// What the writer knows of tensors.
mod ggml_type {
    pub(crate) use model_files::GgmlType;
}

/// Where a family comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Json,
    Gguf,
}

/// What is expected of one text.
struct Expected {
    ids: Ids,
    decoded: String,
    skip: String,
}

/// Token ids, or their number and hash where they are many.
enum Ids {
    All(Vec<u32>),
    Digest(u64, String),
}

fn folder(family: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/tokenizers")
        .join(family)
}

fn read(family: &str, name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(folder(family).join(name)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn strings(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).unwrap()
}

fn fnv(ids: &[u32]) -> String {
    let bytes = ids.iter().flat_map(|id| id.to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |state, byte| {
        (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// What convert_hf_to_gguf.py of llama.cpp takes for a control token, whatever its flag.
fn looks_special(token: &str) -> bool {
    let wrapped = |before: &str, after: &str| token.starts_with(before) && token.ends_with(after);
    ["<pad>", "<mask>"].contains(&token) || wrapped("<|", "|>") || wrapped("<｜", "｜>")
}

/// Tokens, their types, and merges, as a converter writes them from a byte-level `tokenizer.json`.
fn byte_level_arrays(json: &Value) -> Vec<(String, Put)> {
    let mut tokens: Vec<(String, u32)> = Vec::new();
    let mut put = |id: &Value, text: &str, kind: u32| {
        let id = usize::try_from(id.as_u64().unwrap()).unwrap();
        if tokens.len() <= id {
            tokens.resize(id + 1, (String::new(), 5));
        }
        tokens[id] = (text.to_owned(), kind);
    };
    for (entry, id) in json["model"]["vocab"].as_object().unwrap() {
        put(id, entry, 1);
    }
    for token in json["added_tokens"].as_array().unwrap() {
        let content = token["content"].as_str().unwrap();
        let control = token["special"] == true || looks_special(content);
        put(&token["id"], content, if control { 3 } else { 4 });
    }
    let merges = json["model"]["merges"].as_array().unwrap();
    let merges = merges.iter().map(|pair| strings(pair).join(" ")).collect();
    let (texts, kinds) = tokens.into_iter().unzip();
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    vec![
        (key("tokens"), Put::Strs(texts)),
        (key("token_type"), Put::U32s(kinds)),
        (key("merges"), Put::Strs(merges)),
    ]
}

/// The arrays of a SentencePiece vocabulary, which cannot be read off its `tokenizer.json`.
fn sentence_arrays(json: &Value) -> Vec<(String, Put)> {
    let scores: Vec<f32> = serde_json::from_value(json["scores"].clone()).unwrap();
    let mut raw = 6_u32.to_le_bytes().to_vec();
    raw.extend((scores.len() as u64).to_le_bytes());
    raw.extend(scores.iter().flat_map(|score| score.to_le_bytes()));
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    vec![
        (key("tokens"), Put::Strs(strings(&json["tokens"]))),
        (key("token_type"), Put::U32s(ids(&json["token_type"]))),
        (key("scores"), Put::Raw(9, raw)),
    ]
}

fn gguf(family: &str, keys: &Value) -> Vec<u8> {
    let arrays = if folder(family).join("gguf.json").exists() {
        sentence_arrays(&read(family, "gguf.json"))
    } else {
        byte_level_arrays(&read(family, "tokenizer.json"))
    };
    let architecture = keys["general.architecture"].as_str().unwrap();
    let mut builder = Builder::new().put(&format!("{architecture}.context_length"), 4096);
    builder.metadata.extend(arrays);
    for (key, value) in keys.as_object().unwrap() {
        let value = match value {
            Value::Bool(flag) => Put::Bool(*flag),
            Value::String(text) => Put::Str(text.clone()),
            number => Put::U32(number.as_u64().unwrap().try_into().unwrap()),
        };
        builder = builder.put(key, value);
    }
    builder.build()
}

fn load(family: &str, form: Form, cases: &Value) -> TextModel {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let path = match form {
        Form::Gguf => {
            std::fs::write(file("m.gguf"), gguf(family, &cases["gguf"])).unwrap();
            file("m.gguf")
        }
        Form::Json => {
            let config = json!({"model_type": "llama", "vocab_size": 1024, "max_position_embeddings": 4096});
            std::fs::write(file("config.json"), config.to_string()).unwrap();
            std::fs::copy(folder(family).join("tokenizer.json"), file("tokenizer.json")).unwrap();
            // Opening looks for weights but does not read them.
            std::fs::write(file("model.safetensors"), [0; 8]).unwrap();
            directory.path().to_path_buf()
        }
    };
    ModelFiles::open(path).unwrap().text().unwrap()
}

/// The text of a case, and what is expected of it in a form.
fn expected(case: &Value, form: Form) -> (String, Expected) {
    let own = &case["gguf"];
    let view = if form == Form::Gguf && own.is_object() {
        own
    } else {
        case
    };
    if let Some(repeat) = case["repeat"].as_array() {
        let times = usize::try_from(repeat[1].as_u64().unwrap()).unwrap();
        let text = repeat[0].as_str().unwrap().repeat(times);
        // What a SentencePiece text loses at its begin, it loses in one of the forms alone.
        let lost = match (form, case["shorter"].as_u64()) {
            (Form::Json, Some(lost)) => usize::try_from(lost).unwrap(),
            _ => 0,
        };
        let decoded = text[lost..].to_owned();
        let digest = Ids::Digest(
            view["count"].as_u64().unwrap(),
            view["fnv"].as_str().unwrap().to_owned(),
        );
        return (
            text,
            Expected {
                ids: digest,
                skip: decoded.clone(),
                decoded,
            },
        );
    }
    let text = case["text"].as_str().unwrap().to_owned();
    let decoded = view["decoded"].as_str().unwrap_or(&text).to_owned();
    let skip = view["skip"].as_str().unwrap_or(&decoded).to_owned();
    let ids = Ids::All(ids(&view["ids"]));
    (text, Expected { ids, decoded, skip })
}

/// Streams token by token; nothing that comes out is half a character, which a `String` cannot hold, nor waits for longer
/// than a character is.
fn stream(tokenizer: &TextTokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut decoder = tokenizer.incremental(skip_special);
    let mut text = String::new();
    for &id in ids {
        text.push_str(&decoder.push(id));
        assert!(decoder.pending().len() <= 3);
    }
    text + &decoder.finish()
}

/// A stream keeps the space that a whole text loses at its begin.
fn agree(streamed: &str, whole: &str) -> bool {
    streamed == whole || streamed.strip_prefix(' ') == Some(whole)
}

fn check_decoding(tokenizer: &TextTokenizer, ids: &[u32], decoded: &str, skip: &str, at: &str) {
    for (skip_special, text) in [(false, decoded), (true, skip)] {
        assert_eq!(tokenizer.decode(ids, skip_special), text, "{at}: {ids:?}");
        let streamed = stream(tokenizer, ids, skip_special);
        // In a run of byte tokens that is no text a stream has shown the characters before the fault.
        let replaced = |text: &str| text.contains('\u{fffd}');
        assert!(
            agree(&streamed, text) || (replaced(text) && replaced(&streamed)),
            "{at}: {streamed:?} is not {text:?}"
        );
    }
}

/// Checks a model against a file of cases; `name` is for people.
fn check_model(model: &TextModel, cases: &Value, name: &str, form: Form) {
    let tokenizer = &model.tokenizer;
    let (prefix, suffix) = (ids(&cases["prefix"]), ids(&cases["suffix"]));
    let list = cases["cases"].as_array().unwrap();
    assert!(list.len() >= 200, "{name} has {} texts", list.len());
    for case in list {
        let (text, expected) = expected(case, form);
        let at = format!("{name} {form:?} {:?}", text.chars().take(60).collect::<String>());
        let found = tokenizer.encode_plain(&text).unwrap();
        match expected.ids {
            Ids::All(ids) => assert_eq!(found, ids, "{at}"),
            Ids::Digest(count, hash) => assert_eq!((found.len() as u64, fnv(&found)), (count, hash), "{at}"),
        }
        let whole: Vec<u32> = prefix.iter().chain(&found).chain(&suffix).copied().collect();
        assert_eq!(tokenizer.encode(&text).unwrap(), whole, "{at}");
        check_decoding(tokenizer, &found, &expected.decoded, &expected.skip, &at);
    }
    let broken = cases["bytes"].as_array().unwrap();
    assert!(broken.len() >= 40, "{name} has {} byte sequences", broken.len());
    for case in broken {
        let decoded = case["decoded"].as_str().unwrap();
        let skip = case["skip"].as_str().unwrap_or(decoded);
        check_decoding(
            tokenizer,
            &ids(&case["ids"]),
            decoded,
            skip,
            &format!("{name} {form:?}"),
        );
    }
}

fn check(family: &str, form: Form) {
    let cases = read(family, "cases.json");
    check_model(&load(family, form, &cases), &cases, family, form);
}

/// A real file, from where the caller says, or from the cache.
#[expect(clippy::disallowed_methods, reason = "a test finds its model where the caller says")]
fn real_file(variable: &str, name: &str) -> PathBuf {
    let cached = || {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../.baton/models")
            .join(name)
    };
    std::env::var(variable).map_or_else(|_| cached(), PathBuf::from)
}

#[test]
fn the_vocabulary_of_smollm2_is_read_from_its_real_file() {
    let path = real_file("BATON_TEST_MODEL", "SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(
        path.is_file(),
        "{} is not there: run scripts/fetch-model",
        path.display()
    );
    let model = ModelFiles::open(path).unwrap().text().unwrap();
    check_model(&model, &read("", "smollm2-135m.json"), "SmolLM2 135M", Form::Gguf);
}

#[test]
fn the_vocabulary_of_gemma_3_is_read_from_its_real_file() {
    let mut path = real_file("BATON_TEST_GEMMA", "gemma-3-270m-q4_k_m.gguf");
    if !path.is_file() {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/fetch-model");
        let fetched = Command::new(script).arg("gemma-3-270m").output();
        let Some(output) = fetched.as_ref().ok().filter(|output| output.status.success()) else {
            eprintln!("WARNING: the file of Gemma 3 cannot be fetched, so its tokenizer was NOT checked: {fetched:?}");
            return;
        };
        path = String::from_utf8_lossy(&output.stdout).lines().last().unwrap().into();
    }
    let model = ModelFiles::open(path).unwrap().text().unwrap();
    check_model(&model, &read("", "gemma-3-270m.json"), "Gemma 3 270M", Form::Gguf);
}

//BYHAND
macro_rules! families {
    ($($test:ident $name:literal,)*) => {
        const ALL: &[&str] = &[$($name),*];

        $(mod $test {
            use super::{Form, check};

            #[test]
            fn from_tokenizer_json() {
                check($name, Form::Json);
            }

            #[test]
            fn from_gguf() {
                check($name, Form::Gguf);
            }
        })*
    };
}

families! {
    command_r "command-r",
    deepseek_coder "deepseek-coder",
    deepseek_llm "deepseek-llm",
    deepseek_v3 "deepseek-v3",
    default "default",
    gemma "gemma",
    gpt2 "gpt2",
    gpt4o "gpt4o",
    granite "granite",
    llama2 "llama2",
    llama3 "llama3",
    mistral_nemo "mistral-nemo",
    mistral_v3 "mistral-v3",
    olmo2 "olmo2",
    phi3 "phi3",
    phi4 "phi4",
    qwen2 "qwen2",
    qwen3 "qwen3",
    smollm2 "smollm2",
    starcoder "starcoder",
}

#[test]
fn every_family_that_was_made_is_checked() {
    let mut made: Vec<String> = std::fs::read_dir(folder(""))
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    made.sort();
    assert_eq!(made, ALL);
}
