//! Weights in other forms than they are computed with, through real processes: floats that all nodes quantise when they load
//! them, and a GGUF file in parts, whose tokenizer the coordinator reads.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use config::{ModelConfig, Quantize};
use integration_tests::ask::{Door, MODEL_NAME};
use integration_tests::client::post_ok;
use integration_tests::cluster::{Cluster, ClusterSpec};
use integration_tests::exact::judge::Judge;
use integration_tests::exact::prompts::{mixed_lengths, prompts};
use integration_tests::exact::query::Query;
use integration_tests::exact::reference::Reference;
use integration_tests::files::{default_model, tiny_model};
use integration_tests::vitals::logged;
use model_files::gguf::{GgufFile, TensorInfo};
use reqwest::Client;
use serde_json::json;
use tokio::sync::Mutex;

/// Clusters run one after the other: nodes that starve each other lose their links.
static ONE_CLUSTER: Mutex<()> = Mutex::const_new(());

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_quantise_answer_as_one_process_does() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let model = ModelConfig {
        path: tiny_model().to_str().context("UTF-8")?.to_owned(),
        quantize: Quantize::Q8_0,
        ..ModelConfig::default()
    };
    let mut reference = Reference::of(&model)?;
    let mut plain = Reference::open(&tiny_model(), model.kv_dtype)?;
    ensure!(reference.identity().weights_hash != plain.identity().weights_hash);
    let spec = ClusterSpec::pair(tiny_model())
        .set(format!("model.model_name={MODEL_NAME}"))
        .set("model.quantize=q8_0");
    let cluster = Cluster::start(spec).await?;
    let judge = Judge::new(cluster.url(), reference.text.clone());
    let tokens = 24;
    let mut different = 0;
    for (i, text) in prompts(&reference.text.tokenizer.clone(), &mixed_lengths(12, 250))?
        .into_iter()
        .enumerate()
    {
        let query = Query {
            top: (i % 3) as u8,
            ..Query::greedy(text, tokens)
        };
        let expected = reference.answer(&query, tokens)?;
        different += usize::from(plain.answer(&query, tokens)?.tokens != expected.tokens);
        let doors: Vec<Door> = Door::ALL.into_iter().filter(|d| query.belongs_to(*d)).collect();
        let door = doors[i % doors.len()];
        let asked = judge.ask(&query, tokens, &expected, door).await;
        asked.with_context(|| cluster.logs())?;
    }
    ensure!(different > 0, "quantising changes nothing, so this shows nothing");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_quantise_differently_are_not_one_cluster() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let spec = ClusterSpec::pair(tiny_model()).set("model.quantize=q8_0");
    let mut cluster = Cluster::start(ClusterSpec { decode: 2, ..spec }).await?;
    cluster.kill("decode-1")?;
    cluster.start_process("decode-1", "decode-node", &["model.quantize=q4_0"])?;
    let words = ["refuses this node", "weights hash", "q8_0", "q4_0"];
    logged(&mut cluster, "decode-1", &words).await?;
    Ok(())
}

/// Writes a GGUF file in parts: all keys and a third of the tensors, and two parts of other tensors.
fn split(from: &Path, at: &Path) -> Result<Vec<PathBuf>> {
    let file = GgufFile::open(from)?;
    let (bytes, tensors) = (file.bytes(), file.tensors());
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    // Metadata are all between the counts and the first tensor's name.
    let first = text(&tensors.first().context("a tensor")?.name);
    let table = bytes
        .windows(first.len())
        .position(|window| window == first)
        .context("a table")?;
    let keys = u64::from_le_bytes(bytes[16..24].try_into()?);
    let align = file.header().alignment() as usize;
    let mut paths = Vec::new();
    for (part, some) in tensors.chunks(tensors.len().div_ceil(3)).enumerate() {
        let (own, count) = if part == 0 {
            (&bytes[24..table], keys)
        } else {
            (&[][..], 0)
        };
        let mut out = [&b"GGUF"[..], &3_u32.to_le_bytes(), &(some.len() as u64).to_le_bytes()].concat();
        out.extend((count + 3 + u64::from(part > 0)).to_le_bytes());
        out.extend(own);
        for (key, value) in [("no", part), ("count", 3), ("tensors.count", tensors.len())] {
            out.extend(text(&format!("split.{key}")));
            out.extend([4_u32, value as u32].map(u32::to_le_bytes).concat());
        }
        if part > 0 {
            out.extend(text("general.alignment"));
            out.extend([4_u32, align as u32].map(u32::to_le_bytes).concat());
        }
        let mut data: Vec<u8> = Vec::new();
        for TensorInfo { name, shape, kind, .. } in some {
            out.extend(text(name));
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|size| out.extend(size.to_le_bytes()));
            out.extend(kind.id().to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(file.tensor_bytes(file.tensor(name)?));
            data.resize(data.len().next_multiple_of(align), 0);
        }
        out.resize(out.len().next_multiple_of(align), 0);
        out.extend(data);
        let path = at.join(format!("split-{:05}-of-00003.gguf", part + 1));
        std::fs::write(&path, out)?;
        paths.push(path);
    }
    Ok(paths)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_in_parts_is_served() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let directory = tempfile::tempdir()?;
    let parts = split(&default_model()?, directory.path())?;
    let mut answers = Vec::new();
    // A part that is not the first, and the whole file.
    for model in [parts[1].clone(), default_model()?] {
        let spec = ClusterSpec::pair(model).set(format!("model.model_name={MODEL_NAME}"));
        let cluster = Cluster::start(spec).await?;
        let body = json!({"inputs": "The capital of France is", "parameters": {"max_new_tokens": 12, "details": true}});
        let answer = post_ok(&Client::new(), &format!("{}/generate", cluster.url()), &body).await?;
        ensure!(answer["details"]["generated_tokens"] == 12, "{answer}");
        answers.push((answer["generated_text"].clone(), answer["details"]["tokens"].clone()));
    }
    ensure!(answers[0] == answers[1], "{answers:?}");
    Ok(())
}
