//! The engine's runner over a real model.

use std::sync::Arc;

use engine::plan::{SampleSpec, SequenceId, StepOutput, StepPlan};
use engine::runner::{LayerObserver, Runner, RunnerError};
use protocol::sampling::SampledToken;

use crate::decoder::{Buffers, Decoder, WantedRows};
use crate::kernels::{Cpu, log_sum_exp};
use crate::kv_pool::KvPool;
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
    pub(crate) fn new(decoder: Decoder, pool: Arc<KvPool>, max_positions: usize) -> Self {
        let limits = PlanLimits {
            vocab_size: decoder.vocab_size(),
            block_tokens: pool.layout().block_tokens as usize,
            total_blocks: pool.total_blocks(),
            max_positions,
        };
        let samplers = (0..decoder.cpu.threads()).map(|_| Sampler::default()).collect();
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
        }
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
        let pool = Arc::clone(&self.pool);
        let mut access = pool
            .claim_plan(plan)
            .map_err(|e| RunnerError::InvalidPlan(e.to_string()))?;
        let (hidden, kernels) = self
            .decoder
            .forward(plan, &self.wanted, &mut access, observer, &mut self.buffers)
            .map_err(failed)?;
        drop(access);

        let (vocab, width) = (self.decoder.vocab_size(), self.decoder.config.hidden_size);
        for (outputs, hidden) in self.outputs.chunks(LOGIT_ROWS).zip(hidden.chunks(LOGIT_ROWS * width)) {
            if self.logits.len() < outputs.len() * vocab {
                self.logits.resize(outputs.len() * vocab, 0.0);
            }
            let logits = &mut self.logits[..outputs.len() * vocab];
            self.decoder.logits(hidden, logits, kernels).map_err(failed)?;
            self.rows.clear();
            self.rows.resize_with(outputs.len(), || Ok(Found::default()));
            let cpu = &self.decoder.cpu;
            cpu.each_item(&mut self.rows, &mut self.samplers, |i, row, sampler| {
                *row = use_row(cpu, sampler, &logits[i * vocab..(i + 1) * vocab], plan, &outputs[i]);
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
    logprob: Option<f32>,
    sampled: Option<SampledToken>,
}

impl Found {
    /// Adds it to the step's output.
    fn tell(self, id: SequenceId, out: &mut StepOutput) {
        if let Some(logprob) = self.logprob {
            match out.prompt_logprobs.last_mut().filter(|(last, _)| *last == id) {
                Some((_, list)) => list.push(logprob),
                None => out.prompt_logprobs.push((id, vec![logprob])),
            }
        }
        out.sampled.extend(self.sampled.map(|token| (id, token)));
    }
}

/// Takes what is wanted from a row of logits.
fn use_row(cpu: &Cpu, sampler: &mut Sampler, logits: &[f32], plan: &StepPlan, output: &Output) -> Row {
    let sample = plan.sequences[output.sequence].sample.as_ref();
    Ok(Found {
        logprob: output
            .target
            .map(|target| target_logprob(cpu, logits, target))
            .transpose()?,
        sampled: sample
            .filter(|_| output.sample)
            .map(|sample| sample_row(sampler, logits, plan, sample))
            .transpose()?,
    })
}

fn target_logprob(cpu: &Cpu, logits: &[f32], target: u32) -> Result<f32, String> {
    let logprob = (f64::from(logits[target as usize]) - log_sum_exp(cpu, logits)) as f32;
    if logprob.is_nan() {
        return Err("logits that are no numbers".to_owned());
    }
    Ok(logprob)
}

/// Samples from the logits of a sequence's last row.
pub(crate) fn sample_row(
    sampler: &mut Sampler,
    logits: &[f32],
    plan: &StepPlan,
    sample: &SampleSpec,
) -> Result<SampledToken, String> {
    let draw = Draw {
        params: &sample.params,
        position: sample.output_position,
        history: &plan.history[sample.history.range()],
        prompt_len: sample.prompt_len as usize,
    };
    sampler.sample(logits, &draw).map_err(|e: SampleError| e.to_string())
}
