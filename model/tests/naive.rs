//! The decoder against a plain one in double precision, with features that the golden files lack: biases, tied output
//! matrix, GGUF's interleaved rotation, 8 and 16 bit weights.

mod support;

use std::path::Path;

use protocol::sampling::SamplingParams;
use support::checkpoint::{Checkpoint, Element, temporary};
use support::{Bench, Setup};

/// `y = x W^T + b`.
fn project(c: &Checkpoint, name: &str, x: &[f64]) -> Vec<f64> {
    let (shape, w) = &c.tensors[&format!("{name}.weight")];
    let bias = c.tensors.get(&format!("{name}.bias"));
    (0..shape[0])
        .map(|n| {
            let row = &w[n * shape[1]..(n + 1) * shape[1]];
            let dot: f64 = row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum();
            dot + bias.map_or(0.0, |b| f64::from(b.1[n]))
        })
        .collect()
}

fn norm(c: &Checkpoint, name: &str, x: &[f64]) -> Vec<f64> {
    let scale = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + 1e-6).sqrt();
    x.iter()
        .zip(&c.tensors[name].1)
        .map(|(v, &w)| v / scale * f64::from(w))
        .collect()
}

fn rotate(head: &mut [f64], position: usize) {
    let half = head.len() / 2;
    for i in 0..half {
        let angle = position as f64 * 10_000_f64.powf(-(2.0 * i as f64) / head.len() as f64);
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * angle.cos() - b * angle.sin();
        head[i + half] = b * angle.cos() + a * angle.sin();
    }
}

