//! What must hold when everything is over: the answers are those of an undisturbed run, and nobody holds anything.

use coordinator::core::ledger::Detokenizer;
use coordinator::core::types::{ClientEvent, Finish, ServeErrorKind, ServeRequest};
use protocol::sampling::SampledToken;

use crate::model::{BLOCK_TOKENS, EOS};
use crate::text::Letters;
use crate::workload::{Call, Client, PATIENCE, Planned};
use crate::world::World;

/// What a client sees of a choice.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    tokens: Vec<SampledToken>,
    text: String,
    finish: Option<Finish>,
}

impl World {
    /// Checks everything, after [`World::run`]. An error says what is wrong.
    pub fn check(&mut self) -> anyhow::Result<()> {
        let (mut answered, mut failed, mut tokens) = (0, 0, 0);
        for call in &self.calls {
            for planned in &call.requests {
                let done = self
                    .check_request(call, planned, &mut tokens)
                    .map_err(|problem| anyhow::anyhow!("request {}: {problem}", planned.request.id))?;
                answered += u64::from(done);
                failed += u64::from(!done);
            }
        }
        self.tally.answered = answered;
        self.tally.failed = failed;
        self.tally.tokens = tokens;
        self.check_rest()
    }

    /// Nobody holds anything.
    fn check_rest(&self) -> anyhow::Result<()> {
        let cluster = &self.front.cluster;
        let status = cluster.status();
        anyhow::ensure!(
            cluster.open_requests() == 0,
            "{} requests are open",
            cluster.open_requests()
        );
        anyhow::ensure!(
            status.queued == 0 && status.queued_bytes == 0,
            "something is queued: {status:?}"
        );
        // One timer for each open request, and no other.
        cluster.assert_consistent();
        anyhow::ensure!(
            status.nodes.len() == self.scenario.nodes(),
            "a node is missing: {status:?}"
        );
        for node in &status.nodes {
            let (booked, jobs) = (node.booked_blocks, node.jobs);
            anyhow::ensure!(
                booked == 0 && jobs == 0,
                "{}: {booked} blocks and {jobs} jobs are booked",
                node.node
            );
        }
        for node in self.living() {
            let known = status.nodes.iter().find(|known| known.node == node.name());
            let known = known.map(|known| (known.free_blocks, known.cached_blocks));
            let reported = self.scenario.faults.lost_reports == 0;
            anyhow::ensure!(
                !reported || known == Some(node.spare_blocks()),
                "{}: {known:?} is known",
                node.name()
            );
            let left = node.leftovers();
            anyhow::ensure!(left.is_empty(), "left over: {}", left.join(", "));
        }
        self.check_audit()
    }

    /// The last audit, made when nothing was going on any more, shows that.
    fn check_audit(&self) -> anyhow::Result<()> {
        let report = self.front.last_audit.as_ref();
        let report = report.ok_or_else(|| anyhow::anyhow!("there was no audit"))?;
        let doubts = report.nodes.iter().any(|node| !node.unconfirmed.is_empty());
        anyhow::ensure!(
            report.complete && report.agrees && !doubts,
            "the last audit does not agree: {report:?}"
        );
        let (blocks, nodes) = (&report.blocks, report.nodes.len());
        anyhow::ensure!(
            nodes == self.scenario.nodes() && blocks.owned == 0 && blocks.booked == 0,
            "the last audit is not that of an idle cluster: {report:?}"
        );
        anyhow::ensure!(
            blocks.free + blocks.cached == blocks.total,
            "blocks are missing: {blocks:?}"
        );
        Ok(())
    }

    /// True if the request was answered.
    fn check_request(&self, call: &Call, planned: &Planned, tokens: &mut u64) -> Result<bool, String> {
        let request = &planned.request;
        let got = self.front.got.get(&request.id).ok_or("nobody asked")?;
        let Some((end, before)) = got.events.split_last() else {
            return Err("there is no event".to_owned());
        };
        if !end.is_last() || before.iter().any(ClientEvent::is_last) {
            return Err(format!("it does not end once: {:?}", got.events));
        }
        let seen = collect(planned, before)?;
        for (choice, seen) in seen.iter().enumerate() {
            *tokens += seen.tokens.len() as u64;
            check_choice(request, &planned.answer.choices[choice], seen)
                .map_err(|problem| format!("choice {choice}: {problem}"))?;
        }
        match end {
            ClientEvent::Done { .. } => match seen.iter().position(|seen| seen.finish.is_none()) {
                Some(choice) => Err(format!("it is done, and choice {choice} has not ended")),
                None => Ok(true),
            },
            ClientEvent::Failed(error) => {
                let permitted = self.permitted(error.kind, call, request);
                permitted.then_some(false).ok_or(format!("it fails: {error:?}"))
            }
            other => Err(format!("the end is {other:?}")),
        }
    }

    /// The documented errors, where there is a reason for them.
    fn permitted(&self, kind: ServeErrorKind, call: &Call, request: &ServeRequest) -> bool {
        let faults = &self.scenario.faults;
        let disturbed = faults.crashes
            + faults.freezes
            + faults.partitions
            + faults.slow
            + faults.drains
            + faults.orders
            + faults.lost_reports
            + faults.switches
            + faults.stalls
            + faults.breaks
            + faults.broken_streams
            + faults.damaged_frames
            + faults.failing_steps;
        match kind {
            // The queue is bounded, and so is the wait in it.
            ServeErrorKind::Overloaded { .. } => true,
            ServeErrorKind::Cancelled => call.client != Client::Patient,
            ServeErrorKind::Timeout if request.timeout < PATIENCE => true,
            // What a step's failure comes to when it happens too often.
            ServeErrorKind::Internal => faults.failing_steps > 0,
            ServeErrorKind::Unavailable
            | ServeErrorKind::Timeout
            | ServeErrorKind::NodeLost
            | ServeErrorKind::TransferFailed => disturbed > 0,
            // Larger nodes may be gone, and calls are refused as a whole.
            ServeErrorKind::TooLong => !call.requests.iter().all(|planned| self.fits_all(&planned.request)),
        }
    }
}

