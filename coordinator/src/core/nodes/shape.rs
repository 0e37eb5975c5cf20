//! What a job needs, in the blocks of a node.

use protocol::window::Kept;

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
    pub(super) fn kept(&self) -> Kept {
        self.hello.layout.kept()
    }

    /// Most blocks of a sequence of so many tokens that generates.
    pub(super) fn blocks(&self, tokens: usize) -> i64 {
        self.kept().most_blocks(tokens, 1) as i64
    }

    /// Blocks of a prompt that its sequences share when they begin: the full ones, as far as they are kept. Where blocks leave a
    /// window they share less and less; how much, the node's reports tell.
    pub(super) fn shared_blocks(&self, prompt: usize) -> i64 {
        let full = prompt / self.hello.layout.block_tokens as usize;
        self.kept().common_blocks(full, prompt + 1) as i64
    }

    /// Blocks of all sequences at the start. `rows`: most rows of a prompt that are computed at once, 1 where it comes from
    /// elsewhere. One sequence has never more than all blocks of the node: it fits by the node's own word, whose chunks may be shorter than
    /// those of the coordinator's configuration.
    pub(super) fn blocks_of(&self, shape: &Shape, rows: usize) -> i64 {
        let shared = self.shared_blocks(shape.prompt);
        let own = |tokens: usize| self.kept().most_blocks(shape.prompt + tokens, rows) as i64 - shared;
        let blocks = shared
            + match &shape.held {
                Held::Alike { sequences, tokens } => (*sequences as i64).saturating_mul(own(*tokens)),
                Held::Each(each) => each.iter().map(|tokens| own(*tokens)).sum(),
            };
        if shape.held.sequences() > 1 {
            return blocks;
        }
        blocks.min(i64::from(self.hello.total_blocks))
    }

    /// Blocks of a prompt that have to come from elsewhere if the first `cached` ones are there.
    pub(super) fn missing_blocks(&self, prompt: usize, cached: usize) -> u64 {
        self.kept().missing_blocks(prompt, cached, prompt) as u64
    }

    /// Whether the node could ever hold a job. `chunk`: most rows of a sequence that are computed at once.
    pub(super) fn could_hold(&self, shape: &Shape, chunk: usize) -> bool {
        let (kept, sequences) = (self.kept(), shape.held.sequences());
        let full = shape.prompt / self.hello.layout.block_tokens as usize;
        // One sequence that is not too long fits by the node's own word. Of several each may start again.
        let rows = if sequences > 1 { chunk } else { 1 };
        let needed = kept.most_blocks_of(sequences.max(1), full, shape.most_tokens, rows);
        shape.most_tokens <= self.hello.max_seq_len as usize
            && sequences <= self.hello.max_num_seqs as usize
            && needed <= self.hello.total_blocks as usize
    }
}

#[cfg(test)]
mod tests {
    use protocol::ids::Role;
    use protocol::window::Groups;

    use super::*;
    use crate::core::fixtures::{hello, settings};
    use crate::core::nodes::{LinkId, Nodes};

    #[test]
    fn one_sequence_that_a_node_takes_by_its_word_is_not_too_much_for_it() {
        let settings = settings();
        let mut nodes = Nodes::new(settings.text, settings.prefill_credit, settings.steps, settings.health);
        let mut hello = hello(Role::Prefill, "p0", 0, 6);
        hello.layout.groups = Groups::sliding(8);
        nodes.join(LinkId(0), Role::Prefill, hello);
        let node = &nodes.nodes[&LinkId(0)];
        let shape = |sequences| Shape {
            prompt: 400,
            held: Held::alike(sequences, 1),
            most_tokens: 410,
        };
        // The node's chunks are shorter, and it has room for one of them.
        let chunk = 256;
        assert!(node.could_hold(&shape(1), chunk));
        assert_eq!((node.blocks_of(&shape(1), chunk), node.blocks_of(&shape(1), 1)), (6, 3));
        assert!(node.blocks_of(&shape(2), chunk) > 6);
    }
}
