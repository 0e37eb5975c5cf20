//! A low-rank adapter as PEFT saves it: a directory with `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Here the configuration is read; its meaning is that of PEFT's `LoraConfig` and `inject_adapter`. What would change the
//! adapter's function and is not computed is refused by name, known or not.

use std::path::{Path, PathBuf};

use fancy_regex::Regex;
use serde_json::{Map, Value};

use crate::directory::{MAX_CONFIG_BYTES, read_json};
use crate::error::ModelFilesError;

/// Largest rank.
const MAX_RANK: u64 = 65_536;

/// Keys that say where an adapter comes from, how it was trained or how its training began.
const HARMLESS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// Keys that are read here.
const READ: &[&str] = &[
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_rslora",
];

/// The configuration of an adapter.
#[derive(Debug)]
pub struct AdapterDirectory {
    path: PathBuf,
    targets: Modules,
    excluded: Option<Modules>,
    /// `None`: all.
    layers: Option<Vec<u64>>,
    rank: u64,
    alpha: f64,
    /// Scales are alpha / sqrt(rank), not alpha / rank.
    rank_stabilised: bool,
    ranks: Vec<Pattern<u64>>,
    alphas: Vec<Pattern<f64>>,
}

/// A choice of modules.
#[derive(Debug)]
enum Modules {
    /// Every linear module but the output matrix.
    AllLinear,
    /// Those of these names, or whose last parts are one of them.
    Named(Vec<String>),
    /// Those whose whole name matches.
    Matching(Regex),
}

/// What holds for some modules instead of the default.
#[derive(Debug)]
struct Pattern<T> {
    words: String,
    regex: Regex,
    value: T,
}

/// The rank of an adapted module, and what its product is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankAndScale {
    /// Rows of A, columns of B.
    pub rank: usize,
    /// See [`AdapterDirectory::rank_and_scale`].
    pub scale: f64,
}

impl AdapterDirectory {
    /// Reads the configuration of the adapter in the directory `path`.
    ///
    /// # Errors
    /// [`ModelFilesError`] naming the file, the key, its value and what would be right.
    pub fn open(path: &Path) -> Result<Self, ModelFilesError> {
        let file = path.join("adapter_config.json");
        if !file.is_file() {
            let what = "holds no adapter_config.json; give a directory that PEFT's save_pretrained has written";
            return Err(ModelFilesError::invalid(path, what));
        }
        let value = read_json(&file, MAX_CONFIG_BYTES)?;
        let invalid = |what| ModelFilesError::invalid(&file, what);
        let Value::Object(keys) = &value else {
            return Err(invalid("holds no JSON object at its top level".to_owned()));
        };
        Self::read(path, &Keys(keys)).map_err(invalid)
    }

