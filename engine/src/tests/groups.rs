//! Several sequences of one prompt: choices that share blocks, and beam searches.

use std::sync::Arc;

use proptest::prelude::*;
use protocol::sampling::{PromptLogprob, SamplingParams, StopRules};

use super::{Bench, groups, limits, prompt, sampled, spec, stop_at};
use crate::beam::{BeamError, Hypothesis};
use crate::engine::AddError;
use crate::fake::ScriptedModel;
use crate::limits::EngineLimits;
use crate::plan::SequenceId;
use crate::reservation::{CommitError, Reservation, ReserveError};
use crate::sequence::SequenceSpec;

/// What a search has to tell of its prompt; `None`: nothing, or not any more.
type OwedPrompt = Option<Option<Vec<PromptLogprob>>>;

/// What has been seen of a beam search, beside what it must come to.
#[derive(Debug)]
pub(super) struct ObservedBeams {
    expected: Vec<Hypothesis>,
    pub(super) prompt: OwedPrompt,
    pub(super) ended: bool,
    pub(super) failed: bool,
}

/// A beam search as its definition says: every hypothesis is a list of tokens, nothing is cut off early.
fn search(model: &ScriptedModel, spec: &SequenceSpec, width: usize, max_seq_len: usize) -> Vec<Hypothesis> {
    struct Plain {
        tokens: Vec<u32>,
        logprobs: Vec<f32>,
    }
    let sum = |plain: &Plain| plain.logprobs.iter().fold(0.0, |sum, value| sum + f64::from(*value));
    let score = |plain: &Plain| sum(plain) / plain.tokens.len() as f64;
    let longest = (spec.stop.max_tokens as usize).min(max_seq_len - spec.prompt_len);
    let ends = |token: &u32| {
        spec.stop.stop_token_ids.contains(token) || (!spec.stop.ignore_eos && spec.stop.eos_token_ids.contains(token))
    };
    let mut living = vec![Plain {
        tokens: Vec::new(),
        logprobs: Vec::new(),
    }];
    let mut finished = Vec::new();
    for _ in 0..longest {
        let mut all = Vec::new();
        for (parent, plain) in living.iter().enumerate() {
            let before = [spec.token_ids.as_slice(), &plain.tokens].concat();
            for (token, logprob) in model.candidates(&before, 2 * width) {
                let tokens = [plain.tokens.as_slice(), &[token]].concat();
                let logprobs = [plain.logprobs.as_slice(), &[logprob]].concat();
                all.push((parent, token, Plain { tokens, logprobs }));
            }
        }
        all.sort_by(|a, b| sum(&b.2).total_cmp(&sum(&a.2)).then(a.1.cmp(&b.1)).then(a.0.cmp(&b.0)));
        let (over, on): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, token, _)| ends(token));
        finished.extend(over.into_iter().map(|(_, _, plain)| plain));
        living = on.into_iter().map(|(_, _, plain)| plain).take(width).collect();
    }
    finished.append(&mut living);
    finished.sort_by(|a, b| score(b).total_cmp(&score(a)));
    finished.truncate(width);
    let top = usize::from(spec.sampling.top_logprobs.unwrap_or(0));
    let hypothesis = |plain: &Plain| Hypothesis {
        score: score(plain) as f32,
        tokens: (0..plain.tokens.len())
            .map(|at| {
                let before = [spec.token_ids.as_slice(), &plain.tokens[..at]].concat();
                protocol::sampling::SampledToken {
                    position: at as u32,
                    token: plain.tokens[at],
                    logprob: plain.logprobs[at],
                    raw_logprob: plain.logprobs[at],
                    top_logprobs: model.candidates(&before, top),
                }
            })
            .collect(),
    };
    finished.iter().map(hypothesis).collect()
}

impl Bench {
    /// Whether a sequence or beam search has ended.
    pub(super) fn has_ended(&self, id: SequenceId) -> bool {
        self.observed
            .get(&id)
            .map_or_else(|| self.beams[&id].ended, |observed| observed.ended)
    }

