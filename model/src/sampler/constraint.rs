//! Biases of single tokens, and which tokens may not be drawn at all.

use protocol::sampling::SamplingParams;

use super::SampleError;

/// The bias that a client gave single tokens.
pub(super) fn bias(logits: &mut [f32], bias: &[(u32, f32)]) -> Result<(), SampleError> {
    for &(token, amount) in bias {
        let logit = at(logits, token)?;
        if *logit != f32::NEG_INFINITY {
            *logit = (*logit + amount).clamp(f32::MIN, f32::MAX);
        }
    }
    Ok(())
}

/// Makes the logits of all tokens that may not be drawn at `position` of the output negative infinity. `output`: the tokens
/// generated so far, where `params` need them; `mask`: what the grammar allows.
pub(super) fn forbid(
    logits: &mut [f32],
    params: &SamplingParams,
    position: u32,
    output: &[u32],
    mask: Option<&[u32]>,
) -> Result<(), SampleError> {
    if !params.allowed_token_ids.is_empty() {
        keep_only(logits, &params.allowed_token_ids)?;
    }
    for word in &params.bad_words {
        if let Some((&last, before)) = word.split_last()
            && output.ends_with(before)
        {
            *at(logits, last)? = f32::NEG_INFINITY;
        }
    }
    if let Some(mask) = mask {
        keep_masked(logits, mask);
    }
    if position < params.min_tokens && !must_end(mask, &params.end_token_ids) {
        for &token in &params.end_token_ids {
            *at(logits, token)? = f32::NEG_INFINITY;
        }
    }
    Ok(())
}

fn at(logits: &mut [f32], token: u32) -> Result<&mut f32, SampleError> {
    let vocab = logits.len();
    logits
        .get_mut(token as usize)
        .ok_or(SampleError::NoSuchToken { token, vocab })
}

/// `allowed` is ascending.
fn keep_only(logits: &mut [f32], allowed: &[u32]) -> Result<(), SampleError> {
    let vocab = logits.len();
    let mut next = 0;
    for &token in allowed {
        let index = token as usize;
        if index >= vocab || index < next {
            return Err(SampleError::NoSuchToken { token, vocab });
        }
        logits[next..index].fill(f32::NEG_INFINITY);
        next = index + 1;
    }
    logits[next..].fill(f32::NEG_INFINITY);
    Ok(())
}

fn keep_masked(logits: &mut [f32], mask: &[u32]) {
    let mut words = mask.iter();
    for part in logits.chunks_mut(u32::BITS as usize) {
        match words.next().copied().unwrap_or(0) {
            u32::MAX => {}
            0 => part.fill(f32::NEG_INFINITY),
            word => {
                for (bit, logit) in part.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// True if a grammar allows nothing but end tokens: then its text is complete, and no number of tokens can be waited for.
fn must_end(mask: Option<&[u32]>, end_token_ids: &[u32]) -> bool {
    let Some(mask) = mask else { return false };
    let ends = end_token_ids.iter().filter(|&&token| {
        let word = mask.get(token as usize / u32::BITS as usize).copied().unwrap_or(0);
        word >> (token % u32::BITS) & 1 == 1
    });
    let allowed: u32 = mask.iter().map(|word| word.count_ones()).sum();
    allowed as usize == ends.count()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: f32 = f32::NEG_INFINITY;

    fn forbidden(params: &SamplingParams, position: u32, output: &[u32], mask: Option<&[u32]>) -> Vec<u32> {
        let mut logits = vec![0.5; 70];
        forbid(&mut logits, params, position, output, mask).expect("ids are in the vocabulary");
        (0..70).filter(|&i| logits[i as usize] == NO).collect()
    }

    #[test]
    fn biases_add_up_and_stay_finite() {
        let mut logits = vec![1.0, NO, f32::MAX];
        assert_eq!(bias(&mut logits, &[(0, -3.0), (1, 100.0), (2, f32::MAX)]), Ok(()));
        assert_eq!(logits, [-2.0, NO, f32::MAX]);
        assert_eq!(
            bias(&mut logits, &[(3, 1.0)]),
            Err(SampleError::NoSuchToken { token: 3, vocab: 3 })
        );
    }

    #[test]
    fn only_allowed_tokens_remain() {
        let params = SamplingParams {
            allowed_token_ids: vec![0, 5, 69],
            ..SamplingParams::greedy()
        };
        let expected: Vec<u32> = (0..70).filter(|i| ![0, 5, 69].contains(i)).collect();
        assert_eq!(forbidden(&params, 0, &[], None), expected);
        let mut logits = vec![0.0; 5];
        assert!(forbid(&mut logits, &params, 0, &[], None).is_err());
    }

    #[test]
    fn a_bad_words_last_token_is_forbidden_behind_the_others() {
        let params = SamplingParams {
            bad_words: vec![vec![7], vec![1, 2, 3]],
            ..SamplingParams::greedy()
        };
        assert_eq!(forbidden(&params, 0, &[], None), [7]);
        assert_eq!(forbidden(&params, 2, &[1, 2], None), [3, 7]);
        assert_eq!(forbidden(&params, 2, &[2, 1], None), [7]);
        assert_eq!(forbidden(&params, 3, &[9, 1, 2], None), [3, 7]);
    }

    #[test]
    fn end_tokens_wait_for_their_time_but_not_for_a_grammar_that_is_through() {
        let params = SamplingParams {
            min_tokens: 2,
            end_token_ids: vec![3, 40],
            ..SamplingParams::greedy()
        };
        assert_eq!(forbidden(&params, 1, &[], None), [3, 40]);
        assert_eq!(forbidden(&params, 2, &[], None), [0; 0]);
        // Tokens 3 and 4, then token 3 alone.
        let all_but = |kept: &[u32]| (0..70).filter(|i| !kept.contains(i)).collect::<Vec<u32>>();
        assert_eq!(forbidden(&params, 1, &[], Some(&[0b11000])), all_but(&[4]));
        assert_eq!(forbidden(&params, 1, &[], Some(&[0b01000])), all_but(&[3]));
        assert_eq!(forbidden(&params, 1, &[], Some(&[0, 1 << 8])), all_but(&[40]));
    }

    #[test]
    fn masks_are_read_bit_by_bit() {
        let mask = [u32::MAX, 0, 0b101];
        let kept: Vec<u32> = (0..32).chain([64, 66]).collect();
        let expected: Vec<u32> = (0..70).filter(|i| !kept.contains(i)).collect();
        assert_eq!(forbidden(&SamplingParams::greedy(), 0, &[], Some(&mask)), expected);
    }
}
