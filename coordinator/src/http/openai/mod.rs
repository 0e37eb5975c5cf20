//! The paths under `/v1`: completions and models.

pub mod answer;
pub mod handlers;
pub mod logprobs;
pub mod models;
pub mod prompt;
pub mod request;
pub mod shared;
pub mod stream;
pub mod unbuilt;
