//! The nodes' side of several sequences a request, with a fake model: this test plays the coordinator. The fake model makes
//! its tokens of the bytes in the KV blocks, so what is lost or mixed up on the way changes the text.

mod cached;
mod local;
mod scene;

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use protocol::context::RequestContext;
use protocol::control::{Beam, ChoiceStart, DecodeJob, Job, JobEvent, JobUpdate, KvSource, PrefillJob};
use protocol::ids::{Epoch, RequestId};
use protocol::sampling::{SampledToken, SamplingParams, StopRules};
use scene::{Scene, Stream};

const PROMPT: usize = 150;

fn prompt(salt: u32) -> Vec<u32> {
    (0..PROMPT as u32)
        .map(|t| (t * 7 + t * t * salt + salt) % 300)
        .collect()
}

fn stop(max_tokens: u32) -> StopRules {
    StopRules {
        max_tokens,
        eos_token_ids: Vec::new(),
        ignore_eos: false,
        stop_token_ids: Vec::new(),
    }
}

fn sampling() -> SamplingParams {
    SamplingParams {
        greedy: false,
        seed: 11,
        top_logprobs: Some(2),
        ..SamplingParams::greedy()
    }
}

fn prefill_job(choices: u32, stop: &StopRules) -> PrefillJob {
    PrefillJob {
        request: RequestId(1),
        context: RequestContext::default(),
        epoch: Epoch(1),
        token_ids: prompt(3),
        adapter: None,
        sampling: sampling(),
        choices,
        stop: stop.clone(),
        prompt_logprobs: None,
        handoff: None,
        deadline_ms: 60_000,
    }
}

fn decode_job(choices: u32, stop: &StopRules) -> DecodeJob {
    let start = |choice| ChoiceStart {
        choice,
        generated: Vec::new(),
    };
    DecodeJob {
        request: RequestId(1),
        context: RequestContext::default(),
        epoch: Epoch(1),
        token_ids: prompt(3),
        adapter: None,
        choices: (0..choices).map(start).collect(),
        beam_width: None,
        sampling: sampling(),
        stop: stop.clone(),
        source: KvSource::Handoff,
        prompt_logprobs: None,
        handoff_deadline_ms: 60_000,
        deadline_ms: 60_000,
    }
}

