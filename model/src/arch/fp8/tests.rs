//! What is understood of `quantization_config`, and that everything else is refused by key and value.

use serde_json::{Value, json};

use super::{Fp8Scheme, Scales};
use crate::kernels::GgmlType;

fn read(section: Value) -> Result<Fp8Scheme, String> {
    let config = json!({"torch_dtype": "bfloat16", "quantization_config": section});
    let scheme = Fp8Scheme::of_config(&config).map_err(|error| error.to_string())?;
    Ok(scheme.unwrap())
}

fn compressed(change: impl FnOnce(&mut Value)) -> Value {
    let mut section = json!({
        "config_groups": {"group_0": {
            "input_activations": {"dynamic": true, "num_bits": 8, "strategy": "token", "type": "float"},
            "output_activations": null,
            "targets": ["Linear"],
            "weights": {
                "actorder": null, "block_structure": null, "dynamic": false, "group_size": null, "num_bits": 8,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": true, "type": "float",
            },
        }},
        "format": "float-quantized", "global_compression_ratio": 1.46, "ignore": ["lm_head"], "kv_cache_scheme": null,
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
        "version": "0.9.0",
    });
    change(&mut section);
    section
}

#[test]
fn three_ways_of_saying_it_are_read() {
    let deepseek = json!({
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 64],
    });
    let scheme = read(deepseek).unwrap();
    assert_eq!(scheme.scales, Scales::Block(128, 64));
    assert_eq!((scheme.suffixes, scheme.becomes), (&["_scale_inv"][..], GgmlType::Bf16));
    let whole =
        read(json!({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]})).unwrap();
    assert_eq!(
        (whole.scales, whole.suffixes),
        (Scales::Tensor, &["_scale", "_scale_inv"][..])
    );
    let rows = read(json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})).unwrap();
    assert_eq!((rows.scales, rows.suffixes), (Scales::Row, &["_scale"][..]));
    assert_eq!(read(compressed(|_| ())).unwrap().scales, Scales::Row);
    let tensor = compressed(|c| c["config_groups"]["group_0"]["weights"]["strategy"] = "tensor".into());
    assert_eq!(read(tensor).unwrap().scales, Scales::Tensor);
    let block = compressed(|c| {
        c["config_groups"]["group_0"]["weights"]["strategy"] = "block".into();
        c["config_groups"]["group_0"]["weights"]["block_structure"] = json!([128, 128]);
    });
    assert_eq!(read(block).unwrap().scales, Scales::Block(128, 128));
    assert_eq!(
        Fp8Scheme::of_config(&json!({"quantization_config": null})).unwrap(),
        None
    );
    let single = json!({"dtype": "float32", "quantization_config": {"quant_method": "fp8"}});
    assert_eq!(Fp8Scheme::of_config(&single).unwrap().unwrap().becomes, GgmlType::F32);
}

#[test]
fn what_is_not_understood_is_named() {
    let weights =
        |key: &'static str, value: Value| compressed(move |c| c["config_groups"]["group_0"]["weights"][key] = value);
    let top = |key: &'static str, value: Value| compressed(move |c| c[key] = value);
    let fp8 = |key: &str, value: Value| json!({"quant_method": "fp8", key: value});
    for (section, key, value) in [
        (json!({"quant_method": "gptq", "bits": 4}), "quant_method", "gptq"),
        (json!({"bits": 4}), "quant_method", "(missing)"),
        (json!("fp8"), "quant_method", "(missing)"),
        (fp8("fmt", "e5m2".into()), "fmt", "e5m2"),
        (fp8("scale_fmt", "odd".into()), "scale_fmt", "odd"),
        (fp8("weight_block_size", json!([128])), "weight_block_size", "[128]"),
        (
            fp8("weight_block_size", json!([0, 128])),
            "weight_block_size",
            "[0,128]",
        ),
        (fp8("kv_cache_scheme", "static".into()), "kv_cache_scheme", "static"),
        (top("format", "pack-quantized".into()), "format", "pack-quantized"),
        (
            top("kv_cache_scheme", json!({"num_bits": 8})),
            "kv_cache_scheme",
            "num_bits",
        ),
        (top("transform_config", json!({"R1": 1})), "transform_config", "R1"),
        (
            top("sparsity_config", json!({"format": "sparse-24"})),
            "sparsity_config.format",
            "sparse-24",
        ),
        (top("config_groups", json!({})), "config_groups", "{}"),
        (
            weights("num_bits", 4.into()),
            "config_groups.group_0.weights.num_bits",
            "4",
        ),
        (weights("type", "int".into()), "weights.type", "int"),
        (weights("symmetric", false.into()), "weights.symmetric", "false"),
        (weights("group_size", 32.into()), "weights.group_size", "32"),
        (weights("strategy", "group".into()), "weights.strategy", "group"),
        (weights("strategy", "block".into()), "weights.block_structure", "null"),
    ] {
        let message = read(section).unwrap_err();
        let wanted = "quantization_config.".to_owned();
        for word in [wanted.as_str(), key, value] {
            assert!(message.contains(word), "{message:?} does not name {word:?}");
        }
    }
    let two = compressed(|c| {
        let mut other = c["config_groups"]["group_0"].clone();
        other["weights"]["strategy"] = "tensor".into();
        c["config_groups"]["group_1"] = other;
    });
    assert!(read(two).unwrap_err().contains("groups that scale their weights alike"));
    let old = Fp8Scheme::of_config(&json!({"compression_config": {"format": "int"}})).unwrap_err();
    assert!(old.to_string().contains("compression_config"));
}
