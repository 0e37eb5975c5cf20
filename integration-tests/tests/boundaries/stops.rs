//! Stop strings, cut at every border between two tokens and inside of tokens.

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use integration_tests::ask::Door;
use integration_tests::exact::judge::Judge;
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::Continuation;
use model_files::TextTokenizer;

use super::{ONE_CLUSTER, queries, reference, start, tiny};

/// Longest part of a stop string on either side of a border, in characters.
const SIDE: usize = 3;

/// Stop strings made of an answer.
struct Cuts {
    /// Each lies across the border behind a token.
    across: Vec<String>,
    /// Each lies within the text of a token, away from its ends.
    within: Vec<String>,
}

fn cuts(tokenizer: &TextTokenizer, ids: &[u32]) -> Cuts {
    let mut decoder = tokenizer.incremental(true);
    let pieces: Vec<Vec<char>> = ids.iter().map(|id| decoder.push(*id).chars().collect()).collect();
    let text: Vec<char> = pieces.concat();
    let (mut across, mut within) = (Vec::new(), Vec::new());
    let mut border = 0;
    for (i, piece) in pieces.iter().enumerate() {
        if piece.len() >= 3 {
            within.push(text[border + 1..border + piece.len() - 1].iter().collect());
        }
        border += piece.len();
        // Behind a token that completes no character there is no border in the text.
        if !piece.is_empty() && border < text.len() {
            let (left, right) = (i % SIDE + 1, (i / SIDE) % SIDE + 1);
            across.push(
                text[border.saturating_sub(left)..(border + right).min(text.len())]
                    .iter()
                    .collect(),
            );
        }
    }
    Cuts { across, within }
}

/// A request that `stop` ends, one way or another: alone, among others, with the limit right behind it or far away.
fn query(of: &Query, stop: &str, i: usize, tokens: u32, tgi: bool) -> Query {
    let beginning: String = stop.chars().take(stop.chars().count() - 1).collect();
    // Never comes, but looks like it for a while.
    let decoy = format!("{beginning}\u{1}");
    let stop = match i % 3 {
        0 => vec![stop.to_owned()],
        1 => vec![decoy, stop.to_owned()],
        _ => vec![stop.to_owned(), format!("{stop}{stop}"), decoy],
    };
    Query {
        stop,
        keep_stop: !tgi && i % 4 < 2,
        max_tokens: Some(tokens),
        ..of.clone()
    }
}

/// Asks both doors of a family with every stop string. Returns how many answers ended by a stop string, and how many did not.
async fn ask_all(judge: &Judge, work: Vec<(Query, &Continuation, bool)>) -> Result<(usize, usize)> {
    let asked = work.iter().map(|(query, endless, tgi)| async move {
        let most = query.max_tokens.context("a limit")?;
        let right = judge.ask_family(query, most, endless, *tgi).await?;
        Ok::<_, anyhow::Error>(right.answer.tokens.len() < endless.tokens.len())
    });
    let early: Vec<bool> = stream::iter(asked).buffer_unordered(8).try_collect().await?;
    let stopped = early.iter().filter(|early| **early).count();
    Ok((stopped, early.len() - stopped))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_strings_end_answers_wherever_they_lie() -> Result<()> {
    const TOKENS: u32 = 12;
    let _alone = ONE_CLUSTER.lock().await;
    let mut reference = reference()?;
    let queries = queries(&mut reference, 50, TOKENS)?;
    let (_cluster, judge) = start(tiny(), &reference).await?;
    let mut work = Vec::new();
    let (mut borders, mut insides) = (0, 0);
    for (of, endless) in &queries {
        let Cuts { across, within } = cuts(&reference.text.tokenizer, &endless.ids());
        (borders, insides) = (borders + across.len(), insides + within.len());
        for (i, stop) in across.iter().chain(&within).enumerate() {
            for tgi in [true, false] {
                work.push((query(of, stop, i, TOKENS, tgi), endless, tgi));
            }
        }
    }
    ensure!(
        borders >= 300 && insides >= 20,
        "{borders} borders, {insides} places inside of tokens"
    );
    let (early, late) = ask_all(&judge, work).await?;
    eprintln!("{borders} borders and {insides} insides: {early} pairs of answers cut short, {late} at the last token");
    ensure!(early > late, "stop strings end answers");
    Ok(())
}

/// Tokens drawn almost evenly from the vocabulary: special ones, torn characters and ends anywhere.
fn wild(of: &Query, seed: u64) -> Query {
    let draw = Draw {
        sample: true,
        temperature: Some(20.0),
        top_k: Some(512),
        seed,
        ..Draw::default()
    };
    Query { draw, ..of.clone() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn special_tokens_and_torn_characters_are_shown_as_asked() -> Result<()> {
    const TOKENS: u32 = 60;
    let _alone = ONE_CLUSTER.lock().await;
    let mut reference = reference()?;
    let tokenizer = reference.text.tokenizer.clone();
    let mut wilds = Vec::new();
    for (i, (of, _)) in queries(&mut reference, 40, 1)?.iter().enumerate() {
        let query = Query {
            max_tokens: Some(TOKENS),
            ..wild(of, 1_000 + i as u64)
        };
        let endless = reference.endless(&query, TOKENS)?;
        wilds.push((query, endless));
    }
    let (_cluster, judge) = start(tiny(), &reference).await?;
    let (mut work, mut special, mut torn) = (Vec::new(), 0, 0);
    for (i, (query, endless)) in wilds.iter().enumerate() {
        let ids = endless.ids();
        special += ids.iter().filter(|id| tokenizer.is_special(**id)).count();
        torn += tokenizer
            .decode(&ids, true)
            .matches(char::REPLACEMENT_CHARACTER)
            .count();
        for skip_special in [true, false] {
            let text = tokenizer.decode(&ids, skip_special);
            for stop in ["", "</s>", "<s>", "\u{fffd}"].into_iter().chain(text.get(20..23)) {
                let stop = if stop.is_empty() {
                    Vec::new()
                } else {
                    vec![stop.to_owned()]
                };
                let keep_stop = i % 2 == 0 && !stop.is_empty();
                for ignore_eos in [true, false] {
                    let query = Query {
                        stop: stop.clone(),
                        skip_special,
                        keep_stop,
                        ignore_eos,
                        ..query.clone()
                    };
                    let tgi = query.belongs_to(Door::Generate);
                    work.push((query.clone(), endless, false));
                    work.extend(tgi.then_some((query, endless, true)));
                }
            }
        }
    }
    let (early, late) = ask_all(&judge, work).await?;
    eprintln!("{special} special tokens, {torn} torn characters: {early} pairs of answers ended early, {late} did not");
    ensure!(
        special >= 10 && torn >= 100 && early >= 100 && late >= 100,
        "the answers are tame"
    );
    Ok(())
}
