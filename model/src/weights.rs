//! Reads a model's tensors from a GGUF file or safetensors, checks their shapes, hashes and packs them.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use config::Quantize;
use xxhash_rust::xxh3::Xxh3;

use crate::arch::ArchConfig;
use crate::kernels::{GgmlType, KernelError, Linear, LinearMode, dequantise, embedding_row};
use crate::tensor_names::{Part, Place, Tensor};

mod adapter;
mod convert;
mod error;
mod fp8;
mod header;
mod indexed;
mod policy;
mod store;

pub(crate) use adapter::load_adapter;
use convert::{From, Rows};
pub use error::WeightError;
pub use store::Held;
pub(crate) use store::WeightFiles;
use store::{Stored, View};

/// Where the rows of the embedding matrix are.
pub(crate) enum Embedding {
    /// A copy of the tensor, in the file's element type.
    Own { kind: GgmlType, bytes: Vec<u8> },
    /// In the packed output matrix, which is the same tensor.
    Head,
}

impl Embedding {
    /// The row of `token`, which must be below the vocabulary size.
    pub(crate) fn row(&self, head: &Linear, token: u32, out: &mut [f32]) -> Result<(), KernelError> {
        match self {
            Self::Own { kind, bytes } => embedding_row(*kind, bytes, token as usize, out),
            Self::Head => head.row(token as usize, out),
        }
    }

    /// Bytes that are kept beside the output matrix.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Own { bytes, .. } => bytes.len(),
            Self::Head => 0,
        }
    }
}

/// How far loading is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of tensors that have been read.
    pub done: u64,
    /// Bytes of all tensors of the files.
    pub total: u64,
}

/// How tensors are read.
#[derive(Clone, Copy)]
pub(crate) struct LoadOptions {
    pub(crate) mode: LinearMode,
    /// What matrices of floats become.
    pub(crate) quantize: Quantize,
    /// Threads that convert and pack a matrix.
    pub(crate) threads: usize,
}

/// A tensor, or rows of one, in a type that can be packed.
struct Taken<'a> {
    name: String,
    kind: GgmlType,
    bytes: Cow<'a, [u8]>,
}

/// Takes tensors out of a model's files, one after the other, and hashes what it takes: as it is computed with, after all
/// conversions.
pub(crate) struct WeightLoader<'a> {
    files: WeightFiles<'a>,
    arch: ArchConfig,
    options: LoadOptions,
    hash: Xxh3,
    used: HashSet<String>,
    /// Types without a kernel, with the number of their matrices.
    widened: BTreeMap<&'static str, usize>,
    /// What matrices were, what they should become, what they became, and how many.
    quantised: BTreeMap<[&'static str; 3], usize>,
    progress: LoadProgress,
    watch: &'a mut dyn FnMut(LoadProgress),
}

impl<'a> WeightLoader<'a> {
    /// Reads the weights of a model that is described by `arch`, which enters the hash; `watch` is told after each tensor.
    pub(crate) fn new(
        files: WeightFiles<'a>,
        arch: &ArchConfig,
        options: LoadOptions,
        watch: &'a mut dyn FnMut(LoadProgress),
    ) -> Result<Self, WeightError> {
        let mut total = 0;
        for name in files.names() {
            if !files.is_harmless(name, arch) {
                total += files.find(name)?.map_or(0, |view| view.bytes.len() as u64);
            }
        }
        let mut hash = Xxh3::new();
        hash.update(format!("{arch:?}").as_bytes());
        Ok(Self {
            files,
            arch: arch.clone(),
            options,
            hash,
            used: HashSet::new(),
            widened: BTreeMap::new(),
            quantised: BTreeMap::new(),
            progress: LoadProgress { done: 0, total },
            watch,
        })
    }

