//! The language model: weights, arithmetic, KV pool, samplers; implements the engine's [`Runner`](engine::runner::Runner).
//!
//! Life of a step on the compute thread ([`ModelRunner`]):
//!
//! 1. The plan is checked against the model's and the pool's limits; a wrong one changes nothing.
//! 2. Its blocks are claimed in the [`kv_pool`], so that no handoff writes them meanwhile.
//! 3. The rows of all sequences pass the layers together. In each, K and V of the rows go into the pool, the observer
//!    is told, and attention reads what the pool holds: rows of this step, of earlier ones, and from other nodes alike.
//! 4. Rows that sample or have targets get logits, some rows at a time; the [`sampler`] draws from them. What grammars
//!    allow next has been found out meanwhile, on a thread of its own.
//!
//! [`load()`] makes all of this from a file, [`mod@verify`] holds it against a reference, and [`mod@inspect`] says what a model needs. [`fake::FakeModel`] has the same form and no weights.

pub mod arch;
mod cost;
mod decoder;
pub mod fake;
pub mod inspect;
pub mod kernels;
mod kv_error;
mod kv_groups;
pub mod kv_pool;
mod load;
mod masks;
mod plan_check;
mod pool_size;
mod runner;
pub mod sampler;
mod tensor_names;
pub mod verify;
mod weights;

pub use cost::{ModelMemory, StepCost};
pub use load::{LoadError, LoadedModel, load, load_watched, load_with};
pub use pool_size::PoolSizeError;
pub use runner::ModelRunner;
pub use weights::{Held, LoadProgress, WeightError};