/// Log-probabilities of `tokens[1..]`, each given the ones before it.
fn naive(c: &Checkpoint, tokens: &[u32]) -> Vec<f64> {
    let (hidden, dim) = (c.size("hidden_size"), c.size("head_dim"));
    let (heads, kv_heads) = (c.size("num_attention_heads"), c.size("num_key_value_heads"));
    let embedding = &c.tensors["model.embed_tokens.weight"].1;
    let row = |t: u32| {
        embedding[t as usize * hidden..][..hidden]
            .iter()
            .map(|&x| f64::from(x))
            .collect::<Vec<_>>()
    };
    let mut xs: Vec<Vec<f64>> = tokens.iter().map(|&t| row(t)).collect();
    for layer in 0..c.size("num_hidden_layers") {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in xs.iter_mut().enumerate() {
            let normed = norm(c, &name("input_layernorm.weight"), x);
            let mut q = project(c, &name("self_attn.q_proj"), &normed);
            let mut k = project(c, &name("self_attn.k_proj"), &normed);
            q.chunks_mut(dim)
                .chain(k.chunks_mut(dim))
                .for_each(|head| rotate(head, position));
            keys.push(k);
            values.push(project(c, &name("self_attn.v_proj"), &normed));
            let mut attended = vec![0.0; heads * dim];
            for head in 0..heads {
                let from = head / (heads / kv_heads) * dim;
                let q = &q[head * dim..(head + 1) * dim];
                let score = |k: &Vec<f64>| q.iter().zip(&k[from..]).map(|(a, b)| a * b).sum::<f64>();
                let weights: Vec<f64> = keys.iter().map(|k| (score(k) / (dim as f64).sqrt()).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (weight, v) in weights.iter().zip(&values) {
                    for d in 0..dim {
                        attended[head * dim + d] += weight / total * v[from + d];
                    }
                }
            }
            let delta = project(c, &name("self_attn.o_proj"), &attended);
            x.iter_mut().zip(delta).for_each(|(x, d)| *x += d);
            let normed = norm(c, &name("post_attention_layernorm.weight"), x);
            let gate = project(c, &name("mlp.gate_proj"), &normed);
            let up = project(c, &name("mlp.up_proj"), &normed);
            let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let delta = project(c, &name("mlp.down_proj"), &inner);
            x.iter_mut().zip(delta).for_each(|(x, d)| *x += d);
        }
    }
    let head = if c.config["tie_word_embeddings"] == true {
        "model.embed_tokens"
    } else {
        "lm_head"
    };
    let scored = xs.iter().zip(&tokens[1..]).map(|(x, &next)| {
        let logits = project(c, head, &norm(c, "model.norm.weight", x));
        let max = logits.iter().copied().fold(f64::MIN, f64::max);
        logits[next as usize] - max - logits.iter().map(|l| (l - max).exp()).sum::<f64>().ln()
    });
    scored.collect()
}

fn tokens() -> Vec<u32> {
    (0..70_u32).map(|i| (i * i * 13 + 5) % 512).collect()
}

fn decoder(path: &Path, setup: Setup) -> Vec<f32> {
    let mut bench: Bench<_> = setup.bench(path);
    let s = bench.add(&tokens(), &SamplingParams::greedy(), 1, true);
    bench.finish(32, 1, 1);
    bench.sequences[s].logprobs.clone()
}

fn close(found: &[f32], expected: &[f64], limit: f64) {
    assert_eq!(found.len(), expected.len());
    let difference = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs();
    let worst = found.iter().zip(expected).map(difference).fold(0.0, f64::max);
    eprintln!("largest difference {worst:.7}");
    assert!(worst < limit && found.iter().all(|x| x.is_finite()));
}

#[test]
fn biases_and_both_rotations() {
    for biased in [false, true] {
        let mut checkpoint = Checkpoint::tiny();
        if biased {
            checkpoint.add_biases();
        }
        let expected = naive(&checkpoint, &tokens());
        let (_keep, path) = temporary("model");
        checkpoint.write_directory(&path, Element::F32);
        close(&decoder(&path, Setup::float()), &expected, 1e-4);
        let (_keep, path) = temporary("model.gguf");
        checkpoint.write_gguf(&path, &checkpoint.gguf_keys(), Element::F32);
        close(&decoder(&path, Setup::float()), &expected, 1e-4);
        close(
            &decoder(
                &path,
                Setup {
                    kv_dtype: config::KvDtypeConfig::F16,
                    ..Setup::float()
                },
            ),
            &expected,
            0.02,
        );
    }
}

#[test]
fn a_tied_output_matrix() {
    let mut checkpoint = Checkpoint::tiny();
    let untied = naive(&checkpoint, &tokens());
    checkpoint.config["tie_word_embeddings"] = true.into();
    let expected = naive(&checkpoint, &tokens());
    assert!((untied[3] - expected[3]).abs() > 0.1);
    let (_keep, path) = temporary("model");
    // Some files store the copy; it must not matter.
    checkpoint.write_directory(&path, Element::F32);
    let with_copy = decoder(&path, Setup::float());
    close(&with_copy, &expected, 1e-4);
    checkpoint.tensors.remove("lm_head.weight");
    checkpoint.write_directory(&path, Element::F32);
    assert_eq!(decoder(&path, Setup::float()), with_copy);
    let (_keep, path) = temporary("model.gguf");
    checkpoint.write_gguf(&path, &checkpoint.gguf_keys(), Element::F32);
    close(&decoder(&path, Setup::float()), &expected, 1e-4);
}

#[test]
fn narrow_floats_are_read_exactly() {
    for element in [Element::F16, Element::Bf16] {
        let checkpoint = Checkpoint::tiny();
        let rounded = checkpoint.rounded(element);
        let (_keep, narrow) = temporary("narrow");
        let (_keep_too, wide) = temporary("wide");
        checkpoint.write_directory(&narrow, element);
        rounded.write_directory(&wide, Element::F32);
        assert_eq!(
            decoder(&narrow, Setup::float()),
            decoder(&wide, Setup::float()),
            "{element:?}"
        );
        assert_eq!(
            decoder(&narrow, Setup::quantised()),
            decoder(&wide, Setup::quantised()),
            "{element:?}"
        );
    }
}

#[test]
fn eight_bit_weights_of_a_gguf_file() {
    let checkpoint = Checkpoint::tiny();
    let expected = naive(&checkpoint.rounded(Element::Q8_0), &tokens());
    let (_keep, path) = temporary("model.gguf");
    checkpoint.write_gguf(&path, &checkpoint.gguf_keys(), Element::Q8_0);
    close(&decoder(&path, Setup::float()), &expected, 1e-4);
    let quantised = decoder(&path, Setup::quantised());
    let mean = quantised
        .iter()
        .zip(&expected)
        .map(|(&a, b)| (f64::from(a) - b).abs())
        .sum::<f64>()
        / 69.0;
    eprintln!("8 bit activations: mean difference {mean:.5}");
    assert!(mean < 0.05);
}
