//! What clients ask: random requests, some of which begin alike, and how patient each client is.

use std::sync::Arc;
use std::time::Duration;

use coordinator::core::queue::Tenant;
use coordinator::core::types::{About, ServeRequest};
use protocol::ids::RequestId;
use protocol::sampling::{SamplingParams, StopRules};

use crate::model::{ADAPTER, EOS};
use crate::random::Random;
use crate::reference::{Answer, Reference};
use crate::scenario::{MAX_SEQ_LEN, Scenario};

/// Most tokens that are asked for.
const MAX_TOKENS: u64 = 24;

/// How long most clients let a request take.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// One request of a call.
pub struct Planned {
    /// What is asked.
    pub request: ServeRequest,
    /// What the answer is.
    pub answer: Answer,
}

/// How a client behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// It waits for its answer.
    Patient,
    /// It leaves after this time.
    Leaves(Duration),
    /// It takes an event in this time.
    Slow(Duration),
}

/// What a client sends at once.
pub struct Call {
    /// When.
    pub at: Duration,
    /// Its requests: they are admitted together.
    pub requests: Vec<Planned>,
    /// Its client.
    pub client: Client,
}

/// The calls of a scenario.
pub fn calls(seed: u64, scenario: &Scenario) -> anyhow::Result<Vec<Call>> {
    let mut random = Random::new(seed, "workload");
    let mut reference = Reference::new(MAX_SEQ_LEN, scenario.groups)?;
    let beginnings: Vec<Vec<u32>> = (0..3).map(|_| tokens(&mut random, 6..24)).collect();
    let mut said: Vec<Vec<u32>> = Vec::new();
    let mut calls = Vec::new();
    let mut next_id = 1;
    for _ in 0..scenario.size.calls {
        let prompts = if random.chance(100) { random.within(2..5) } else { 1 };
        let mut requests = Vec::new();
        for number in 0..prompts {
            let prompt = prompt(&mut random, &beginnings, &said);
            let mut request = request(&mut random, next_id, prompt);
            request.body_bytes = if number == 0 { request.token_ids.len() * 5 } else { 0 };
            next_id += 1;
            let answer = reference.answer(&request)?;
            if let Some(choice) = answer.choices.first() {
                // A conversation that may go on.
                let answer = choice.iter().map(|token| token.token).filter(|token| *token != EOS);
                said.push(request.token_ids.iter().copied().chain(answer).collect());
            }
            requests.push(Planned { request, answer });
        }
        calls.push(Call {
            at: Duration::from_micros(random.below(scenario.busy.as_micros() as u64)),
            requests,
            client: client(&mut random, scenario),
        });
    }
    Ok(calls)
}

fn tokens(random: &mut Random, len: std::ops::Range<u64>) -> Vec<u32> {
    let len = random.within(len);
    (0..len).map(|_| random.below(u64::from(EOS)) as u32).collect()
}

fn prompt(random: &mut Random, beginnings: &[Vec<u32>], said: &[Vec<u32>]) -> Vec<u32> {
    let mut prompt = match random.below(4) {
        0 | 1 => random.pick(beginnings).clone(),
        2 if !said.is_empty() => random.pick(said).clone(),
        _ => Vec::new(),
    };
    prompt.extend(tokens(random, 1..24));
    prompt.truncate(MAX_SEQ_LEN / 2);
    prompt
}

fn request(random: &mut Random, id: u128, prompt: Vec<u32>) -> ServeRequest {
    let stop_strings: Arc<[String]> = match random.below(4) {
        0 => ["ab".to_owned(), "hé".to_owned(), "c".to_owned()].into(),
        1 => ["bcd".to_owned(), "k".to_owned()].into(),
        _ => [].into(),
    };
    let mut request = ServeRequest {
        about: About::default(),
        id: RequestId(id),
        token_ids: prompt.into(),
        adapter: random.chance(150).then(|| ADAPTER.to_owned()),
        body_bytes: 0,
        tenant: Tenant(random.below(3) as u32),
        timeout: if random.chance(100) {
            random.micros(300_000..6_000_000)
        } else {
            PATIENCE
        },
        choices: 1,
        beam_width: None,
        sampling: sampling(random),
        stop: StopRules {
            max_tokens: random.within(1..MAX_TOKENS + 1) as u32,
            eos_token_ids: vec![EOS],
            ignore_eos: random.chance(100),
            stop_token_ids: if random.chance(150) { vec![3] } else { Vec::new() },
        },
        stop_strings,
        include_stop_str: random.chance(300),
        skip_special_tokens: random.chance(700),
        prompt_logprobs: random.chance(80).then(|| random.below(3) as u8),
    };
    match random.below(10) {
        0 | 1 => {
            request.choices = random.within(2..5) as u32;
            if random.chance(250) {
                request.sampling.choice_seeds = (0..request.choices).map(|_| random.next_u64()).collect();
            }
        }
        2 => {
            request.choices = random.within(1..4) as u32;
            request.beam_width = Some(request.choices);
            request.stop_strings = [].into();
            request.sampling = SamplingParams::greedy();
        }
        3 if random.chance(300) => {
            request.choices = 0;
            request.stop.max_tokens = 1;
            request.prompt_logprobs = Some(1);
        }
        _ => {}
    }
    request
}

fn sampling(random: &mut Random) -> SamplingParams {
    SamplingParams {
        greedy: random.chance(400),
        seed: random.next_u64(),
        top_logprobs: random.chance(200).then(|| random.below(4) as u8),
        repetition_penalty: if random.chance(200) { 1.25 } else { 1.0 },
        ..SamplingParams::greedy()
    }
}

fn client(random: &mut Random, scenario: &Scenario) -> Client {
    let faults = &scenario.faults;
    if random.chance(faults.leaving_clients) {
        Client::Leaves(random.micros(0..scenario.leaves_within_us))
    } else if random.chance(faults.slow_clients) {
        Client::Slow(random.micros(20_000..400_000))
    } else {
        Client::Patient
    }
}
