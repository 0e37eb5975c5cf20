//! What a `config.json` says of the decoder: the words of Hugging Face transformers, in the older form
//! (`rope_theta`, `rope_scaling`) and the newer (`rope_parameters`, `layer_types`).

use model_files::ModelDirectory;
use serde_json::Value;

use super::json::Reader;
use super::rope::{self, ConfigRope, yarn_amplitude};
use super::{
    ArchConfig, ArchError, ExpertGroups, ExpertNames, Experts, Latent, MOST_LAYERS, Norms, QkNorm, Rope, Scoring,
    feature_error, value_error,
};
use crate::kernels::{Activation, RopeStyle};

/// Classes of `config.json` (`architectures`) that the decoder computes.
pub const CONFIG_ARCHITECTURES: [&str; 13] = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "Olmo2ForCausalLM",
    "GraniteForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
];

/// Reads a directory's description. How long texts may be is what the configuration says of the training: see
/// [`model_files::ModelFiles::positions`] for what is served.
pub(super) fn read(directory: &ModelDirectory, long_texts: bool) -> Result<ArchConfig, ArchError> {
    let config = Reader(directory.config());
    let classes = config.get("architectures");
    let class = classes.and_then(|v| v.get(0)).and_then(Value::as_str);
    let Some(class) = class.filter(|class| CONFIG_ARCHITECTURES.contains(class)) else {
        return Err(ArchError::Architecture {
            found: classes.unwrap_or(&Value::Null).to_string(),
            supported: CONFIG_ARCHITECTURES.join(", "),
        });
    };
    let gemma = matches!(class, "Gemma2ForCausalLM" | "Gemma3ForCausalLM");
    let mut arch = common(config, gemma, long_texts)?;
    match class {
        "Qwen2ForCausalLM" => (arch.qkv_bias, arch.output_bias) = (true, false),
        "Qwen3ForCausalLM" => arch.qk_norm = QkNorm::Heads,
        "Qwen3MoeForCausalLM" => {
            arch.qk_norm = QkNorm::Heads;
            arch.experts = Some(qwen3_experts(config, arch.num_layers)?);
        }
        "MixtralForCausalLM" => arch.experts = Some(mixtral_experts(config, &arch)?),
        "Gemma2ForCausalLM" => {
            gemma_switches(config, &mut arch)?;
            let or_default = |key: &str, default| match config.names(key) {
                true => config.number(key),
                false => Ok(Some(default)),
            };
            arch.attention_cap = or_default("attn_logit_softcapping", 50.0)?.map(|cap| cap as f32);
            arch.logit_cap = or_default("final_logit_softcapping", 30.0)?.map(|cap| cap as f32);
        }
        "Gemma3ForCausalLM" => {
            gemma_switches(config, &mut arch)?;
            arch.qk_norm = QkNorm::Heads;
            arch.attention_cap = config.number("attn_logit_softcapping")?.map(|cap| cap as f32);
            arch.logit_cap = config.number("final_logit_softcapping")?.map(|cap| cap as f32);
        }
        "Phi3ForCausalLM" => arch.fused = true,
        "Olmo2ForCausalLM" => (arch.norms, arch.qk_norm) = (Norms::After, QkNorm::Whole),
        "GraniteForCausalLM" => {
            arch.embedding_scale = config.float("embedding_multiplier", 1.0)?;
            arch.attention_scale = config.float("attention_multiplier", 1.0)?;
            arch.residual_scale = config.float("residual_multiplier", 1.0)?;
            arch.logit_scale = 1.0 / config.float("logits_scaling", 1.0)?;
        }
        "DeepseekV2ForCausalLM" | "DeepseekV3ForCausalLM" => deepseek(config, class, &mut arch, long_texts)?,
        _ => {}
    }
    arch.windows = windows(config, class, arch.num_layers)?;
    Ok(arch)
}

