//! Rotary embeddings and the ways to stretch them over longer texts than a model was first trained on.
//!
//! KV must depend on tokens and positions alone, so every method here is a fixed set of frequencies. Methods that change
//! them with the length of the sequence (`dynamic`, `longrope`) are served with those for the texts of the first training, up to
//! their length, or on wish with those for long texts, as vLLM does; see [`model_files::ModelFiles::positions`].

use std::f64::consts::PI;

use serde_json::Value;

use super::json::Reader;
use super::{ArchError, feature_error, value_error};

/// Rotary embeddings of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Elements of a head that are rotated.
    pub width: usize,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
}

/// A way to stretch the frequencies base^(-2 i / width).
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All are divided by the factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3.1: slow ones are divided, fast ones stay, those between go over smoothly.
    Llama3 {
        /// What slow ones are divided by.
        factor: f64,
        /// Slower than this often in the first training's length: divided.
        low: f64,
        /// Faster than this often in it: not divided.
        high: f64,
        /// The first training's length, in positions.
        original: f64,
    },
    /// YaRN (Peng et al., 2023): slow ones are divided, fast ones stay, with a ramp over the index between them.
    Yarn {
        /// What slow ones are divided by.
        factor: f64,
        /// The first training's length, in positions.
        original: f64,
        /// Faster than this often in the first training's length: not divided.
        fast: f64,
        /// Slower than this often in it: divided.
        slow: f64,
        /// The ramp's ends are rounded to whole indices.
        whole: bool,
        /// Factor of cosines and sines.
        amplitude: f64,
    },
    /// Each is divided by a number of its own.
    Divided {
        /// The numbers, one for two rotated elements.
        by: Vec<f64>,
        /// Factor of cosines and sines.
        amplitude: f64,
    },
}

impl Rope {
    /// Plain ones.
    pub(super) fn plain(theta: f64, width: usize) -> Self {
        let scaling = RopeScaling::None;
        Self { theta, width, scaling }
    }

    /// Angle per position of each pair of elements.
    pub(crate) fn frequencies(&self) -> Vec<f64> {
        let plain = |i: usize| self.theta.powf(-((2 * i) as f64) / self.width as f64);
        let scaled = |i: usize| match &self.scaling {
            RopeScaling::None => plain(i),
            RopeScaling::Linear { factor } => plain(i) / factor,
            RopeScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => {
                let turns = original * plain(i) / (2.0 * PI);
                // 0 for slow ones, 1 for fast ones.
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                plain(i) * (kept + (1.0 - kept) / factor)
            }
            RopeScaling::Yarn { factor, .. } => {
                let divided = self.yarn_ramp(i);
                plain(i) * (1.0 - divided + divided / factor)
            }
            RopeScaling::Divided { by, .. } => plain(i) / by[i],
        };
        (0..self.width / 2).map(scaled).collect()
    }

