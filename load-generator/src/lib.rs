//! Load for any server that speaks TGI's or OpenAI's dialects, ours or another, and what its clients see of it: TTFT, ITL,
//! TPOT, throughput, goodput.
//!
//! * [`core`]: arrivals, traces, prompts, what answers mean, statistics, the search for goodput. Pure.
//! * [`workload`], [`run`]: which requests are sent, and when. [`client`]: one of them.
//! * [`calibrate`]: how many tokens words are for a server.
//! * [`sweep`], [`interfere`]: what is measured beside a plain run. [`null_server`]: a server without a model. [`cpu`]: what
//!   processes cost.
//! * [`report`]: tables, CSV, a page with plots.

pub mod calibrate;
pub mod client;
pub mod core;
pub mod cpu;
pub mod interfere;
pub mod null_server;
pub mod report;
pub mod run;
pub mod sweep;
pub mod workload;
