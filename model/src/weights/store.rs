//! A model's tensors by name, whatever files they are in, and what becomes of them in memory.

use std::collections::BTreeMap;

use config::Quantize;
use model_files::{GgufFile, ModelFiles, Source};

use super::WeightError;
use super::indexed::SafeTensorFiles;
use super::policy::{Choice, choose};
use crate::arch::{ArchConfig, Fp8Scheme};
use crate::kernels::GgmlType;
use crate::tensor_names::{LatentPart, Naming, Tensor};

/// What the numbers of a tensor are in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    Ggml(GgmlType),
    /// 8-bit floats, whose scales are another tensor.
    Fp8,
}

impl Stored {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Ggml(kind) => kind.as_str(),
            Self::Fp8 => "F8_E4M3",
        }
    }
}

/// A tensor as it lies in the file.
pub(super) struct View<'a> {
    pub(super) stored: Stored,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: &'a [u8],
}

/// Where tensors come from.
enum Store<'a> {
    Gguf(&'a GgufFile),
    Safetensors(SafeTensorFiles),
}

/// The opened weights of a model.
pub(crate) struct WeightFiles<'a> {
    store: Store<'a>,
    pub(super) naming: Naming,
    pub(super) fp8: Option<Fp8Scheme>,
}

/// What the weights are in memory, about: matrices as they are kept, before they are arranged for the processor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// By element type: how many tensors, and their bytes.
    pub types: BTreeMap<&'static str, (usize, u64)>,
    /// Matrices whose rows do not fit the type that they should become, by that type and the one that they become.
    pub fallbacks: BTreeMap<(&'static str, &'static str), usize>,
}

impl Held {
    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.types
            .values()
            .fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

impl<'a> WeightFiles<'a> {
    /// Opens a model's weights, and checks the headers of all files.
    pub(crate) fn open(files: &'a ModelFiles, fp8: Option<Fp8Scheme>) -> Result<Self, WeightError> {
        let (store, naming) = match files.source() {
            Source::Gguf(file) => (Store::Gguf(file), Naming::Gguf),
            Source::Directory(directory) => (
                Store::Safetensors(SafeTensorFiles::open_directory(directory)?),
                Naming::HuggingFace,
            ),
        };
        Ok(Self { store, naming, fp8 })
    }

    pub(super) fn find(&self, name: &str) -> Result<Option<View<'_>>, WeightError> {
        match &self.store {
            Store::Safetensors(files) => files.find(name),
            Store::Gguf(file) => {
                let Some(info) = file.header().tensor(name) else {
                    return Ok(None);
                };
                let kind = GgmlType::from_id(info.kind.id()).map_err(|source| WeightError::Kernel {
                    name: name.to_owned(),
                    source,
                })?;
                let shape = info.shape.iter();
                Ok(Some(View {
                    stored: Stored::Ggml(kind),
                    shape: shape.map(|&n| usize::try_from(n).unwrap_or(usize::MAX)).collect(),
                    bytes: file.tensor_bytes(info),
                }))
            }
        }
    }

    pub(super) fn names(&self) -> Vec<&str> {
        match &self.store {
            Store::Gguf(file) => file.tensors().iter().map(|t| t.name.as_str()).collect(),
            Store::Safetensors(files) => files.names(),
        }
    }

    /// Whether the decoder does not need a tensor and is complete without: buffers that old checkpoints store, a copy of the
    /// embedding, what is in the description already, scales of activations, and layers that guess further tokens.
    pub(super) fn is_harmless(&self, name: &str, arch: &ArchConfig) -> bool {
        let (layers, more) = (arch.num_layers, arch.prediction_layers);
        let in_description = [
            "rope_freqs.weight",
            "rope_factors_short.weight",
            "rope_factors_long.weight",
        ];
        let guesses = || {
            let layer: Option<usize> = name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok();
            layer.map(|layer| layer >= layers && layer - layers < more)
        };
        name.ends_with(".rotary_emb.inv_freq")
            || arch.tied_head && name == Naming::HuggingFace.name(Tensor::Head)
            || in_description.contains(&name)
            || self.fp8.is_some() && Fp8Scheme::is_for_activations(name)
            || guesses() == Some(true)
    }

