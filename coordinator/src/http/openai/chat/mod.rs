//! `POST /v1/chat/completions`: a conversation becomes a prompt through the model's chat template, and is then served
//! like any other.

pub mod answer;
pub mod handlers;
pub mod logprobs;
pub mod messages;
pub mod request;
pub mod stream;
pub mod template;
pub mod tools;
pub mod voice;