/// The choice of that number, asked for alone.
fn alone(choice: u32, stop: &StopRules) -> DecodeJob {
    let generated = Vec::new();
    DecodeJob {
        choices: vec![ChoiceStart { choice, generated }],
        ..decode_job(1, stop)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_come_of_one_prefill_and_one_transfer() -> Result<()> {
    let scene = Scene::with_cache(false).await?;
    let stop = stop(20);
    let (_, one, mut single) = scene.hand_over(prefill_job(1, &stop), decode_job(1, &stop)).await?;
    single.tokens().await?;
    let (computed, stats, mut decoding) = scene.hand_over(prefill_job(8, &stop), decode_job(8, &stop)).await?;
    ensure!(
        stats.bytes == one.bytes,
        "{} bytes for 8 choices, {} for one",
        stats.bytes,
        one.bytes
    );
    let mut tokens = decoding.tokens().await?;
    ensure!((tokens.len(), computed.tokens.len()) == (8, 8));
    for (choice, first) in (0..).zip(computed.tokens) {
        let expected = scene.computed_there(alone(choice, &stop)).await?;
        let rest = tokens.remove(&choice).context("a choice")?;
        let all = [vec![first], rest].concat();
        ensure!(
            Some(&all) == expected.get(&choice),
            "choice {choice} is another one alone"
        );
    }
    scene.close().await
}

const SEEDS: [u64; 4] = [5, u64::MAX, 11, 5];

/// Each choice has a seed of its own.
fn seeded() -> SamplingParams {
    SamplingParams {
        choice_seeds: SEEDS.to_vec(),
        ..sampling()
    }
}

/// The only choice of a request with that seed.
fn with_seed(seed: u64, stop: &StopRules) -> DecodeJob {
    DecodeJob {
        sampling: SamplingParams { seed, ..sampling() },
        ..decode_job(1, stop)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_with_seeds_of_their_own_are_what_each_seed_leads_to_alone() -> Result<()> {
    let scene = Scene::with_cache(false).await?;
    let stop = stop(20);
    let (_, one, mut single) = scene.hand_over(prefill_job(1, &stop), decode_job(1, &stop)).await?;
    single.tokens().await?;
    let prefill = PrefillJob {
        sampling: seeded(),
        ..prefill_job(4, &stop)
    };
    let decode = DecodeJob {
        sampling: seeded(),
        ..decode_job(4, &stop)
    };
    let (computed, stats, mut decoding) = scene.hand_over(prefill, decode.clone()).await?;
    ensure!(stats.bytes == one.bytes, "{stats:?} for 4 choices, {one:?} for one");
    let rest = decoding.tokens().await?;
    let mut whole: Vec<Vec<SampledToken>> = Vec::new();
    for (choice, (first, seed)) in (0..).zip(computed.tokens.into_iter().zip(SEEDS)) {
        let all = [vec![first], rest[&choice].clone()].concat();
        let expected = scene.computed_there(with_seed(seed, &stop)).await?;
        ensure!(
            Some(&all) == expected.get(&0),
            "choice {choice} is not that of its seed"
        );
        whole.push(all);
    }
    ensure!(whole[0] == whole[3] && whole[0] != whole[1] && whole[1] != whole[2]);
    // Another node takes two of them over, each from where it is.
    let start = |choice: u32, known: usize| ChoiceStart {
        choice,
        generated: whole[choice as usize][..known]
            .iter()
            .map(|token| token.token)
            .collect(),
    };
    let moved = DecodeJob {
        choices: vec![start(3, 12), start(1, 4)],
        ..decode
    };
    let moved = scene.computed_there(moved).await?;
    ensure!(moved.len() == 2 && moved[&3] == whole[3][12..] && moved[&1] == whole[1][4..]);
    scene.close().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_without_a_seed_among_others_with_one_are_refused() -> Result<()> {
    let scene = Scene::open().await?;
    let prefill = PrefillJob {
        sampling: seeded(),
        ..prefill_job(5, &stop(1))
    };
    let problem = Stream::open(&scene.prefill, Job::Prefill(prefill))
        .await?
        .failed()
        .await?;
    let expected = "sampling.choice_seeds has 4 elements: none for choice 4";
    ensure!(problem == expected, "{problem}");
    let decode = DecodeJob {
        sampling: seeded(),
        ..decode_job(5, &stop(2))
    };
    let problem = Stream::open(&scene.decode, Job::Decode(decode)).await?.failed().await?;
    ensure!(problem == expected, "{problem}");
    scene.close().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_go_on_elsewhere_from_where_they_are() -> Result<()> {
    let scene = Scene::open().await?;
    let stop = stop(20);
    let whole = scene.computed_there(decode_job(4, &stop)).await?;
    let mut job = decode_job(4, &stop);
    for start in &mut job.choices {
        let known = &whole[&start.choice][..start.choice as usize * 5];
        start.generated = known.iter().map(|token| token.token).collect();
    }
    let rest = scene.computed_there(job).await?;
    for (choice, tokens) in &rest {
        ensure!(
            tokens == &whole[choice][*choice as usize * 5..],
            "choice {choice} goes on in another way"
        );
    }
    ensure!(rest.len() == 4);
    scene.close().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_tokens_end_choices_of_which_nothing_more_is_heard() -> Result<()> {
    let scene = Scene::open().await?;
    let free = stop(9);
    let (computed, _, mut decoding) = scene.hand_over(prefill_job(4, &free), decode_job(4, &free)).await?;
    let whole = decoding.tokens().await?;
    let ended = computed.tokens[1].token;
    let rules = StopRules {
        stop_token_ids: vec![ended],
        ..free.clone()
    };
    let (again, _, mut decoding) = scene.hand_over(prefill_job(4, &rules), decode_job(4, &rules)).await?;
    ensure!(again.tokens == computed.tokens);
    let tokens = decoding.tokens().await?;
    for (choice, first) in (0..).zip(&computed.tokens) {
        let expected = whole.get(&choice).filter(|_| first.token != ended).map(|tokens| {
            let end = tokens.iter().position(|token| token.token == ended);
            tokens[..end.map_or(tokens.len(), |end| end + 1)].to_vec()
        });
        ensure!(tokens.get(&choice) == expected.as_ref(), "choice {choice}");
    }
    // If all of them end, nobody waits for a commit.
    let rules = StopRules {
        stop_token_ids: computed.tokens.iter().map(|token| token.token).collect(),
        ..free
    };
    let mut stream = Stream::open(
        &scene.prefill,
        Job::Prefill(PrefillJob {
            stop: StopRules { max_tokens: 1, ..rules },
            ..prefill_job(4, &stop(1))
        }),
    )
    .await?;
    ensure!(matches!(stream.next().await?, JobEvent::Computed(_)));
    ensure!(stream.next().await? == JobEvent::Finished);
    scene.close().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_coordinator_ends_one_choice_and_the_others_go_on() -> Result<()> {
    let scene = Scene::open().await?;
    let rules = stop(250);
    let (_, _, mut decoding) = scene.hand_over(prefill_job(3, &rules), decode_job(3, &rules)).await?;
    let mut tokens: BTreeMap<u32, Vec<SampledToken>> = BTreeMap::new();
    // Choices that have ended, or do not exist, are nothing.
    for choice in [1, 1, 77] {
        decoding.writer.write(&JobUpdate::EndChoice { choice }).await?;
    }
    decoding.writer.finish()?;
    loop {
        match decoding.next().await? {
            JobEvent::Token { choice, token, .. } => tokens.entry(choice).or_default().push(token),
            JobEvent::Finished => break,
            other => bail!("{other:?}"),
        }
    }
    let count = |choice: u32| tokens.get(&choice).map_or(0, Vec::len);
    ensure!(
        (count(0), count(2)) == (249, 249),
        "{} and {} tokens",
        count(0),
        count(2)
    );
    ensure!(count(1) < 249, "choice 1 was not ended");
    for choice in [0, 2] {
        let expected = scene.computed_there(alone(choice, &rules)).await?;
        ensure!(tokens[&choice] == expected[&choice][1..], "choice {choice}");
    }
    // The last one to end ends the job.
    let (_, _, mut decoding) = scene.hand_over(prefill_job(2, &rules), decode_job(2, &rules)).await?;
    for choice in [0, 1] {
        decoding.writer.write(&JobUpdate::EndChoice { choice }).await?;
    }
    decoding.tokens().await?;
    scene.close().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_beam_search_is_the_same_after_a_handoff_and_alone() -> Result<()> {
    let scene = Scene::open().await?;
    let stop = StopRules {
        eos_token_ids: (0..40).collect(),
        ..stop(12)
    };
    let search = DecodeJob {
        choices: Vec::new(),
        beam_width: Some(4),
        ..decode_job(0, &stop)
    };
    let (computed, _, mut decoding) = scene.hand_over(prefill_job(0, &stop), search.clone()).await?;
    ensure!(
        computed.tokens.is_empty() && computed.step.compute_us > 0,
        "{computed:?}"
    );
    let beams = |event| match event {
        JobEvent::Beams(beams) => Ok::<Vec<Beam>, anyhow::Error>(beams),
        other => bail!("{other:?}"),
    };
    let handed_over = beams(decoding.next().await?)?;
    let alone = DecodeJob {
        source: KvSource::Compute,
        ..search
    };
    let mut stream = Stream::open(&scene.decode, Job::Decode(alone)).await?;
    ensure!(stream.computed().await?.tokens.is_empty());
    let alone = beams(stream.next().await?)?;
    let bare = |beams: &[Beam]| {
        let tokens = |beam: &Beam| beam.tokens.iter().map(|(token, _)| token.clone()).collect::<Vec<_>>();
        beams
            .iter()
            .map(|beam| (tokens(beam), beam.score.to_bits()))
            .collect::<Vec<_>>()
    };
    ensure!(bare(&handed_over) == bare(&alone), "{handed_over:?} and {alone:?}");
    ensure!(
        alone.len() == 4 && alone.is_sorted_by(|a, b| a.score >= b.score),
        "{alone:?}"
    );
    for beam in &alone {
        let last = beam.tokens.last().context("a token")?.0.token;
        ensure!(
            beam.tokens.len() == 12 || last < 40,
            "a hypothesis ends without a reason: {beam:?}"
        );
        ensure!(
            beam.tokens
                .iter()
                .all(|(token, step)| token.top_logprobs.len() == 2 && step.batch_size > 0)
        );
    }
    scene.close().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_computed_for_its_log_probabilities_alone() -> Result<()> {
    let scene = Scene::open().await?;
    let job = |choices, stop: &StopRules| PrefillJob {
        prompt_logprobs: Some(3),
        ..prefill_job(choices, stop)
    };
    let mut found = Vec::new();
    for (choices, max_tokens) in [(0, 0), (0, 5), (1, 1), (3, 1)] {
        let mut stream = Stream::open(&scene.prefill, Job::Prefill(job(choices, &stop(max_tokens)))).await?;
        let JobEvent::Computed(computed) = stream.next().await? else {
            bail!("not computed");
        };
        ensure!(stream.next().await? == JobEvent::Finished);
        ensure!(computed.tokens.len() == choices as usize);
        found.push(computed.prompt_logprobs.context("log-probabilities")?);
    }
    ensure!(found.iter().all(|all| *all == found[0] && all.len() == PROMPT - 1));
    ensure!(found[0].iter().all(|target| target.top.len() == 3));
    scene.close().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_that_contradict_themselves_are_refused() -> Result<()> {
    let scene = Scene::open().await?;
    let stop = stop(9);
    let valid = decode_job(2, &stop);
    let twice = ChoiceStart {
        choice: 1,
        generated: Vec::new(),
    };
    let cases = [
        (decode_job(0, &stop), "choices is empty"),
        (
            DecodeJob {
                choices: vec![twice.clone(), twice],
                ..valid.clone()
            },
            "choice 1 is named twice",
        ),
        (
            DecodeJob {
                beam_width: Some(2),
                ..valid.clone()
            },
            "beam_width = 2 and choices has 2 elements",
        ),
        (
            DecodeJob {
                beam_width: Some(0),
                choices: Vec::new(),
                ..valid.clone()
            },
            "beam_width is 0",
        ),
        (decode_job(17, &stop), "choices is 17"),
        (
            DecodeJob {
                prompt_logprobs: Some(1),
                ..valid.clone()
            },
            "prompt_logprobs is set",
        ),
        (
            DecodeJob {
                prompt_logprobs: Some(1),
                source: KvSource::Compute,
                choices: vec![ChoiceStart {
                    choice: 0,
                    generated: vec![7],
                }],
                ..valid.clone()
            },
            "prompt_logprobs is set",
        ),
        (
            DecodeJob {
                beam_width: Some(17),
                choices: Vec::new(),
                source: KvSource::Compute,
                ..valid
            },
            "beam width is 17",
        ),
    ];
    for (job, reason) in cases {
        let message = Stream::open(&scene.decode, Job::Decode(job)).await?.failed().await?;
        ensure!(message.contains(reason), "{message}; expected: {reason}");
    }
    scene.close().await
}