    /// What the weights become in memory.
    ///
    /// # Errors
    /// If a tensor has a type that cannot be read.
    pub(crate) fn held(&self, arch: &ArchConfig, quantize: Quantize) -> Result<Held, WeightError> {
        let mut held = Held::default();
        let scales = |name: &str| {
            let suffixes = self.fp8.as_ref().map_or(&[][..], |scheme| scheme.suffixes);
            let ends = suffixes.iter().filter_map(|suffix| name.strip_suffix(suffix));
            ends.into_iter().any(|weight| weight.ends_with(".weight"))
        };
        for name in self.names() {
            if self.is_harmless(name, arch) || scales(name) {
                continue;
            }
            let Some(view) = self.find(name)? else { continue };
            let numbers = view.bytes.len() as u64 / view.stored.block_bytes() * view.stored.block_len();
            let (kind, choice) = self.becomes(name, &view, arch, quantize);
            if let Some(choice) = choice.filter(|choice| choice.fits != Some(choice.wanted)) {
                *held
                    .fallbacks
                    .entry((choice.wanted.as_str(), kind.as_str()))
                    .or_default() += 1;
            }
            let bytes = (numbers / kind.block_len() as u64).saturating_mul(kind.block_bytes() as u64);
            let (count, sum) = held.types.entry(kind.as_str()).or_default();
            *count += 1;
            *sum = sum.saturating_add(bytes);
        }
        Ok(held)
    }

    /// The type that a tensor has in memory, and how it was chosen if it is quantised.
    fn becomes(
        &self,
        name: &str,
        view: &View<'_>,
        arch: &ArchConfig,
        quantize: Quantize,
    ) -> (GgmlType, Option<Choice>) {
        if self.is_widened(name) {
            return (GgmlType::F32, None);
        }
        let own = match view.stored {
            Stored::Ggml(kind) => kind,
            Stored::Fp8 => self.fp8.as_ref().map_or(GgmlType::F32, |scheme| scheme.becomes),
        };
        if view.shape.len() < 2 || !view.stored.is_float() {
            return (own, None);
        }
        let (tensor, head) = self.stand_in(name, arch);
        let width = view.shape.last().copied().unwrap_or(1);
        match choose(quantize, tensor, head, width) {
            Some(choice) => (choice.fits.unwrap_or(own), Some(choice)),
            None => (own, None),
        }
    }

    /// A tensor's layer, by its name.
    fn layer(name: &str) -> Option<usize> {
        let rest = name.strip_prefix("model.layers.").or(name.strip_prefix("blk."))?;
        rest.split('.').next()?.parse().ok()
    }

    /// Whether a matrix is held as f32 whatever it is in the file: those that latent attention takes apart by heads.
    fn is_widened(&self, name: &str) -> bool {
        let Some(layer) = Self::layer(name) else { return false };
        let parts = [LatentPart::KvUp, LatentPart::KeyUp, LatentPart::ValueUp];
        parts
            .iter()
            .any(|&part| self.naming.name(Tensor::Latent(layer, part)) == name)
    }

    /// The tensor of this name as far as the rules distinguish it, and whether it is the output matrix.
    fn stand_in(&self, name: &str, arch: &ArchConfig) -> (Tensor, bool) {
        if let (Some(layer), Some(experts)) = (Self::layer(name), &arch.experts) {
            let router = Tensor::Router(layer, experts.names);
            if self.naming.name(router) == name {
                return (router, false);
            }
        }
        let head = if arch.tied_head {
            Tensor::Embedding
        } else {
            Tensor::Head
        };
        (head, self.naming.name(head) == name)
    }
}

impl Stored {
    /// Whether it can be quantised at loading.
    pub(super) fn is_float(self) -> bool {
        matches!(
            self,
            Self::Fp8 | Self::Ggml(GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16)
        )
    }

    fn block_bytes(self) -> u64 {
        match self {
            Self::Ggml(kind) => kind.block_bytes() as u64,
            Self::Fp8 => 1,
        }
    }

    fn block_len(self) -> u64 {
        match self {
            Self::Ggml(kind) => kind.block_len() as u64,
            Self::Fp8 => 1,
        }
    }
}
