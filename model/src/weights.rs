//! Reads a model's tensors from a GGUF file or safetensors, checks their shapes, hashes and packs them.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

use indexed::SafeTensorFiles;
use model_files::{GgufFile, ModelFiles, ModelFilesError, Source};
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

use crate::arch::ArchConfig;
use crate::kernels::{GgmlType, KernelError, Linear, LinearMode, dequantise, embedding_row};
use crate::tensor_names::{Naming, Part, Place, Tensor};

mod adapter;
mod indexed;

pub(crate) use adapter::load_adapter;

/// Why the weights could not be loaded. Every message names the tensor.
#[derive(Debug, Error)]
pub enum WeightError {
    /// The files could not be read.
    #[error(transparent)]
    Files(#[from] ModelFilesError),
    /// A safetensors file breaks its format.
    #[error("{}: {reason}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that the decoder needs is not there.
    #[error("tensor {name} is missing; it must have the shape {expected:?}")]
    Missing {
        /// Its name.
        name: String,
        /// Its shape, outermost dimension first.
        expected: Vec<usize>,
    },
    /// A tensor has another shape than the model's description says.
    #[error("tensor {name} has the shape {found:?}; the model's description calls for {expected:?}")]
    Shape {
        /// Its name.
        name: String,
        /// The shape that follows from the description.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor's element type cannot be read.
    #[error("tensor {name} is {found}; supported are {supported}")]
    Type {
        /// Its name.
        name: String,
        /// Its type.
        found: String,
        /// What can be read.
        supported: &'static str,
    },
    /// The file has tensors that the decoder would leave out, so it would compute another function.
    #[error("{count} tensors of the file are not used by the decoder, for example {example}; another architecture?")]
    Unused {
        /// How many.
        count: usize,
        /// The first by name.
        example: String,
    },
    /// An adapter's file has a tensor that the decoder would leave out.
    #[error(
        "tensor {name} is not the lora_A.weight or lora_B.weight of a module that adapter_config.json chooses and that \
         can be adapted (base_model.model.model.layers.N.self_attn.q_proj, k_proj, v_proj, o_proj and \
         .mlp.gate_proj, up_proj, down_proj)"
    )]
    NotAdapted {
        /// Its name.
        name: String,
    },
    /// An adapter's numbers must be numbers, also when they are multiplied with its scale.
    #[error("tensor {name} has the value {value} (B's with the adapter's scale), must be finite")]
    NotFinite {
        /// Its name.
        name: String,
        /// One of its values.
        value: f32,
    },
    /// A tensor cannot be packed.
    #[error("tensor {name}: {source}")]
    Kernel {
        /// Its name.
        name: String,
        /// What is wrong with it.
        source: KernelError,
    },
}

/// A tensor as it lies in the file.
struct View<'a> {
    kind: GgmlType,
    shape: Vec<usize>,
    bytes: &'a [u8],
}

/// Where tensors come from.
enum Store<'a> {
    Gguf(&'a GgufFile),
    Safetensors(SafeTensorFiles),
}

impl Store<'_> {
    fn find(&self, name: &str) -> Result<Option<View<'_>>, WeightError> {
        match self {
            Self::Safetensors(files) => files.find(name),
            Self::Gguf(file) => {
                let Some(info) = file.header().tensor(name) else {
                    return Ok(None);
                };
                let kind = GgmlType::from_id(info.kind.id()).map_err(|source| WeightError::Kernel {
                    name: name.to_owned(),
                    source,
                })?;
                let shape = info
                    .shape
                    .iter()
                    .map(|&n| usize::try_from(n).unwrap_or(usize::MAX))
                    .collect();
                Ok(Some(View {
                    kind,
                    shape,
                    bytes: file.tensor_bytes(info),
                }))
            }
        }
    }

    fn names(&self) -> Vec<&str> {
        match self {
            Self::Gguf(file) => file.tensors().iter().map(|t| t.name.as_str()).collect(),
            Self::Safetensors(files) => files.names(),
        }
    }
}

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

/// Takes tensors out of a model's files, one after the other, and hashes what it takes.
pub(crate) struct WeightLoader<'a> {
    store: Store<'a>,
    naming: Naming,
    arch: ArchConfig,
    mode: LinearMode,
    /// Threads that pack a matrix.
    threads: usize,
    hash: Xxh3,
    used: HashSet<String>,
    /// Types without a kernel, with the number of their matrices.
    widened: BTreeMap<&'static str, usize>,
}

impl<'a> WeightLoader<'a> {
    /// Opens the weights of a model that is described by `arch`, which enters the hash.
    pub(crate) fn open(
        files: &'a ModelFiles,
        mode: LinearMode,
        threads: usize,
        arch: &ArchConfig,
    ) -> Result<Self, WeightError> {
        let (store, naming) = match files.source() {
            Source::Gguf(file) => (Store::Gguf(file), Naming::Gguf),
            Source::Directory(directory) => (
                Store::Safetensors(SafeTensorFiles::open(directory.weight_files())?),
                Naming::HuggingFace,
            ),
        };
        let mut hash = Xxh3::new();
        hash.update(format!("{arch:?}").as_bytes());
        Ok(Self {
            store,
            naming,
            arch: arch.clone(),
            mode,
            threads,
            hash,
            used: HashSet::new(),
            widened: BTreeMap::new(),
        })
    }

