//! Token limits: the client's, the server's and its one extra token, the model's; and the limit of one.

use anyhow::{Context, Result, ensure};
use integration_tests::ask::Door;
use integration_tests::client::post;
use integration_tests::cluster::ClusterSpec;
use integration_tests::exact::judge::Judge;
use integration_tests::exact::prompts::prompts;
use integration_tests::exact::query::Query;
use integration_tests::exact::reference::Continuation;
use integration_tests::exact::watched::Watched;
use reqwest::Client;

use super::{ONE_CLUSTER, queries, reference, start, tiny};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_of_1_to_5_hold_at_every_door() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let mut reference = reference()?;
    let queries = queries(&mut reference, 20, 5)?;
    let (_cluster, judge) = start(tiny(), &reference).await?;
    let (mut answers, mut numbers) = (0, 0);
    for (query, endless) in &queries {
        for most in 1..=5 {
            let query = Query {
                max_tokens: Some(most),
                ..query.clone()
            };
            for right in judge.ask_everywhere(&query, most, endless).await? {
                (answers, numbers) = (answers + 2, numbers + right.numbers);
            }
        }
    }
    eprintln!("{answers} answers of 1 to 5 tokens, {numbers} numbers equal");
    Ok(())
}

/// Requests that may generate one token only, and the same ones with a limit of two.
async fn ask_all(judge: &Judge, queries: &[(Query, Continuation)], most: u32) -> Result<u64> {
    let mut asked = 0;
    for (query, endless) in queries {
        for door in Door::ALL {
            let query = Query {
                max_tokens: Some(most),
                ..query.clone()
            };
            judge.ask(&query, most, endless, door).await?;
            asked += 1;
        }
    }
    Ok(asked)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_token_never_reaches_the_decode_node() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let mut reference = reference()?;
    // No end token among the first ones: each limit of two is a handoff.
    let mut queries = queries(&mut reference, 12, 4)?;
    queries.retain(|(_, endless)| !reference.text.eos_token_ids.contains(&endless.ids()[0]));
    let watched = Watched::start(tiny()).await?;
    let judge = Judge::new(watched.cluster.url(), reference.text.clone());

    let mut asked = ask_all(&judge, &queries, 1).await?;
    // The model's positions leave room for one token as well, whatever the client wants.
    let positions = reference.text.max_position_embeddings;
    let long = prompts(&reference.text.tokenizer, &[positions - 1])?.remove(0);
    let query = Query::greedy(long, 5);
    let endless = reference.endless(&query, 1)?;
    ensure!(
        endless.prompt.len() == positions - 1,
        "a prompt of {} tokens",
        endless.prompt.len()
    );
    for door in Door::ALL {
        judge.ask(&query, 1, &endless, door).await?;
        asked += 1;
    }

    let jobs = watched.prefill_count("baton_node_jobs_total", &[]).await?;
    ensure!(jobs == asked, "{jobs} prefill jobs for {asked} requests");
    for counter in [
        "baton_node_jobs_total",
        "baton_engine_rows_total",
        "baton_kv_handoffs_total",
    ] {
        let count = watched.decode_count(counter, &[]).await?;
        ensure!(
            count == 0,
            "the decode node's {counter} is {count} after {asked} requests of one token"
        );
    }
    // The same counters do move where a second token is wanted.
    let handed = ask_all(&judge, &queries, 2).await?;
    let jobs = watched.decode_count("baton_node_jobs_total", &[]).await?;
    ensure!(jobs == handed, "{jobs} decode jobs for {handed} requests of two tokens");
    eprintln!("{asked} requests of one token: no decode job; {handed} requests of two tokens: {jobs} decode jobs");
    Ok(())
}

