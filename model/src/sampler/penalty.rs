//! Penalties on tokens that already occurred.

use protocol::sampling::SamplingParams;

use super::SampleError;

/// Set in a mark once its token has been penalised.
const DONE: u32 = 1 << 31;

/// Scratch for [`Penalties::apply`]: a mark per token, all zero between calls.
#[derive(Debug, Default)]
pub(super) struct Penalties {
    marks: Vec<u32>,
}

impl Penalties {
    pub(super) fn with_vocabulary(vocab: usize) -> Self {
        Self {
            marks: Vec::with_capacity(vocab),
        }
    }

    /// Changes `logits` for every distinct token of `history`, whose first `prompt_len` tokens are the prompt: repetition
    /// over all of it, then presence and frequency over the rest.
    pub(super) fn apply(
        &mut self,
        logits: &mut [f32],
        params: &SamplingParams,
        history: &[u32],
        prompt_len: usize,
    ) -> Result<(), SampleError> {
        let vocab = logits.len();
        if let Some(&token) = history.iter().find(|&&t| t as usize >= vocab) {
            return Err(SampleError::NoSuchToken { token, vocab });
        }
        let output = history.get(prompt_len..).ok_or(SampleError::History {
            length: history.len(),
            prompt_len,
        })?;
        self.marks.resize(vocab, 0);
        for &token in output {
            self.marks[token as usize] += 1;
        }
        for &token in history {
            let mark = &mut self.marks[token as usize];
            if *mark & DONE == 0 {
                let logit = &mut logits[token as usize];
                *logit = penalised(*logit, params, *mark);
                *mark |= DONE;
            }
        }
        for &token in history {
            self.marks[token as usize] = 0;
        }
        Ok(())
    }
}

/// The logit of a token that occurred `count` times in the output, and at least once in prompt and output.
fn penalised(logit: f32, params: &SamplingParams, count: u32) -> f32 {
    if logit == f32::NEG_INFINITY {
        return logit;
    }
    let mut value = if logit > 0.0 {
        logit / params.repetition_penalty
    } else {
        logit * params.repetition_penalty
    };
    if count > 0 {
        value -= params.presence_penalty;
        value -= params.frequency_penalty * count as f32;
    }
    // An overflow must not turn into "certain" or "impossible".
    value.clamp(f32::MIN, f32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_penalty_sees_its_part_of_the_history() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            presence_penalty: 0.25,
            frequency_penalty: 0.5,
            ..SamplingParams::greedy()
        };
        let mut logits = vec![1.0, -1.0, 3.0, 4.0, -2.0, f32::NEG_INFINITY];
        let mut scratch = Penalties::default();
        for _ in 0..2 {
            let mut row = logits.clone();
            // Token 1 twice in the prompt, token 2 in both, token 4 twice in the output.
            let done = scratch.apply(&mut row, &params, &[1, 1, 2, 2, 4, 4, 5], 3);
            assert_eq!(done, Ok(()));
            assert_eq!(row, [1.0, -2.0, 1.5 - 0.75, 4.0, -4.0 - 1.25, f32::NEG_INFINITY]);
        }
        assert_eq!(
            scratch.apply(&mut logits, &params, &[0, 6], 1),
            Err(SampleError::NoSuchToken { token: 6, vocab: 6 })
        );
        assert_eq!(
            scratch.apply(&mut logits, &params, &[0], 2),
            Err(SampleError::History {
                length: 1,
                prompt_len: 2
            })
        );
        assert!(scratch.marks.iter().all(|&m| m == 0));
    }

    #[test]
    fn overflow_stays_finite() {
        let params = SamplingParams {
            repetition_penalty: 1e-30,
            ..SamplingParams::greedy()
        };
        assert_eq!(penalised(1e20, &params, 0), f32::MAX);
        let params = SamplingParams {
            presence_penalty: f32::MAX,
            ..SamplingParams::greedy()
        };
        assert_eq!(penalised(f32::MIN, &params, 1), f32::MIN);
    }
}
