//! The decode role: reserves blocks, takes KV in, runs the generation loop.
//!
//! Life of a decode job with a handoff:
//! 1. [`role`] reserves blocks for the prompt and answers `Granted` with a fresh ticket, or `Busy`;
//! 2. the prefill node pushes frames under the ticket; [`reservations`] places them into the reserved blocks, and only there;
//! 3. its commit makes the reservation a sequence of the engine, with the first token appended;
//! 4. every further token goes to the coordinator as it is sampled, until the stop rules end the sequence;
//! 5. a cancel, a deadline or a lost link at any point gives everything back.
//!
//! A job without a handoff (`KvSource::Compute`) enters at 4, through the same scheduler. If none of its choices has tokens
//! yet, the node does what a prefill node does, too: the first tokens, and what the answer needs from the prompt, go to the
//! coordinator first ([`protocol::control::JobEvent::Computed`]).

mod answers;
pub mod reservations;
pub mod role;
