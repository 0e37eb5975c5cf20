//! The names of a prompt's blocks: what the prefix caches of nodes know them by, and the coordinator's index of these.
//!
//! The name of a full block is a hash chained over everything its KV depends on: the name of the block before it, a key
//! word (what else matters beside the tokens; see [`crate::kv::ModelIdentity::cache_key`]), and its own tokens. So equal
//! names mean equal beginnings, unless somebody looked for a collision: xxh3 does not withstand that, and whoever uses KV
//! because of a name compares the tokens too. On the wire a name is its lower 64 bits.

use xxhash_rust::xxh3::xxh3_128;

/// The name of a block with everything before it.
pub type BlockName = u128;

/// Names blocks. Holds nothing but scratch memory.
#[derive(Clone, Debug, Default)]
pub struct BlockNames {
    bytes: Vec<u8>,
}

impl BlockNames {
    /// The name of the block of `tokens` after the one named `before` (0 for none).
    pub fn next(&mut self, before: BlockName, cache_key: u64, tokens: &[u32]) -> BlockName {
        self.bytes.clear();
        self.bytes.extend_from_slice(&before.to_le_bytes());
        self.bytes.extend_from_slice(&cache_key.to_le_bytes());
        self.bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        xxh3_128(&self.bytes)
    }
}

/// A name on the wire: its lower half.
pub fn wire_name(name: BlockName) -> u64 {
    name as u64
}

/// The wire names of the full blocks of `token_ids`, in their order: `token_ids.len() / block_tokens` of them.
/// `block_tokens` is [`crate::kv::KvLayout::block_tokens`]; none if that is 0.
pub fn block_hashes(token_ids: &[u32], block_tokens: usize, cache_key: u64) -> Vec<u64> {
    if block_tokens == 0 {
        return Vec::new();
    }
    let (mut names, mut name) = (BlockNames::default(), 0);
    let blocks = token_ids.chunks_exact(block_tokens).map(|tokens| {
        name = names.next(name, cache_key, tokens);
        wire_name(name)
    });
    blocks.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_full_blocks_have_names_and_each_depends_on_all_before_it() {
        let tokens: Vec<u32> = (0..11).collect();
        let names = block_hashes(&tokens, 4, 0);
        assert_eq!(names.len(), 2);
        assert_eq!(block_hashes(&tokens[..8], 4, 0), names);
        assert_eq!(block_hashes(&tokens[..7], 4, 0), names[..1]);
        let mut other = tokens.clone();
        other[0] = 99;
        let others = block_hashes(&other, 4, 0);
        assert!(others[0] != names[0] && others[1] != names[1]);
        // The same tokens elsewhere are another block.
        assert_ne!(block_hashes(&tokens[4..8], 4, 0)[0], names[1]);
        assert!(block_hashes(&tokens, 0, 0).is_empty());
    }

    #[test]
    fn the_key_is_part_of_every_name() {
        let tokens: Vec<u32> = (0..8).collect();
        let (plain, keyed) = (block_hashes(&tokens, 4, 0), block_hashes(&tokens, 4, 7));
        assert!(plain.iter().zip(&keyed).all(|(a, b)| a != b));
    }

    #[test]
    fn a_name_is_stable_across_versions_of_the_program() {
        // Nodes and coordinators of one protocol version need not be the same build.
        assert_eq!(block_hashes(&[1, 2, 3, 4], 2, 5), [STABLE[0], STABLE[1]]);
    }

    const STABLE: [u64; 2] = [9_822_358_374_858_711_710, 16_341_698_293_351_282_326];
}
