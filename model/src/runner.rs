//! The engine's runner over a real model.

use std::sync::Arc;

use engine::plan::{BlockId, PlannedSequence, SampleSpec, SequenceId, Span, StepOutput, StepPlan, Wanted as Wish};
use engine::runner::{LayerObserver, NoObserver, Runner, RunnerError};
use grammar::Grammars;
use protocol::sampling::{PromptLogprob, SampledToken};

use crate::decoder::{Buffers, Decoder, WantedRows};
use crate::kernels::{Cpu, log_sum_exp};
use crate::kv_pool::KvPool;
use crate::masks::{Answers, Mask, Masks};
use crate::plan_check::{PlanChecker, PlanLimits};
use crate::sampler::{Draw, SampleError, Sampler};

/// Rows whose logits are held at once.
const LOGIT_ROWS: usize = 32;

/// Computes steps of a loaded model. Owned by the one compute thread.
pub struct ModelRunner {
    decoder: Decoder,
    pool: Arc<KvPool>,
    checker: PlanChecker,
    /// One for each thread.
    samplers: Vec<Sampler>,
    rows: Vec<Row>,
    buffers: Buffers,
    wanted: Vec<WantedRows>,
    outputs: Vec<Output>,
    logits: Vec<f32>,
    masks: Masks,
}

/// What a row's logits are for.
struct Output {
    /// Index into the plan's sequences.
    sequence: usize,
    /// The token whose log-probability is asked for.
    target: Option<u32>,
    /// A token is sampled.
    sample: bool,
}

impl ModelRunner {
    pub(crate) fn new(decoder: Decoder, pool: Arc<KvPool>, max_positions: usize, grammars: Grammars) -> Self {
        let limits = PlanLimits {
            vocab_size: decoder.vocab_size(),
            block_tokens: pool.layout().block_tokens as usize,
            total_blocks: pool.total_blocks(),
            max_positions,
            adapters: decoder.adapters.len(),
            groups: pool.layout().groups,
        };
        let samplers = (0..decoder.cpu.threads())
            .map(|_| Sampler::with_vocabulary(decoder.vocab_size()))
            .collect();
        Self {
            decoder,
            pool,
            checker: PlanChecker::new(limits),
            samplers,
            rows: Vec::new(),
            buffers: Buffers::default(),
            wanted: Vec::new(),
            outputs: Vec::new(),
            logits: Vec::new(),
            masks: Masks::new(Some(grammars)),
        }
    }

    /// Tokens of the vocabulary.
    pub(crate) fn vocab_size(&self) -> usize {
        self.decoder.vocab_size()
    }

    /// Logits `[rows][vocab]` of some rows of a sequence, whose earlier rows were computed by earlier calls. For checks: it
    /// takes the first blocks of the pool.
    pub(crate) fn logits_of(
        &mut self,
        tokens: &[u32],
        rows: std::ops::Range<usize>,
        logits: &mut Vec<f32>,
    ) -> Result<(), RunnerError> {
        let layout = *self.pool.layout();
        let blocks = layout.blocks_for(rows.end) * layout.groups.count();
        let span = |len: usize| Span {
            start: 0,
            len: len as u32,
        };
        let plan = StepPlan {
            step: 1,
            token_ids: tokens[rows.clone()].to_vec(),
            block_ids: (0..blocks as u32).map(BlockId).collect(),
            sequences: vec![PlannedSequence {
                id: SequenceId(0),
                owner: SequenceId(0),
                rows: span(rows.len()),
                start_position: rows.start as u32,
                adapter: None,
                blocks: span(blocks),
                sample: None,
                targets: span(0),
                target_alternatives: 0,
            }],
            ..StepPlan::default()
        };
        self.checker.check(&plan)?;
        let wanted = [WantedRows {
            sequence: 0,
            first: 0,
            count: rows.len(),
        }];
        let failed = |e: crate::kernels::KernelError| RunnerError::Failed(e.to_string());
        let mut access = self
            .pool
            .claim_plan(&plan)
            .map_err(|e| RunnerError::InvalidPlan(e.to_string()))?;
        let computed = self
            .decoder
            .forward(&plan, &wanted, &mut access, &mut NoObserver, &mut self.buffers);
        let (hidden, kernels) = computed.map_err(failed)?;
        logits.resize(rows.len() * self.decoder.vocab_size(), 0.0);
        self.decoder.logits(hidden, logits, kernels).map_err(failed)
    }

