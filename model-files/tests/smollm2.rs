//! The text side of a real model: SmolLM2-135M-Instruct as GGUF.

use std::path::{Path, PathBuf};

use model_files::gguf::Header;
use model_files::{GgmlType, ModelFiles, RenderInput, Source, TextModel};
use serde_json::{Value, json};

const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

#[expect(clippy::disallowed_methods, reason = "a test finds its model where the caller says")]
fn model_path() -> PathBuf {
    let default = || {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../.baton/models")
            .join(FILE)
    };
    std::env::var("BATON_TEST_MODEL").map_or_else(|_| default(), PathBuf::from)
}

fn open() -> ModelFiles {
    let path = model_path();
    assert!(
        path.is_file(),
        "{} is not there: run scripts/fetch-model, or set BATON_TEST_MODEL to the path of {FILE}",
        path.display()
    );
    ModelFiles::open(path).unwrap()
}

fn load() -> TextModel {
    open().text().unwrap()
}

fn fixture(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn golden_prompts_have_golden_ids() {
    let model = load();
    let golden = fixture("smollm2-135m-instruct-q4_1.golden.json");
    let prompts = golden["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 10);
    for prompt in prompts {
        let text = prompt["prompt"].as_str().unwrap();
        assert_eq!(model.tokenizer.encode(text).unwrap(), ids(&prompt["ids"]), "{text:?}");
        assert_eq!(model.tokenizer.decode(&ids(&prompt["ids"]), false), text);
    }
}

#[test]
fn hard_strings_have_the_ids_of_an_independent_implementation() {
    let model = load();
    let cases = fixture("smollm2-hard-strings.json");
    assert!(cases.as_array().unwrap().len() > 200);
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(model.tokenizer.encode(text).unwrap(), ids(&case["ids"]), "{text:?}");
    }
}

#[test]
fn generated_text_streams_as_it_decodes() {
    let model = load();
    for prompt in fixture("smollm2-135m-instruct-q4_1.golden.json")["prompts"]
        .as_array()
        .unwrap()
    {
        let generated = ids(&prompt["greedy"]);
        for skip_special in [false, true] {
            let mut decoder = model.tokenizer.incremental(skip_special);
            let mut text: String = generated.iter().map(|&id| decoder.push(id)).collect();
            text.push_str(&decoder.finish());
            assert_eq!(text, model.tokenizer.decode(&generated, skip_special));
        }
    }
    let first = ids(&fixture("smollm2-135m-instruct-q4_1.golden.json")["prompts"][0]["greedy"]);
    assert!(
        model.tokenizer.decode(&first, true).starts_with("'m "),
        "My name is Olivier and I'm"
    );
}

#[test]
fn what_the_file_says_is_read() {
    let files = open();
    assert_eq!(files.architecture().unwrap(), "llama");
    let Source::Gguf(file) = files.source() else {
        panic!("a GGUF file")
    };
    assert_eq!(file.tensors().len(), 272);
    let embedding = file.tensor("token_embd.weight").unwrap();
    assert_eq!(
        (embedding.shape.as_slice(), embedding.kind),
        (&[49152, 576][..], GgmlType::Q8_0)
    );
    assert_eq!(embedding.bytes.start, file.header().data_start());
    assert_eq!(file.tensor_bytes(embedding).len(), 49152 * 576 / 32 * 34);
    let last = file.tensors().iter().map(|tensor| tensor.bytes.end).max();
    assert_eq!(
        last,
        Some(file.bytes().len() as u64),
        "the tensors reach the end of the file"
    );
    assert_eq!(file.f32("llama.rope.freq_base").unwrap(), Some(100_000.0));

    let text = files.text().unwrap();
    assert_eq!(text.vocab_size, 49152);
    assert_eq!(text.max_position_embeddings, 8192);
    assert_eq!(text.eos_token_ids, [2]);
    assert_eq!((text.bos_token_id, text.add_bos), (Some(1), false));
    assert_eq!(text.name, "Smollm2 135M 8k Lc100K Mix1 Ep2");
    assert_eq!(text.tokenizer.token_text(2), "<|im_end|>");
    assert!(text.tokenizer.is_special(2) && text.tokenizer.is_special(0) && !text.tokenizer.is_special(17));
    assert_eq!(text.tokenizer_hash, files.tokenizer_hash().unwrap());
}

#[test]
fn the_chat_template_renders_and_becomes_special_tokens() {
    let text = load();
    let template = text.chat_template.unwrap();
    assert!(template.problem().is_none());
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let prompt = template.render(&RenderInput::new(&messages)).unwrap();
    assert_eq!(
        prompt,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let ids = text.tokenizer.encode_plain(&prompt).unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == 1).count(), 3);
    assert_eq!(ids.iter().filter(|&&id| id == 2).count(), 2);
    assert_eq!(text.tokenizer.decode(&ids, false), prompt);
    let own = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    let mut input = RenderInput::new(&own);
    input.add_generation_prompt = false;
    let expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n";
    assert_eq!(template.render(&input).unwrap(), expected);
}

#[test]
fn the_file_cut_anywhere_is_refused() {
    let files = open();
    let Source::Gguf(file) = files.source() else {
        panic!("a GGUF file")
    };
    let bytes = file.bytes();
    let starts: Vec<usize> = file
        .tensors()
        .iter()
        .map(|tensor| usize::try_from(tensor.bytes.start).unwrap())
        .collect();
    // Around every tensor's begin, and at sixty places of the header.
    let data_start = usize::try_from(file.header().data_start()).unwrap();
    let header = (0..60).map(|part| data_start / 60 * part + part);
    for length in header.chain(starts.iter().flat_map(|&start| [start, start + 1]).step_by(40)) {
        assert!(Header::parse(&bytes[..length]).is_err(), "cut at {length}");
    }
    assert!(Header::parse(&bytes[..bytes.len() - 1]).is_err());
}
