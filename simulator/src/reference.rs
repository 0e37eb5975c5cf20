//! What a request's answer is: the run of one engine that serves nothing else and that nothing disturbs.

use std::sync::Arc;

use coordinator::core::types::ServeRequest;
use engine::engine::Engine;
use engine::event::EngineEvent;
use engine::limits::EngineLimits;
use engine::plan::{SequenceId, StepOutput};
use engine::sequence::{OnFinish, SequenceSpec};
use protocol::sampling::{PromptLogprob, SampledToken, SamplingParams};
use protocol::window::Groups;

use crate::model::{self, BLOCK_TOKENS, Pool};

/// Blocks of the engine's pool: it never lacks any.
const BLOCKS: usize = 512;

/// The answer to a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// Tokens of each choice, up to what the stop rules say; stop strings are not heeded.
    pub choices: Vec<Vec<SampledToken>>,
    /// What the model thinks of the prompt, if the request asks.
    pub prompt_logprobs: Option<Vec<PromptLogprob>>,
}

/// See the head of the file.
pub struct Reference {
    engine: Engine,
    pool: Pool,
    output: StepOutput,
}

impl Reference {
    /// An engine for sequences of up to `max_seq_len` tokens, of a model with such groups of layers. An error says what is wrong with the limits.
    pub fn new(max_seq_len: usize, groups: Groups) -> anyhow::Result<Self> {
        let blocks = BLOCKS * groups.count();
        let limits = EngineLimits {
            total_blocks: blocks,
            block_tokens: BLOCK_TOKENS,
            max_num_seqs: 16,
            max_batch_tokens: 1024,
            prefill_chunk_tokens: 1024,
            mixed_prefill_tokens: 1024,
            mixed_prefill_time: std::time::Duration::ZERO,
            max_seq_len,
            prefix_cache: false,
            // It keeps everything.
            groups: groups.whole(),
        };
        Ok(Self {
            engine: Engine::new(limits)?,
            pool: Pool::new(blocks, groups),
            output: StepOutput::default(),
        })
    }

    /// The answer to `request`.
    pub fn answer(&mut self, request: &ServeRequest) -> anyhow::Result<Answer> {
        let mut answer = Answer {
            choices: vec![Vec::new(); request.choices as usize],
            prompt_logprobs: None,
        };
        if request.prompt_logprobs.is_some() {
            let asks = SequenceSpec {
                prompt_logprobs: request.prompt_logprobs,
                first_only: Some(0),
                ..spec(request, 0)
            };
            let id = self.engine.add(asks)?;
            self.run(&[id], &mut answer)?;
        }
        let ids = match request.beam_width {
            Some(width) => vec![self.engine.add_beams(spec(request, 0), width as usize)?],
            None => {
                let specs = (0..request.choices).map(|choice| spec(request, choice));
                self.engine.add_choices(specs.collect())?
            }
        };
        self.run(&ids, &mut answer)?;
        Ok(answer)
    }

    fn run(&mut self, ids: &[SequenceId], answer: &mut Answer) -> anyhow::Result<()> {
        let mut events = Vec::new();
        while let Some(plan) = self.engine.plan() {
            model::execute(plan, &mut self.pool, |_, _| (), &mut self.output);
            self.engine.apply(&self.output, &mut events)?;
        }
        for event in events {
            match event {
                EngineEvent::Token { id, token, .. } => {
                    if let Some(choice) = ids.iter().position(|of| *of == id) {
                        answer.choices[choice].push(token);
                    }
                }
                EngineEvent::Computed { prompt_logprobs, .. } => {
                    answer.prompt_logprobs = prompt_logprobs.or(answer.prompt_logprobs.take());
                }
                EngineEvent::Beams { beams, .. } => {
                    answer.choices = beams.into_iter().map(|beam| beam.tokens).collect();
                }
                EngineEvent::BeamStep { .. } | EngineEvent::Preempted { .. } => {}
                EngineEvent::Failed { message, .. } => anyhow::bail!("the reference run failed: {message}"),
            }
        }
        Ok(())
    }
}

fn spec(request: &ServeRequest, choice: u32) -> SequenceSpec {
    let (adapter, cache_key) = model::adapter(request.adapter.as_deref()).unwrap_or_default();
    let sampling = SamplingParams {
        choice,
        ..request.sampling.clone()
    };
    SequenceSpec {
        token_ids: request.token_ids.to_vec(),
        prompt_len: request.token_ids.len(),
        sampling: Arc::new(sampling),
        stop: request.stop.clone(),
        prompt_logprobs: None,
        on_finish: OnFinish::Release,
        first_only: None,
        adapter,
        cache_key,
    }
}
