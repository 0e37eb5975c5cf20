//! How many blocks the KV pool gets, and whether they suffice and fit: found out before the weights are read.

use config::EngineConfig;
use protocol::kv::KvLayout;
use thiserror::Error;

/// A size of the KV pool that cannot be served with.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum PoolSizeError {
    /// The pool holds no block, or not the longest sequence.
    #[error(
        "engine.{field} is {given}, which holds {tokens} tokens in blocks of {block} bytes; a sequence may have \
         {needed} tokens {why}, so at least {least} would be right"
    )]
    TooSmall {
        /// The field that gives the size.
        field: &'static str,
        /// The configured size.
        given: usize,
        /// Tokens that fit.
        tokens: usize,
        /// Bytes of a block's tokens in all layers.
        block: usize,
        /// Most tokens of a sequence that are kept at once.
        needed: usize,
        /// What decides that.
        why: &'static str,
        /// What the field's value could be.
        least: u128,
    },
    /// The machine's memory does not hold it.
    #[error(
        "engine.{field} is {given}, a KV pool of {bytes} bytes; the memory of this machine is {memory} bytes, of which the \
         model's weights take {weights}, so at most {fits} would be right"
    )]
    TooLarge {
        /// The field that gives the size.
        field: &'static str,
        /// Its value.
        given: usize,
        /// The pool's size, in bytes.
        bytes: u128,
        /// All memory that the process may use, in bytes.
        memory: u64,
        /// Bytes of weights, about.
        weights: u64,
        /// What the field's value could be.
        fits: u128,
    },
}

const LENGTH: &str = "(limits.max_seq_len, and the model)";
const WINDOW: &str = "at once (the model's window, and engine.prefill_chunk_tokens)";

/// Blocks of the KV pool that the configuration asks for. `longest` is the length of the longest sequence, in tokens;
/// `memory` and `weights` are bytes of the machine's memory, if known, and of the model's weights in it.
///
/// # Errors
/// [`PoolSizeError`] names the field, its value and what would be right.
pub(crate) fn pool_blocks(
    engine: &EngineConfig,
    layout: &KvLayout,
    longest: usize,
    memory: Option<u64>,
    weights: u64,
) -> Result<usize, PoolSizeError> {
    let (block, block_tokens) = (layout.block_bytes().max(1), engine.kv_block_tokens.max(1));
    let in_bytes = engine.kv_pool_bytes > 0;
    // A token takes room in a block of each group of layers.
    let groups = layout.groups.count();
    let (field, given, blocks) = if in_bytes {
        ("kv_pool_bytes", engine.kv_pool_bytes, engine.kv_pool_bytes / block)
    } else {
        let places = engine.kv_pool_tokens / block_tokens;
        ("kv_pool_tokens", engine.kv_pool_tokens, places.saturating_mul(groups))
    };
    let size = |blocks: u128| {
        if in_bytes {
            blocks * block as u128
        } else {
            blocks.div_ceil(groups as u128) * block_tokens as u128
        }
    };
    // Of a window the blocks are kept, and those that a chunk of a prompt is computed into.
    let rows = engine.prefill_chunk_tokens.min(engine.max_batch_tokens);
    let needed = layout.kept().most_blocks(longest, rows);
    if blocks < needed {
        let slides = needed < layout.kept().all_blocks(longest);
        return Err(PoolSizeError::TooSmall {
            field,
            given,
            tokens: (blocks / groups).saturating_mul(block_tokens),
            block: block * groups,
            needed: if slides {
                needed.div_ceil(groups) * block_tokens
            } else {
                longest
            },
            why: if slides { WINDOW } else { LENGTH },
            least: size(needed as u128),
        });
    }
    let bytes = blocks as u128 * block as u128;
    if let Some(memory) = memory
        && bytes + u128::from(weights) > u128::from(memory)
    {
        let blocks_that_fit = u128::from(memory.saturating_sub(weights)) / block as u128;
        let fits = if in_bytes {
            blocks_that_fit
        } else {
            blocks_that_fit / groups as u128 * groups as u128
        };
        return Err(PoolSizeError::TooLarge {
            field,
            given,
            bytes,
            memory,
            weights,
            fits: size(fits),
        });
    }
    Ok(blocks)
}

/// All memory that this process may use, in bytes: the machine's, or what its control group has of it. `None` where the
/// system does not say.
pub(crate) fn machine_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = mem_total(&meminfo)?;
    // "max", or no such file: there is no limit.
    let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let limit = group.and_then(|text| text.trim().parse::<u64>().ok());
    Some(limit.map_or(total, |limit| limit.min(total)))
}