    pub(super) fn check_beam_prompt(&mut self, id: SequenceId, logprobs: Option<&Vec<PromptLogprob>>) {
        let expected = self.beams.get_mut(&id).unwrap().prompt.take();
        assert_eq!(
            expected.as_ref().map(Option::as_ref),
            Some(logprobs),
            "prompt of {id:?}"
        );
    }

    pub(super) fn check_beams(&mut self, id: SequenceId, beams: &[Hypothesis]) {
        let observed = self.beams.get_mut(&id).unwrap();
        assert!(!observed.ended, "{id:?} ends twice");
        assert_eq!(observed.prompt, None, "{id:?} has not told of its prompt");
        assert_eq!(beams, observed.expected, "beams of {id:?}");
        observed.ended = true;
    }

    fn observe_beams(&mut self, id: SequenceId, spec: &SequenceSpec, width: usize, prompt: OwedPrompt) -> SequenceId {
        let expected = search(&self.model, spec, width, self.engine.limits().max_seq_len);
        let observed = ObservedBeams {
            expected,
            prompt,
            ended: false,
            failed: false,
        };
        assert!(self.beams.insert(id, observed).is_none());
        self.audit();
        id
    }

    pub(super) fn add_beams(&mut self, spec: SequenceSpec, width: usize) -> Result<SequenceId, AddError> {
        let id = self.engine.add_beams(spec.clone(), width)?;
        let told = spec
            .prompt_logprobs
            .map(|alternatives| self.model.prompt_logprobs(&spec.token_ids, alternatives));
        Ok(self.observe_beams(id, &spec, width, Some(told)))
    }

    pub(super) fn commit_beams(
        &mut self,
        reservation: Reservation,
        spec: SequenceSpec,
        width: usize,
    ) -> Result<SequenceId, CommitError> {
        self.receive(&reservation, &spec.token_ids);
        let computed = spec.token_ids.len() - 1;
        let id = self.engine.commit_beams(reservation, spec.clone(), computed, width)?;
        Ok(self.observe_beams(id, &spec, width, None))
    }

    /// Several choices of one prompt, as far as `generated` says.
    pub(super) fn add_choices(&mut self, spec: &SequenceSpec, generated: &[usize]) -> Vec<SequenceId> {
        let mut specs: Vec<SequenceSpec> = (0..)
            .zip(generated)
            .filter_map(|(choice, count)| self.choice(spec, choice, *count))
            .collect();
        if let Some(first) = specs.first_mut() {
            first.prompt_logprobs = spec.prompt_logprobs;
        }
        let ids = self.engine.add_choices(specs.clone()).unwrap();
        let pairs = ids.iter().copied().zip(specs);
        pairs.map(|(id, spec)| self.observe(id, spec)).collect()
    }

    /// Receives the KV of a prompt and commits the choices that the first token does not end.
    pub(super) fn commit_choices(&mut self, reservation: Reservation, spec: &SequenceSpec) -> Vec<SequenceId> {
        self.receive(&reservation, &spec.token_ids);
        let specs: Vec<SequenceSpec> = (0..reservation.choices() as u32)
            .filter_map(|choice| self.choice(spec, choice, 1))
            .collect();
        if specs.is_empty() {
            assert!(self.engine.release_reservation(reservation));
            return Vec::new();
        }
        let computed = spec.token_ids.len();
        let ids = self
            .engine
            .commit_choices(reservation, specs.clone(), computed)
            .unwrap();
        let pairs = ids.iter().copied().zip(specs);
        pairs.map(|(id, spec)| self.observe(id, spec)).collect()
    }

    /// The choice of that number after `count` tokens; `None` if it has ended by then.
    fn choice(&self, spec: &SequenceSpec, choice: u32, count: usize) -> Option<SequenceSpec> {
        let sampling = SamplingParams {
            choice,
            ..(*spec.sampling).clone()
        };
        let longest = self.engine.limits().max_seq_len;
        let (tokens, _) = self
            .model
            .generate(&spec.token_ids, spec.prompt_len, &sampling, &spec.stop, longest);
        if tokens.len() <= count {
            return None;
        }
        let mut token_ids = spec.token_ids.clone();
        token_ids.extend(tokens[..count].iter().map(|token| token.token));
        Some(SequenceSpec {
            token_ids,
            sampling: Arc::new(sampling),
            prompt_logprobs: None,
            first_only: None,
            ..spec.clone()
        })
    }
}