impl World {
    /// True if every node can hold a request that grows as far as it may.
    fn fits_all(&self, request: &ServeRequest) -> bool {
        let prompt = request.token_ids.len();
        let shared = prompt / BLOCK_TOKENS;
        let own = (prompt + request.stop.max_tokens as usize).div_ceil(BLOCK_TOKENS) - shared;
        let blocks = shared + own * request.choices as usize;
        let smallest = self.scenario.blocks.iter().min().copied().unwrap_or_default();
        blocks <= smallest && request.choices as usize <= self.scenario.max_num_seqs
    }
}

/// Sorts the events of a request by its choices.
fn collect(planned: &Planned, events: &[ClientEvent]) -> Result<Vec<Seen>, String> {
    let mut all: Vec<Seen> = planned.answer.choices.iter().map(|_| Seen::default()).collect();
    for (index, event) in events.iter().enumerate() {
        match event {
            ClientEvent::Prefill {
                cached_tokens,
                prompt_logprobs,
                ..
            } => {
                if index > 0 || *cached_tokens as usize >= planned.request.token_ids.len() {
                    return Err(format!("event {index} is a prompt with {cached_tokens} cached tokens"));
                }
                if *prompt_logprobs != planned.answer.prompt_logprobs {
                    return Err(format!("the prompt's log-probabilities are {prompt_logprobs:?}"));
                }
            }
            ClientEvent::Token { choice, token } => {
                let seen = all.get_mut(*choice as usize).ok_or("a token of no choice")?;
                if seen.finish.is_some() {
                    return Err(format!("choice {choice} goes on behind its end"));
                }
                seen.tokens.push(token.sampled.clone());
                seen.text.push_str(&token.visible);
            }
            ClientEvent::Ended { choice, completion } => {
                let seen = all.get_mut(*choice as usize).ok_or("the end of no choice")?;
                seen.text.push_str(&completion.tail);
                if seen.finish.replace(completion.finish.clone()).is_some() {
                    return Err(format!("choice {choice} ends twice"));
                }
                if completion.generated_tokens as usize != seen.tokens.len() {
                    let count = completion.generated_tokens;
                    return Err(format!(
                        "choice {choice} has {} tokens and says {count}",
                        seen.tokens.len()
                    ));
                }
            }
            ClientEvent::Served(_) => {}
            ClientEvent::Done { .. } | ClientEvent::Failed(_) => return Err("an end before the end".to_owned()),
        }
    }
    Ok(all)
}

/// Compares a choice with the undisturbed run; one that has not ended must be a beginning of it.
fn check_choice(request: &ServeRequest, answer: &[SampledToken], seen: &Seen) -> Result<(), String> {
    if !answer.starts_with(&seen.tokens) {
        return Err(format!("tokens are {:?}, expected {answer:?}", seen.tokens));
    }
    let expected = undisturbed(request, answer);
    if seen.finish.is_some() && *seen != expected {
        return Err(format!("it is {seen:?}, expected {expected:?}"));
    }
    if seen.finish.is_none() && !expected.text.starts_with(&seen.text) {
        return Err(format!("its text is {:?}, expected {:?}", seen.text, expected.text));
    }
    Ok(())
}

/// What a client sees of a choice when nothing goes wrong: by a search of the whole text after each token.
fn undisturbed(request: &ServeRequest, answer: &[SampledToken]) -> Seen {
    let mut decoder = Letters.decoder(request.skip_special_tokens);
    let mut seen = Seen::default();
    for (index, token) in answer.iter().enumerate() {
        seen.tokens.push(token.clone());
        let by_rules = request.stop.finish(token.token, index as u32 + 1);
        let terminates = match by_rules {
            Some(protocol::sampling::FinishReason::Length) | None => false,
            Some(_) => true,
        };
        if !terminates || request.include_stop_str {
            seen.text.push_str(&decoder.push(token.token));
        }
        if by_rules.is_some() {
            // What is left of a character becomes text, and may complete a stop string.
            let rest = decoder.finish();
            if let Some(stopped) = stopped(request, &seen) {
                return stopped;
            }
            seen.text.push_str(&rest);
        }
        if let Some(stopped) = stopped(request, &seen) {
            return stopped;
        }
        seen.finish = by_rules.map(|reason| match reason {
            protocol::sampling::FinishReason::Length => Finish::Length,
            protocol::sampling::FinishReason::Eos => Finish::Eos,
            protocol::sampling::FinishReason::StopToken(token) => Finish::StopToken(token),
        });
        debug_assert!(token.token != EOS || request.stop.ignore_eos || seen.finish.is_some());
    }
    seen
}

/// What is seen if a stop string is in the text: the match that ends first wins, then the first in the list.
fn stopped(request: &ServeRequest, seen: &Seen) -> Option<Seen> {
    let ends = |(index, stop): (usize, &String)| {
        let at = seen.text.find(stop.as_str())?;
        Some((at + stop.len(), index, at))
    };
    let (end, index, at) = request.stop_strings.iter().enumerate().filter_map(ends).min()?;
    let keep = if request.include_stop_str { end } else { at };
    Some(Seen {
        tokens: seen.tokens.clone(),
        text: seen.text[..keep].to_owned(),
        finish: Some(Finish::StopString(request.stop_strings[index].clone())),
    })
}
