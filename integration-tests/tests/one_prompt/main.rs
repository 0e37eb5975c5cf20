//! Several sequences of one prompt over the real model: each choice is the answer of a single request with its number, and a
//! beam search is the plain one, bit by bit, whatever shares the batch, the blocks and the prompt.

mod one;

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use config::EngineConfig;
use engine::engine::Engine;
use engine::limits::EngineLimits;
use engine::sequence::{OnFinish, SequenceSpec};
use one::{One, Variant};
use protocol::sampling::{SampledToken, SamplingParams, StopRules};
use protocol::window::Groups;

const LONGEST: usize = 300;
const OUTPUTS: u32 = 8;
const CHOICES: u32 = 4;

const ALONE: Variant = Variant {
    batch: 1,
    chunk: LONGEST,
    threads: 1,
    cache: false,
    spare: 0,
};

const VARIANTS: [Variant; 4] = [
    Variant {
        batch: 32,
        chunk: 16,
        threads: 2,
        cache: false,
        spare: 400,
    },
    Variant {
        batch: 32,
        chunk: 61,
        threads: 2,
        cache: true,
        spare: 400,
    },
    // So few blocks that members of a beam search lose theirs.
    Variant {
        batch: 8,
        chunk: 33,
        threads: 1,
        cache: false,
        spare: 3,
    },
    Variant {
        batch: 5,
        chunk: LONGEST,
        threads: 2,
        cache: true,
        spare: 2,
    },
];

fn prompt(salt: usize, length: usize) -> Vec<u32> {
    let token = |t: usize| ((t * t * 31 + t * 7 + salt * 1_009 + 1_000) % 48_000 + 100) as u32;
    (0..length).map(token).collect()
}

fn spec(token_ids: Vec<u32>, sampling: SamplingParams) -> SequenceSpec {
    SequenceSpec {
        sampling: Arc::new(sampling),
        ..SequenceSpec::greedy(token_ids, OUTPUTS)
    }
}

fn sampling(salt: usize) -> SamplingParams {
    SamplingParams {
        greedy: false,
        temperature: 1.1,
        top_p: 0.97,
        repetition_penalty: if salt.is_multiple_of(2) { 1.0 } else { 1.2 },
        seed: 31 + salt as u64,
        top_logprobs: Some(3),
        ..SamplingParams::greedy()
    }
}

/// The bits of a list of tokens.
fn bits(tokens: &[SampledToken]) -> Vec<u32> {
    let numbers = |token: &SampledToken| {
        let own = [
            token.position,
            token.token,
            token.logprob.to_bits(),
            token.raw_logprob.to_bits(),
        ];
        let top = token.top_logprobs.clone().into_iter();
        own.into_iter()
            .chain(top.flat_map(|(token, logprob)| [token, logprob.to_bits()]))
    };
    tokens.iter().flat_map(numbers).collect()
}

/// Prompts that end within a block, at its end, and are shorter than one.
fn prompts() -> Vec<Vec<u32>> {
    [203, 64, 5, 17, 130]
        .iter()
        .enumerate()
        .map(|(salt, length)| prompt(salt, *length))
        .collect()
}

/// The choice of that number, asked for alone.
fn single(tokens: &[u32], salt: usize, choice: u32) -> SequenceSpec {
    let sampling = SamplingParams {
        choice,
        ..sampling(salt)
    };
    spec(tokens.to_vec(), sampling)
}

#[test]
fn every_choice_is_the_answer_of_a_request_of_its_own() -> Result<()> {
    let prompts = prompts();
    let mut alone = One::open(ALONE)?;
    let mut expected = Vec::new();
    for (salt, tokens) in prompts.iter().enumerate() {
        for choice in 0..CHOICES {
            expected.push(alone.answer(single(tokens, salt, choice))?);
        }
    }
    let expected_bits: Vec<Vec<u32>> = expected.iter().map(|tokens| bits(tokens)).collect();
    let distinct: std::collections::HashSet<_> = expected_bits.iter().collect();
    ensure!(
        distinct.len() == expected.len(),
        "the choices are too alike to show a mix-up"
    );
    for variant in VARIANTS {
        let mut one = One::open(variant)?;
        let mut ids = Vec::new();
        for (salt, tokens) in prompts.iter().enumerate() {
            // As after a fail-over: some have tokens already.
            let specs = (0..CHOICES).map(|choice| {
                let mut spec = single(tokens, salt, choice);
                let known = &expected[salt * CHOICES as usize + choice as usize][..choice as usize % 3];
                spec.token_ids.extend(known.iter().map(|token| token.token));
                spec
            });
            ids.extend(one.engine.add_choices(specs.collect())?);
        }
        let found = one.run()?;
        for (index, id) in ids.iter().enumerate() {
            let known = index % CHOICES as usize % 3;
            let all = [&expected[index][..known], found.tokens[id].as_slice()].concat();
            ensure!(
                bits(&all) == expected_bits[index],
                "{variant:?}: choice {index} is another one"
            );
        }
    }
    Ok(())
}

