//! From a path to something that computes.

use std::path::Path;
use std::sync::Arc;

use config::{Compute, EngineConfig, KvDtypeConfig, ModelConfig, Quantize, cores};
use grammar::{Grammars, Vocabulary};
use model_files::{ModelFiles, ModelFilesError};
use protocol::kv::{AdapterIdentity, KvDtype, KvLayout, ModelIdentity};
use thiserror::Error;

use crate::arch::{ArchConfig, ArchError, Fp8Scheme};
use crate::cost::{ModelMemory, StepCost};
use crate::decoder::Decoder;
use crate::kernels::{Cpu, KernelError, LinearMode};
use crate::kv_groups::LayerGroups;
use crate::kv_pool::{KvError, KvPool};
use crate::pool_size::{PoolSizeError, machine_memory, pool_blocks};
use crate::runner::ModelRunner;
use crate::weights::{LoadOptions, LoadProgress, WeightError, WeightFiles, WeightLoader, load_adapter};

/// Generation of the arithmetic: goes up when a change of the kernels changes bits, so that nodes of different versions do
/// not serve one request together.
const ARITHMETIC: u32 = 3;

/// A model in memory, ready to compute steps.
pub struct LoadedModel {
    /// Executes plans; owned by the compute thread.
    pub runner: ModelRunner,
    /// The KV cache; shared with whoever moves its blocks.
    pub pool: Arc<KvPool>,
    /// What the model is, for the cluster's fingerprint.
    pub identity: ModelIdentity,
    /// Shape of the KV cache.
    pub layout: KvLayout,
    /// Positions the model was made for; longer sequences make no sense.
    pub max_position_embeddings: u32,
    /// What a step costs at least.
    pub cost: StepCost,
    /// What is kept in memory.
    pub memory: ModelMemory,
    /// Compiles grammars for the runner: whoever is not the compute thread can have it done before a sequence comes.
    pub grammars: Grammars,
}

