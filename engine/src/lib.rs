//! Sequences, scheduler and block manager: everything that decides what a step computes. Pure: the whole crate is a core
//! (no threads, no clock, no I/O); the shell around it owns the thread, the model and the sockets.
//!
//! Life of a sequence:
//!
//! 1. It enters by [`engine::Engine::add`] (tokens to be computed here) or by [`engine::Engine::reserve`], a transfer
//!    into the reserved blocks, and [`engine::Engine::commit`] (tokens computed elsewhere). It gets an id; ids are ages.
//! 2. It waits, oldest first, until a slot is free and the pool would suffice if nobody ended early (see `admission`).
//!    It starts with the blocks of its longest beginning that the prefix cache holds (see `prefix_cache`), so its counter
//!    starts there; at least its last token is computed.
//! 3. Every step `plan -> Runner::execute -> apply` moves its one counter, `num_computed`, towards its number of tokens:
//!    a prompt in chunks, a running sequence by one row, both in one batch.
//! 4. Whenever the counter meets the number of tokens, one token is sampled and appended: an [`event::EngineEvent`].
//! 5. If the pool runs dry, the youngest loses its blocks and goes back to 2. Nothing else about it changes, and sampling is a function of its tokens alone, so its further tokens are the same.
//! 6. Sequences of one prompt may share its blocks (`Engine::commit_choices`, `Engine::add_choices`, and the members of a
//!    [`beam`] search). A shared block is not written: who is going to gets a copy first, which the plan names.
//! 7. It ends by its stop rules, by the longest length, by a failed step or by [`engine::Engine::cancel`]. Its blocks
//!    are let go at once, or after `release_held` if someone still has to read them. Full ones stay cached until others
//!    need the room.

mod admission;
pub mod beam;
mod block_manager;
mod budget;
pub mod engine;
mod error;
pub mod event;
pub mod fake;
pub mod limits;
mod output;
pub mod owners;
pub mod plan;
mod prefix_cache;
pub mod reservation;
pub mod runner;
mod scheduler;
pub mod sequence;
pub mod stats;
mod step_time;
#[cfg(test)]
mod tests;
