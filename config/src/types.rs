//! Types of fields that are not plain numbers or strings.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What the weights are multiplied in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compute {
    /// Quantised weights as stored, against activations rounded to int8 (query, key, value, head: about 15 bits).
    #[default]
    Quantised,
    /// As stored, against activations of about 15 bits (two int8 passes): about the reference's answers at twice the
    /// arithmetic.
    Precise,
    /// Quantised weights widened to float32: slower, closest to the reference.
    Float32,
}

/// What matrices of floats become when the model is loaded. All nodes of a cluster must agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Quantize {
    /// What they are.
    #[default]
    #[serde(rename = "none")]
    None,
    /// 8 bits, blocks of 32 with a scale.
    #[serde(rename = "q8_0")]
    Q8_0,
    /// 6 bits, blocks of 256.
    #[serde(rename = "q6_k")]
    Q6K,
    /// 5 bits, blocks of 256.
    #[serde(rename = "q5_k")]
    Q5K,
    /// 4 bits, blocks of 256.
    #[serde(rename = "q4_k")]
    Q4K,
    /// 5 bits, blocks of 32 with scale and minimum.
    #[serde(rename = "q5_1")]
    Q5_1,
    /// 5 bits, blocks of 32 with a scale.
    #[serde(rename = "q5_0")]
    Q5_0,
    /// 4 bits, blocks of 32 with scale and minimum.
    #[serde(rename = "q4_1")]
    Q4_1,
    /// 4 bits, blocks of 32 with a scale.
    #[serde(rename = "q4_0")]
    Q4_0,
}

impl Quantize {
    /// All, the largest first.
    pub const ALL: [Self; 9] = [
        Self::None,
        Self::Q8_0,
        Self::Q6K,
        Self::Q5K,
        Self::Q4K,
        Self::Q5_1,
        Self::Q5_0,
        Self::Q4_1,
        Self::Q4_0,
    ];

    /// The word in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Q8_0 => "q8_0",
            Self::Q6K => "q6_k",
            Self::Q5K => "q5_k",
            Self::Q4K => "q4_k",
            Self::Q5_1 => "q5_1",
            Self::Q5_0 => "q5_0",
            Self::Q4_1 => "q4_1",
            Self::Q4_0 => "q4_0",
        }
    }
}

/// How nodes find the coordinators.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiscoveryMethod {
    /// A list in the configuration.
    #[default]
    Static,
    /// Names that resolve to them.
    Dns,
    /// Keys in etcd that they keep alive.
    Etcd,
}

/// Element type of the KV cache. All nodes of a cluster must agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvDtypeConfig {
    /// Half precision: half the memory and half the bytes of a handoff.
    #[default]
    F16,
    /// The upper half of single precision: as large as half precision, coarser, without its limit of 65,504.
    Bf16,
    /// Signed bytes with a scale for each token and head: about a quarter of single precision.
    Int8,
    /// Single precision.
    F32,
}

/// What a completion with `best_of` returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BestOf {
    /// All choices, the best first.
    #[default]
    All,
    /// The best `n`, as OpenAI does.
    Openai,
}

/// What a node of switchable role serves at first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeRoleConfig {
    /// Prompts and first tokens.
    Prefill,
    /// The generation loop.
    Decode,
    /// Both.
    #[default]
    Both,
}

/// The CPU cores of a list in the notation of `taskset`: numbers and ranges with commas between them, for example
/// `0,2-3`. `None` if it is not one, names a core twice, or names one above 1023. Empty: no core.
pub fn cores(list: &str) -> Option<Vec<usize>> {
    const MOST: usize = 1_024;
    let mut cores = Vec::new();
    for part in list.split(',').filter(|_| !list.is_empty()) {
        let number = |digits: &str| -> Option<usize> {
            let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            digits.parse().ok().filter(|&n: &usize| plain && n < MOST)
        };
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if first > last || cores.iter().any(|core| (first..=last).contains(core)) {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores)
}

/// Which log-probabilities of tokens an answer tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogprobsConfig {
    /// Those of the model's own distribution.
    #[default]
    Raw,
    /// Those of the distribution that tokens are drawn from: after biases, penalties, temperature and filters.
    Processed,
}

/// Whether decode nodes compute prompts themselves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LocalPrefillConfig {
    /// Never, but for a node that serves both roles and would hand over to itself.
    Never,
    /// Where that is predicted to be cheaper, or no prefill node could take the job.
    #[default]
    Auto,
    /// Every prompt that they can.
    Always,
}

/// How the coordinator chooses nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoutingConfig {
    /// Least predicted time for the request and those it delays; what nodes have cached counts.
    #[default]
    PrefixAffinity,
    /// Least work ahead.
    LeastLoaded,
    /// One after the other.
    RoundRobin,
}

/// Shape of a log line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For a terminal.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

/// Level of the line about a request that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogRequests {
    /// No such line.
    Off,
    /// Where `telemetry.log_level` is `debug`.
    #[default]
    Debug,
    /// Where it is `info` or more.
    Info,
}

/// A string that is never printed: neither by `Debug` nor by `Config::to_toml`.
#[derive(Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// What is printed in place of a secret; refused as a value.
    pub const HIDDEN: &str = "(hidden)";

    /// Wraps `value`.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The secret itself, for comparing, and for whom it is meant.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::HIDDEN)
    }
}

impl Serialize for Secret {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // What is not there needs no hiding, and the printed configuration can be read again.
        serializer.serialize_str(if self.is_empty() { "" } else { Self::HIDDEN })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_lists_are_read_as_taskset_reads_them() {
        assert_eq!(cores(""), Some(vec![]));
        assert_eq!(cores("3"), Some(vec![3]));
        assert_eq!(cores("4,0-2"), Some(vec![4, 0, 1, 2]));
        for wrong in [",", "1,", "a", "-1", "2-1", "1,1", "0-3,2", "1024", "+1", " 1", "0-"] {
            assert_eq!(cores(wrong), None, "{wrong}");
        }
    }
}
