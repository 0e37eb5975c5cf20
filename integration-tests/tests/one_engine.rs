//! One answer, within one engine over the real model: tokens, log-probabilities and alternatives are the same bits for every
//! batch size, chunk length and number of threads, and with a hit in the prefix cache or without.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use config::{Compute, EngineConfig, ModelConfig};
use engine::engine::Engine;
use engine::event::EngineEvent;
use engine::limits::EngineLimits;
use engine::runner::NoObserver;
use engine::sequence::{OnFinish, SequenceSpec};
use integration_tests::files::default_model;
use model::ModelRunner;
use protocol::sampling::{SamplingParams, StopRules};

const PROMPTS: usize = 50;
const LONGEST: usize = 2_100;
const OUTPUTS: u32 = 6;

/// How an engine cuts and mixes.
#[derive(Clone, Copy, Debug)]
struct Variant {
    batch: usize,
    chunk: usize,
    threads: usize,
    cache: bool,
    compute: Compute,
}

/// A prompt and how its answer is drawn.
struct Case {
    tokens: Vec<u32>,
    params: SamplingParams,
    prompt_logprobs: Option<u8>,
}

/// All numbers of an answer, as bits.
#[derive(Clone, PartialEq, Debug, Default)]
struct Answer {
    tokens: Vec<u32>,
    numbers: Vec<u32>,
    cached: u32,
}

/// Prompts of many lengths, in groups that share a beginning: 12 tokens, some blocks, or almost all.
fn cases() -> Vec<Case> {
    (0..PROMPTS)
        .map(|i| {
            let length = match i {
                0 => LONGEST,
                1 => LONGEST - 800,
                _ if i % 12 == 2 => 300 + 7 * i,
                _ => 3 + (i * 29) % 90,
            };
            // Group g shares its first `common` tokens.
            let (group, common) = (i / 5, [12, 40, 75][i / 5 % 3]);
            let token = |t: usize| {
                let salt = if t < common { group } else { PROMPTS + i };
                ((t * t * 31 + t * 7 + salt * 1_009 + 1_000) % 48_000 + 100) as u32
            };
            let mut params = SamplingParams {
                seed: 77 + i as u64,
                top_logprobs: (i % 2 == 0).then_some(5),
                ..SamplingParams::greedy()
            };
            params.greedy = i % 3 == 0;
            params.temperature = 0.8;
            match i % 4 {
                0 => params.top_p = 0.9,
                1 => params.repetition_penalty = 1.3,
                2 => params.top_k = 20,
                _ => {}
            }
            Case {
                tokens: (0..length).map(token).collect(),
                params,
                // A prompt whose log-probabilities are asked for is computed as a whole.
                prompt_logprobs: (i % 10 == 3).then_some(i as u8 % 4),
            }
        })
        .collect()
}

/// An engine over the default model.
struct One {
    engine: Engine,
    runner: ModelRunner,
}

impl One {
    fn open(variant: Variant) -> Result<Self> {
        let model = ModelConfig {
            path: default_model()?
                .to_str()
                .context("the model's path is not UTF-8")?
                .to_owned(),
            compute: variant.compute,
            ..ModelConfig::default()
        };
        let config = EngineConfig {
            kv_pool_tokens: 16_384,
            threads: variant.threads,
            ..EngineConfig::default()
        };
        let max_seq_len = LONGEST + OUTPUTS as usize + 1;
        let loaded = model::load(&model, &config, max_seq_len)?;
        let rows = variant.batch * variant.chunk;
        let engine = Engine::new(EngineLimits {
            total_blocks: loaded.pool.total_blocks(),
            block_tokens: config.kv_block_tokens,
            max_num_seqs: variant.batch,
            max_batch_tokens: rows.min(4_096),
            prefill_chunk_tokens: variant.chunk,
            mixed_prefill_tokens: rows.min(4_096),
            mixed_prefill_time: std::time::Duration::ZERO,
            prefix_cache: variant.cache,
            groups: loaded.layout.groups.whole(),
            max_seq_len,
        })?;
        let runner = loaded.runner;
        Ok(Self { engine, runner })
    }