    /// Some rows of a tensor, noted as used and hashed. The shape that it must have is that of the place and `k`. Floats
    /// become `target`, if there is one.
    fn take(&mut self, place: Place, k: Option<usize>, target: Option<GgmlType>) -> Result<Taken<'_>, WeightError> {
        let Place { name, outer, rows } = place;
        let expected: Vec<usize> = outer.iter().copied().chain(k).collect();
        let Some(view) = self.files.find(&name)? else {
            return Err(WeightError::Missing { name, expected });
        };
        if view.shape != expected {
            return Err(WeightError::Shape {
                name,
                expected,
                found: view.shape,
            });
        }
        // The file has as many bytes as the shape says, so the number of rows divides them.
        let all = outer.iter().product::<usize>();
        let size = view.bytes.len() / all.max(1);
        let bytes = &view.bytes[rows.start * size..rows.end * size];
        self.used.insert(name.clone());
        self.progress.done += bytes.len() as u64;
        (self.watch)(self.progress);
        let threads = self.options.threads;
        let (mut kind, mut bytes) = match (view.stored, k) {
            (Stored::Ggml(kind), _) => (kind, Cow::Borrowed(bytes)),
            (Stored::Fp8, Some(k)) => {
                let (scale, scales, becomes) = scales_of(&self.files, &name, all, k)?;
                self.used.insert(scale);
                let rows = Rows {
                    name: &name,
                    from: From::Fp8(&scales),
                    first: rows.start,
                    k,
                    bytes,
                };
                (becomes, Cow::Owned(rows.convert(becomes, threads)?))
            }
            (Stored::Fp8, None) => return Err(of_type(&name, Stored::Fp8, "F32, F16 and BF16 for a vector")),
        };
        if let (Some(target), Some(k)) = (target, k) {
            let rows = Rows {
                name: &name,
                from: From::Floats(kind),
                first: rows.start,
                k,
                bytes: &bytes,
            };
            (kind, bytes) = (target, Cow::Owned(rows.convert(target, threads)?));
        }
        let word = kind.as_str();
        match rows.len() == all {
            true => self.hash.update(format!("|{name} {word} {expected:?}|").as_bytes()),
            false => self
                .hash
                .update(format!("|{name} {word} {expected:?} {rows:?}|").as_bytes()),
        }
        self.hash.update(&bytes);
        Ok(Taken { name, kind, bytes })
    }

    /// What the floats of a matrix in this place become; notes it. `head`: it is the output matrix, maybe among others.
    fn target(&mut self, tensor: Tensor, head: bool, place: &Place, k: usize) -> Result<Option<GgmlType>, WeightError> {
        let Some(choice) = policy::choose(self.options.quantize, tensor, head, k) else {
            return Ok(None);
        };
        // A tensor that is not there is an error later.
        let Some(stored) = self.files.find(&place.name)?.map(|view| view.stored) else {
            return Ok(None);
        };
        let becomes = choice.fits.filter(|_| stored.is_float());
        let words = [
            stored.as_str(),
            choice.wanted.as_str(),
            becomes.map_or(stored.as_str(), GgmlType::as_str),
        ];
        *self.quantised.entry(words).or_default() += 1;
        Ok(becomes)
    }

    /// Where a whole tensor of so many rows is.
    fn whole(&self, tensor: Tensor, outer: &[usize]) -> Place {
        Place {
            name: self.files.naming.name(tensor),
            outer: outer.to_vec(),
            rows: 0..outer.iter().product(),
        }
    }

    /// Whether the files have a tensor.
    pub(crate) fn has(&self, tensor: Tensor) -> Result<bool, WeightError> {
        Ok(self.files.find(&self.files.naming.name(tensor))?.is_some())
    }

    /// A vector of `n` numbers.
    pub(crate) fn vector(&mut self, tensor: Tensor, n: usize) -> Result<Vec<f32>, WeightError> {
        let Taken { name, kind, bytes } = self.take(self.whole(tensor, &[n]), None, None)?;
        let mut out = vec![0.0; n];
        dequantise(kind, &bytes, &mut out).map_err(|source| WeightError::Kernel { name, source })?;
        Ok(out)
    }

    /// Weights of a norm of `n` numbers, as they are multiplied.
    pub(crate) fn norm(&mut self, tensor: Tensor, n: usize) -> Result<Vec<f32>, WeightError> {
        let mut weights = self.vector(tensor, n)?;
        // Not a factor of 1 + x where there is nothing to add: 0 + -0 is not -0.
        if self.arch.norm_offset != 0.0 {
            weights.iter_mut().for_each(|weight| *weight += self.arch.norm_offset);
        }
        Ok(weights)
    }

    /// The numbers of a tensor with rows of `k`.
    pub(crate) fn floats(&mut self, tensor: Tensor, outer: &[usize], k: usize) -> Result<Vec<f32>, WeightError> {
        let Taken { name, kind, bytes } = self.take(self.whole(tensor, outer), Some(k), None)?;
        let mut out = vec![0.0; outer.iter().product::<usize>() * k];
        dequantise(kind, &bytes, &mut out).map_err(|source| WeightError::Kernel { name, source })?;
        Ok(out)
    }

    /// How a matrix is multiplied. What the head rounds goes into the logits directly, and what query and key round goes
    /// through an exponential: there precision is worth most. Together they are a sixth of a layer's arithmetic and the
    /// head, which works on the few rows that need logits.
    fn mode_of(&self, tensor: Tensor) -> LinearMode {
        match (self.options.mode, tensor) {
            (LinearMode::Quantised, Tensor::Head) => LinearMode::Precise,
            (LinearMode::Quantised, Tensor::Weight(_, Part::Query | Part::Key | Part::Value)) => LinearMode::Precise,
            // Which experts a token gets hangs on small differences.
            (LinearMode::Quantised, Tensor::Latent(..) | Tensor::Router(..)) => LinearMode::Precise,
            (mode, _) => mode,
        }
    }

    /// A matrix of `n` outputs and `k` inputs, packed.
    pub(crate) fn matrix(&mut self, tensor: Tensor, n: usize, k: usize) -> Result<Linear, WeightError> {
        let (mode, threads) = (self.mode_of(tensor), self.options.threads);
        let place = self.files.naming.place(&self.arch, tensor, n);
        let target = self.target(tensor, tensor == Tensor::Head, &place, k)?;
        let Taken { name, kind, bytes } = self.take(place, Some(k), target)?;
        let packed = Linear::from_ggml_on(kind, n, k, &bytes, mode, threads)
            .map_err(|source| WeightError::Kernel { name, source })?;
        self.note(kind);
        Ok(packed)
    }

    /// Counts a matrix whose type has no kernel.
    fn note(&mut self, kind: GgmlType) {
        let float = matches!(kind, GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16);
        if self.options.mode != LinearMode::Float32 && !float && !kind.has_int8_kernel() {
            *self.widened.entry(kind.as_str()).or_default() += 1;
        }
    }

    /// The embedding matrix, and the same packed as the output matrix if `tied`.
    pub(crate) fn embedding(
        &mut self,
        vocab: usize,
        hidden: usize,
        tied: bool,
    ) -> Result<(Embedding, Option<Linear>), WeightError> {
        let (mode, threads) = (self.mode_of(Tensor::Head), self.options.threads);
        let place = self.whole(Tensor::Embedding, &[vocab]);
        let target = self.target(Tensor::Embedding, tied, &place, hidden)?;
        let Taken { name, kind, bytes } = self.take(place, Some(hidden), target)?;
        let packed = tied
            .then(|| Linear::from_ggml_on(kind, vocab, hidden, &bytes, mode, threads))
            .transpose();
        let head = packed.map_err(|source| WeightError::Kernel { name, source })?;
        let embedding = match &head {
            Some(head) if head.has_rows() => Embedding::Head,
            _ => Embedding::Own {
                kind,
                bytes: bytes.into_owned(),
            },
        };
        if head.is_some() {
            self.note(kind);
        }
        Ok((embedding, head))
    }

    /// Ends the loading: the hash of everything that was taken. The log says which types have no kernel, and what was
    /// quantised.
    ///
    /// # Errors
    /// [`WeightError::Unused`] if the files hold weights that nobody took.
    pub(crate) fn finish(self) -> Result<u128, WeightError> {
        for (kind, matrices) in &self.widened {
            tracing::warn!(
                kind,
                matrices,
                "no kernel for weights of this type: they become f32, larger and slower"
            );
        }
        for ([from, wanted, to], matrices) in &self.quantised {
            if to == wanted && from != to {
                tracing::info!(from, to, matrices, "quantised at loading");
            } else if from != wanted {
                let why = if from == to {
                    "they stay as they are"
                } else {
                    "another type takes its place"
                };
                tracing::warn!(from, wanted, to, matrices, "not quantised at loading as asked: {why}");
            }
        }
        let mut unused: Vec<&str> = self
            .files
            .names()
            .into_iter()
            .filter(|&name| !self.used.contains(name) && !self.files.is_harmless(name, &self.arch))
            .collect();
        unused.sort_unstable();
        match unused.first() {
            None => Ok(self.hash.digest128()),
            Some(first) => Err(WeightError::Unused {
                count: unused.len(),
                example: (*first).to_owned(),
            }),
        }
    }
}

