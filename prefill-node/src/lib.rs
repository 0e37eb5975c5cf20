//! The prefill role: computes prompts and first tokens, ships the KV while it computes.
//!
//! Life of a prefill job:
//! 1. [`role`] opens a push to the decode node's reservation and submits the prompt to the engine;
//! 2. after each layer of each chunk, on the compute thread, [`tap`] copies what [`core::push_schedule`] says is due into
//!    the push, which never blocks; what the network cannot take yet is kept for later, and sent by the job; so is what the
//!    prefix cache had of the prompt, while the rest is computed;
//! 3. the first token goes to the coordinator at once;
//! 4. the rest of the KV follows, then the commit with the first token; the blocks are free once it is acknowledged;
//! 5. a first token that ends the sequence, a cancel, a deadline or a lost link: the push is dropped, which resets it.

pub mod core;
pub mod role;
mod tap;