    /// Answers all cases, as many at once as the engine takes.
    fn answers(&mut self, cases: &[Case]) -> Result<Vec<Answer>> {
        let mut ids = Vec::new();
        for case in cases {
            ids.push(self.engine.add(SequenceSpec {
                token_ids: case.tokens.clone(),
                prompt_len: case.tokens.len(),
                sampling: Arc::new(case.params.clone()),
                stop: StopRules {
                    max_tokens: OUTPUTS,
                    eos_token_ids: Vec::new(),
                    ignore_eos: true,
                    stop_token_ids: Vec::new(),
                },
                prompt_logprobs: case.prompt_logprobs,
                on_finish: OnFinish::Release,
                first_only: None,
                adapter: None,
                cache_key: 0,
            })?);
        }
        let mut answers = vec![Answer::default(); cases.len()];
        let mut events = Vec::new();
        while self
            .engine
            .step(&mut self.runner, &mut NoObserver, &mut events)?
            .is_some()
        {
            for event in events.drain(..) {
                match event {
                    EngineEvent::Token {
                        id,
                        token,
                        prompt_logprobs,
                        cached_tokens,
                        ..
                    } => {
                        let at = ids
                            .iter()
                            .position(|&known| known == id)
                            .context("a stranger's token")?;
                        let answer = &mut answers[at];
                        for target in prompt_logprobs.into_iter().flatten() {
                            answer.numbers.push(target.logprob.to_bits());
                            let top = target.top.into_iter();
                            answer
                                .numbers
                                .extend(top.flat_map(|(token, logprob)| [token, logprob.to_bits()]));
                        }
                        answer.tokens.push(token.token);
                        answer
                            .numbers
                            .extend([token.logprob.to_bits(), token.raw_logprob.to_bits()]);
                        for (token, logprob) in token.top_logprobs {
                            answer.numbers.extend([token, logprob.to_bits()]);
                        }
                        answer.cached = cached_tokens;
                    }
                    EngineEvent::Preempted { .. } => {}
                    other => bail!("an answer ends with {other:?}"),
                }
            }
        }
        self.engine.check_invariants()?;
        Ok(answers)
    }
}

/// Compares all but the count of cached tokens, which tells how an answer came about.
fn compare(found: &[Answer], expected: &[Answer], how: &str) -> Result<()> {
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        ensure!(
            found.tokens.len() == OUTPUTS as usize,
            "prompt {i}, {how}: {} tokens",
            found.tokens.len()
        );
        ensure!(
            (&found.tokens, &found.numbers) == (&expected.tokens, &expected.numbers),
            "prompt {i}, {how}: {:?} instead of {:?}, or other log-probabilities",
            found.tokens,
            expected.tokens
        );
    }
    Ok(())
}

#[test]
fn batch_chunk_threads_and_cache_do_not_change_a_bit() -> Result<()> {
    let cases = cases();
    let alone = Variant {
        batch: 1,
        chunk: 4_096,
        threads: 1,
        cache: false,
        compute: Compute::Quantised,
    };
    let expected = One::open(alone)?.answers(&cases)?;
    let distinct: std::collections::HashSet<_> = expected.iter().map(|answer| &answer.numbers).collect();
    ensure!(distinct.len() == PROMPTS, "the prompts are too alike to show a mix-up");
    ensure!(
        expected.iter().all(|answer| answer.cached == 0),
        "without a cache nothing is cached"
    );

    let variants = [
        (32, 1, 2, false),
        (1, 2_048, 2, false),
        (2, 512, 1, true),
        (4, 100, 2, true),
        (8, 16, 1, true),
        (16, 64, 2, true),
        (32, 33, 1, true),
    ];
    for (batch, chunk, threads, cache) in variants {
        let variant = Variant {
            batch,
            chunk,
            threads,
            cache,
            compute: Compute::Quantised,
        };
        let mut one = One::open(variant)?;
        compare(&one.answers(&cases)?, &expected, &format!("{variant:?}"))?;
        if !cache {
            continue;
        }
        // Everything that fits is cached now.
        let again = one.answers(&cases)?;
        compare(&again, &expected, &format!("{variant:?}, the second time"))?;
        let hits = again.iter().filter(|answer| answer.cached > 0).count();
        println!(
            "{variant:?}: {hits} of {PROMPTS} prompts hit the cache, {} tokens in all",
            again.iter().map(|answer| answer.cached).sum::<u32>()
        );
        ensure!(hits > PROMPTS / 3, "only {hits} prompts found their beginning");
    }
    Ok(())
}

#[test]
fn in_the_precise_mode_neither() -> Result<()> {
    // Without the two longest prompts, and a third of the others.
    let cases: Vec<Case> = cases().into_iter().skip(2).step_by(3).collect();
    let cases = &cases[..];
    let variant = |batch, chunk, threads, cache| Variant {
        batch,
        chunk,
        threads,
        cache,
        compute: Compute::Precise,
    };
    let expected = One::open(variant(1, 4_096, 1, false))?.answers(cases)?;
    let quantised = Variant {
        compute: Compute::Quantised,
        ..variant(1, 4_096, 1, false)
    };
    ensure!(
        One::open(quantised)?.answers(cases)? != expected,
        "the mode makes no difference"
    );
    for variant in [variant(32, 1, 2, false), variant(8, 33, 1, true)] {
        let mut one = One::open(variant)?;
        compare(&one.answers(cases)?, &expected, &format!("{variant:?}"))?;
        compare(
            &one.answers(cases)?,
            &expected,
            &format!("{variant:?}, the second time"),
        )?;
    }
    Ok(())
}