#[test]
fn a_prompt_draws_a_first_token_for_each_choice() {
    for choices in [0, 1, 5] {
        let mut bench = Bench::new(limits());
        let id = bench.add(SequenceSpec {
            sampling: sampled(4),
            first_only: Some(choices),
            prompt_logprobs: Some(2),
            ..spec(prompt(1, 21), 9)
        });
        bench.run();
        bench.assert_complete_and_idle();
        assert_eq!(bench.observed[&id].others.len(), choices.saturating_sub(1) as usize);
    }
}

#[test]
fn choices_share_the_prompt_until_they_write() {
    let mut bench = Bench::new(limits());
    let reservation = bench.engine.reserve_choices(18, 12, 8).unwrap();
    let many = SequenceSpec {
        sampling: sampled(9),
        ..spec(prompt(1, 18), 12)
    };
    let ids = bench.commit_choices(reservation, &many);
    assert_eq!(ids.len(), 8);
    assert_eq!(bench.engine.stats().owned_blocks, 5, "one prompt");
    bench.step();
    assert_eq!(
        bench.engine.stats().owned_blocks,
        4 + 8,
        "the last block is partial, and each has its own"
    );
    bench.run();
    bench.assert_complete_and_idle();
    assert_eq!(bench.engine.stats().preemptions, 0);
    // A prompt that ends with a block has nothing to copy.
    let reservation = bench.engine.reserve_choices(16, 2, 8).unwrap();
    let many = SequenceSpec {
        sampling: sampled(9),
        ..spec(prompt(2, 16), 2)
    };
    bench.commit_choices(reservation, &many);
    let plan = bench.engine.plan().unwrap().clone();
    assert_eq!((plan.sequences.len(), plan.copies.len()), (8, 0));
    bench.execute(&plan);
    bench.run();
    bench.assert_complete_and_idle();
}

#[test]
fn a_prompt_computed_here_is_computed_once_for_all_choices() {
    for prefix_cache in [false, true] {
        let mut bench = Bench::new(EngineLimits {
            prefix_cache,
            ..limits()
        });
        let many = SequenceSpec {
            sampling: sampled(3),
            ..spec(prompt(1, 21), 20)
        };
        let ids = bench.add_choices(&many, &[2, 0, 5, 1]);
        assert_eq!(ids.len(), 4);
        // 20 tokens are common; the rest of each is its own.
        let own = [21 + 2, 1, 1 + 5, 1 + 1].iter().sum::<u64>();
        assert_eq!(bench.engine.stats().queued_rows, own);
        bench.step();
        assert_eq!(bench.engine.stats().queued_rows, own - bench.engine.stats().rows);
        bench.run();
        bench.assert_complete_and_idle();
        assert_eq!(bench.engine.stats().queued_rows, 0);
        let sampled: u64 = bench.observed.values().map(|observed| observed.seen as u64).sum();
        assert_eq!(bench.engine.stats().rows, own + sampled - 4);
    }
}

#[test]
fn a_choice_that_is_cancelled_or_preempted_disturbs_no_other() {
    let tight = EngineLimits {
        total_blocks: 17,
        ..limits()
    };
    for prefix_cache in [false, true] {
        let mut bench = Bench::reckless(EngineLimits { prefix_cache, ..tight });
        let reservation = bench.engine.reserve_choices(18, 30, 4).unwrap();
        let many = SequenceSpec {
            sampling: sampled(5),
            ..spec(prompt(1, 18), 30)
        };
        let ids = bench.commit_choices(reservation, &many);
        bench.run_steps(3);
        assert!(bench.cancel(ids[1]));
        bench.run();
        bench.assert_complete_and_idle();
        assert!(bench.preempted > 0, "the pool was meant to be too small");
    }
}

