//! Prompts that the decode node computes itself: it says what a prefill node and a handoff would have led to.

use anyhow::{Context, Result, bail, ensure};
use protocol::control::{DecodeJob, Job, JobEvent, JobUpdate, KvSource, PrefillJob};

use crate::scene::{Scene, Stream};
use crate::{PROMPT, decode_job, prefill_job, stop};

/// The job of a decode node that does everything.
fn local(choices: u32, max_tokens: u32) -> DecodeJob {
    DecodeJob {
        source: KvSource::Compute,
        ..decode_job(choices, &stop(max_tokens))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_node_alone_answers_as_both_nodes_do() -> Result<()> {
    for choices in [1, 5] {
        let (alone, pair) = (Scene::open().await?, Scene::open().await?);
        for (round, logprobs) in [None, Some(3), None].into_iter().enumerate() {
            let rules = stop(40);
            let prefill = PrefillJob {
                prompt_logprobs: logprobs,
                ..prefill_job(choices, &rules)
            };
            let (expected, _, mut decoding) = pair.hand_over(prefill, decode_job(choices, &rules)).await?;
            let rest = decoding.tokens().await?;
            let job = DecodeJob {
                prompt_logprobs: logprobs,
                ..local(choices, 40)
            };
            let mut stream = Stream::open(&alone.decode, Job::Decode(job)).await?;
            let computed = stream.computed().await?;
            ensure!(computed.tokens == expected.tokens, "first tokens of round {round}");
            ensure!(computed.prompt_logprobs == expected.prompt_logprobs, "round {round}");
            ensure!(computed.prompt_logprobs.map(|all| all.len()) == logprobs.map(|_| PROMPT - 1));
            ensure!(
                computed.cached_tokens == expected.cached_tokens,
                "{} cached tokens in round {round}, {} expected",
                computed.cached_tokens,
                expected.cached_tokens
            );
            ensure!(computed.step.compute_us > 0 && computed.step.batch_size > 0);
            ensure!(stream.tokens().await? == rest, "tokens of round {round}");
        }
        alone.close().await?;
        pair.close().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_token_and_no_token_are_served_too() -> Result<()> {
    let scene = Scene::open().await?;
    let whole = scene.computed_there(decode_job(3, &stop(5))).await?;
    let mut stream = Stream::open(&scene.decode, Job::Decode(local(3, 1))).await?;
    let firsts = stream.computed().await?.tokens;
    ensure!(firsts.iter().zip(whole.values()).all(|(first, all)| *first == all[0]));
    ensure!(firsts.len() == 3 && stream.next().await? == JobEvent::Finished);
    let alone = DecodeJob {
        prompt_logprobs: Some(2),
        ..local(0, 0)
    };
    let mut stream = Stream::open(&scene.decode, Job::Decode(alone)).await?;
    let computed = stream.computed().await?;
    let prompt = computed.prompt_logprobs.context("log-probabilities")?;
    ensure!(computed.tokens.is_empty() && prompt.len() == PROMPT - 1);
    ensure!(stream.next().await? == JobEvent::Finished);
    scene.close().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_beam_search_tells_of_its_prompt_first() -> Result<()> {
    let scene = Scene::open().await?;
    let search = |logprobs| DecodeJob {
        beam_width: Some(3),
        prompt_logprobs: logprobs,
        ..local(0, 12)
    };
    let mut answers = Vec::new();
    for logprobs in [None, Some(2)] {
        let mut stream = Stream::open(&scene.decode, Job::Decode(search(logprobs))).await?;
        let computed = stream.computed().await?;
        ensure!(computed.tokens.is_empty() && computed.step.compute_us > 0);
        ensure!(computed.prompt_logprobs.as_ref().map(Vec::len) == logprobs.map(|_| PROMPT - 1));
        if let Some(all) = &computed.prompt_logprobs {
            let prefill = PrefillJob {
                prompt_logprobs: logprobs,
                ..prefill_job(0, &stop(0))
            };
            let mut stream = Stream::open(&scene.prefill, Job::Prefill(prefill)).await?;
            ensure!(stream.computed().await?.prompt_logprobs.as_ref() == Some(all));
        }
        let JobEvent::Beams(beams) = stream.next().await? else {
            bail!("no beams");
        };
        let tokens = beams
            .into_iter()
            .map(|beam| (beam.tokens.into_iter().map(|(token, _)| token), beam.score));
        answers.push(
            tokens
                .map(|(tokens, score)| (tokens.collect::<Vec<_>>(), score))
                .collect::<Vec<_>>(),
        );
    }
    ensure!(
        answers[0] == answers[1],
        "the answer depends on what is asked of the prompt"
    );
    scene.close().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_coordinator_says_too_early_is_heard_later() -> Result<()> {
    let scene = Scene::open().await?;
    let mut stream = Stream::open(&scene.decode, Job::Decode(local(3, 300))).await?;
    stream.writer.write(&JobUpdate::EndChoice { choice: 1 }).await?;
    ensure!(stream.computed().await?.tokens.len() == 3);
    let tokens = stream.tokens().await?;
    let count = |choice: u32| tokens.get(&choice).map_or(0, Vec::len);
    ensure!(
        (count(0), count(2)) == (299, 299),
        "{} and {} tokens",
        count(0),
        count(2)
    );
    ensure!(count(1) < 299, "choice 1 was not ended");
    // A job that is reset while its prompt is computed leaves nothing behind.
    drop(Stream::open(&scene.decode, Job::Decode(local(3, 300))).await?);
    scene.close().await
}