/// The scales of a tensor of `n` rows of `k` 8-bit floats, the name of their own tensor, and what the floats become.
fn scales_of(
    files: &WeightFiles<'_>,
    name: &str,
    n: usize,
    k: usize,
) -> Result<(String, fp8::RowScales, GgmlType), WeightError> {
    let Some(scheme) = &files.fp8 else {
        let supported = "F32, F16 and BF16, and F8_E4M3 where quantization_config of config.json says how it is scaled";
        return Err(of_type(name, Stored::Fp8, supported));
    };
    let shapes = fp8::shapes(scheme.scales, n, k);
    let mut found = None;
    for suffix in scheme.suffixes {
        let scale = format!("{name}{suffix}");
        if let Some(view) = files.find(&scale)? {
            found = Some((scale, view));
            break;
        }
    }
    let Some((scale, view)) = found else {
        let name = format!("{name}{}", scheme.suffixes[0]);
        let expected = shapes[0].clone();
        return Err(WeightError::Missing { name, expected });
    };
    let View { stored, shape, bytes } = view;
    if !shapes.contains(&shape) {
        return Err(WeightError::Shape {
            name: scale,
            expected: shapes[0].clone(),
            found: shape,
        });
    }
    let Stored::Ggml(kind) = stored else {
        return Err(of_type(&scale, stored, "F32, F16 and BF16 for scales"));
    };
    let mut numbers = vec![0.0; shape.iter().product()];
    dequantise(kind, bytes, &mut numbers).map_err(|source| WeightError::Kernel {
        name: scale.clone(),
        source,
    })?;
    let width = shape.last().copied().unwrap_or(1).max(1);
    if let Some(at) = numbers.iter().position(|number: &f32| !number.is_finite()) {
        return Err(WeightError::Value {
            name: scale,
            row: at / width,
            column: at % width,
            value: numbers[at],
        });
    }
    let kind = scheme.scales;
    Ok((scale, fp8::RowScales { kind, numbers }, scheme.becomes))
}

fn of_type(name: &str, stored: Stored, supported: &'static str) -> WeightError {
    WeightError::Type {
        name: name.to_owned(),
        found: stored.as_str().to_owned(),
        supported,
    }
}
