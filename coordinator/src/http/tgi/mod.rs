//! The paths of TGI 0.9.4: `/generate`, `/generate_stream`, `/`, `/invocations`, `/info`, `/health`.

pub mod answer;
pub mod handlers;
pub mod info;
pub mod request;
pub mod stream;
