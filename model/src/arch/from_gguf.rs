//! What a GGUF file's metadata says of the decoder: the words of llama.cpp.

use model_files::GgufFile;

use super::rope::{longrope_amplitude, yarn_amplitude};
use super::{
    ArchConfig, ArchError, ExpertGroups, ExpertNames, Experts, Latent, MOST_LAYERS, Norms, QkNorm, Rope, RopeScaling,
    Scoring, feature_error, value_error,
};
use crate::kernels::{Activation, GgmlType, RopeStyle, dequantise};

/// GGUF architectures (`general.architecture`) that the decoder computes.
pub const GGUF_ARCHITECTURES: [&str; 10] = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "granite",
    "deepseek2",
];

/// Metadata below the architecture's name.
struct Keys<'a> {
    file: &'a GgufFile,
    name: String,
}

impl Keys<'_> {
    fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.name)
    }

    fn require(&self, suffix: &str) -> Result<usize, ArchError> {
        Ok(self.file.require_u32(&self.key(suffix))? as usize)
    }

    fn size(&self, suffix: &str) -> Result<Option<usize>, ArchError> {
        Ok(self.file.u32(&self.key(suffix))?.map(|n| n as usize))
    }

    fn float(&self, suffix: &str) -> Result<Option<f32>, ArchError> {
        Ok(self.file.f32(&self.key(suffix))?)
    }

    fn has(&self, tensor: &str) -> bool {
        self.file.header().tensor(tensor).is_some()
    }

    fn feature(&self, suffix: &str, value: impl ToString, supported: &'static str) -> ArchError {
        feature_error(self.key(suffix), value, supported)
    }
}

/// Reads a file's description. How long texts may be is what the file says of the training: see
/// [`model_files::ModelFiles::positions`] for what is served.
pub(super) fn read(file: &GgufFile, long_texts: bool) -> Result<ArchConfig, ArchError> {
    let name = file.require_string("general.architecture")?.to_owned();
    if !GGUF_ARCHITECTURES.contains(&name.as_str()) {
        return Err(ArchError::Architecture {
            found: name,
            supported: GGUF_ARCHITECTURES.join(", "),
        });
    }
    let keys = Keys { file, name };
    let mut arch = common(&keys, long_texts)?;
    match keys.name.as_str() {
        "qwen3" | "qwen3moe" => arch.qk_norm = QkNorm::Heads,
        "gemma2" | "gemma3" => gemma(&keys, &mut arch)?,
        "phi3" => arch.fused = true,
        "olmo2" => (arch.norms, arch.qk_norm) = (Norms::After, QkNorm::Whole),
        "granite" => {
            arch.embedding_scale = keys.float("embedding_scale")?.unwrap_or(1.0);
            arch.attention_scale = keys.float("attention.scale")?.unwrap_or(arch.attention_scale);
            arch.residual_scale = keys.float("residual_scale")?.unwrap_or(1.0);
            arch.logit_scale = 1.0 / keys.float("logit_scale")?.unwrap_or(1.0);
        }
        "deepseek2" => deepseek(&keys, &mut arch)?,
        _ => {}
    }
    if keys.size("expert_count")?.unwrap_or(0) > 0 {
        arch.experts = Some(experts(&keys, &arch)?);
    }
    arch.windows = windows(&keys, arch.num_layers.min(MOST_LAYERS))?;
    Ok(arch)
}

/// What all families have in common.
fn common(keys: &Keys<'_>, long_texts: bool) -> Result<ArchConfig, ArchError> {
    let (hidden_size, num_heads) = (keys.require("embedding_length")?, keys.require("attention.head_count")?);
    let even_split = hidden_size.checked_div(num_heads).unwrap_or(0);
    let head_dim = keys.size("attention.key_length")?.unwrap_or(even_split);
    let latent = keys.name == "deepseek2";
    if let Some(width) = keys.size("attention.value_length")?.filter(|&width| width != head_dim)
        && !latent
    {
        return Err(keys.feature("attention.value_length", width, "only the width of a key is"));
    }
    let width = keys.size("rope.dimension_count")?.unwrap_or(head_dim);
    let trained = keys.require("context_length")?;
    let rope = rope(keys, width, trained, long_texts)?;
    let embedding = keys.file.tensor("token_embd.weight")?;
    // Files of this format keep rotated elements side by side for the first family, and apart for the later ones.
    let side_by_side = matches!(keys.name.as_str(), "llama" | "granite" | "deepseek2");
    Ok(ArchConfig {
        name: keys.name.clone(),
        num_layers: keys.require("block_count")?,
        hidden_size,
        ffn_size: keys.require("feed_forward_length")?,
        num_heads,
        num_kv_heads: keys.size("attention.head_count_kv")?.unwrap_or(num_heads),
        head_dim,
        vocab_size: keys
            .size("vocab_size")?
            .unwrap_or(embedding.shape.first().map_or(0, |&n| n as usize)),
        max_positions: trained,
        norm_eps: keys.file.require_f32(&keys.key("attention.layer_norm_rms_epsilon"))?,
        norms: Norms::Before,
        // Files have the weights as they are multiplied.
        norm_offset: 0.0,
        qk_norm: QkNorm::None,
        rope_style: match side_by_side {
            true => RopeStyle::Interleaved,
            false => RopeStyle::Half,
        },
        rope,
        local_rope: None,
        windows: Vec::new(),
        attention_scale: (1.0 / (head_dim as f64).sqrt()) as f32,
        attention_cap: None,
        logit_cap: None,
        activation: Activation::Silu,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        tied_head: !keys.has("output.weight"),
        qkv_bias: keys.has("blk.0.attn_q.bias"),
        output_bias: keys.has("blk.0.attn_output.bias"),
        ffn_bias: keys.has("blk.0.ffn_gate.bias"),
        fused: false,
        experts: None,
        latent: None,
        prediction_layers: 0,
    })
}

