//! How long the texts are that a model can be served with.
//!
//! KV depends on tokens and positions alone, so one set of rotary frequencies serves all texts. Where a model's method changes
//! them with the length of a text (`dynamic`, `longrope`), the operator chooses: those for texts up to the length of the first
//! training, or those for long texts, for all.

use serde_json::Value;

use crate::error::ModelFilesError;
use crate::files::Source;

/// Positions that the model is served with.
pub(crate) fn positions(source: &Source, long_texts: bool) -> Result<usize, ModelFilesError> {
    match source {
        Source::Directory(directory) => of_config(directory.config(), long_texts).ok_or_else(|| {
            let found = directory
                .config()
                .get("max_position_embeddings")
                .unwrap_or(&Value::Null);
            let what = format!(
                "key `max_position_embeddings` is {found}; an integer from 1 to {} would be right",
                u32::MAX
            );
            ModelFilesError::invalid(&directory.path().join("config.json"), what)
        }),
        Source::Gguf(file) => {
            let architecture = file.require_string("general.architecture")?;
            let trained = file.require_u32(&format!("{architecture}.context_length"))?;
            let original = match file.header().tensor("rope_factors_short.weight") {
                Some(_) => file.u32(&format!("{architecture}.rope.scaling.original_context_length"))?,
                None => None,
            };
            let served = match original {
                Some(original) if !long_texts => trained.min(original),
                _ => trained,
            };
            Ok(served as usize)
        }
    }
}

/// None if the length of the training is missing or absurd. What else is wrong is told by who computes the frequencies.
fn of_config(config: &Value, long_texts: bool) -> Option<usize> {
    let size = |value: &Value, key: &str| {
        let size = value.get(key).and_then(Value::as_u64)?;
        (1..=u64::from(u32::MAX)).contains(&size).then_some(size as usize)
    };
    let trained = size(config, "max_position_embeddings")?;
    let section = given(config, "rope_parameters").or_else(|| given(config, "rope_scaling"));
    // One section for each kind of layer: those that see all of a text count.
    let section = section.and_then(|section| section.get("full_attention").or(Some(section)));
    let Some(section) = section else {
        return Some(trained);
    };
    let original = size(section, "original_max_position_embeddings");
    let kind = given(section, "rope_type").or_else(|| given(section, "type"));
    let kind = kind.and_then(Value::as_str);
    let stretched = || {
        let factor = section.get("factor").and_then(Value::as_f64).unwrap_or(1.0);
        let stretched = factor * original.unwrap_or(trained) as f64;
        // Casts of floats saturate; what is not positive or no number becomes 0.
        trained.max((stretched as usize).min(u32::MAX as usize))
    };
    Some(match kind {
        Some("yarn") => stretched(),
        Some("dynamic") if long_texts => stretched(),
        Some("dynamic") => trained.min(original.unwrap_or(trained)),
        Some("longrope" | "su") if !long_texts => {
            let original = original.or_else(|| size(config, "original_max_position_embeddings"));
            trained.min(original.unwrap_or(trained))
        }
        _ => trained,
    })
}

/// What stands under a key; `null` is nothing.
fn given<'a>(section: &'a Value, key: &str) -> Option<&'a Value> {
    section.get(key).filter(|value| !value.is_null())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn methods_that_change_with_the_length_end_where_they_change_unless_long_texts_are_wanted() {
        let longrope = json!({"max_position_embeddings": 131_072, "original_max_position_embeddings": 4_096,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}});
        let dynamic =
            json!({"max_position_embeddings": 2_048, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}});
        let newer = json!({"max_position_embeddings": 100, "rope_parameters": {
            "full_attention": {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 50}}});
        let mut nulls = longrope.clone();
        nulls["rope_parameters"] = Value::Null;
        nulls["rope_scaling"]["rope_type"] = Value::Null;
        for (config, short, long) in [
            (longrope, 4_096, 131_072),
            (nulls, 4_096, 131_072),
            (dynamic, 2_048, 8_192),
            (newer, 50, 150),
        ] {
            assert_eq!(of_config(&config, false), Some(short), "{config}");
            assert_eq!(of_config(&config, true), Some(long), "{config}");
        }
    }

    #[test]
    fn others_are_what_they_are() {
        let yarn = json!({"max_position_embeddings": 32_768, "rope_scaling": {"type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32_768}});
        let linear = json!({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4.0}});
        let plain = json!({"max_position_embeddings": 64, "rope_scaling": null});
        for long in [false, true] {
            assert_eq!(of_config(&yarn, long), Some(131_072));
            assert_eq!(of_config(&linear, long), Some(64));
            assert_eq!(of_config(&plain, long), Some(64));
        }
    }

    #[test]
    fn absurd_numbers_make_no_absurd_lengths() {
        for wrong in [json!(0), json!(-1), json!("x"), json!(u64::MAX), Value::Null] {
            assert_eq!(of_config(&json!({ "max_position_embeddings": wrong }), true), None);
        }
        for factor in [json!(1e300), json!(-1e300), json!("x"), json!(0)] {
            let config = json!({"max_position_embeddings": 8, "rope_scaling": {"type": "yarn", "factor": factor}});
            assert!(
                of_config(&config, true).is_some_and(|most| (8..=u32::MAX as usize).contains(&most)),
                "{config}"
            );
        }
    }
}