/// What all families have in common.
fn common(config: Reader<'_>, gemma: bool, long_texts: bool) -> Result<ArchConfig, ArchError> {
    let (hidden_size, num_heads) = (config.require("hidden_size")?, config.require("num_attention_heads")?);
    let even_split = hidden_size.checked_div(num_heads).unwrap_or(0);
    let head_dim = config.size("head_dim")?.unwrap_or(if gemma { 256 } else { even_split });
    let (rope, local_rope) = ropes(config, head_dim, long_texts)?;
    let attention_bias = config.flag("attention_bias")?.unwrap_or(false);
    Ok(ArchConfig {
        name: config.text("model_type")?.unwrap_or("llama").to_owned(),
        num_layers: config.require("num_hidden_layers")?,
        hidden_size,
        ffn_size: config.require("intermediate_size")?,
        num_heads,
        num_kv_heads: config.size("num_key_value_heads")?.unwrap_or(num_heads),
        head_dim,
        vocab_size: config.require("vocab_size")?,
        max_positions: config.require("max_position_embeddings")?,
        norm_eps: config.float("rms_norm_eps", 1e-6)?,
        norms: Norms::Before,
        norm_offset: 0.0,
        qk_norm: QkNorm::None,
        rope_style: RopeStyle::Half,
        rope: rope.rope,
        local_rope,
        windows: Vec::new(),
        attention_scale: (1.0 / (head_dim as f64).sqrt()) as f32,
        attention_cap: None,
        logit_cap: None,
        activation: activation(config)?,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        tied_head: config.flag("tie_word_embeddings")?.unwrap_or(gemma),
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        ffn_bias: config.flag("mlp_bias")?.unwrap_or(false),
        fused: false,
        experts: None,
        latent: None,
        prediction_layers: config.size("num_nextn_predict_layers")?.unwrap_or(0),
    })
}

fn activation(config: Reader<'_>) -> Result<Activation, ArchError> {
    let key = match config.get("hidden_activation") {
        Some(_) => "hidden_activation",
        None => "hidden_act",
    };
    match config.text(key)?.unwrap_or("silu") {
        "silu" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        other => Err(feature_error(key, other, "silu and gelu_pytorch_tanh are")),
    }
}

/// The rotary embeddings, and those of layers with a window if they have others.
fn ropes(config: Reader<'_>, head_dim: usize, long_texts: bool) -> Result<(ConfigRope, Option<Rope>), ArchError> {
    let theta = config.number("rope_theta")?.unwrap_or(10_000.0);
    let (name, section) = rope::section(config);
    // One section for each kind of layer.
    if let Some(by_kind) = section.map(Reader).filter(|value| value.names("full_attention")) {
        let global = by_kind.get("full_attention");
        let section = |value| rope::from_section(config, value, theta, head_dim, long_texts);
        let global = section(("rope_parameters.full_attention", global))?;
        let local = match by_kind.get("sliding_attention") {
            Some(local) => {
                let local = ("rope_parameters.sliding_attention", Some(local));
                Some(section(local)?.rope)
            }
            None => None,
        };
        return Ok((global, local));
    }
    let global = rope::from_section(config, (name, section), theta, head_dim, long_texts)?;
    let local = config.number("rope_local_base_freq")?;
    Ok((global, local.map(|theta| Rope::plain(theta, head_dim))))
}

