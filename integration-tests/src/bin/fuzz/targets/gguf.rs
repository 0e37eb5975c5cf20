//! A GGUF file: its header, every value in it, its tensors, the tokenizer and template that it describes, and the model, which
//! is loaded.

use std::path::PathBuf;

use model_files::ModelFiles;
use model_files::gguf::{GgufFile, Header};
use tempfile::TempDir;

use super::{Target, weights};
use crate::corpus::shape;

pub(crate) struct Gguf {
    _dir: TempDir,
    path: PathBuf,
}

impl Gguf {
    pub(crate) fn new() -> Option<Self> {
        // In memory where that is possible.
        let dir = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).ok()?;
        let path = dir.path().join("model.gguf");
        Some(Self { _dir: dir, path })
    }
}

impl Target for Gguf {
    fn name(&self) -> &'static str {
        "gguf"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        let tokens = [
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
        let kinds = [3, 3, 1, 1, 1, 1, 1, 1, 5, 4];
        let pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "<0x41>", "ab"];
        let base = |model: &str, pre: &str, tokens: &[&str], kinds: &[u32]| {
            Writer::default()
                .text("general.architecture", "llama")
                .number("llama.context_length", 128)
                .number("llama.embedding_length", 8)
                .text("tokenizer.ggml.model", model)
                .text("tokenizer.ggml.pre", pre)
                .texts("tokenizer.ggml.tokens", tokens)
                .numbers("tokenizer.ggml.token_type", kinds)
                .number("tokenizer.ggml.bos_token_id", 1)
                .number("tokenizer.ggml.eos_token_id", 2)
                .text(
                    "tokenizer.chat_template",
                    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
                )
        };
        let mut all: Vec<Vec<u8>> = [
            "default",
            "llama-bpe",
            "qwen2",
            "gpt-2",
            "smollm",
            "tekken",
            "deepseek-llm",
        ]
        .into_iter()
        .map(|pre| {
            base("gpt2", pre, &tokens, &kinds)
                .texts("tokenizer.ggml.merges", &["a b", "Ġ ab"])
                .build(&[])
        })
        .collect();
        let scores: Vec<f32> = (0..pieces.len()).map(|n| -(n as f32)).collect();
        let unigram = base("llama", "default", &pieces, &[2, 3, 3, 1, 1, 1, 1, 6, 1]);
        all.push(unigram.floats("tokenizer.ggml.scores", &scores).build(&[]));
        let tensors = [
            ("token_embd.weight", vec![8, 10], 0, 0),
            ("output.weight", vec![32, 2], 8, 320),
        ];
        all.push(base("gpt2", "default", &tokens, &kinds).build(&tensors));
        all.extend([model(false), model(true)]);
        all
    }

    fn run(&self, input: &[u8]) -> Result<String, String> {
        let header = match Header::parse(input) {
            Ok(header) => header,
            Err(problem) => return Ok(shape(&problem.to_string())),
        };
        for key in header.keys() {
            let Some(value) = header.get(input, key) else {
                return Err(format!("the key {key:?} has no value"));
            };
            if let Some(array) = value.as_array() {
                let found = array.iter().take(1 << 20).count() as u64;
                if found != array.len().min(1 << 20) {
                    return Err(format!("{key:?}: {found} elements of {}", array.len()));
                }
            }
        }
        std::fs::write(&self.path, input).map_err(|error| error.to_string())?;
        let parts = header.get(input, "split.count").map(|value| value.as_u64());
        let file = match GgufFile::open(&self.path) {
            Ok(file) => file,
            // A part of a model must be called so, and this file never is.
            Err(error) if parts.is_some_and(|parts| parts != Some(0) && parts != Some(1)) => {
                return Ok(shape(&error.to_string()));
            }
            Err(error) => return Err(format!("a good header, but {error}")),
        };
        for tensor in header.tensors() {
            // Promise: a tensor of a header that was read lies within the file.
            std::hint::black_box(file.tensor_bytes(tensor).last().copied());
        }
        let tensors = header.tensors().len().min(4);
        let loaded = weights::load(&self.path, input.len());
        let text = ModelFiles::open(&self.path).and_then(|files| files.text());
        let text = match text {
            Ok(text) => text,
            // The path is in the message, and always the same.
            Err(error) => return Ok(format!("{tensors} tensors; {loaded}; {}", shape(&error.to_string()))),
        };
        let ids = text.tokenizer.encode("ab a<tool>c").map_err(|error| error.to_string());
        let back = ids.as_ref().map(|ids| text.tokenizer.decode(ids, false));
        Ok(format!(
            "{tensors} tensors; {loaded}; text model, {} ids, {} bytes back, template {}",
            ids.as_ref().map_or(0, Vec::len),
            back.map_or(0, |text| text.len()),
            text.chat_template.is_some()
        ))
    }
}