const ROPE_SUPPORTED: &str = "none, linear, yarn and longrope are";

/// Rotary embeddings; with `long_texts` those for long ones, if the file has others for them.
fn rope(keys: &Keys<'_>, width: usize, trained: usize, long_texts: bool) -> Result<Rope, ArchError> {
    let theta = f64::from(keys.float("rope.freq_base")?.unwrap_or(10_000.0));
    let mut rope = Rope::plain(theta, width);
    let factor = keys.float("rope.scaling.factor")?.or(keys.float("rope.scale_linear")?);
    // 0 stands for "not scaled" in old files.
    let factor = factor.filter(|&factor| factor != 0.0).map_or(1.0, f64::from);
    let kind_key = keys.key("rope.scaling.type");
    let kind = keys.file.string(&kind_key)?;
    let original = keys.size("rope.scaling.original_context_length")?.unwrap_or(trained);
    let amplitude = keys.float("rope.scaling.attn_factor")?.map(f64::from);
    // Which of the two lists applies must not depend on a text.
    let list = if long_texts {
        "rope_factors_long.weight"
    } else {
        "rope_factors_short.weight"
    };
    if let Some(by) = factors(keys, list)? {
        let stretch = trained as f64 / original.max(1) as f64;
        let amplitude = amplitude.unwrap_or_else(|| longrope_amplitude(stretch, original as f64));
        rope.scaling = RopeScaling::Divided { by, amplitude };
        return Ok(rope);
    }
    let pair = ["rope_factors_short.weight", "rope_factors_long.weight"];
    if pair.iter().any(|name| keys.file.header().tensor(name).is_some()) {
        return Err(value_error(list, "(missing)", "there beside the other list of factors"));
    }
    if let Some(by) = factors(keys, "rope_freqs.weight")? {
        let amplitude = 1.0;
        rope.scaling = RopeScaling::Divided { by, amplitude };
        return Ok(rope);
    }
    rope.scaling = match kind {
        None | Some("linear" | "none") if factor == 1.0 => RopeScaling::None,
        None | Some("linear") => RopeScaling::Linear { factor },
        Some("none") => RopeScaling::None,
        Some("yarn") => {
            // DeepSeek's: the file has a tenth of `mscale_all_dim`, and its `mscale` is the same number.
            let cancelled = keys.float("rope.scaling.yarn_log_multiplier")?.is_some();
            RopeScaling::Yarn {
                factor,
                original: original as f64,
                fast: f64::from(keys.float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0)),
                slow: f64::from(keys.float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0)),
                whole: true,
                amplitude: amplitude.unwrap_or(1.0) * if cancelled { 1.0 } else { yarn_amplitude(factor, 1.0) },
            }
        }
        Some(other) => return Err(feature_error(kind_key, other, ROPE_SUPPORTED)),
    };
    Ok(rope)
}

/// Numbers that frequencies are divided by, if the file has the tensor.
fn factors(keys: &Keys<'_>, name: &str) -> Result<Option<Vec<f64>>, ArchError> {
    let Some(info) = keys.file.header().tensor(name) else {
        return Ok(None);
    };
    let bytes = keys.file.tensor_bytes(info);
    let mut numbers = vec![0.0_f32; bytes.len() / size_of::<f32>()];
    let read = GgmlType::from_id(info.kind.id()).and_then(|kind| dequantise(kind, bytes, &mut numbers));
    read.map_err(|error| value_error(name, error, "a vector of f32"))?;
    Ok(Some(numbers.into_iter().map(f64::from).collect()))
}

/// By layer, how many of the last positions are seen.
fn windows(keys: &Keys<'_>, layers: usize) -> Result<Vec<Option<usize>>, ArchError> {
    let window = keys.size("attention.sliding_window")?.filter(|&window| window > 0);
    let pattern = keys.size("attention.sliding_window_pattern")?.unwrap_or(6);
    let has_window = |layer: usize| match keys.name.as_str() {
        "gemma2" => layer.is_multiple_of(2),
        "gemma3" => pattern == 0 || !(layer + 1).is_multiple_of(pattern),
        _ => true,
    };
    let by_layer = (0..layers).map(|layer| window.filter(|_| has_window(layer)));
    Ok(by_layer.collect())
}