#[test]
fn the_forecast_counts_a_shared_prompt_once() {
    let mut bench = Bench::new(limits());
    // 64 blocks: 8 x (48 + 12) tokens would be 120 blocks; shared they are 12 + 8 x 3.
    let reservation = bench.engine.reserve_choices(48, 13, 8).unwrap();
    assert!(bench.engine.release_reservation(reservation));
    let limit = 8;
    assert_eq!(
        bench.engine.reserve_choices(4, 4, 9).unwrap_err(),
        ReserveError::Choices { choices: 9, limit }
    );
    let five = bench.engine.reserve_choices(4, 4, 5).unwrap();
    assert_eq!(
        bench.engine.reserve_choices(4, 4, 4).unwrap_err(),
        ReserveError::NoSlots {
            in_use: 5,
            choices: 4,
            limit
        }
    );
    assert!(bench.engine.release_reservation(five));
    let small = EngineLimits {
        total_blocks: 35,
        ..limits()
    };
    let error = Bench::new(small).engine.reserve_choices(48, 13, 8).unwrap_err();
    assert!(matches!(error, ReserveError::NoBlocks { peak: 36, .. }), "{error}");
}

#[test]
fn what_does_not_belong_together_is_not_committed() {
    let mut bench = Bench::new(limits());
    let one = |token| SequenceSpec {
        prompt_len: 6,
        ..spec([prompt(1, 5), vec![token, 7]].concat(), 9)
    };
    let mut refused = |specs: Vec<SequenceSpec>| {
        let reservation = bench.engine.reserve_choices(6, 9, 2).unwrap();
        let error = bench.engine.commit_choices(reservation, specs, 6).unwrap_err();
        bench.assert_complete_and_idle();
        error.to_string()
    };
    assert_eq!(
        refused(vec![one(1), one(2)]),
        "sequence 1 has other tokens than the first one among the first 6, or another cache key"
    );
    assert_eq!(
        refused(vec![one(1), one(1), one(1)]),
        "3 sequences are committed; at least 1 and at most 2 were reserved for"
    );
    assert_eq!(
        refused(vec![]),
        "0 sequences are committed; at least 1 and at most 2 were reserved for"
    );
}

#[test]
fn a_beam_search_is_the_plain_one() {
    for (width, max_tokens, ends) in [(1, 9, 0), (2, 6, 40), (4, 12, 200), (5, 1, 3), (8, 20, 20)] {
        let mut bench = Bench::new(limits());
        let stop = StopRules {
            eos_token_ids: (0..ends).map(|i| i * 4).collect(),
            ..stop_at(max_tokens)
        };
        let sampling = Arc::new(SamplingParams {
            top_logprobs: Some(3),
            ..SamplingParams::greedy()
        });
        let search = SequenceSpec {
            stop,
            sampling,
            ..spec(prompt(width, 13), 1)
        };
        bench.add_beams(search.clone(), width as usize).unwrap();
        let reservation = bench.engine.reserve_choices(13, max_tokens as usize, width as usize);
        // The one that was added holds some of the slots.
        if let Ok(reservation) = reservation {
            bench.commit_beams(reservation, search, width as usize).unwrap();
        }
        bench.add(spec(prompt(7, 9), 20));
        bench.run();
        bench.assert_complete_and_idle();
    }
}

