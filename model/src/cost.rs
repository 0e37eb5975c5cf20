//! What a step of a model costs at least, and what the loaded model keeps in memory.

/// Arithmetic and memory traffic that follow from a model's shape, for comparing measured times with what a machine can
/// do. A multiply-add counts as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCost {
    /// Multiply-adds of the products of all layers, for one row. A matrix that takes its input in two int8 passes counts
    /// twice.
    pub layer_macs: u64,
    /// Multiply-adds of the output head, for one row that samples, counted likewise.
    pub head_macs: u64,
    /// Multiply-adds of attention (scores and weighted values) of all layers, for one row and one position it sees.
    pub attention_macs: u64,
    /// Bytes of the packed weights of all layers, read once a step.
    pub layer_bytes: u64,
    /// Bytes of the packed output head, read once a step that samples.
    pub head_bytes: u64,
    /// Bytes of K and V of all layers, for one position of one sequence, room in blocks that no layer uses included.
    pub kv_bytes: u64,
}

/// Bytes that a loaded model keeps, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelMemory {
    /// Packed matrices of the layers, the head and the adapters.
    pub weights: u64,
    /// The embedding matrix, as far as it is kept beside the head.
    pub embedding: u64,
    /// Norms, biases and the table of rotary angles.
    pub tables: u64,
    /// Address space of the KV pool; its pages become resident as they are first used.
    pub kv_pool: u64,
}
