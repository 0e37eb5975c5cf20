//! Decode jobs that compute the prompt themselves, as `decode_node::answers` tells of them.

use coordinator::core::nodes::LegId;
use engine::sequence::SequenceSpec;
use protocol::control::{JobEvent, PromptComputed, StepTiming};
use protocol::sampling::{SampledToken, StopRules};

use super::decode::spec;
use super::engine_loop::kind_of;
use super::prefill::Prompt;
use super::{Node, Work};

/// What is known of a prompt that is computed here.
#[derive(Default)]
pub(super) struct PromptHere {
    /// The first token of each choice.
    tokens: Vec<Option<SampledToken>>,
    /// What the first choice said, without its token.
    computed: Option<PromptComputed>,
    /// Words that come after it.
    later: Vec<JobEvent>,
}

impl PromptHere {
    /// A token of a choice. What is to be told, once all first tokens are there.
    pub(super) fn take(&mut self, (choice, index): (u32, usize), news: Prompt) -> Vec<JobEvent> {
        let first = news.firsts.first().is_some_and(|(token, _)| token.position == 0);
        if !first {
            self.later.extend(word(choice, news));
            return Vec::new();
        }
        self.tokens[index] = news.firsts.first().map(|(token, _)| token.clone());
        if index == 0 {
            self.computed = Some(computed(news));
        }
        if self.tokens.iter().any(Option::is_none) {
            return Vec::new();
        }
        let tokens = self.tokens.drain(..).flatten().collect();
        let Some(computed) = self.computed.take() else {
            return Vec::new();
        };
        let mut words = vec![JobEvent::Computed(PromptComputed { tokens, ..computed })];
        words.append(&mut self.later);
        words
    }
}

fn step(news: &Prompt) -> StepTiming {
    StepTiming {
        batch_size: news.batch_size,
        ..StepTiming::default()
    }
}

/// What is told of a prompt, without tokens.
fn computed(news: Prompt) -> PromptComputed {
    PromptComputed {
        tokens: Vec::new(),
        step: step(&news),
        cached_tokens: news.cached_tokens,
        prompt_logprobs: news.prompt_logprobs,
    }
}

/// What is told of one token.
pub(super) fn word(choice: u32, news: Prompt) -> Option<JobEvent> {
    let step = step(&news);
    let (token, _) = news.firsts.into_iter().next()?;
    Some(JobEvent::Token { choice, token, step })
}

impl Node {
    /// The engine takes the sequences of a job that computes everything here.
    pub(super) fn enter_compute(&mut self, leg: LegId) {
        let Some(Work::Decode(work)) = self.jobs.get_mut(&leg) else {
            return;
        };
        let job = &work.job;
        let prompt = || SequenceSpec {
            prompt_logprobs: job.prompt_logprobs,
            ..spec(job, 0, &[])
        };
        let alone = match job.beam_width {
            Some(width) => Some(self.engine.add_beams(prompt(), width as usize)),
            None if job.choices.is_empty() => {
                let stop = StopRules {
                    max_tokens: job.stop.max_tokens.max(1),
                    ..job.stop.clone()
                };
                Some(self.engine.add(SequenceSpec {
                    first_only: Some(0),
                    stop,
                    ..prompt()
                }))
            }
            None => None,
        };
        match alone {
            None => {}
            Some(Ok(id)) => return self.searches(leg, id),
            Some(Err(error)) => return self.fail(leg, kind_of(&error), error.to_string()),
        }
        let starts = job.choices.iter().enumerate();
        let specs = starts.map(|(index, start)| SequenceSpec {
            prompt_logprobs: job.prompt_logprobs.filter(|_| index == 0),
            ..spec(job, start.choice, &start.generated)
        });
        let specs = specs.collect();
        let choices = job.choices.iter().map(|start| start.choice).collect();
        if job.choices.iter().all(|start| start.generated.is_empty()) {
            work.prompt = Some(PromptHere {
                tokens: vec![None; job.choices.len()],
                ..PromptHere::default()
            });
        }
        match self.engine.add_choices(specs) {
            Ok(ids) => self.runs(leg, ids, choices),
            Err(error) => self.fail(leg, kind_of(&error), error.to_string()),
        }
    }

    /// A prompt is computed whose first tokens come later, or never.
    pub(super) fn prompt_alone(&mut self, leg: LegId, news: Prompt) {
        let Some(work) = self.decode(leg) else { return };
        let searches = work.job.beam_width.is_some();
        self.say(leg, JobEvent::Computed(computed(news)));
        if !searches {
            self.end(leg, JobEvent::Finished);
        }
    }
}