/// The status of a request and the field that its error names.
async fn refusal(url: &str, query: &Query, door: Door) -> Result<(u16, String)> {
    let (status, answer) = post(&Client::new(), &format!("{url}{}", door.path()), &query.body(door)).await?;
    Ok((status, answer.to_string()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_models_and_the_servers_longest_sequence_cut_answers_and_refuse_prompts() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let mut reference = reference()?;
    let positions = reference.text.max_position_embeddings;
    // Where the model's positions are the limit a prompt may fill them: the token behind it needs none.
    for (setting, longest, total) in [("8192", positions, positions), ("64", 63, 64)] {
        let lengths: Vec<usize> = [8, 7, 5, 4, 3, 2, 1, 0].map(|less| longest - less).into();
        let (_cluster, judge) = start(tiny().set(format!("limits.max_seq_len={setting}")), &reference).await?;
        let texts = prompts(&reference.text.tokenizer, &lengths)?;
        let mut seen = Vec::new();
        for text in texts {
            let mut query = Query::greedy(text, 100);
            let length = reference.text.tokenizer.encode(&query.prompt)?.len();
            let most = (total - length).max(1) as u32;
            let endless = reference.endless(&query, most)?;
            judge.ask_everywhere(&query, most, &endless).await?;
            // The limit itself is no reason to refuse a larger one.
            query.max_tokens = Some(i32::MAX as u32);
            judge.ask_everywhere(&query, most, &endless).await?;
            seen.push((length, most));
        }
        ensure!(
            seen.iter().any(|(length, _)| *length == longest),
            "no prompt of {longest} tokens in {seen:?}"
        );
        eprintln!("max_seq_len {setting}, {positions} positions: (prompt, answer) {seen:?}");

        let long = prompts(&reference.text.tokenizer, &[longest + 1, longest + 2])?;
        let long = long.into_iter().find(|text| {
            reference
                .text
                .tokenizer
                .encode(text)
                .is_ok_and(|ids| ids.len() > longest)
        });
        let query = Query::greedy(long.context("no prompt beyond the limit")?, 5);
        for door in Door::ALL {
            let (status, error) = refusal(judge.url(), &query, door).await?;
            ensure!(status == if door.is_tgi() { 422 } else { 400 }, "{status}: {error}");
            let names = error.contains(if door.is_tgi() { "inputs" } else { "prompt" });
            ensure!(names && error.contains(&longest.to_string()), "{error}");
        }
    }
    Ok(())
}

/// Asks with a client limit (or none) where the server's limit is `most`.
async fn limited(judge: &Judge, client: Option<u32>, most: u32, tokens: &Continuation, query: &Query) -> Result<()> {
    let mut query = Query {
        max_tokens: client,
        ..query.clone()
    };
    // Without a limit `/generate` has one of its own: 20.
    judge
        .ask_family(&query, most, tokens, true)
        .await
        .with_context(|| format!("TGI, {client:?}"))?;
    query.ignore_eos = true;
    judge
        .ask_family(&query, most, tokens, false)
        .await
        .with_context(|| format!("OpenAI, {client:?}"))?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_limit_gives_one_more_where_it_binds() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let mut reference = reference()?;
    let mut queries = queries(&mut reference, 12, 9)?;
    // TGI cannot ignore an end token.
    queries.retain(|(_, endless)| {
        endless
            .ids()
            .iter()
            .all(|id| !reference.text.eos_token_ids.contains(id))
    });
    ensure!(queries.len() >= 4, "only {} prompts without an end", queries.len());
    let spec = |extra: bool| -> ClusterSpec {
        tiny()
            .set("limits.max_iter_times=8")
            .set(format!("limits.extra_decode_iteration={extra}"))
    };
    for (extra, absent) in [(true, 9), (false, 8)] {
        let (_cluster, judge) = start(spec(extra), &reference).await?;
        let table = [
            (None, absent),
            (Some(20), absent),
            (Some(9), absent),
            (Some(8), 8),
            (Some(3), 3),
            (Some(1), 1),
        ];
        for (client, most) in table {
            for (query, endless) in &queries {
                limited(&judge, client, most, endless, query).await?;
            }
        }
        eprintln!(
            "max_iter_times 8, extra token {extra}: {table:?} tokens for {} prompts",
            queries.len()
        );
    }
    Ok(())
}
