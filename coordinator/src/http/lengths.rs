//! How long prompts and answers may be. Prompts that are too long are refused; answers are cut, never refused.

use config::LimitsConfig;

/// No prompt is longer than this, whatever the configuration says: the API's own bound.
const MAX_INPUT_TOKENS: usize = 1_048_576;

/// The limits of one model under one configuration, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Longest prompt.
    pub input: usize,
    seq: usize,
    positions: usize,
    iterations: usize,
    extra_iteration: bool,
}

impl Lengths {
    /// `positions`: the model's `max_position_embeddings`.
    pub fn new(limits: &LimitsConfig, positions: usize) -> Self {
        let input = [
            limits.max_input_token_len,
            limits.max_seq_len.saturating_sub(1),
            positions,
            MAX_INPUT_TOKENS,
        ];
        Self {
            input: input.into_iter().min().unwrap_or(MAX_INPUT_TOKENS),
            seq: limits.max_seq_len,
            positions,
            iterations: limits.max_iter_times,
            extra_iteration: limits.extra_decode_iteration,
        }
    }

    /// Longest sequence, prompt and answer together.
    pub fn total(&self) -> usize {
        self.seq.min(self.positions)
    }

    /// Most tokens to generate after a prompt of `prompt` tokens; `client` is what the client allows. At least 1: the
    /// token after a prompt that fills the model's positions needs no position of its own.
    ///
    /// The iteration limit counts the decode node's steps where it is the limit that binds, so the prefill node's token
    /// comes on top of it (`extra_decode_iteration`). A limit that the client gave is never exceeded.
    pub fn output(&self, prompt: usize, client: Option<u32>) -> u32 {
        let client = client.map_or(usize::MAX, |client| client as usize);
        let extra = usize::from(self.extra_iteration && client > self.iterations);
        let limits = [
            client,
            self.iterations.saturating_add(extra),
            self.seq.saturating_sub(prompt),
            self.positions.saturating_sub(prompt),
        ];
        let limit = limits.into_iter().min().unwrap_or(1).max(1);
        u32::try_from(limit).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(change: impl FnOnce(&mut LimitsConfig)) -> Lengths {
        let mut limits = LimitsConfig {
            max_input_token_len: 100,
            max_seq_len: 64,
            max_iter_times: 8,
            extra_decode_iteration: true,
            ..LimitsConfig::default()
        };
        change(&mut limits);
        Lengths::new(&limits, 50)
    }

    #[test]
    fn the_smallest_bound_limits_the_prompt() {
        assert_eq!(lengths(|_| {}).input, 50);
        assert_eq!(lengths(|limits| limits.max_seq_len = 20).input, 19);
        assert_eq!(lengths(|limits| limits.max_input_token_len = 7).input, 7);
        let wide = LimitsConfig {
            max_input_token_len: usize::MAX,
            max_seq_len: usize::MAX,
            ..LimitsConfig::default()
        };
        assert_eq!(Lengths::new(&wide, usize::MAX).input, 1_048_576);
    }

    #[test]
    fn the_iteration_limit_gives_one_more_only_where_it_binds() {
        let lengths = lengths(|_| {});
        assert_eq!(lengths.output(5, None), 9);
        assert_eq!(lengths.output(5, Some(20)), 9);
        assert_eq!(lengths.output(5, Some(9)), 9);
        assert_eq!(lengths.output(5, Some(8)), 8);
        assert_eq!(lengths.output(5, Some(3)), 3);
        assert_eq!(lengths.output(5, Some(1)), 1);
    }

    #[test]
    fn the_extra_token_can_be_switched_off() {
        let lengths = lengths(|limits| limits.extra_decode_iteration = false);
        assert_eq!(lengths.output(5, None), 8);
        assert_eq!(lengths.output(5, Some(20)), 8);
    }

    #[test]
    fn sequence_and_positions_cut_the_answer() {
        let lengths = lengths(|_| {});
        assert_eq!(lengths.output(45, None), 5);
        assert_eq!(lengths.output(49, None), 1);
        assert_eq!(lengths.output(50, None), 1);
        let short = Lengths::new(
            &LimitsConfig {
                max_seq_len: 40,
                max_iter_times: 8,
                ..LimitsConfig::default()
            },
            50,
        );
        assert_eq!(short.output(38, Some(2_147_483_647)), 2);
        assert_eq!(short.total(), 40);
    }
}
