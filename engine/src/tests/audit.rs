//! What holds after every call.

use std::collections::BTreeMap;

use super::Bench;
use crate::plan::BlockId;

impl Bench {
    /// The engine's own audit, and another one from outside: no block is in two places, unless it is full and computed
    /// in all of them and holds the same tokens.
    pub(super) fn audit(&mut self) {
        self.engine.check_invariants().unwrap();
        self.hear_of_the_cache();
        let stats = self.engine.stats();
        assert_eq!(
            stats.total_blocks,
            stats.free_blocks + stats.cached_blocks + stats.owned_blocks
        );
        let block_tokens = self.engine.limits().block_tokens;
        // By block: its group and all tokens up to its last one, if it has any.
        let mut seen: BTreeMap<BlockId, Option<(usize, Vec<u32>)>> = BTreeMap::new();
        for (id, observed) in &self.observed {
            let Some(table) = self.engine.block_table(*id) else {
                continue;
            };
            let computed = self.engine.num_computed(*id).unwrap();
            let generated = observed.expected.iter().map(|token| token.token);
            let tokens: Vec<u32> = observed.spec.token_ids.iter().copied().chain(generated).collect();
            for group in 0..self.engine.limits().groups.count() {
                let table = self.runner.of_group(table, group);
                let gone = table.iter().take_while(|block| !block.is_some()).count();
                let first = (gone * block_tokens).min(computed);
                let origins = self.engine.before_copies(&table);
                let found = self.runner.read_part(&origins, first..computed).unwrap();
                assert_eq!(found, tokens[first..computed], "KV of {id:?}");
                for (i, block) in table.iter().enumerate().skip(gone) {
                    let end = ((i + 1) * block_tokens).min(computed);
                    let content = (i * block_tokens < end).then(|| (group, tokens[..end].to_vec()));
                    if let Some(other) = seen.insert(*block, content.clone()) {
                        assert!(content.is_some(), "block {block:?} is in two places and not computed");
                        assert_eq!(other, content, "block {block:?} is in two places");
                    }
                }
            }
        }
        for block in self.reserved() {
            assert_eq!(seen.insert(block, None), None, "block {block:?} is in two places");
        }
        assert!(seen.len() <= stats.owned_blocks);
        assert_eq!(self.reservations.len() + self.promised.len(), stats.reservations);
    }
}
