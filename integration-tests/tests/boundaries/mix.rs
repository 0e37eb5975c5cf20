//! Sixteen different requests at once: each is answered as if it were alone.

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use integration_tests::ask::Door;
use integration_tests::exact::answer::Answer;
use integration_tests::exact::judge::Judge;
use integration_tests::exact::query::Query;
use integration_tests::exact::reference::Continuation;

use super::{ONE_CLUSTER, queries, reference, start, tiny};

const AT_ONCE: usize = 16;

/// Requests of all kinds, with their doors.
fn mixed(queries: &[(Query, Continuation)]) -> Vec<(Query, Door)> {
    let mut out = Vec::new();
    for (i, (query, endless)) in queries.iter().enumerate() {
        let door = Door::ALL[i % Door::ALL.len()];
        let mut query = Query {
            max_tokens: Some(1 + (i as u32 * 7) % 40),
            ..query.clone()
        };
        match i % 5 {
            1 => query.stop = vec!["e".to_owned(), "zz".to_owned()],
            2 if !door.is_tgi() => query.stop_token_ids = vec![endless.ids()[i % 7]],
            3 if !door.is_tgi() => (query.ignore_eos, query.top) = (true, 4),
            _ => {}
        }
        out.push((query, door));
    }
    out
}

async fn ask(judge: &Judge, query: &Query, endless: &Continuation, door: Door) -> Result<Answer> {
    let most = query.max_tokens.context("a limit")?;
    let mut answer = judge.ask(query, most, endless, door).await?.answer;
    // What came before decides what the prefix cache holds: the one thing in an answer that others may change.
    answer.cached_tokens = None;
    Ok(answer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_different_requests_at_once_get_their_solo_answers() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let mut reference = reference()?;
    let queries = queries(&mut reference, 5 * AT_ONCE, 40)?;
    let (_cluster, judge) = start(tiny(), &reference).await?;
    let mixed = mixed(&queries);
    let mut solo = Vec::new();
    for ((query, door), (_, endless)) in mixed.iter().zip(&queries) {
        solo.push(ask(&judge, query, endless, *door).await?);
    }
    for wave in 0..3 {
        // In every wave other requests meet.
        let order = (0..mixed.len()).map(|i| (i * 29 + wave * 7) % mixed.len());
        let (judge, mixed, queries) = (&judge, &mixed, &queries);
        let asked = order.map(|i| async move {
            let (query, door) = &mixed[i];
            Ok::<_, anyhow::Error>((i, ask(judge, query, &queries[i].1, *door).await?))
        });
        let answers: Vec<(usize, Answer)> = stream::iter(asked).buffer_unordered(AT_ONCE).try_collect().await?;
        for (i, answer) in answers {
            ensure!(
                answer == solo[i],
                "{:?}: alone {:?}, among others {answer:?}",
                mixed[i],
                solo[i]
            );
        }
    }
    let tokens: usize = solo.iter().map(|answer| answer.tokens.len()).sum();
    eprintln!(
        "3 x {} answers of {tokens} tokens, {AT_ONCE} at a time, equal the answers alone",
        solo.len()
    );
    Ok(())
}