    /// Lists the rows that need logits and why, in the plan's order.
    fn find_outputs(&mut self, plan: &StepPlan) {
        self.wanted.clear();
        self.outputs.clear();
        for (sequence, s) in plan.sequences.iter().enumerate() {
            let targets = &plan.targets[s.targets.range()];
            self.outputs.extend(targets.iter().map(|&t| Output {
                sequence,
                target: Some(t),
                sample: false,
            }));
            if !targets.is_empty() {
                self.wanted.push(WantedRows {
                    sequence,
                    first: 0,
                    count: targets.len(),
                });
            }
            if s.sample.is_some() {
                match self.outputs.last_mut() {
                    Some(last) if targets.len() == s.rows.len as usize => last.sample = true,
                    _ => {
                        self.outputs.push(Output {
                            sequence,
                            target: None,
                            sample: true,
                        });
                        self.wanted.push(WantedRows {
                            sequence,
                            first: s.rows.len as usize - 1,
                            count: 1,
                        });
                    }
                }
            }
        }
    }
}

impl Runner for ModelRunner {
    fn execute(
        &mut self,
        plan: &StepPlan,
        observer: &mut dyn LayerObserver,
        out: &mut StepOutput,
    ) -> Result<(), RunnerError> {
        out.clear();
        self.checker.check(plan)?;
        let failed = |e: crate::kernels::KernelError| RunnerError::Failed(e.to_string());
        self.find_outputs(plan);
        self.masks.begin(plan);
        let pool = Arc::clone(&self.pool);
        pool.copy_blocks(&plan.copies)
            .map_err(|e| RunnerError::InvalidPlan(e.to_string()))?;
        let mut access = pool
            .claim_plan(plan)
            .map_err(|e| RunnerError::InvalidPlan(e.to_string()))?;
        let (hidden, kernels) = self
            .decoder
            .forward(plan, &self.wanted, &mut access, observer, &mut self.buffers)
            .map_err(failed)?;
        drop(access);
        self.masks.finish();

        let (vocab, width) = (self.decoder.vocab_size(), self.decoder.config.hidden_size);
        for (outputs, hidden) in self.outputs.chunks(LOGIT_ROWS).zip(hidden.chunks(LOGIT_ROWS * width)) {
            if self.logits.len() < outputs.len() * vocab {
                self.logits.resize(outputs.len() * vocab, 0.0);
            }
            let logits = &mut self.logits[..outputs.len() * vocab];
            self.decoder.logits(hidden, logits, kernels).map_err(failed)?;
            self.rows.clear();
            self.rows.resize_with(outputs.len(), || Ok(Found::default()));
            let (cpu, masks) = (&self.decoder.cpu, self.masks.answers());
            cpu.each_item(&mut self.rows, &mut self.samplers, |i, row, sampler| {
                let logits = &logits[i * vocab..(i + 1) * vocab];
                *row = use_row(cpu, (sampler, masks), logits, plan, &outputs[i]);
            });
            for (output, row) in outputs.iter().zip(self.rows.drain(..)) {
                let id = plan.sequences[output.sequence].id;
                if out.has_failed(id) {
                    continue;
                }
                match row {
                    Ok(found) => found.tell(id, out),
                    Err(reason) => out.fail(id, reason),
                }
            }
        }
        Ok(())
    }
}

/// What came of a row, or why nothing did.
type Row = Result<Found, String>;

/// What was wanted from a row.
#[derive(Default)]
struct Found {
    target: Option<PromptLogprob>,
    sampled: Option<SampledToken>,
    /// First tokens of further choices.
    others: Vec<SampledToken>,
    candidates: Vec<(u32, f32)>,
}