#[test]
fn one_prefill_and_one_handoff_serve_all_choices() -> Result<()> {
    let mut alone = One::open(ALONE)?;
    let mut prefill = One::open(Variant {
        batch: 4,
        chunk: 48,
        ..VARIANTS[0]
    })?;
    for variant in VARIANTS {
        let mut decode = One::open(variant)?;
        for (salt, tokens) in prompts().iter().enumerate() {
            let id = prefill.engine.add(SequenceSpec {
                first_only: Some(CHOICES),
                on_finish: OnFinish::Hold,
                prompt_logprobs: Some(2),
                ..single(tokens, salt, 0)
            })?;
            let found = prefill.run()?;
            let firsts = [found.tokens[&id].as_slice(), found.others[&id].as_slice()].concat();
            let layers = 0..prefill.pool.layout().num_layers;
            let table = prefill.engine.block_table(id).context("held")?.to_vec();
            let payload = prefill.pool.gather(layers.clone(), &table)?;
            prefill.engine.release_held(id);

            let reservation = decode
                .engine
                .reserve_choices(tokens.len(), OUTPUTS as usize, CHOICES as usize)?;
            let writer = decode.pool.writer(reservation.blocks().to_vec())?;
            writer.write(0, layers.end, 0, table.len() as u32, &payload)?;
            drop(writer);
            let specs = (0..).zip(&firsts).map(|(choice, first)| {
                let mut spec = single(tokens, salt, choice);
                spec.token_ids.push(first.token);
                spec
            });
            let ids = decode
                .engine
                .commit_choices(reservation, specs.collect(), tokens.len())?;
            let found = decode.run()?;
            for (choice, id) in ids.iter().enumerate() {
                let all = [std::slice::from_ref(&firsts[choice]), found.tokens[id].as_slice()].concat();
                let expected = alone.answer(single(tokens, salt, choice as u32))?;
                ensure!(
                    bits(&all) == bits(&expected),
                    "{variant:?}: prompt {salt}, choice {choice}"
                );
            }
        }
    }
    Ok(())
}

/// A beam search as its definition says, over a model that sees one whole sequence at a time.
fn search(one: &mut One, prompt: &[u32], width: usize, stop: &StopRules) -> Result<Vec<(Vec<SampledToken>, f32)>> {
    let sum = |tokens: &[SampledToken]| tokens.iter().fold(0.0, |sum, token| sum + f64::from(token.raw_logprob));
    let score = |tokens: &[SampledToken]| sum(tokens) / tokens.len() as f64;
    let (mut living, mut finished) = (vec![Vec::<SampledToken>::new()], Vec::new());
    for position in 0..OUTPUTS {
        let mut all = Vec::new();
        for (parent, tokens) in living.iter().enumerate() {
            let before = prompt
                .iter()
                .copied()
                .chain(tokens.iter().map(|token| token.token))
                .collect();
            let params = SamplingParams {
                top_logprobs: Some(2 * width as u8),
                ..SamplingParams::greedy()
            };
            let row = one.answer(SequenceSpec {
                first_only: Some(1),
                ..spec(before, params)
            })?;
            let candidates = row.first().context("a row")?.top_logprobs.clone();
            for &(token, logprob) in &candidates {
                let sampled = SampledToken {
                    position,
                    token,
                    logprob,
                    raw_logprob: logprob,
                    top_logprobs: candidates[..2].to_vec(),
                };
                all.push((parent, token, [tokens.as_slice(), &[sampled]].concat()));
            }
        }
        all.sort_by(|a, b| sum(&b.2).total_cmp(&sum(&a.2)).then(a.1.cmp(&b.1)).then(a.0.cmp(&b.0)));
        let (over, on): (Vec<_>, Vec<_>) = all.into_iter().partition(|all| stop.stop_token_ids.contains(&all.1));
        finished.extend(over.into_iter().map(|all| all.2));
        living = on.into_iter().map(|all| all.2).take(width).collect();
    }
    finished.append(&mut living);
    finished.sort_by(|a, b| score(b).total_cmp(&score(a)));
    finished.truncate(width);
    Ok(finished
        .into_iter()
        .map(|tokens| (tokens.clone(), score(&tokens) as f32))
        .collect())
}

