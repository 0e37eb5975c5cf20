//! The language model: weights, arithmetic, KV pool, samplers; implements the engine's [`Runner`](engine::runner::Runner).

mod kv_error;
pub mod kv_pool;
pub mod sampler;
