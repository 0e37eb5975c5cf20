//! What a job needs, in the blocks of a node.

use super::Node;

/// What a job needs. Its sequences share the full blocks of the prompt.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// What the node must hold at the start behind the prompt.
    pub held: Held,
    /// Tokens each sequence may grow to, prompt included.
    pub most_tokens: usize,
}

/// The sequences of a job, and how many tokens each has behind the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// All of them have as many.
    Alike {
        /// How many sequences.
        sequences: usize,
        /// Tokens of each.
        tokens: usize,
    },
    /// Tokens of each sequence.
    Each(Vec<usize>),
}

impl Held {
    /// So many sequences with so many tokens each.
    pub fn alike(sequences: usize, tokens: usize) -> Self {
        Self::Alike { sequences, tokens }
    }

    /// How many sequences.
    pub fn sequences(&self) -> usize {
        match self {
            Self::Alike { sequences, .. } => *sequences,
            Self::Each(tokens) => tokens.len(),
        }
    }
}

impl Shape {
    /// Tokens to be computed before the next one of every sequence can be drawn.
    pub fn tokens(&self) -> usize {
        let held = match &self.held {
            Held::Alike { sequences, tokens } => sequences * tokens.saturating_sub(1),
            Held::Each(each) => each.iter().map(|tokens| tokens.saturating_sub(1)).sum(),
        };
        self.prompt + held
    }
}

impl Node {
    pub(super) fn blocks(&self, tokens: usize) -> i64 {
        self.hello.layout.blocks_for(tokens) as i64
    }

    /// Blocks of a prompt that its sequences share: the full ones.
    pub(super) fn shared_blocks(&self, prompt: usize) -> i64 {
        (prompt / self.hello.layout.block_tokens as usize) as i64
    }

    /// Blocks of all sequences at the start.
    pub(super) fn blocks_of(&self, shape: &Shape) -> i64 {
        let shared = self.shared_blocks(shape.prompt);
        let own = |tokens: usize| self.blocks(shape.prompt + tokens) - shared;
        shared
            + match &shape.held {
                Held::Alike { sequences, tokens } => (*sequences as i64).saturating_mul(own(*tokens)),
                Held::Each(each) => each.iter().map(|tokens| own(*tokens)).sum(),
            }
    }

    pub(super) fn could_hold(&self, shape: &Shape) -> bool {
        let shared = self.shared_blocks(shape.prompt);
        let own = (self.blocks(shape.most_tokens) - shared).saturating_mul(shape.held.sequences() as i64);
        shape.most_tokens <= self.hello.max_seq_len as usize
            && shape.held.sequences() <= self.hello.max_num_seqs as usize
            && shared.saturating_add(own) <= i64::from(self.hello.total_blocks)
    }
}