    /// Some rows of a tensor, noted as used and hashed. The shape that it must have is that of the place and `k`.
    fn take(&mut self, place: Place, k: Option<usize>) -> Result<(String, View<'_>), WeightError> {
        let Place { name, outer, rows } = place;
        let expected: Vec<usize> = outer.iter().copied().chain(k).collect();
        let Some(view) = self.store.find(&name)? else {
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
        let size = view.bytes.len() / outer.iter().product::<usize>().max(1);
        let bytes = &view.bytes[rows.start * size..rows.end * size];
        self.used.insert(name.clone());
        let kind = view.kind.as_str();
        match rows.len() == outer.iter().product::<usize>() {
            true => self.hash.update(format!("|{name} {kind} {expected:?}|").as_bytes()),
            false => self
                .hash
                .update(format!("|{name} {kind} {expected:?} {rows:?}|").as_bytes()),
        }
        self.hash.update(bytes);
        Ok((name, View { bytes, ..view }))
    }

    /// Where a whole tensor of so many rows is.
    fn whole(&self, tensor: Tensor, outer: &[usize]) -> Place {
        Place {
            name: self.naming.name(tensor),
            outer: outer.to_vec(),
            rows: 0..outer.iter().product(),
        }
    }

    /// Whether the files have a tensor.
    pub(crate) fn has(&self, tensor: Tensor) -> Result<bool, WeightError> {
        Ok(self.store.find(&self.naming.name(tensor))?.is_some())
    }

    /// A vector of `n` numbers.
    pub(crate) fn vector(&mut self, tensor: Tensor, n: usize) -> Result<Vec<f32>, WeightError> {
        let (name, view) = self.take(self.whole(tensor, &[n]), None)?;
        let mut out = vec![0.0; n];
        dequantise(view.kind, view.bytes, &mut out).map_err(|source| WeightError::Kernel { name, source })?;
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
        let (name, view) = self.take(self.whole(tensor, outer), Some(k))?;
        let mut out = vec![0.0; outer.iter().product::<usize>() * k];
        dequantise(view.kind, view.bytes, &mut out).map_err(|source| WeightError::Kernel { name, source })?;
        Ok(out)
    }

    /// How a matrix is multiplied. What the head rounds goes into the logits directly, and what query and key round goes
    /// through an exponential: there precision is worth most. Together they are a sixth of a layer's arithmetic and the
    /// head, which works on the few rows that need logits.
    fn mode_of(&self, tensor: Tensor) -> LinearMode {
        match (self.mode, tensor) {
            (LinearMode::Quantised, Tensor::Head) => LinearMode::Precise,
            (LinearMode::Quantised, Tensor::Weight(_, Part::Query | Part::Key | Part::Value)) => LinearMode::Precise,
            // Which experts a token gets hangs on small differences.
            (LinearMode::Quantised, Tensor::Latent(..) | Tensor::Router(..)) => LinearMode::Precise,
            (mode, _) => mode,
        }
    }

    /// A matrix of `n` outputs and `k` inputs, packed.
    pub(crate) fn matrix(&mut self, tensor: Tensor, n: usize, k: usize) -> Result<Linear, WeightError> {
        let (mode, threads) = (self.mode_of(tensor), self.threads);
        let place = self.naming.place(&self.arch, tensor, n);
        let (name, view) = self.take(place, Some(k))?;
        let kind = view.kind;
        let packed = Linear::from_ggml_on(kind, n, k, view.bytes, mode, threads)
            .map_err(|source| WeightError::Kernel { name, source })?;
        self.note(kind);
        Ok(packed)
    }

    /// Counts a matrix whose type has no kernel.
    fn note(&mut self, kind: GgmlType) {
        let float = matches!(kind, GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16);
        if self.mode != LinearMode::Float32 && !float && !kind.has_int8_kernel() {
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
        let (mode, threads) = (self.mode_of(Tensor::Head), self.threads);
        let (name, view) = self.take(self.whole(Tensor::Embedding, &[vocab]), Some(hidden))?;
        let packed = tied
            .then(|| Linear::from_ggml_on(view.kind, vocab, hidden, view.bytes, mode, threads))
            .transpose();
        let head = packed.map_err(|source| WeightError::Kernel { name, source })?;
        let kind = view.kind;
        let embedding = match &head {
            Some(head) if head.has_rows() => Embedding::Head,
            _ => Embedding::Own {
                kind,
                bytes: view.bytes.to_vec(),
            },
        };
        if head.is_some() {
            self.note(kind);
        }
        Ok((embedding, head))
    }

    /// Ends the loading: the hash of everything that was taken. The log says which types have no kernel.
    ///
    /// # Errors
    /// [`WeightError::Unused`] if the files hold weights that nobody took.
    pub(crate) fn finish(self, tied: bool) -> Result<u128, WeightError> {
        for (kind, matrices) in &self.widened {
            tracing::warn!(
                kind,
                matrices,
                "no kernel for weights of this type: they become f32, larger and slower"
            );
        }
        let (layers, more) = (self.arch.num_layers, self.arch.prediction_layers);
        let harmless = |name: &str| {
            let layer = || {
                name.strip_prefix("model.layers.")?
                    .split('.')
                    .next()?
                    .parse::<usize>()
                    .ok()
            };
            // Buffers that old checkpoints store, a copy of the embedding, and what is in the description already.
            name.ends_with(".rotary_emb.inv_freq")
                || tied && name == Naming::HuggingFace.name(Tensor::Head)
                || [
                    "rope_freqs.weight",
                    "rope_factors_short.weight",
                    "rope_factors_long.weight",
                ]
                .contains(&name)
                || more > 0 && layer().is_some_and(|layer| (layers..layers + more).contains(&layer))
        };
        let mut unused: Vec<&str> = self
            .store
            .names()
            .into_iter()
            .filter(|&name| !self.used.contains(name) && !harmless(name))
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
