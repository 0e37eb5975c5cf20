//! Clients that go away: at once, while they wait, in the middle of a stream.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use futures_util::StreamExt;
use reqwest::Client;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::ask::Ask;
use crate::random::Random;

/// When a client goes.
#[derive(Clone, Copy, Debug)]
pub enum Moment {
    /// So long after it began to connect.
    After(Duration),
    /// After so many events of its stream.
    Events(usize),
}

/// What a client had seen when it went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Nothing.
    Nothing,
    /// A status, and a part of the answer.
    Part,
    /// Everything: it went too late.
    Everything,
    /// No connection, or an answer that is none: why.
    Failed(String),
}

impl Moment {
    /// A moment from "at once" to "in the middle of decoding"; some of them for streams only.
    pub fn any(random: &mut Random, stream: bool) -> Self {
        let micros = |random: &mut Random, first, last| Self::After(Duration::from_micros(random.between(first, last)));
        match random.below(if stream { 6 } else { 4 }) {
            0 => Self::After(Duration::ZERO),
            1 => micros(random, 500, 5_000),
            2 => micros(random, 5_000, 50_000),
            3 => micros(random, 50_000, 400_000),
            4 => Self::Events(1),
            _ => Self::Events(random.between(2, 100) as usize),
        }
    }
}

/// Sends every request, at most `at_once` at a time, and drops each at its moment. What they had seen, in no order.
pub async fn storm(client: &Client, url: &str, asks: Vec<(Ask, Moment)>, at_once: usize) -> Result<Vec<Seen>> {
    let slots = Arc::new(Semaphore::new(at_once));
    let mut set = JoinSet::new();
    for (ask, moment) in asks {
        let (client, url) = (client.clone(), url.to_owned());
        let slot = Arc::clone(&slots).acquire_owned().await?;
        set.spawn(async move {
            let seen = leave(&client, &url, &ask, moment).await;
            drop(slot);
            seen
        });
    }
    let mut seen = Vec::new();
    while let Some(one) = set.join_next().await {
        seen.push(one?);
    }
    Ok(seen)
}

async fn leave(client: &Client, url: &str, ask: &Ask, moment: Moment) -> Seen {
    let mut seen = Seen::Nothing;
    let (time, events) = match moment {
        Moment::After(time) => (time, usize::MAX),
        Moment::Events(events) => (Duration::from_secs(30), events),
    };
    // Dropped at the end of the time, which closes the connection.
    let ended = timeout(time, read(client, url, ask, events, &mut seen)).await;
    match ended {
        Ok(Ok(())) | Err(_) => seen,
        Ok(Err(error)) => Seen::Failed(format!("{error:#}")),
    }
}

async fn read(client: &Client, url: &str, ask: &Ask, events: usize, seen: &mut Seen) -> Result<()> {
    let answer = client
        .post(format!("{url}{}", ask.door.path()))
        .json(&ask.body)
        .send()
        .await?;
    if answer.status() != 200 {
        bail!("status {}: {}", answer.status(), answer.text().await?);
    }
    *seen = Seen::Part;
    let mut body = answer.bytes_stream();
    let mut count = 0;
    while let Some(chunk) = body.next().await {
        count += chunk?.windows(2).filter(|pair| pair == b"\n\n").count();
        if count >= events {
            return Ok(());
        }
    }
    *seen = Seen::Everything;
    Ok(())
}