/// Why a model could not be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// No model was named.
    #[error("model.path is empty: it must name a GGUF file or a model directory")]
    NoPath,
    /// The files cannot be read.
    #[error(transparent)]
    Files(#[from] ModelFilesError),
    /// The model's description cannot be served.
    #[error("{path}: {source}")]
    Arch {
        /// The file or directory.
        path: String,
        /// What is wrong.
        source: ArchError,
    },
    /// The weights cannot be loaded.
    #[error("{path}: {source}")]
    Weights {
        /// The file or directory.
        path: String,
        /// What is wrong.
        source: WeightError,
    },
    /// An adapter cannot be loaded.
    #[error("model.adapters: adapter {name} in {path}: {source}")]
    Adapter {
        /// Its name.
        name: String,
        /// Its directory.
        path: String,
        /// What is wrong.
        source: Box<WeightError>,
    },
    /// The threads or instruction sets asked for do not exist.
    #[error(transparent)]
    Cpu(#[from] KernelError),
    /// The KV pool's size is none to serve with.
    #[error(transparent)]
    PoolSize(#[from] PoolSizeError),
    /// The KV pool cannot be made.
    #[error(transparent)]
    Pool(#[from] KvError),
}

/// Loads a model and makes a KV pool for it. `max_seq_len` is the longest sequence, in tokens, that will be computed;
/// the model's own limit holds as well.
///
/// # Errors
/// [`LoadError`] names the file, the key or tensor, its value and what would be right.
pub fn load(model: &ModelConfig, engine: &EngineConfig, max_seq_len: usize) -> Result<LoadedModel, LoadError> {
    load_watched(model, engine, max_seq_len, &mut |_| {})
}

/// [`load`] that tells `watch` after each tensor how far it is.
///
/// # Errors
/// As [`load`].
pub fn load_watched(
    model: &ModelConfig,
    engine: &EngineConfig,
    max_seq_len: usize,
    watch: &mut dyn FnMut(LoadProgress),
) -> Result<LoadedModel, LoadError> {
    if model.path.is_empty() {
        return Err(LoadError::NoPath);
    }
    let cpu = Cpu::pinned(engine.threads, &cores(&engine.cores).unwrap_or_default());
    let files = ModelFiles::open(&model.path)?;
    assemble(&files, (model, engine), max_seq_len, cpu?, watch)
}

/// [`load`] of opened files on a given CPU (for comparing instruction sets).
///
/// # Errors
/// As [`load`].
pub fn load_with(
    files: &ModelFiles,
    model: &ModelConfig,
    engine: &EngineConfig,
    max_seq_len: usize,
    cpu: Cpu,
) -> Result<LoadedModel, LoadError> {
    assemble(files, (model, engine), max_seq_len, cpu, &mut |_| {})
}

/// A model's description, for long texts or not, and its opened weights.
pub(crate) fn describe(files: &ModelFiles, long_texts: bool) -> Result<(ArchConfig, WeightFiles<'_>), LoadError> {
    let path = || files.path().display().to_string();
    let unserved = |source| LoadError::Arch { path: path(), source };
    let arch = ArchConfig::read_for(files, long_texts).map_err(unserved)?;
    let fp8 = Fp8Scheme::read(files).map_err(unserved)?;
    let opened = WeightFiles::open(files, fp8);
    let opened = opened.map_err(|source| LoadError::Weights { path: path(), source })?;
    Ok((arch, opened))
}

fn assemble(
    files: &ModelFiles,
    (model, engine): (&ModelConfig, &EngineConfig),
    max_seq_len: usize,
    cpu: Cpu,
    watch: &mut dyn FnMut(LoadProgress),
) -> Result<LoadedModel, LoadError> {
    let weights_failed = |source| LoadError::Weights {
        path: files.path().display().to_string(),
        source,
    };
    let (arch, opened) = describe(files, model.long_texts)?;
    let (mode, compute) = match model.compute {
        Compute::Quantised => (LinearMode::Quantised, "quantised"),
        Compute::Precise => (LinearMode::Precise, "precise"),
        Compute::Float32 => (LinearMode::Float32, "float32"),
    };
    let layout = kv_layout(&arch, model, engine.kv_block_tokens);
    let held = opened.held(&arch, model.quantize).map_err(weights_failed)?;
    let longest = max_seq_len.min(arch.max_positions);
    let blocks = pool_blocks(engine, &layout, longest, machine_memory(), held.bytes())?;
    let pool = Arc::new(KvPool::new(layout, blocks)?);
    // In words too, although the hash of the weights has it: so that a node that is refused can tell why.
    let quantize = match model.quantize {
        Quantize::None => String::new(),
        other => format!("/{}", other.as_str()),
    };
    let numerics = format!(
        "{compute}-{ARITHMETIC}/{}/{}{quantize}{}",
        cpu.level().as_str(),
        layout.dtype.as_str(),
        if model.long_texts { "/long-texts" } else { "" }
    );
    let positions = longest;
    let (name, vocab_size, max_positions) = (arch.name.clone(), arch.vocab_size, arch.max_positions);

    let options = LoadOptions {
        mode,
        quantize: model.quantize,
        threads: cpu.threads(),
    };
    let mut loader = WeightLoader::new(opened, &arch, options, watch).map_err(weights_failed)?;
    let mut decoder = Decoder::load(arch, cpu, positions, &mut loader).map_err(weights_failed)?;
    let weights_hash = loader.finish().map_err(weights_failed)?;
    let adapters = load_adapters(model, &mut decoder)?;
    let identity = ModelIdentity {
        architecture: name,
        vocab_size: vocab_size as u32,
        tokenizer_hash: files.tokenizer_hash()?,
        weights_hash,
        numerics,
        adapters,
    };
    let block_bytes = layout.block_bytes() as u64;
    let memory = ModelMemory {
        kv_pool: block_bytes * pool.total_blocks() as u64,
        ..decoder.memory()
    };
    let grammars = Grammars::new(Vocabulary::Path(files.path().to_path_buf()));
    Ok(LoadedModel {
        cost: decoder.cost(layout.token_bytes() as u64),
        memory,
        runner: ModelRunner::new(decoder, Arc::clone(&pool), positions, grammars.clone()),
        grammars,
        pool,
        identity,
        layout,
        max_position_embeddings: max_positions as u32,
    })
}

/// Shape of a model's KV cache.
pub(crate) fn kv_layout(arch: &ArchConfig, model: &ModelConfig, block_tokens: usize) -> KvLayout {
    let groups = LayerGroups::of(arch);
    KvLayout {
        num_layers: groups.layers as u32,
        num_kv_heads: arch.num_kv_heads as u32,
        head_dim: arch.head_dim as u32,
        block_tokens: block_tokens as u32,
        dtype: match model.kv_dtype {
            KvDtypeConfig::F16 => KvDtype::F16,
            KvDtypeConfig::Bf16 => KvDtype::Bf16,
            KvDtypeConfig::Int8 => KvDtype::Int8,
            KvDtypeConfig::F32 => KvDtype::F32,
        },
        latent: arch.latent.is_some(),
        groups: groups.groups,
    }
}

/// Loads the configured adapters.
fn load_adapters(model: &ModelConfig, decoder: &mut Decoder) -> Result<Vec<AdapterIdentity>, LoadError> {
    let mut identities = Vec::new();
    for (name, path) in model.named_adapters() {
        let loaded = load_adapter(Path::new(path), &decoder.config);
        let (adapter, hash) = loaded.map_err(|source| LoadError::Adapter {
            name: name.to_owned(),
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        decoder.adapters.push(adapter);
        identities.push(AdapterIdentity {
            name: name.to_owned(),
            hash,
        });
    }
    Ok(identities)
}
