//! Attention over paged KV: prompts, decoding, several sequences; of SmolLM2-135M's and Gemma 3 270M's heads.

use criterion::Criterion;
use engine::plan::{BlockId, GroupBlocks};
use model::kernels::{AttentionShape, Cpu, KvShape, PagedAttention, Scratch, SequenceRows};
use protocol::kv::KvDtype;

use super::{Bench, Work, numbers};

/// One layer's attention: `rows` rows after `past` tokens, for `batch` sequences with KV of their own.
pub(crate) fn attention(bench: &Bench, c: &mut Criterion) {
    let mut group = c.benchmark_group("attention");
    let smollm2 = ("9x3x64", 9, 3, 64);
    let gemma = ("4x1x256", 4, 1, 256);
    for (name, heads, kv_heads, dim) in [smollm2, gemma] {
        for dtype in KvDtype::ALL {
            for (past, rows, batch) in [
                (0, 512, 1),
                (1792, 256, 1),
                (512, 1, 1),
                (512, 1, 16),
                (4096, 1, 1),
                (4096, 1, 16),
            ] {
                let kv = KvShape {
                    latent: false,
                    num_kv_heads: kv_heads,
                    head_dim: dim,
                    block_tokens: 16,
                    dtype,
                };
                let case = Attention {
                    kv,
                    heads,
                    past,
                    rows,
                    batch,
                };
                let keys: usize = (past + 1..=past + rows).sum();
                let operations = 4.0 * (batch * keys * heads * dim) as f64;
                let id = (name, format!("{}/{rows}+{past}/batch={batch}", dtype.as_str()));
                let mut ready = None;
                bench.run(&mut group, id, Work::Operations(operations), || {
                    ready.get_or_insert_with(|| case.ready()).run(&case, &bench.cpu);
                });
            }
        }
    }
    group.finish();
}

/// A call of attention.
struct Attention {
    kv: KvShape,
    heads: usize,
    past: usize,
    rows: usize,
    batch: usize,
}

/// What a call of attention works on.
struct Ready {
    pool: Vec<u8>,
    blocks: Vec<BlockId>,
    q: Vec<f32>,
    out: Vec<f32>,
    scratch: Scratch,
}

impl Attention {
    fn ready(&self) -> Ready {
        let count = self.batch * (self.past + self.rows).div_ceil(16);
        let width = self.batch * self.rows * self.heads * self.kv.head_dim;
        // Numbers near 1: any legal ones will do. (As int8: 63 times a scale of 0.75.)
        let unit: &[u8] = match self.kv.dtype {
            KvDtype::F16 => &[0x12, 0x3c],
            KvDtype::Bf16 => &[0x80, 0x3f],
            KvDtype::Int8 => &[0x3f],
            KvDtype::F32 => &[0x12, 0x34, 0x80, 0x3f],
        };
        Ready {
            pool: unit
                .iter()
                .copied()
                .cycle()
                .take(count * self.kv.block_bytes())
                .collect(),
            blocks: (0..count as u32).map(BlockId).collect(),
            q: numbers(width),
            out: vec![0.0; width],
            scratch: Scratch::default(),
        }
    }
}

impl Ready {
    fn run(&mut self, case: &Attention, cpu: &Cpu) {
        let size = case.kv.block_bytes();
        let pool = &self.pool;
        let block = |id: BlockId| &pool[id.0 as usize * size..][..size];
        let shape = AttentionShape {
            kv: case.kv,
            num_heads: case.heads,
            scale: 1.0 / (case.kv.head_dim as f32).sqrt(),
            window: None,
            cap: None,
        };
        let each = self.blocks.len() / case.batch;
        let sequences: Vec<SequenceRows<'_>> = (0..case.batch)
            .map(|i| SequenceRows {
                rows: i * case.rows..(i + 1) * case.rows,
                first_position: case.past,
                blocks: GroupBlocks::new(&self.blocks[i * each..(i + 1) * each], 1, 0),
            })
            .collect();
        let attention = PagedAttention {
            shape: &shape,
            group: 0,
            sequences: &sequences,
            kv: &block,
        };
        let done = attention.run(cpu, &self.q, &mut self.out, &mut self.scratch);
        done.expect("the buffers fit");
    }
}