/// By layer, how many of the last positions are seen.
fn windows(config: Reader<'_>, class: &str, layers: usize) -> Result<Vec<Option<usize>>, ArchError> {
    let window = config.size("sliding_window")?;
    let window = match class {
        "Qwen2ForCausalLM" | "Qwen3ForCausalLM" | "Qwen3MoeForCausalLM" => {
            window.filter(|_| config.0.get("use_sliding_window") == Some(&Value::Bool(true)))
        }
        // These have the key with a default of the class.
        "Gemma2ForCausalLM" | "Gemma3ForCausalLM" => Some(window.unwrap_or(4_096)),
        "MistralForCausalLM" | "MixtralForCausalLM" | "Phi3ForCausalLM" => window,
        _ => None,
    };
    // Their number is checked later; a list for an absurd one would take all memory.
    let layers = layers.min(MOST_LAYERS);
    let kinds = config.list("layer_types", "a list of strings", Value::as_str)?;
    if let Some(kinds) = kinds {
        if kinds.len() != layers {
            let right = format!("{layers}, one for each layer");
            return Err(value_error("number of layer_types", kinds.len(), right));
        }
        let of_kind = |kind: &&str| match (*kind, window) {
            ("full_attention", _) => Ok(None),
            ("sliding_attention", Some(window)) => Ok(Some(window)),
            ("sliding_attention", None) => Err(value_error("sliding_window", "null", "a number for sliding layers")),
            (other, _) => Err(feature_error(
                "layer_types",
                other,
                "full_attention and sliding_attention are",
            )),
        };
        return kinds.iter().map(of_kind).collect();
    }
    let pattern = config
        .size("sliding_window_pattern")?
        .or(config.size("_sliding_window_pattern")?)
        .unwrap_or(6);
    let first = config.size("max_window_layers")?.unwrap_or(0);
    let has_window = |layer: usize| match class {
        "Gemma2ForCausalLM" => layer.is_multiple_of(2),
        "Gemma3ForCausalLM" => pattern == 0 || !(layer + 1).is_multiple_of(pattern),
        "Qwen2ForCausalLM" | "Qwen3ForCausalLM" => layer >= first,
        _ => true,
    };
    let by_layer = (0..layers).map(|layer| window.filter(|_| has_window(layer)));
    Ok(by_layer.collect())
}

fn gemma_switches(config: Reader<'_>, arch: &mut ArchConfig) -> Result<(), ArchError> {
    arch.norms = Norms::Around;
    arch.norm_offset = 1.0;
    arch.embedding_scale = (arch.hidden_size as f32).sqrt();
    let scalar = config.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    arch.attention_scale = (1.0 / scalar.sqrt()) as f32;
    if config.flag("use_bidirectional_attention")?.unwrap_or(false) {
        let key = "use_bidirectional_attention";
        return Err(feature_error(key, true, "only attention to earlier positions is"));
    }
    Ok(())
}

/// Sizes of experts under any of their names.
fn any_size(config: Reader<'_>, keys: [&str; 2]) -> Result<usize, ArchError> {
    match config.size(keys[0])? {
        Some(size) => Ok(size),
        None => config.require(keys[1]),
    }
}

fn mixtral_experts(config: Reader<'_>, arch: &ArchConfig) -> Result<Experts, ArchError> {
    Ok(Experts {
        count: config.require("num_local_experts")?,
        used: config.require("num_experts_per_tok")?,
        ffn_size: arch.ffn_size,
        shared_ffn_size: 0,
        scoring: Scoring::Softmax,
        choice_bias: false,
        normalised: true,
        scale: 1.0,
        groups: None,
        layers: vec![true; arch.num_layers.min(MOST_LAYERS)],
        names: ExpertNames::BlockSparse,
    })
}

fn qwen3_experts(config: Reader<'_>, layers: usize) -> Result<Experts, ArchError> {
    let step = config.size("decoder_sparse_step")?.unwrap_or(1);
    let right = "a list of numbers of layers";
    let dense = config
        .list("mlp_only_layers", right, Value::as_u64)?
        .unwrap_or_default();
    let sparse = |layer: usize| step > 0 && (layer + 1).is_multiple_of(step) && !dense.contains(&(layer as u64));
    Ok(Experts {
        count: any_size(config, ["num_experts", "num_local_experts"])?,
        used: config.require("num_experts_per_tok")?,
        ffn_size: config.require("moe_intermediate_size")?,
        shared_ffn_size: 0,
        scoring: Scoring::Softmax,
        choice_bias: false,
        normalised: config.flag("norm_topk_prob")?.unwrap_or(false),
        scale: 1.0,
        groups: None,
        layers: (0..layers.min(MOST_LAYERS)).map(sparse).collect(),
        names: ExpertNames::Mlp,
    })
}

