//! What the three kinds of processes measure: held against what they say they measure, against the real promtool, a real Prometheus,
//! and against what their clients count.

mod alerts;
mod first_token;
mod pages;
mod usage;
mod watched;
