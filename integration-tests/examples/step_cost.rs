//! What the engine itself costs in a step: planning and applying, without a model. Prints microseconds a step.
//!
//! `target/release/examples/step_cost [SEQUENCES] [CONTEXT]`

#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use engine::engine::Engine;
use engine::limits::EngineLimits;
use engine::plan::StepOutput;
use engine::sequence::SequenceSpec;
use protocol::sampling::{SampledToken, SamplingParams};
use protocol::window::Groups;
use runtime::clock::Clock;

const STEPS: usize = 200;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse::<usize>());
    let (sequences, context) = (number(256)?, number(4_096)?);
    println!("{sequences} sequences of {context} tokens, {STEPS} steps of one token each");
    for (name, penalty, prefix_cache) in [
        ("no penalties, no prefix cache", 1.0, false),
        ("no penalties, prefix cache", 1.0, true),
        ("all with a repetition penalty", 1.1, true),
    ] {
        let (plan, apply) = measure(sequences, context, penalty, prefix_cache)?;
        let micros = |time: Duration| time.as_secs_f64() * 1e6 / STEPS as f64;
        println!("{name:32} plan {:8.1} us  apply {:8.1} us", micros(plan), micros(apply));
    }
    Ok(())
}

/// Time of all plans and of all applications.
fn measure(sequences: usize, context: usize, penalty: f32, prefix_cache: bool) -> Result<(Duration, Duration)> {
    let blocks = (context + STEPS).div_ceil(16) + 1;
    let mut engine = Engine::new(EngineLimits {
        total_blocks: sequences * blocks,
        block_tokens: 16,
        max_num_seqs: sequences,
        max_batch_tokens: sequences.max(512),
        prefill_chunk_tokens: 256,
        mixed_prefill_tokens: 32,
        mixed_prefill_time: Duration::ZERO,
        max_seq_len: blocks * 16,
        prefix_cache,
        groups: Groups::ONE,
    })?;
    for i in 0..sequences {
        let reservation = engine.reserve(context, STEPS + 1)?;
        let mut token_ids: Vec<u32> = (0..context).map(|at| (at * 31 + i) as u32).collect();
        token_ids.push(1);
        let spec = SequenceSpec {
            prompt_len: context,
            sampling: Arc::new(SamplingParams {
                repetition_penalty: penalty,
                ..SamplingParams::greedy()
            }),
            ..SequenceSpec::greedy(token_ids, STEPS as u32 + 1)
        };
        engine.commit(reservation, spec, context)?;
    }
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    let (mut planning, mut applying) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..STEPS {
        let start = Clock.now();
        let plan = engine.plan().context("nobody advances")?;
        planning += Clock.now() - start;
        output.clear();
        for planned in &plan.sequences {
            let sample = planned.sample.as_ref().context("every sequence generates")?;
            let token = SampledToken {
                position: sample.output_position,
                token: 1,
                logprob: 0.0,
                raw_logprob: 0.0,
                top_logprobs: Vec::new(),
            };
            output.sampled.push((planned.id, token));
        }
        let start = Clock.now();
        engine.apply(&output, &mut events)?;
        applying += Clock.now() - start;
        events.clear();
    }
    Ok((planning, applying))
}