#[test]
fn a_beam_search_is_the_plain_one() -> Result<()> {
    let mut alone = One::open(ALONE)?;
    let mut cases = Vec::new();
    for (salt, (tokens, width)) in prompts().into_iter().zip([4, 2, 3, 1, 4]).enumerate() {
        // Tokens that the model likes end some hypotheses early.
        let free = StopRules {
            max_tokens: OUTPUTS,
            eos_token_ids: Vec::new(),
            ignore_eos: true,
            stop_token_ids: Vec::new(),
        };
        let first = search(&mut alone, &tokens, width, &free)?;
        let stop = StopRules {
            stop_token_ids: first.iter().map(|(tokens, _)| tokens[2 + salt % 3].token).collect(),
            ..free
        };
        let expected = search(&mut alone, &tokens, width, &stop)?;
        cases.push((tokens, width, stop, expected));
    }
    for variant in VARIANTS {
        let mut one = One::open(variant)?;
        let params = SamplingParams {
            top_logprobs: Some(2),
            ..SamplingParams::greedy()
        };
        let mut ids = Vec::new();
        for (tokens, width, stop, _) in &cases {
            let search = SequenceSpec {
                stop: stop.clone(),
                ..spec(tokens.clone(), params.clone())
            };
            ids.push(one.engine.add_beams(search, *width)?);
            // Somebody else in the same batch.
            one.engine.add(spec(prompt(99, 40), sampling(3)))?;
        }
        let found = one.run()?;
        for (index, (id, (_, _, _, expected))) in ids.iter().zip(&cases).enumerate() {
            let beams = &found.beams[id];
            ensure!(
                beams.len() == expected.len(),
                "{variant:?}: search {index} has {} beams",
                beams.len()
            );
            for (beam, (tokens, score)) in beams.iter().zip(expected) {
                let same = bits(&beam.tokens) == bits(tokens) && beam.score.to_bits() == score.to_bits();
                ensure!(
                    same,
                    "{variant:?}: search {index}: {beam:?} instead of {tokens:?}, {score}"
                );
            }
        }
        ensure!(
            variant.spare > 100 || found.preempted > 0,
            "{variant:?}: nobody lost blocks"
        );
    }
    Ok(())
}

#[test]
fn alternatives_in_a_prompt_are_the_best_tokens_however_it_is_cut() -> Result<()> {
    let mut alone = One::open(ALONE)?;
    let tokens = prompt(7, 90);
    let asked = |first_only| SequenceSpec {
        prompt_logprobs: Some(4),
        first_only,
        ..spec(tokens.clone(), SamplingParams::greedy())
    };
    let id = alone.engine.add(asked(Some(0)))?;
    let expected = alone.run()?.prompts.remove(&id).context("prompt")?;
    ensure!(expected.len() == tokens.len() - 1);
    for (position, target) in expected.iter().enumerate() {
        let ordered = target.top.is_sorted_by(|a, b| a.1 > b.1 || (a.1 == b.1 && a.0 < b.0));
        ensure!(target.top.len() == 4 && ordered, "position {position}: {target:?}");
        match target.top.iter().find(|(token, _)| *token == tokens[position + 1]) {
            Some((_, logprob)) => ensure!(*logprob == target.logprob, "position {position}: {target:?}"),
            None => ensure!(target.top[3].1 >= target.logprob, "position {position}: {target:?}"),
        }
    }
    for variant in VARIANTS {
        let mut one = One::open(variant)?;
        let ids = [
            one.engine.add(asked(Some(0)))?,
            one.engine.add(asked(Some(3)))?,
            one.engine.add(asked(None))?,
        ];
        let found = one.run()?;
        for id in ids {
            ensure!(found.prompts[&id] == expected, "{variant:?}: other log-probabilities");
        }
    }
    Ok(())
}

/// Eight branches of a prompt of 1,000 tokens take less than 1.2 prompts of memory before they write.
#[test]
fn branches_cost_no_prompt_each() -> Result<()> {
    let mut engine = Engine::new(EngineLimits {
        total_blocks: 4_096,
        block_tokens: EngineConfig::default().kv_block_tokens,
        max_num_seqs: 64,
        max_batch_tokens: 512,
        prefill_chunk_tokens: 512,
        mixed_prefill_tokens: 512,
        mixed_prefill_time: std::time::Duration::ZERO,
        max_seq_len: 2_048,
        prefix_cache: true,
        groups: Groups::ONE,
    })?;
    let tokens = prompt(1, 1_000);
    let one = engine.limits().blocks_for(tokens.len());
    let reservation = engine.reserve_choices(tokens.len(), 100, 8)?;
    let specs = (0..8).map(|choice| {
        let mut spec = single(&tokens, 1, choice);
        spec.token_ids.push(5);
        spec
    });
    engine.commit_choices(reservation, specs.collect(), tokens.len())?;
    ensure!(engine.stats().owned_blocks == one, "{:?}", engine.stats());
    engine.plan().context("a plan")?;
    let owned = engine.stats().owned_blocks;
    ensure!(owned as f64 <= 1.2 * one as f64, "{owned} blocks for a prompt of {one}");
    Ok(())
}