fn gemma(keys: &Keys<'_>, arch: &mut ArchConfig) -> Result<(), ArchError> {
    arch.norms = Norms::Around;
    arch.activation = Activation::GeluTanh;
    arch.embedding_scale = (arch.hidden_size as f32).sqrt();
    // The format has no key for the scale: the largest model of each generation divides by the even split.
    let largest = if keys.name == "gemma2" { 46 } else { 62 };
    if arch.num_layers == largest {
        let even_split = arch.hidden_size as f64 / arch.num_heads.max(1) as f64;
        arch.attention_scale = (1.0 / even_split.sqrt()) as f32;
    }
    if keys.name == "gemma2" {
        arch.attention_cap = Some(keys.float("attn_logit_softcapping")?.unwrap_or(50.0));
        arch.logit_cap = Some(keys.float("final_logit_softcapping")?.unwrap_or(30.0));
    } else {
        arch.qk_norm = QkNorm::Heads;
        let theta = keys.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
        arch.local_rope = Some(Rope::plain(f64::from(theta), arch.rope.width));
    }
    Ok(())
}

fn experts(keys: &Keys<'_>, arch: &ArchConfig) -> Result<Experts, ArchError> {
    let latent = arch.latent.is_some();
    if !latent && !matches!(keys.name.as_str(), "llama" | "qwen3moe") {
        let value = keys.size("expert_count")?.unwrap_or(0);
        return Err(keys.feature("expert_count", value, "only dense networks are for this architecture"));
    }
    let ffn_size = keys.size("expert_feed_forward_length")?.unwrap_or(arch.ffn_size);
    let scoring = match keys.size("expert_gating_func")? {
        Some(2) => Scoring::Sigmoid,
        None | Some(0 | 1) => Scoring::Softmax,
        Some(other) => return Err(keys.feature("expert_gating_func", other, "1 (softmax) and 2 (sigmoid) are")),
    };
    let groups = match (keys.size("expert_group_count")?, keys.size("expert_group_used_count")?) {
        (Some(count), Some(used)) if used < count => Some(ExpertGroups {
            count,
            used,
            best: if scoring == Scoring::Sigmoid { 2 } else { 1 },
        }),
        _ => None,
    };
    let dense = keys.size("leading_dense_block_count")?.unwrap_or(0);
    let first_sparse = format!("blk.{dense}.exp_probs_b.bias");
    let normalised = keys.file.bool(&keys.key("expert_weights_norm"))?;
    Ok(Experts {
        count: keys.require("expert_count")?,
        used: keys.require("expert_used_count")?,
        ffn_size,
        shared_ffn_size: keys.size("expert_shared_count")?.unwrap_or(0).saturating_mul(ffn_size),
        scoring,
        choice_bias: keys.has(&first_sparse),
        normalised: normalised.unwrap_or(!latent),
        scale: keys
            .float("expert_weights_scale")?
            .filter(|&scale| scale != 0.0)
            .unwrap_or(1.0),
        groups,
        layers: (0..arch.num_layers.min(MOST_LAYERS))
            .map(|layer| layer >= dense)
            .collect(),
        names: ExpertNames::Mlp,
    })
}

/// DeepSeek V2 and V3.
fn deepseek(keys: &Keys<'_>, arch: &mut ArchConfig) -> Result<(), ArchError> {
    let rope_dim = arch.rope.width;
    // The newer form has the lengths of the latent vectors in the usual keys, and those of heads in keys of their own.
    let length = |of: &str| match keys.size(&format!("attention.{of}_length_mla"))? {
        Some(length) => Ok(length),
        None => keys.require(&format!("attention.{of}_length")),
    };
    let (key, value_dim) = (length("key")?, length("value")?);
    let Some(plain_dim) = key.checked_sub(rope_dim) else {
        let right = format!("at least {rope_dim}, the rotated width");
        return Err(value_error(keys.key("attention.key_length"), key, right));
    };
    let latent = Latent {
        query_rank: keys.size("attention.q_lora_rank")?.unwrap_or(0),
        kv_rank: keys.require("attention.kv_lora_rank")?,
        plain_dim,
        rope_dim,
        value_dim,
    };
    let mut scale = 1.0 / (key as f64).sqrt();
    if let (Some(tenth), RopeScaling::Yarn { factor, .. }) =
        (keys.float("rope.scaling.yarn_log_multiplier")?, &arch.rope.scaling)
    {
        scale *= yarn_amplitude(*factor, 10.0 * f64::from(tenth)).powi(2);
    }
    arch.attention_scale = scale as f32;
    (arch.num_kv_heads, arch.head_dim) = (1, latent.kv_rank.saturating_add(rope_dim));
    arch.latent = Some(latent);
    Ok(())
}