    /// 0 for fast frequencies, 1 for slow ones.
    fn yarn_ramp(&self, i: usize) -> f64 {
        let RopeScaling::Yarn {
            original,
            fast,
            slow,
            whole,
            ..
        } = &self.scaling
        else {
            return 0.0;
        };
        let width = self.width as f64;
        let index_of = |turns: f64| width * (original / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
        let (mut first, mut last) = (index_of(*fast), index_of(*slow));
        if *whole {
            (first, last) = (first.floor(), last.ceil());
        }
        let first = first.max(0.0);
        let mut last = last.min(width - 1.0);
        if first == last {
            last += 0.001;
        }
        ((i as f64 - first) / (last - first)).clamp(0.0, 1.0)
    }

    /// Factor of cosines and sines.
    pub(crate) fn amplitude(&self) -> f64 {
        match &self.scaling {
            RopeScaling::Yarn { amplitude, .. } | RopeScaling::Divided { amplitude, .. } => *amplitude,
            _ => 1.0,
        }
    }

    /// Refuses what gives no frequencies for heads of that many elements.
    pub(super) fn check(&self, head_dim: usize) -> Result<(), ArchError> {
        let positive = |what: &str, value: f64| match value > 0.0 && value.is_finite() {
            true => Ok(()),
            false => Err(value_error(what, value, "a finite number above 0")),
        };
        positive("rope theta", self.theta)?;
        if self.width == 0 || self.width > head_dim || !self.width.is_multiple_of(2) {
            let right = format!("even and between 2 and {head_dim}, the head size");
            return Err(value_error("rotated width of a head", self.width, right));
        }
        positive("rope scaling amplitude", self.amplitude())?;
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("rope scaling factor", *factor),
            RopeScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => {
                positive("rope scaling factor", *factor)?;
                positive("rope scaling original_max_position_embeddings", *original)?;
                match low < high && low.is_finite() && high.is_finite() {
                    true => Ok(()),
                    false => Err(value_error(
                        "rope scaling high_freq_factor",
                        high,
                        "above low_freq_factor",
                    )),
                }
            }
            RopeScaling::Yarn {
                factor,
                original,
                fast,
                slow,
                ..
            } => {
                positive("rope scaling factor", *factor)?;
                positive("rope scaling original_max_position_embeddings", *original)?;
                positive("rope scaling beta_fast", *fast)?;
                positive("rope scaling beta_slow", *slow)
            }
            RopeScaling::Divided { by, .. } => {
                let pairs = self.width / 2;
                if by.len() != pairs {
                    let right = format!("{pairs}, one for two of the {} rotated elements", self.width);
                    return Err(value_error("number of rope factors", by.len(), right));
                }
                by.iter().try_for_each(|&factor| positive("a rope factor", factor))
            }
        }
    }
}

/// YaRN's factor of cosines and sines for a stretch, where `scale` is 1 unless a model says otherwise.
pub(super) fn yarn_amplitude(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * scale * factor.ln() + 1.0
    }
}

/// What a `config.json` says on rotary embeddings.
pub(super) struct ConfigRope {
    pub(super) rope: Rope,
    /// YaRN's `mscale_all_dim` and factor, which some architectures put into the scale of attention.
    pub(super) all_dim: Option<(f64, f64)>,
}

const SUPPORTED: &str = "default, linear, llama3, yarn, dynamic and longrope are";

/// Reads one set of parameters: `section` is its name for messages. `theta` is what the older form has beside it. `long_texts`:
/// what the method has for long texts, if it has something else for them.
pub(super) fn from_section(
    config: Reader<'_>,
    section: (&str, Option<&Value>),
    theta: f64,
    head_dim: usize,
    long_texts: bool,
) -> Result<ConfigRope, ArchError> {
    let (name, value) = section;
    let reader = Reader(value.unwrap_or(&Value::Null));
    let mut theta = reader.number("rope_theta")?.unwrap_or(theta);
    let partial = match reader.number("partial_rotary_factor")? {
        Some(factor) => factor,
        None => config.number("partial_rotary_factor")?.unwrap_or(1.0),
    };
    if !(partial > 0.0 && partial <= 1.0) {
        return Err(value_error("partial_rotary_factor", partial, "above 0 and at most 1"));
    }
    let width = (head_dim as f64 * partial) as usize;
    let kind = match reader.text("rope_type")? {
        Some(kind) => kind,
        None => reader.text("type")?.unwrap_or("default"),
    };
    let mut all_dim = None;
    let require = |key: &str| {
        let missing = || value_error(format!("{name}.{key}"), "(missing)", format!("there for {kind}"));
        reader.number(key)?.ok_or_else(missing)
    };
    let trained = config.require("max_position_embeddings")?;
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear {
            factor: require("factor")?,
        },
        "llama3" => RopeScaling::Llama3 {
            factor: require("factor")?,
            low: require("low_freq_factor")?,
            high: require("high_freq_factor")?,
            original: require("original_max_position_embeddings")?,
        },
        "yarn" => {
            let original = reader.size("original_max_position_embeddings")?.unwrap_or(trained);
            let (scaling, all) = yarn(reader, require("factor")?, original)?;
            all_dim = all;
            scaling
        }
        "dynamic" => {
            let factor = require("factor")?;
            if long_texts {
                theta = dynamic_theta(theta, factor, width);
            }
            RopeScaling::None
        }
        "longrope" | "su" => {
            let original = match reader.size("original_max_position_embeddings")? {
                Some(original) => original,
                None => config.require("original_max_position_embeddings")?,
            };
            longrope(reader, name, (trained, original), long_texts)?
        }
        other => return Err(feature_error(format!("{name}.rope_type"), other, SUPPORTED)),
    };
    let rope = Rope { theta, width, scaling };
    Ok(ConfigRope { rope, all_dim })
}