/// Writes a GGUF file of version 3.
#[derive(Default)]
struct Writer {
    count: u64,
    metadata: Vec<u8>,
}

impl Writer {
    fn put(mut self, key: &str, kind: u32, bytes: &[u8]) -> Self {
        self.count += 1;
        self.metadata.extend(string(key));
        self.metadata.extend(kind.to_le_bytes());
        self.metadata.extend_from_slice(bytes);
        self
    }

    fn text(self, key: &str, text: &str) -> Self {
        self.put(key, 8, &string(text))
    }

    fn number(self, key: &str, number: u32) -> Self {
        self.put(key, 4, &number.to_le_bytes())
    }

    fn list(self, key: &str, kind: u32, count: usize, elements: &[u8]) -> Self {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend((count as u64).to_le_bytes());
        bytes.extend_from_slice(elements);
        self.put(key, 9, &bytes)
    }

    fn texts(self, key: &str, texts: &[&str]) -> Self {
        let elements: Vec<u8> = texts.iter().flat_map(|text| string(text)).collect();
        self.list(key, 8, texts.len(), &elements)
    }

    fn numbers(self, key: &str, numbers: &[u32]) -> Self {
        let elements: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.list(key, 5, numbers.len(), &elements)
    }

    fn floats(self, key: &str, numbers: &[f32]) -> Self {
        let elements: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.list(key, 6, numbers.len(), &elements)
    }

    /// `tensors`: name, dimensions, type, offset.
    fn build(self, tensors: &[(&str, Vec<u64>, u32, u64)]) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((tensors.len() as u64).to_le_bytes());
        out.extend(self.count.to_le_bytes());
        out.extend(self.metadata);
        for (name, dimensions, kind, offset) in tensors {
            out.extend(string(name));
            out.extend((dimensions.len() as u32).to_le_bytes());
            for dimension in dimensions {
                out.extend(dimension.to_le_bytes());
            }
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        let last = tensors.iter().map(|(.., offset)| offset + 256).max().unwrap_or(0);
        out.resize(out.len().next_multiple_of(32) + 512.max(last as usize), 0);
        out
    }
}

/// A whole model of one layer, dense or with two experts.
fn model(sparse: bool) -> Vec<u8> {
    let name = if sparse { "qwen3moe" } else { "llama" };
    let mut writer = Writer::default().text("general.architecture", name);
    for (key, value) in [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 8),
        ("feed_forward_length", 8),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 4),
        ("attention.value_length", 4),
        ("expert_count", if sparse { 2 } else { 0 }),
        ("expert_used_count", u32::from(sparse)),
        ("expert_feed_forward_length", 8),
    ] {
        writer = writer.number(&format!("{name}.{key}"), value);
    }
    let epsilon = 1e-6_f32.to_le_bytes();
    writer = writer.put(&format!("{name}.attention.layer_norm_rms_epsilon"), 6, &epsilon);
    writer = writer.text("tokenizer.ggml.model", "gpt2");
    let mut tensors: Vec<(&str, Vec<u64>)> = vec![
        ("token_embd.weight", vec![8, 8]),
        ("output.weight", vec![8, 8]),
        ("output_norm.weight", vec![8]),
        ("blk.0.attn_norm.weight", vec![8]),
        ("blk.0.ffn_norm.weight", vec![8]),
        ("blk.0.attn_q.weight", vec![8, 8]),
        ("blk.0.attn_k.weight", vec![8, 4]),
        ("blk.0.attn_v.weight", vec![8, 4]),
        ("blk.0.attn_output.weight", vec![8, 8]),
    ];
    if sparse {
        tensors.extend([
            ("blk.0.attn_q_norm.weight", vec![4]),
            ("blk.0.attn_k_norm.weight", vec![4]),
            ("blk.0.ffn_gate_inp.weight", vec![8, 2]),
            ("blk.0.ffn_gate_exps.weight", vec![8, 8, 2]),
            ("blk.0.ffn_up_exps.weight", vec![8, 8, 2]),
            ("blk.0.ffn_down_exps.weight", vec![8, 8, 2]),
        ]);
    } else {
        tensors.extend([
            ("blk.0.ffn_gate.weight", vec![8, 8]),
            ("blk.0.ffn_up.weight", vec![8, 8]),
            ("blk.0.ffn_down.weight", vec![8, 8]),
        ]);
    }
    let mut offset = 0;
    let placed: Vec<_> = tensors
        .into_iter()
        .map(|(name, dimensions)| {
            let (kind, size) = if dimensions.len() == 1 { (0, 4) } else { (1, 2) };
            let at = offset;
            offset += (size * dimensions.iter().product::<u64>()).next_multiple_of(32);
            (name, dimensions, kind, at)
        })
        .collect();
    writer.build(&placed)
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}