impl Found {
    /// Adds it to the step's output.
    fn tell(self, id: SequenceId, out: &mut StepOutput) {
        if let Some(target) = self.target {
            match out.prompt_logprobs.last_mut().filter(|(last, _)| *last == id) {
                Some((_, list)) => list.push(target),
                None => out.prompt_logprobs.push((id, vec![target])),
            }
        }
        let tokens = self.sampled.into_iter().chain(self.others);
        out.sampled.extend(tokens.map(|token| (id, token)));
        if !self.candidates.is_empty() {
            out.candidates.push((id, self.candidates));
        }
    }
}

/// Takes what is wanted from a row of logits.
fn use_row(
    cpu: &Cpu,
    (sampler, masks): (&mut Sampler, &Answers),
    logits: &[f32],
    plan: &StepPlan,
    output: &Output,
) -> Row {
    let planned = &plan.sequences[output.sequence];
    let mut found = Found::default();
    if let Some(target) = output.target {
        found.target = Some(look_at_target(
            cpu,
            sampler,
            logits,
            (target, planned.target_alternatives),
        )?);
    }
    if let Some(sample) = planned.sample.as_ref().filter(|_| output.sample) {
        let sample = (sample, masks.of(planned.id));
        match sample.0.wanted {
            Wish::Tokens(count) => {
                found.sampled = Some(sample_row(sampler, logits, plan, sample, 0)?);
                for choice in 1..count {
                    found.others.push(sample_row(sampler, logits, plan, sample, choice)?);
                }
            }
            Wish::Candidates(count) => found.candidates = find_candidates(sampler, logits, plan, sample, count)?,
        }
    }
    Ok(found)
}

/// What a row of logits says of `target`, and so many alternatives.
fn look_at_target(
    cpu: &Cpu,
    sampler: &mut Sampler,
    logits: &[f32],
    (target, alternatives): (u32, u8),
) -> Result<PromptLogprob, String> {
    let log_sum = log_sum_exp(cpu, logits);
    let logprob_of = |token: u32| (f64::from(logits[token as usize]) - log_sum) as f32;
    let logprob = logprob_of(target);
    if logprob.is_nan() {
        return Err("logits that are no numbers".to_owned());
    }
    let mut top = Vec::new();
    if alternatives > 0 {
        let best = sampler
            .best(logits, usize::from(alternatives))
            .map_err(|e| e.to_string())?;
        top.extend(best.map(|token| (token, logprob_of(token))));
    }
    Ok(PromptLogprob { logprob, top })
}

/// The most probable tokens of the unmodified distribution.
pub(crate) fn most_probable(sampler: &mut Sampler, logits: &[f32], count: usize) -> Result<Vec<(u32, f32)>, String> {
    sampler.most_probable(logits, count).map_err(|e| e.to_string())
}

/// The most probable tokens of the distribution that tokens are drawn from at temperature 1.
pub(crate) fn find_candidates(
    sampler: &mut Sampler,
    logits: &[f32],
    plan: &StepPlan,
    sample: (&SampleSpec, Option<&Mask>),
    count: u32,
) -> Result<Vec<(u32, f32)>, String> {
    let draw = draw(plan, sample)?;
    sampler
        .candidates(logits, &draw, count as usize)
        .map_err(|e| e.to_string())
}

/// Samples from the logits of a sequence's last row, for the choice that many after the first one. Beside what is wanted:
/// what the sequence's grammar allows, if it has one.
pub(crate) fn sample_row(
    sampler: &mut Sampler,
    logits: &[f32],
    plan: &StepPlan,
    sample: (&SampleSpec, Option<&Mask>),
    choice: u32,
) -> Result<SampledToken, String> {
    let draw = Draw {
        further: choice,
        ..draw(plan, sample)?
    };
    sampler.sample(logits, &draw).map_err(|e: SampleError| e.to_string())
}

fn draw<'a>(plan: &'a StepPlan, (sample, mask): (&'a SampleSpec, Option<&'a Mask>)) -> Result<Draw<'a>, String> {
    let mask = mask.map(Result::as_ref).transpose().map_err(Clone::clone)?;
    Ok(Draw {
        params: &sample.params,
        further: 0,
        position: sample.output_position,
        history: &plan.history[sample.history.range()],
        prompt_len: sample.prompt_len as usize,
        mask: mask.map(Vec::as_slice),
    })
}