fn yarn(reader: Reader<'_>, factor: f64, original: usize) -> Result<(RopeScaling, Option<(f64, f64)>), ArchError> {
    let (scale, all) = (reader.number("mscale")?, reader.number("mscale_all_dim")?);
    let amplitude = match (reader.number("attention_factor")?, scale, all) {
        (Some(amplitude), ..) => amplitude,
        (None, Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => {
            yarn_amplitude(factor, scale) / yarn_amplitude(factor, all)
        }
        _ => yarn_amplitude(factor, 1.0),
    };
    let scaling = RopeScaling::Yarn {
        factor,
        original: original as f64,
        fast: reader.number("beta_fast")?.unwrap_or(32.0),
        slow: reader.number("beta_slow")?.unwrap_or(1.0),
        whole: reader.flag("truncate")?.unwrap_or(true),
        amplitude,
    };
    Ok((scaling, all.filter(|&all| all != 0.0).map(|all| (all, factor))))
}

/// The base of the `dynamic` method for the longest text that it is made for: factor times the length of the training. (The
/// formula of transformers and vLLM; the length of the training cancels out.)
fn dynamic_theta(theta: f64, factor: f64, width: usize) -> f64 {
    let width = width as f64;
    theta * (factor * factor - (factor - 1.0)).powf(width / (width - 2.0))
}

/// The factors for texts no longer than the original length, or those for long texts: which of the two lists applies must not
/// depend on a text. `lengths` are the final training's and the first training's.
fn longrope(
    reader: Reader<'_>,
    name: &str,
    lengths: (usize, usize),
    long_texts: bool,
) -> Result<RopeScaling, ArchError> {
    let (trained, original) = lengths;
    let (right, key) = (
        "a list of numbers",
        if long_texts { "long_factor" } else { "short_factor" },
    );
    let by = reader.list(key, right, Value::as_f64)?;
    let by = by.ok_or_else(|| value_error(format!("{name}.{key}"), "(missing)", "there for longrope"))?;
    let stretch = trained as f64 / original.max(1) as f64;
    let amplitude = match reader.number("attention_factor")? {
        Some(amplitude) => amplitude,
        None => longrope_amplitude(stretch, original as f64),
    };
    Ok(RopeScaling::Divided { by, amplitude })
}

/// LongRoPE's factor of cosines and sines.
pub(super) fn longrope_amplitude(stretch: f64, original: f64) -> f64 {
    if stretch <= 1.0 {
        1.0
    } else {
        (1.0 + stretch.ln() / original.ln()).sqrt()
    }
}

/// The older form's section, by either of its names.
pub(super) fn section(config: Reader<'_>) -> (&'static str, Option<&Value>) {
    match (config.get("rope_parameters"), config.get("rope_scaling")) {
        (Some(newer), _) => ("rope_parameters", Some(newer)),
        (None, older) => ("rope_scaling", older),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(config: &Value) -> ConfigRope {
        read_for(config, false)
    }

    fn read_for(config: &Value, long_texts: bool) -> ConfigRope {
        let reader = Reader(config);
        let theta = reader.number("rope_theta").unwrap().unwrap_or(10_000.0);
        from_section(reader, section(reader), theta, 8, long_texts).unwrap()
    }

    fn close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            assert!(
                (a - b).abs() < 1e-9 * b.abs().max(1e-3),
                "{found:?} instead of {expected:?}"
            );
        }
    }

    #[test]
    fn both_forms_of_the_configuration_say_the_same() {
        let older = json!({"max_position_embeddings": 64, "rope_theta": 100.0,
            "rope_scaling": {"type": "linear", "factor": 4.0}});
        let newer = json!({"max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}});
        assert_eq!(read(&older).rope, read(&newer).rope);
        let tenth = 10_f64.sqrt();
        close(
            &read(&older).rope.frequencies(),
            &[0.25, 0.25 / tenth, 0.025, 0.025 / tenth],
        );
    }

    #[test]
    fn a_part_of_a_head_may_be_rotated() {
        let config = json!({"max_position_embeddings": 64, "rope_theta": 100.0, "partial_rotary_factor": 0.5});
        let rope = read(&config).rope;
        assert_eq!(rope.width, 4);
        close(&rope.frequencies(), &[1.0, 0.1]);
    }

    #[test]
    fn llama3_leaves_fast_ones_and_divides_slow_ones() {
        let config = json!({"max_position_embeddings": 1024, "rope_theta": 10_000.0, "rope_scaling":
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 128}});
        // Turns in 128 positions: 20.4, 2.04, 0.204, 0.0204.
        let turns = 128.0 * 0.1 / (2.0 * PI);
        let between = (turns - 1.0) / 3.0;
        let second = 0.1 * (between + (1.0 - between) / 8.0);
        close(
            &read(&config).rope.frequencies(),
            &[1.0, second, 0.01 / 8.0, 0.001 / 8.0],
        );
    }

    #[test]
    fn yarn_ramps_over_the_index_and_raises_the_amplitude() {
        let config = json!({"max_position_embeddings": 128, "rope_theta": 10_000.0, "rope_scaling":
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 8.0}});
        let read = read(&config);
        // index(8) = 8 ln(128 / 16 pi) / (2 ln 10^4) = 0.406 -> 0; index(1) = 1.309 -> 2.
        let ramp = [0.0, 0.5, 1.0, 1.0];
        let expected: Vec<f64> = [1.0, 0.1, 0.01, 0.001]
            .iter()
            .zip(ramp)
            .map(|(f, r)| f * (1.0 - r) + f / 4.0 * r)
            .collect();
        close(&read.rope.frequencies(), &expected);
        assert!((read.rope.amplitude() - (0.1 * 4_f64.ln() + 1.0)).abs() < 1e-12);
    }

    #[test]
    fn methods_that_change_with_the_length_have_one_set_of_frequencies_for_all_texts() {
        let config = json!({"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}});
        assert_eq!(read(&config).rope, Rope::plain(10_000.0, 8));
        // At 128 positions: 10^4 * (2 * 128 / 64 - 1)^(8 / 6).
        let long = read_for(&config, true).rope;
        assert!(
            (long.theta - 10_000.0 * 3_f64.powf(8.0 / 6.0)).abs() < 1e-6,
            "{}",
            long.theta
        );
        let config = json!({"max_position_embeddings": 1024, "original_max_position_embeddings": 64, "rope_theta": 100.0,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0, 4.0, 5.0], "long_factor": [9, 8, 7, 6]}});
        let tenth = 10_f64.sqrt();
        for (long_texts, by) in [(false, [1.0, 2.0, 4.0, 5.0]), (true, [9.0, 8.0, 7.0, 6.0])] {
            let rope = read_for(&config, long_texts).rope;
            close(
                &rope.frequencies(),
                &[1.0 / by[0], 1.0 / tenth / by[1], 0.1 / by[2], 0.1 / tenth / by[3]],
            );
            assert!((rope.amplitude() - (1.0 + 16_f64.ln() / 64_f64.ln()).sqrt()).abs() < 1e-12);
        }
    }
}
