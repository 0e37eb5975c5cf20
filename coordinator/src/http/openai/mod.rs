//! The paths under `/v1`: completions, chats and models.

pub mod answer;
pub mod chat;
pub mod choices;
pub mod echo;
pub mod handlers;
pub mod logprobs;
pub mod models;
pub mod prompt;
pub mod request;
pub mod shared;
pub mod stream;
pub mod structured;
pub mod whole;