    fn read(path: &Path, keys: &Keys<'_>) -> Result<Self, String> {
        keys.refuse_what_is_not_computed()?;
        let targets = keys
            .modules("target_modules")?
            .ok_or_else(|| keys.wrong("target_modules", "a list of module names, a pattern, or \"all-linear\""))?;
        let layers = keys.layers()?;
        if layers.is_some() && keys.get("layers_pattern").is_some_and(|v| !matches_layers(v)) {
            return Err(keys.wrong(
                "layers_pattern",
                "\"layers\", which is what this model's layers are called",
            ));
        }
        Ok(Self {
            path: path.to_path_buf(),
            targets,
            excluded: keys.modules("exclude_modules")?,
            layers,
            rank: keys.number("r", rank_of, RANK)?.unwrap_or(8),
            alpha: keys.number("lora_alpha", finite, NUMBER)?.unwrap_or(8.0),
            rank_stabilised: keys.flag("use_rslora")?,
            ranks: keys.patterns("rank_pattern", rank_of, RANK)?,
            alphas: keys.patterns("alpha_pattern", finite, NUMBER)?,
        })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file with the numbers.
    ///
    /// # Errors
    /// If it is not there.
    pub fn weight_file(&self) -> Result<PathBuf, ModelFilesError> {
        let file = self.path.join("adapter_model.safetensors");
        if file.is_file() {
            return Ok(file);
        }
        let what = "holds no adapter_model.safetensors, the one format of adapters that is read";
        Err(ModelFilesError::invalid(&self.path, what))
    }

    /// Whether the linear module `name` (for example `model.layers.3.self_attn.q_proj`), which is in decoder layer
    /// `layer`, is adapted.
    ///
    /// # Errors
    /// If a pattern of the configuration cannot be matched.
    pub fn adapts(&self, name: &str, layer: usize) -> Result<bool, ModelFilesError> {
        let in_layer = self
            .layers
            .as_ref()
            .is_none_or(|layers| layers.contains(&(layer as u64)));
        if !in_layer || !self.matches("target_modules", &self.targets, name)? {
            return Ok(false);
        }
        match &self.excluded {
            Some(excluded) => Ok(!self.matches("exclude_modules", excluded, name)?),
            None => Ok(true),
        }
    }

    /// The rank of an adapted module, and its scale: alpha / rank, or alpha / sqrt(rank) with `use_rslora`.
    ///
    /// # Errors
    /// If several patterns give the module different values, or a pattern cannot be matched.
    pub fn rank_and_scale(&self, name: &str) -> Result<RankAndScale, ModelFilesError> {
        let rank = self.look_up("rank_pattern", &self.ranks, name)?.unwrap_or(self.rank);
        let alpha = self.look_up("alpha_pattern", &self.alphas, name)?.unwrap_or(self.alpha);
        let divisor = if self.rank_stabilised {
            (rank as f64).sqrt()
        } else {
            rank as f64
        };
        Ok(RankAndScale {
            rank: rank as usize,
            scale: alpha / divisor,
        })
    }

    fn invalid(&self, what: String) -> ModelFilesError {
        ModelFilesError::invalid(&self.path.join("adapter_config.json"), what)
    }

    fn matches(&self, key: &str, modules: &Modules, name: &str) -> Result<bool, ModelFilesError> {
        match modules {
            Modules::AllLinear => Ok(true),
            Modules::Named(names) => Ok(names.iter().any(|end| {
                name.strip_suffix(end.as_str())
                    .is_some_and(|before| before.is_empty() || before.ends_with('.'))
            })),
            Modules::Matching(regex) => regex
                .is_match(name)
                .map_err(|error| self.invalid(format!("{key}: {name}: {error}"))),
        }
    }

    fn look_up<T: Copy + PartialEq>(
        &self,
        key: &str,
        patterns: &[Pattern<T>],
        name: &str,
    ) -> Result<Option<T>, ModelFilesError> {
        let mut found: Option<&Pattern<T>> = None;
        for pattern in patterns {
            let matches = pattern.regex.is_match(name);
            if !matches.map_err(|error| self.invalid(format!("{key}.{}: {name}: {error}", pattern.words)))? {
                continue;
            }
            if let Some(first) = found.filter(|first| first.value != pattern.value) {
                let (one, other) = (&first.words, &pattern.words);
                return Err(self.invalid(format!("{key}: {one} and {other} give {name} different values")));
            }
            found = Some(pattern);
        }
        Ok(found.map(|pattern| pattern.value))
    }
}

const RANK: &str = "a whole number from 1 to 65536";
const NUMBER: &str = "a finite number";

fn rank_of(value: &Value) -> Option<u64> {
    value.as_u64().filter(|rank| (1..=MAX_RANK).contains(rank))
}

fn finite(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.is_finite())
}

fn matches_layers(pattern: &Value) -> bool {
    match pattern {
        Value::String(word) => word.is_empty() || word == "layers",
        Value::Array(words) => words.is_empty() || words.iter().all(|word| word == "layers"),
        _ => false,
    }
}

