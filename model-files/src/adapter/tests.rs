use serde_json::json;

use super::*;

const QUERY: &str = "model.layers.3.self_attn.q_proj";
const DOWN: &str = "model.layers.11.mlp.down_proj";

fn read(changes: Value) -> Result<AdapterDirectory, ModelFilesError> {
    let directory = tempfile::tempdir().unwrap();
    let mut config = json!({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]});
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(directory.path().join("adapter_config.json"), config.to_string()).unwrap();
    AdapterDirectory::open(directory.path())
}

fn scale(changes: Value, name: &str) -> (usize, f64) {
    let found = read(changes).unwrap().rank_and_scale(name).unwrap();
    (found.rank, found.scale)
}

#[test]
fn what_peft_writes_is_read() {
    let adapter = read(json!({
        "alpha_pattern": {}, "auto_mapping": null, "base_model_name_or_path": "some/model", "bias": "none",
        "corda_config": null, "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false,
        "inference_mode": true, "init_lora_weights": true, "layer_replication": null, "layers_pattern": null,
        "layers_to_transform": null, "loftq_config": {}, "lora_bias": false, "lora_dropout": 0.05,
        "megatron_config": null, "megatron_core": "megatron.core", "modules_to_save": null,
        "qalora_group_size": 16, "rank_pattern": {}, "revision": null, "target_parameters": null,
        "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_dora": false, "use_qalora": false,
        "use_rslora": false, "alora_invocation_tokens": null, "arrow_config": null, "peft_version": "0.18.0"
    }))
    .unwrap();
    assert!(adapter.adapts(QUERY, 3).unwrap() && !adapter.adapts(DOWN, 11).unwrap());
    assert_eq!(
        adapter.rank_and_scale(QUERY).unwrap(),
        RankAndScale { rank: 8, scale: 2.0 }
    );
    assert!(
        adapter
            .weight_file()
            .unwrap_err()
            .to_string()
            .contains("adapter_model.safetensors")
    );
}

#[test]
fn modules_are_chosen_as_peft_chooses_them() {
    let adapts = |changes: Value, name: &str, layer| read(changes).unwrap().adapts(name, layer).unwrap();
    assert!(adapts(json!({"target_modules": "all-linear"}), DOWN, 11));
    assert!(adapts(json!({"target_modules": [QUERY]}), QUERY, 3), "a whole name");
    assert!(
        adapts(json!({"target_modules": ["self_attn.q_proj"]}), QUERY, 3),
        "its last parts"
    );
    assert!(
        !adapts(json!({"target_modules": ["proj"]}), QUERY, 3),
        "no part of a part"
    );
    let pattern = r".*\.(3|4)\.self_attn\.(q|v)_proj";
    assert!(adapts(json!({"target_modules": pattern}), QUERY, 3));
    assert!(!adapts(
        json!({"target_modules": pattern}),
        "model.layers.13.self_attn.q_projection",
        13
    ));
    assert!(
        !adapts(json!({"target_modules": r"self_attn\.q_proj"}), QUERY, 3),
        "the whole name must match"
    );
    assert!(!adapts(
        json!({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}),
        QUERY,
        3
    ));
    assert!(adapts(json!({"layers_to_transform": [1, 3]}), QUERY, 3));
    assert!(!adapts(json!({"layers_to_transform": 1}), QUERY, 3));
}

#[test]
fn ranks_and_scales_follow_the_patterns() {
    assert_eq!(
        scale(json!({"use_rslora": true, "r": 16, "lora_alpha": 2}), QUERY),
        (16, 0.5)
    );
    assert_eq!(scale(json!({"rank_pattern": {"q_proj": 4}}), QUERY), (4, 4.0));
    assert_eq!(scale(json!({"rank_pattern": {"q_proj": 4}}), DOWN), (8, 2.0));
    assert_eq!(
        scale(json!({"rank_pattern": {r"layers\.\d\.self_attn\..*": 2}}), QUERY),
        (2, 8.0)
    );
    assert_eq!(scale(json!({"alpha_pattern": {"mlp.down_proj": 4.0}}), DOWN), (8, 0.5));
    assert_eq!(
        scale(json!({"rank_pattern": {"_proj": 4}}), QUERY),
        (8, 2.0),
        "no part of a part"
    );
    let both = read(json!({"rank_pattern": {"q_proj": 4, "self_attn.q_proj": 2}})).unwrap();
    let error = both.rank_and_scale(QUERY).unwrap_err().to_string();
    assert!(
        error.contains("rank_pattern") && error.contains("self_attn.q_proj"),
        "{error}"
    );
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    for (key, value) in [
        ("peft_type", json!("IA3")),
        ("peft_type", json!(null)),
        ("bias", json!("lora_only")),
        ("modules_to_save", json!(["lm_head"])),
        ("use_dora", json!(true)),
        ("fan_in_fan_out", json!(true)),
        ("lora_bias", json!(true)),
        ("use_qalora", json!(true)),
        ("layer_replication", json!([[0, 2]])),
        ("trainable_token_indices", json!([1])),
        ("alora_invocation_tokens", json!([1, 2])),
        ("something_new", json!(1)),
        ("init_lora_weights", json!("pissa")),
        ("r", json!(0)),
        ("r", json!(-1)),
        ("r", json!(1e300)),
        ("r", json!("8")),
        ("lora_alpha", json!("16")),
        ("use_rslora", json!("yes")),
        ("target_modules", json!(null)),
        ("target_modules", json!(7)),
        ("target_modules", json!([1])),
        ("target_modules", json!("(")),
        ("exclude_modules", json!("[")),
        ("layers_to_transform", json!("all")),
        ("rank_pattern", json!([1])),
        ("rank_pattern", json!({"q_proj": 0})),
        ("rank_pattern", json!({"(": 4})),
        ("alpha_pattern", json!({"q_proj": null})),
    ] {
        let error = read(json!({key: value})).unwrap_err().to_string();
        assert!(
            error.contains(key) && error.contains("adapter_config.json"),
            "{key} = {value}: {error}"
        );
    }
    let error = read(json!({"layers_to_transform": 1, "layers_pattern": "h"}))
        .unwrap_err()
        .to_string();
    assert!(error.contains("layers_pattern"), "{error}");
}

#[test]
fn broken_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let open = || AdapterDirectory::open(directory.path()).unwrap_err().to_string();
    assert!(open().contains("holds no adapter_config.json"));
    for text in ["", "{", "[1]", "null"] {
        std::fs::write(directory.path().join("adapter_config.json"), text).unwrap();
        assert!(open().contains("adapter_config.json"));
    }
}