#[test]
fn beams_that_cannot_be_searched_are_refused() {
    let mut bench = Bench::new(limits());
    let mut refused = |change: fn(&mut SequenceSpec), width| {
        let mut wrong = spec(prompt(1, 9), 5);
        change(&mut wrong);
        match bench.add_beams(wrong, width).unwrap_err() {
            AddError::Beam(error) => error,
            other => panic!("{other}"),
        }
    };
    assert_eq!(refused(|_| (), 9), BeamError::Width { width: 9, limit: 8 });
    assert_eq!(refused(|_| (), 0), BeamError::Width { width: 0, limit: 8 });
    assert_eq!(refused(|s| s.prompt_len = 8, 2), BeamError::Started { generated: 1 });
    let field = "first_only";
    assert_eq!(refused(|s| s.first_only = Some(1), 2), BeamError::Parameter { field });
    let blocks = refused(|s| s.stop.max_tokens = 100, 8);
    assert!(
        matches!(
            blocks,
            BeamError::Blocks {
                needed: 114,
                total: 64,
                ..
            }
        ),
        "{blocks}"
    );
    let mut tokens = Bench::new(limits());
    let reservation = tokens.engine.reserve_choices(9, 5, 2).unwrap();
    let error = tokens.commit_beams(reservation, spec(prompt(1, 9), 5), 3).unwrap_err();
    assert!(
        matches!(
            error,
            CommitError::Choices {
                sequences: 3,
                reserved: 2
            }
        ),
        "{error}"
    );
    tokens.assert_complete_and_idle();
}

#[test]
fn a_beam_search_ends_as_a_whole() {
    let mut bench = Bench::new(limits());
    let id = bench.add_beams(spec(prompt(1, 9), 20), 4).unwrap();
    bench.run_steps(6);
    assert!(bench.engine.stats().running == 4);
    assert!(bench.cancel(id));
    assert!(!bench.engine.cancel(id));
    bench.assert_complete_and_idle();
    // One member fails, and nobody else but its search.
    let id = bench.add_beams(spec(prompt(1, 9), 20), 4).unwrap();
    bench.add(spec(prompt(2, 9), 20));
    bench.run_steps(6);
    let member = SequenceId(id.0 + 2);
    bench.runner.break_next(member);
    bench.beams.get_mut(&id).unwrap().failed = true;
    bench.run();
    bench.assert_complete_and_idle();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Searches beside each other and other sequences, on pools that are too small: the plain answers.
    #[test]
    fn beams_do_not_depend_on_chunks_batches_or_the_pool(
        total_blocks in 12usize..40,
        shares in (1usize..6, 0usize..8, 1usize..9, 1usize..9),
        prefix_cache in any::<bool>(),
        searches in prop::collection::vec((1usize..4, 1usize..16, 1u32..12, 0u32..120), 1..5),
        others in prop::collection::vec((1usize..12, 1u32..12), 0..4),
        (interrupt, groups) in (0usize..30, groups(12)),
    ) {
        let (block_tokens, more_rows, prefill_chunk_tokens, mixed_prefill_tokens) = shares;
        let limits = EngineLimits {
            total_blocks,
            block_tokens,
            max_num_seqs: 4,
            max_batch_tokens: 4 + more_rows,
            prefill_chunk_tokens,
            mixed_prefill_tokens,
            mixed_prefill_time: std::time::Duration::ZERO,
            max_seq_len: (total_blocks * block_tokens).min(30),
            prefix_cache,
            groups,
        };
        let fits = limits.longest_blocks() <= total_blocks;
        let limits = if fits { limits } else { EngineLimits { groups: super::limits().groups, ..limits } };
        let mut bench = Bench::reckless(limits);
        for (salt, (prompt_len, max_tokens)) in others.iter().enumerate() {
            bench.add(spec(prompt(salt as u32, (*prompt_len).min(limits.max_seq_len - 1)), *max_tokens));
        }
        for (salt, (width, prompt_len, max_tokens, ends)) in searches.iter().enumerate() {
            let search = SequenceSpec {
                stop: StopRules {
                    eos_token_ids: (0..*ends).map(|i| i * 5).collect(),
                    ..stop_at(*max_tokens)
                },
                ..spec(prompt(salt as u32, (*prompt_len).min(limits.max_seq_len - 1)), 1)
            };
            match bench.add_beams(search, *width) {
                Ok(_) | Err(AddError::Beam(BeamError::Blocks { .. })) => {}
                Err(error) => panic!("{error}"),
            }
        }
        for _ in 0..interrupt {
            bench.step();
        }
        if let Some(id) = bench.beams.keys().next().copied().filter(|_| interrupt % 3 == 0) {
            bench.cancel(id);
        }
        bench.run();
        bench.assert_complete_and_idle();
    }
}