/// DeepSeek V2 and V3: latent attention, shared and grouped experts.
fn deepseek(config: Reader<'_>, class: &str, arch: &mut ArchConfig, long_texts: bool) -> Result<(), ArchError> {
    let latent = Latent {
        query_rank: config.size("q_lora_rank")?.unwrap_or(0),
        kv_rank: config.require("kv_lora_rank")?,
        plain_dim: config.require("qk_nope_head_dim")?,
        rope_dim: config.require("qk_rope_head_dim")?,
        value_dim: config.require("v_head_dim")?,
    };
    if arch.qkv_bias {
        return Err(feature_error(
            "attention_bias",
            true,
            "only false is for latent attention",
        ));
    }
    let theta = config.number("rope_theta")?.unwrap_or(10_000.0);
    let rope = rope::from_section(config, rope::section(config), theta, latent.rope_dim, long_texts)?;
    let mut scale = 1.0 / (latent.plain_dim as f64 + latent.rope_dim as f64).sqrt();
    if let Some((all, factor)) = rope.all_dim {
        scale *= yarn_amplitude(factor, all).powi(2);
    }
    arch.rope = rope.rope;
    // Checkpoints have the rotated elements in pairs, unless they say that somebody has sorted them.
    arch.rope_style = match config.flag("rope_interleave")?.unwrap_or(true) {
        true => RopeStyle::Interleaved,
        false => RopeStyle::Half,
    };
    arch.attention_scale = scale as f32;
    (arch.num_kv_heads, arch.head_dim) = (1, latent.kv_rank.saturating_add(latent.rope_dim));
    arch.latent = Some(latent);
    if config.size("n_routed_experts")?.is_some() {
        arch.experts = Some(deepseek_experts(config, class, arch.num_layers)?);
    }
    Ok(())
}

fn deepseek_experts(config: Reader<'_>, class: &str, layers: usize) -> Result<Experts, ArchError> {
    let third = class == "DeepseekV3ForCausalLM";
    let ffn_size = config.require("moe_intermediate_size")?;
    let dense = config.size("first_k_dense_replace")?.unwrap_or(0);
    let step = config.size("moe_layer_freq")?.unwrap_or(1).max(1);
    let method = config
        .text("topk_method")?
        .unwrap_or(if third { "noaux_tc" } else { "greedy" });
    let best = match method {
        "noaux_tc" => Some(2),
        "group_limited_greedy" => Some(1),
        "greedy" => None,
        other => {
            let supported = "noaux_tc, group_limited_greedy and greedy are";
            return Err(feature_error("topk_method", other, supported));
        }
    };
    let scoring = match config.text("scoring_func")? {
        Some("sigmoid") => Scoring::Sigmoid,
        Some("softmax") => Scoring::Softmax,
        Some(other) => return Err(feature_error("scoring_func", other, "softmax and sigmoid are")),
        None if third => Scoring::Sigmoid,
        None => Scoring::Softmax,
    };
    let groups = match best {
        Some(best) => Some(ExpertGroups {
            count: config.require("n_group")?,
            used: config.require("topk_group")?,
            best,
        }),
        None => None,
    };
    Ok(Experts {
        count: config.require("n_routed_experts")?,
        used: config.require("num_experts_per_tok")?,
        ffn_size,
        shared_ffn_size: config.size("n_shared_experts")?.unwrap_or(0).saturating_mul(ffn_size),
        scoring,
        choice_bias: method == "noaux_tc",
        normalised: config.flag("norm_topk_prob")?.unwrap_or(third),
        scale: config.float("routed_scaling_factor", 1.0)?,
        groups: groups.filter(|groups| groups.used < groups.count),
        layers: (0..layers.min(MOST_LAYERS))
            .map(|layer| layer >= dense && layer.is_multiple_of(step))
            .collect(),
        names: ExpertNames::Mlp,
    })
}