/// Typed access to the configuration; `null` counts as absent. Errors name the key.
struct Keys<'a>(&'a Map<String, Value>);

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, right: &str) -> String {
        wrong(key, self.0.get(key), right)
    }

    fn refuse_what_is_not_computed(&self) -> Result<(), String> {
        if self.get("peft_type").and_then(Value::as_str) != Some("LORA") {
            return Err(self.wrong("peft_type", "\"LORA\", the one kind of adapter that is served"));
        }
        if self.get("bias").is_some_and(|bias| bias != "none") {
            return Err(self.wrong("bias", "\"none\": adapters with biases are not served"));
        }
        // The others change the base model's weights before training, so that the adapter belongs to no model as it is.
        let begins = ["gaussian", "eva", "orthogonal"];
        let plain = |v: &Value| v.is_boolean() || v.as_str().is_some_and(|word| begins.contains(&word));
        if self.get("init_lora_weights").is_some_and(|value| !plain(value)) {
            let right = "true, false, \"gaussian\", \"eva\" or \"orthogonal\": others change the base model";
            return Err(self.wrong("init_lora_weights", right));
        }
        for (key, value) in self.0 {
            let off = match value {
                Value::Null | Value::Bool(false) => true,
                Value::String(text) => text.is_empty(),
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::Bool(true) | Value::Number(_) => false,
            };
            if !off && !HARMLESS.contains(&key.as_str()) && !READ.contains(&key.as_str()) {
                return Err(self.wrong(key, "absent, null, false or empty: what it asks for is not supported"));
            }
        }
        Ok(())
    }

    fn flag(&self, key: &str) -> Result<bool, String> {
        match self.get(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    fn number<T>(&self, key: &str, parse: fn(&Value) -> Option<T>, right: &str) -> Result<Option<T>, String> {
        self.get(key)
            .map(|value| parse(value).ok_or_else(|| self.wrong(key, right)))
            .transpose()
    }

    fn modules(&self, key: &str) -> Result<Option<Modules>, String> {
        let right = "a list of module names, a pattern, or \"all-linear\"";
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(word)) if word == "all-linear" => Ok(Some(Modules::AllLinear)),
            Some(Value::String(pattern)) => {
                let regex = Regex::new(&format!("^(?:{pattern})$"));
                let regex = regex.map_err(|error| format!("{}: {error}", self.wrong(key, "a regular expression")))?;
                Ok(Some(Modules::Matching(regex)))
            }
            Some(Value::Array(list)) => {
                let names = list.iter().map(|name| name.as_str().map(str::to_owned));
                let names: Option<Vec<String>> = names.collect();
                let names = names.filter(|names| names.iter().all(|name| !name.is_empty()));
                names
                    .map(Modules::Named)
                    .map(Some)
                    .ok_or_else(|| self.wrong(key, right))
            }
            Some(_) => Err(self.wrong(key, right)),
        }
    }

    fn layers(&self) -> Result<Option<Vec<u64>>, String> {
        let key = "layers_to_transform";
        let right = "a layer's number, or a list of them";
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(list)) => {
                let numbers: Option<Vec<u64>> = list.iter().map(Value::as_u64).collect();
                numbers.map(Some).ok_or_else(|| self.wrong(key, right))
            }
            Some(one) => one
                .as_u64()
                .map(|n| Some(vec![n]))
                .ok_or_else(|| self.wrong(key, right)),
        }
    }

    /// A map from patterns for the ends of module names, `(.*\.)?(pattern)$` from their beginning on.
    fn patterns<T>(&self, key: &str, parse: fn(&Value) -> Option<T>, right: &str) -> Result<Vec<Pattern<T>>, String> {
        let map = match self.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Object(map)) => map,
            Some(_) => return Err(self.wrong(key, "an object of patterns and values")),
        };
        map.iter()
            .map(|(words, value)| {
                let regex = Regex::new(&format!(r"^(.*\.)?({words})$"));
                let path = format!("{key}.{words}");
                Ok(Pattern {
                    regex: regex.map_err(|error| format!("{path} is no regular expression: {error}"))?,
                    value: parse(value).ok_or_else(|| wrong(&path, Some(value), right))?,
                    words: words.clone(),
                })
            })
            .collect()
    }
}

fn wrong(key: &str, value: Option<&Value>, right: &str) -> String {
    let shown = value.map_or_else(|| "missing".to_owned(), |value| shortened(&value.to_string()));
    format!("{key} is {shown}, must be {right}")
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(200) {
        Some((at, _)) => format!("{}..", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests;
