//! The decoder against a plain one in double precision, with features that the golden files lack: biases, tied output
//! matrix, GGUF's interleaved rotation, 8 and 16 bit weights, soft caps, other places of norms, multipliers, rotation of a
//! part of a head.

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
    let offset = if is(c, "Gemma2ForCausalLM") { 1.0 } else { 0.0 };
    let scale = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + 1e-6).sqrt();
    x.iter()
        .zip(&c.tensors[name].1)
        .map(|(v, &w)| v / scale * (f64::from(w) + offset))
        .collect()
}

fn is(c: &Checkpoint, class: &str) -> bool {
    c.config["architectures"][0] == class
}

fn number(c: &Checkpoint, key: &str, default: f64) -> f64 {
    c.config[key].as_f64().unwrap_or(default)
}

/// The norm of a sub-layer's input, and that of its output, in a checkpoint of its class.
fn norms(c: &Checkpoint, ffn: bool) -> [Option<&'static str>; 2] {
    match (is(c, "Gemma2ForCausalLM"), is(c, "Olmo2ForCausalLM"), ffn) {
        (true, _, false) => [Some("input_layernorm"), Some("post_attention_layernorm")],
        (true, _, true) => [Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm")],
        (_, true, false) => [None, Some("post_attention_layernorm")],
        (_, true, true) => [None, Some("post_feedforward_layernorm")],
        (_, _, false) => [Some("input_layernorm"), None],
        (_, _, true) => [Some("post_attention_layernorm"), None],
    }
}

fn maybe_norm(c: &Checkpoint, layer: usize, which: Option<&str>, x: &[f64]) -> Vec<f64> {
    match which {
        Some(which) => norm(c, &format!("model.layers.{layer}.{which}.weight"), x),
        None => x.to_vec(),
    }
}

fn cap(x: f64, cap: f64) -> f64 {
    if cap > 0.0 { cap * (x / cap).tanh() } else { x }
}

/// The gate of a feed-forward network.
fn activated(c: &Checkpoint, g: f64) -> f64 {
    if is(c, "Gemma2ForCausalLM") {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
        0.5 * g * (1.0 + inner.tanh())
    } else {
        g / (1.0 + (-g).exp())
    }
}

fn rotate(c: &Checkpoint, head: &mut [f64], position: usize) {
    let part = c.config["rope_parameters"]["partial_rotary_factor"]
        .as_f64()
        .unwrap_or(1.0);
    let width = (head.len() as f64 * part) as usize;
    let head = &mut head[..width];
    let half = head.len() / 2;
    for i in 0..half {
        let angle = position as f64 * 10_000_f64.powf(-(2.0 * i as f64) / head.len() as f64);
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * angle.cos() - b * angle.sin();
        head[i + half] = b * angle.cos() + a * angle.sin();
    }
}

/// Attention of the last position of a layer, all heads.
fn attend(c: &Checkpoint, layer: usize, q: &[f64], (keys, values): (&[Vec<f64>], &[Vec<f64>])) -> Vec<f64> {
    let dim = c.size("head_dim");
    let (heads, kv_heads) = (c.size("num_attention_heads"), c.size("num_key_value_heads"));
    let gemma = is(c, "Gemma2ForCausalLM");
    let scale = if gemma {
        1.0 / number(c, "query_pre_attn_scalar", 0.0).sqrt()
    } else {
        number(c, "attention_multiplier", 1.0 / (dim as f64).sqrt())
    };
    let window = if gemma && layer.is_multiple_of(2) {
        c.size("sliding_window")
    } else {
        usize::MAX
    };
    let first = keys.len().saturating_sub(window);
    let mut attended = vec![0.0; heads * dim];
    for head in 0..heads {
        let from = head / (heads / kv_heads) * dim;
        let q = &q[head * dim..(head + 1) * dim];
        let score = |k: &Vec<f64>| {
            let dot: f64 = q.iter().zip(&k[from..]).map(|(a, b)| a * b).sum();
            cap(dot * scale, number(c, "attn_logit_softcapping", 0.0))
        };
        let weights: Vec<f64> = keys[first..].iter().map(|k| score(k).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (weight, v) in weights.iter().zip(&values[first..]) {
            for d in 0..dim {
                attended[head * dim + d] += weight / total * v[from + d];
            }
        }
    }
    attended
}

/// Log-probabilities of `tokens[1..]`, each given the ones before it.
fn naive(c: &Checkpoint, tokens: &[u32]) -> Vec<f64> {
    let (hidden, dim) = (c.size("hidden_size"), c.size("head_dim"));
    let embedding = &c.tensors["model.embed_tokens.weight"].1;
    let row = |t: u32| {
        embedding[t as usize * hidden..][..hidden]
            .iter()
            .map(|&x| f64::from(x))
            .collect::<Vec<_>>()
    };
    let mut embedding_scale = number(c, "embedding_multiplier", 1.0);
    if is(c, "Gemma2ForCausalLM") {
        embedding_scale = (hidden as f64).sqrt();
    }
    let residual = number(c, "residual_multiplier", 1.0);
    let mut xs: Vec<Vec<f64>> = tokens.iter().map(|&t| row(t)).collect();
    xs.iter_mut().flatten().for_each(|x| *x *= embedding_scale);
    for layer in 0..c.size("num_hidden_layers") {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in xs.iter_mut().enumerate() {
            let [before, after] = norms(c, false);
            let normed = maybe_norm(c, layer, before, x);
            let mut q = project(c, &name("self_attn.q_proj"), &normed);
            let mut k = project(c, &name("self_attn.k_proj"), &normed);
            if is(c, "Olmo2ForCausalLM") {
                q = norm(c, &name("self_attn.q_norm.weight"), &q);
                k = norm(c, &name("self_attn.k_norm.weight"), &k);
            }
            q.chunks_mut(dim)
                .chain(k.chunks_mut(dim))
                .for_each(|head| rotate(c, head, position));
            keys.push(k);
            values.push(project(c, &name("self_attn.v_proj"), &normed));
            let attended = attend(c, layer, &q, (&keys, &values));
            let delta = project(c, &name("self_attn.o_proj"), &attended);
            let delta = maybe_norm(c, layer, after, &delta);
            x.iter_mut().zip(delta).for_each(|(x, d)| *x += d * residual);
            let [before, after] = norms(c, true);
            let normed = maybe_norm(c, layer, before, x);
            let gate = project(c, &name("mlp.gate_proj"), &normed);
            let up = project(c, &name("mlp.up_proj"), &normed);
            let inner: Vec<f64> = gate.iter().zip(up).map(|(&g, u)| activated(c, g) * u).collect();
            let delta = project(c, &name("mlp.down_proj"), &inner);
            let delta = maybe_norm(c, layer, after, &delta);
            x.iter_mut().zip(delta).for_each(|(x, d)| *x += d * residual);
        }
    }
    let head = if c.config["tie_word_embeddings"] == true {
        "model.embed_tokens"
    } else {
        "lm_head"
    };
    let scored = xs.iter().zip(&tokens[1..]).map(|(x, &next)| {
        let mut logits = project(c, head, &norm(c, "model.norm.weight", x));
        for logit in &mut logits {
            *logit = cap(
                *logit / number(c, "logits_scaling", 1.0),
                number(c, "final_logit_softcapping", 0.0),
            );
        }
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

/// The tiny checkpoint as one of another class, with these settings and, in each layer, these vectors of so many numbers.
fn of_class(class: &str, settings: serde_json::Value, vectors: &[(&str, usize)]) -> Checkpoint {
    let mut checkpoint = Checkpoint::tiny();
    checkpoint.config["architectures"] = serde_json::json!([class]);
    for (key, value) in settings.as_object().unwrap() {
        checkpoint.config[key] = value.clone();
    }
    for layer in 0..checkpoint.size("num_hidden_layers") {
        for &(name, n) in vectors {
            let numbers = (0..n).map(|i| ((i * 29 + layer * 7 + name.len() * 13) % 31) as f32 / 31.0 + 0.3);
            let name = format!("model.layers.{layer}.{name}.weight");
            checkpoint.tensors.insert(name, (vec![n], numbers.collect()));
        }
    }
    checkpoint
}

fn is_the_plain_decoder(checkpoint: &Checkpoint) {
    let expected = naive(checkpoint, &tokens());
    let unchanged = naive(&Checkpoint::tiny(), &tokens());
    let moved = expected.iter().zip(&unchanged).filter(|(a, b)| (*a - *b).abs() > 0.05);
    assert!(moved.count() > 30, "the settings change nothing");
    let (_keep, path) = temporary("model");
    checkpoint.write_directory(&path, Element::F32);
    close(&decoder(&path, Setup::float()), &expected, 1e-4);
}

#[test]
fn gemma2_with_caps_windows_and_norms_around() {
    let settings = serde_json::json!({
        "attn_logit_softcapping": 2.5, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 9.0,
        "sliding_window": 11, "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh"
    });
    let vectors = [("pre_feedforward_layernorm", 64), ("post_feedforward_layernorm", 64)];
    is_the_plain_decoder(&of_class("Gemma2ForCausalLM", settings, &vectors));
}

#[test]
fn olmo2_with_norms_behind_and_over_whole_rows() {
    let vectors = [
        ("self_attn.q_norm", 64),
        ("self_attn.k_norm", 32),
        ("post_feedforward_layernorm", 64),
    ];
    let mut checkpoint = of_class("Olmo2ForCausalLM", serde_json::json!({}), &vectors);
    checkpoint.tensors.retain(|name, _| !name.contains("input_layernorm"));
    is_the_plain_decoder(&checkpoint);
}

#[test]
fn granite_with_its_multipliers() {
    let settings = serde_json::json!({
        "embedding_multiplier": 6.0, "attention_multiplier": 0.4, "residual_multiplier": 0.35, "logits_scaling": 2.0
    });
    is_the_plain_decoder(&of_class("GraniteForCausalLM", settings, &[]));
}

#[test]
fn a_part_of_a_head_is_rotated() {
    let rope = serde_json::json!({"rope_parameters":
        {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}});
    is_the_plain_decoder(&of_class("LlamaForCausalLM", rope, &[]));
}
