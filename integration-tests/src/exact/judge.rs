//! Asks, and holds the answer against the plain search and the engine's numbers.

use anyhow::{Context, Result, ensure};
use model_files::TextModel;
use reqwest::Client;

use super::answer::{Answer, ask};
use super::expected::{check_ending, check_numbers, ending};
use super::query::Query;
use super::reference::Continuation;
use crate::ask::Door;

/// A cluster that is asked, and the model it serves.
#[derive(Debug)]
pub struct Judge {
    client: Client,
    url: String,
    model: TextModel,
}

/// A right answer.
#[derive(Debug)]
pub struct Right {
    /// The answer.
    pub answer: Answer,
    /// How many numbers were compared.
    pub numbers: usize,
}

impl Judge {
    /// `url`: of the coordinator.
    pub fn new(url: String, model: TextModel) -> Self {
        Self {
            client: Client::new(),
            url,
            model,
        }
    }

    /// The coordinator's address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Asks at a door. `most`: the limit that the server must make of the query's; `tokens`: what the engine generates if
    /// nothing but a limit of at least `most` stops it, or where the answer ends.
    ///
    /// # Errors
    /// Anything about the answer is wrong; the error holds it.
    pub async fn ask(&self, query: &Query, most: u32, tokens: &Continuation, door: Door) -> Result<Right> {
        let answer = ask(&self.client, &self.url, query, door).await?;
        let ending = ending(query, most, &tokens.ids(), &self.model);
        let numbers = check_ending(&answer, &ending, door)
            .and_then(|()| check_numbers(&answer, query, tokens, door, &self.model))
            .with_context(|| format!("{door:?}, {query:?}, limit {most}: {answer:?}"))?;
        Ok(Right { answer, numbers })
    }

    /// Asks at both doors of a family: the stream must say what the whole answer says.
    ///
    /// # Errors
    /// As [`Judge::ask`].
    pub async fn ask_family(&self, query: &Query, most: u32, tokens: &Continuation, tgi: bool) -> Result<Right> {
        let doors = Door::ALL
            .into_iter()
            .filter(|door| door.is_tgi() == tgi && query.belongs_to(*door));
        let mut rights: Vec<Right> = Vec::new();
        for door in doors {
            rights.push(self.ask(query, most, tokens, door).await?);
        }
        let first = rights
            .first()
            .with_context(|| format!("no door for {query:?}"))?
            .answer
            .clone()
            .plain();
        for right in &rights[1..] {
            let other = right.answer.clone().plain();
            ensure!(first == other, "whole {first:?}, streamed {other:?}: {query:?}");
        }
        let numbers = rights.iter().map(|right| right.numbers).sum();
        Ok(Right { answer: first, numbers })
    }

    /// Asks at all doors that have what the query asks.
    ///
    /// # Errors
    /// As [`Judge::ask_family`].
    pub async fn ask_everywhere(&self, query: &Query, most: u32, tokens: &Continuation) -> Result<Vec<Right>> {
        let mut rights = Vec::new();
        for tgi in [true, false] {
            if Door::ALL
                .into_iter()
                .any(|door| door.is_tgi() == tgi && query.belongs_to(door))
            {
                rights.push(self.ask_family(query, most, tokens, tgi).await?);
            }
        }
        Ok(rights)
    }
}