/// Bytes of all memory, out of `/proc/meminfo`.
fn mem_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use protocol::kv::KvDtype;
    use protocol::window::Groups;

    use super::*;

    /// Blocks of 16 tokens and 4,096 bytes.
    const LAYOUT: KvLayout = KvLayout {
        num_layers: 2,
        num_kv_heads: 2,
        head_dim: 16,
        block_tokens: 16,
        dtype: KvDtype::F16,
        latent: false,
        groups: Groups::ONE,
    };

    fn sized(kv_pool_tokens: usize, kv_pool_bytes: usize) -> EngineConfig {
        EngineConfig {
            kv_pool_tokens,
            kv_pool_bytes,
            ..EngineConfig::default()
        }
    }

    #[test]
    fn a_pool_in_bytes_must_hold_the_longest_sequence() {
        assert_eq!(LAYOUT.block_bytes(), 4_096);
        let blocks = |bytes| pool_blocks(&sized(32_768, bytes), &LAYOUT, 100, None, 0);
        assert_eq!(blocks(7 * 4_096), Ok(7));
        assert_eq!(blocks(8 * 4_096 - 1), Ok(7));
        let error = blocks(7 * 4_096 - 1).unwrap_err().to_string();
        assert_eq!(
            error,
            "engine.kv_pool_bytes is 28671, which holds 96 tokens in blocks of 4096 bytes; a sequence may have 100 tokens \
             (limits.max_seq_len, and the model), so at least 28672 would be right"
        );
    }

    #[test]
    fn a_pool_need_not_hold_more_than_a_window_and_a_chunk() {
        let layout = KvLayout {
            groups: Groups::sliding(64),
            ..LAYOUT
        };
        let engine = |tokens| EngineConfig {
            prefill_chunk_tokens: 32,
            ..sized(tokens, 0)
        };
        let blocks = |tokens| pool_blocks(&engine(tokens), &layout, 100_000, None, 0);
        assert_eq!(blocks(7 * 16), Ok(7));
        assert_eq!(
            blocks(6 * 16).unwrap_err().to_string(),
            "engine.kv_pool_tokens is 96, which holds 96 tokens in blocks of 4096 bytes; a sequence may have 112 tokens at once \
             (the model's window, and engine.prefill_chunk_tokens), so at least 112 would be right"
        );
        // Beside layers that see everything: all of a text in one group of three, of which the others keep 7 blocks each.
        let mixed = KvLayout {
            groups: Groups::mixed(1, 2, 64),
            ..LAYOUT
        };
        let blocks = |tokens| pool_blocks(&engine(tokens), &mixed, 1_600, None, 0);
        assert_eq!(blocks(38 * 16), Ok(38 * 3));
        assert_eq!(
            blocks(37 * 16).unwrap_err().to_string(),
            "engine.kv_pool_tokens is 592, which holds 592 tokens in blocks of 12288 bytes; a sequence may have 608 tokens at once \
             (the model's window, and engine.prefill_chunk_tokens), so at least 608 would be right"
        );
        // Shorter sequences need less, and without a window everything is kept.
        assert_eq!(pool_blocks(&engine(48), &layout, 48, None, 0), Ok(3));
        assert!(pool_blocks(&engine(7 * 16), &LAYOUT, 113, None, 0).is_err());
    }

    #[test]
    fn a_pool_must_fit_the_machine_beside_the_weights() {
        let blocks = |engine: &EngineConfig| pool_blocks(engine, &LAYOUT, 16, Some(1_000_000), 100_000);
        // 219 blocks fit into 900,000 bytes.
        assert_eq!(blocks(&sized(219 * 16, 0)), Ok(219));
        assert_eq!(blocks(&sized(0, 900_000)), Ok(219));
        let error = blocks(&sized(220 * 16, 0)).unwrap_err().to_string();
        assert_eq!(
            error,
            "engine.kv_pool_tokens is 3520, a KV pool of 901120 bytes; the memory of this machine is 1000000 bytes, of \
             which the model's weights take 100000, so at most 3504 would be right"
        );
        let error = blocks(&sized(0, 1_000_000)).unwrap_err().to_string();
        assert!(
            error.starts_with("engine.kv_pool_bytes is 1000000, a KV pool of 999424"),
            "{error}"
        );
        assert!(error.ends_with("so at most 897024 would be right"), "{error}");
        assert!(blocks(&sized(usize::MAX, 0)).is_err(), "no overflow");
    }

    #[test]
    fn the_machine_says_what_it_has() {
        assert_eq!(mem_total("MemFree: 1 kB\nMemTotal:       2048 kB\n"), Some(2 << 20));
        assert_eq!(mem_total("MemTotal: lots\n"), None);
        if cfg!(target_os = "linux") {
            assert!(machine_memory().is_some_and(|bytes| bytes > 1 << 20));
        }
    }
}
