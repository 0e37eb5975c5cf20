//! The bytes of the KV cache: one arena for all layers of all blocks, and the rules under which it is read and written.
//!
//! Within a (layer, block) the bytes lie in the canonical order of [`protocol::kv::KvLayout`]. The arena itself is
//! `[layer][block]`, so one layer's blocks are contiguous; it starts on a huge page.
//!
//! Life of a block's bytes. A block is *idle* until somebody claims it:
//!
//! * a step claims the blocks of its plan ([`KvPool::claim_plan`]) and works on them through [`StepAccess`]: it alone
//!   reads and writes those that its rows go into, and it reads the others, which may be in several block tables;
//! * a handoff claims the blocks of its reservation ([`KvPool::writer`]) until [`KvWriter::revoke`] or its drop;
//! * [`KvPool::gather`] copies blocks out, on the thread of the running step, or on any thread while no step writes them,
//!   and [`KvPool::copy_blocks`] within the pool, between steps.
//!
//! A claim that contradicts another is refused with an error, whoever made the mistake: bytes are never written by two
//! owners, nor read while they are written. That exclusion is what the `unsafe` blocks of this module rest on.

#![allow(
    unsafe_code,
    reason = "several threads write disjoint blocks of one arena, which no safe slice type can express"
)]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use bytes::Bytes;
use engine::plan::{BlockId, GroupBlocks, StepPlan};
use memmap2::MmapMut;
use protocol::kv::KvLayout;

use crate::kernels::{Cpu, KvShape, prefetch_slot, write_kv};
pub use crate::kv_error::KvError;

mod copy;
mod read_claim;
mod writer;
use read_claim::{ReadClaim, busy};
pub use writer::KvWriter;

/// Claimed by a handoff.
const WRITER: u32 = 1 << 31;
/// Claimed by the running step, which may write it.
const STEP: u32 = 1 << 30;
/// Claimed by the running step, which only reads it.
const SHARED: u32 = 1 << 29;
/// Number of copies being taken.
const READERS: u32 = SHARED - 1;
/// Size and alignment of a huge page on the systems that have them, in bytes.
const HUGE_PAGE: usize = 2 << 20;

#[cfg(target_endian = "big")]
compile_error!("the canonical KV byte order is little-endian and the pool stores it as is");

/// The arena. Shared by the compute thread and the network tasks of a node.
pub struct KvPool {
    layout: KvLayout,
    total_blocks: u32,
    /// Bytes of one (layer, block).
    chunk: usize,
    base: *mut u8,
    /// Bytes of all chunks.
    bytes: usize,
    /// Keeps the arena mapped; its bytes are touched through `base` only.
    _arena: MmapMut,
    /// Claims, one word per block.
    claims: Vec<AtomicU32>,
    /// The thread whose step runs.
    step: Mutex<Option<ThreadId>>,
}

// SAFETY: `base` points into `_arena`, which lives as long as the pool and never moves. Every access through it is
// covered by a claim (see the module's head), and claims are atomic: two threads never hold contradicting ones.
unsafe impl Send for KvPool {}
// SAFETY: as above; all methods take `&self` and synchronise through `claims` and `step`.
unsafe impl Sync for KvPool {}

impl std::fmt::Debug for KvPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvPool")
            .field("layout", &self.layout)
            .field("total_blocks", &self.total_blocks)
            .finish()
    }
}

impl KvPool {
    /// Allocates a pool of `total_blocks` blocks. Memory is zero and is taken from the system when first touched; huge
    /// pages are asked for.
    ///
    /// # Errors
    /// [`KvError::Allocation`] if `total_blocks` is 0, the layout has a zero dimension, or the system refuses.
    pub fn new(layout: KvLayout, total_blocks: usize) -> Result<Self, KvError> {
        let bytes = layout.layer_block_bytes() as u128 * u128::from(layout.num_layers) * total_blocks as u128;
        let failed = |reason: &str| KvError::Allocation {
            blocks: total_blocks,
            bytes,
            reason: reason.to_owned(),
        };
        if bytes == 0 {
            return Err(failed(
                "the number of blocks and every dimension of the layout must be above 0",
            ));
        }
        let total = u32::try_from(total_blocks).map_err(|_| failed("at most 2^32 - 1 blocks can be numbered"))?;
        // Room to start on a huge page: a mapping is only aligned to a small one.
        let mapped = usize::try_from(bytes).ok().and_then(|n| n.checked_add(HUGE_PAGE));
        let mapped = mapped.filter(|&n| n <= isize::MAX as usize);
        let mut arena = MmapMut::map_anon(mapped.ok_or_else(|| failed("larger than the address space"))?)
            .map_err(|e| failed(&e.to_string()))?;
        let skipped = arena.as_ptr().align_offset(HUGE_PAGE).min(HUGE_PAGE);
        #[cfg(target_os = "linux")]
        if let Err(error) = arena.advise_range(memmap2::Advice::HugePage, skipped, arena.len() - HUGE_PAGE) {
            tracing::debug!(%error, "no huge pages for the KV pool");
        }
        Ok(Self {
            layout,
            total_blocks: total,
            chunk: layout.layer_block_bytes(),
            base: arena[skipped..].as_mut_ptr(),
            bytes: arena.len() - HUGE_PAGE,
            _arena: arena,
            claims: (0..total_blocks).map(|_| AtomicU32::new(0)).collect(),
            step: Mutex::new(None),
        })
    }

    /// Shape of the cache.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Where the arena lies, for asking the system about its pages.
    pub fn address_range(&self) -> Range<usize> {
        let start = self.base.addr();
        start..start + self.layout.block_bytes() * self.total_blocks()
    }

    /// Number of blocks.
    pub fn total_blocks(&self) -> usize {
        self.total_blocks as usize
    }

    /// Bytes of the arena. Those that nobody has touched yet take no memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Claims `blocks` for one step of the calling thread, which may write all of them. A block may occur several times.
    ///
    /// # Errors
    /// [`KvError::NoSuchBlock`], [`KvError::Busy`] if a handoff or a copy holds one of the blocks,
    /// [`KvError::StepRuns`] if another step holds a claim.
    pub fn claim<'a>(&'a self, blocks: &'a [BlockId]) -> Result<StepAccess<'a>, KvError> {
        let access = self.begin_step(blocks)?;
        for block in blocks {
            self.claim_written(*block)?;
        }
        Ok(access)
    }

    /// Claims the blocks of a plan for one step of the calling thread: to be written where rows go, else to be read.
    /// Blocks that are only read may occur several times (shared prefixes) and may be copied out meanwhile.
    ///
    /// # Errors
    /// As [`Self::claim`]; [`KvError::Busy`] also if one sequence writes a block that another one reads.
    ///
    /// # Panics
    /// If a span of the plan lies outside of its arrays: plans are checked before.
    pub fn claim_plan<'a>(&'a self, plan: &'a StepPlan) -> Result<StepAccess<'a>, KvError> {
        let access = self.begin_step(&plan.block_ids)?;
        for s in &plan.sequences {
            let place = (s.start_position / self.layout.block_tokens) as usize;
            let first_written = place * self.layout.groups.count();
            for (i, block) in plan.block_ids[s.blocks.range()].iter().enumerate() {
                if i >= first_written {
                    self.claim_written(*block)?;
                } else if block.is_some() {
                    self.claim_read(*block)?;
                }
            }
        }
        Ok(access)
    }

    /// The guard of a step that may claim `blocks`. Its drop ends all claims of the step on them: as there is one step at
    /// a time, those on blocks that it has not claimed (yet) do not exist.
    fn begin_step<'a>(&'a self, blocks: &'a [BlockId]) -> Result<StepAccess<'a>, KvError> {
        let mut step = lock(&self.step);
        if step.is_some() {
            return Err(KvError::StepRuns);
        }
        *step = Some(std::thread::current().id());
        Ok(StepAccess {
            pool: self,
            blocks,
            _this_thread: PhantomData,
        })
    }

    fn claim_written(&self, block: BlockId) -> Result<(), KvError> {
        let word = self.claim_word(block)?;
        match word.compare_exchange(0, STEP, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) | Err(STEP) => Ok(()),
            Err(held) => Err(busy(block, held)),
        }
    }

    fn claim_read(&self, block: BlockId) -> Result<(), KvError> {
        let readable = |held: u32| (held & (WRITER | STEP) == 0).then_some(held | SHARED);
        let word = self.claim_word(block)?;
        word.fetch_update(Ordering::Acquire, Ordering::Relaxed, readable)
            .map(drop)
            .map_err(|held| busy(block, held))
    }

    /// Copies `blocks` of `layers` out in canonical order: for each layer, for each block in the order given, its
    /// [`KvLayout::layer_block_bytes`] bytes.
    ///
    /// # Errors
    /// [`KvError::NoSuchLayers`], [`KvError::NoSuchBlock`]; [`KvError::Busy`] if a handoff writes one of the blocks, or
    /// a step of another thread holds it. Within the observer of a step its own blocks can be copied.
    pub fn gather(&self, layers: Range<u32>, blocks: &[BlockId]) -> Result<Bytes, KvError> {
        let mut out = Vec::with_capacity(layers.len() * blocks.len() * self.chunk);
        self.gather_into(layers, blocks, &mut out)?;
        Ok(Bytes::from(out))
    }

    /// As [`Self::gather`], appended to `out`; nothing is on an error.
    pub fn gather_into(&self, layers: Range<u32>, blocks: &[BlockId], out: &mut Vec<u8>) -> Result<(), KvError> {
        self.check_layers(layers.start, u64::from(layers.end))?;
        let claim = ReadClaim::take(self, blocks)?;
        for layer in layers {
            for block in blocks {
                // SAFETY: both indices were checked. `claim` keeps writers of other threads out of the block; a step of
                // this thread writes within `write_rows` only, which is not running.
                out.extend_from_slice(unsafe { self.chunk_ref(layer, *block) });
            }
        }
        drop(claim);
        Ok(())
    }

    fn check_layers(&self, start: u32, end: u64) -> Result<(), KvError> {
        if u64::from(start) <= end && end <= u64::from(self.layout.num_layers) {
            Ok(())
        } else {
            Err(KvError::NoSuchLayers {
                start,
                end,
                total: self.layout.num_layers,
            })
        }
    }

    fn claim_word(&self, block: BlockId) -> Result<&AtomicU32, KvError> {
        self.claims.get(block.0 as usize).ok_or(KvError::NoSuchBlock {
            block: block.0,
            total: self.total_blocks,
        })
    }

    /// Ends the claims of kind `bits` on blocks that hold them. Repeated blocks and ones that do not exist are harmless.
    fn unclaim(&self, blocks: &[BlockId], bits: u32) {
        for word in blocks.iter().filter_map(|block| self.claims.get(block.0 as usize)) {
            word.fetch_and(!bits, Ordering::Release);
        }
    }

    /// Start of a (layer, block).
    ///
    /// # Panics
    /// If an index is out of range.
    fn chunk_ptr(&self, layer: u32, block: BlockId) -> *mut u8 {
        assert!(
            layer < self.layout.num_layers && block.0 < self.total_blocks,
            "indices are checked by the caller"
        );
        let index = layer as usize * self.total_blocks as usize + block.0 as usize;
        // SAFETY: the arena holds num_layers * total_blocks chunks and the assertion bounds `index` by that, so the
        // offset stays within one allocation.
        unsafe { self.base.add(index * self.chunk) }
    }

    /// # Safety
    /// Nobody writes the (layer, block) while the slice lives.
    unsafe fn chunk_ref(&self, layer: u32, block: BlockId) -> &[u8] {
        let start = self.chunk_ptr(layer, block);
        // SAFETY: `chunk` bytes from there belong to the arena, are initialised (zero pages at first), and the caller
        // keeps writers away.
        unsafe { std::slice::from_raw_parts(start, self.chunk) }
    }
}

/// The blocks of one running step: read and written by the thread that computes it. Ends with its drop.
#[derive(Debug)]
pub struct StepAccess<'a> {
    pool: &'a KvPool,
    /// What the step may have claimed.
    blocks: &'a [BlockId],
    /// Not `Send`: [`KvPool::gather`] relies on the writes of a step coming from the thread that claimed it.
    _this_thread: PhantomData<MutexGuard<'a, ()>>,
}

impl StepAccess<'_> {
    /// The pool.
    pub fn pool(&self) -> &KvPool {
        self.pool
    }

    /// Bytes of a (layer, block), canonical order.
    ///
    /// # Panics
    /// If the block is not claimed by this step or the layer does not exist: plans are checked before they are
    /// computed.
    pub fn block(&self, layer: u32, block: BlockId) -> &[u8] {
        self.assert_claimed(block, STEP | SHARED);
        // SAFETY: the step's claim keeps handoffs and other steps away; this step writes through `&mut self` only.
        unsafe { self.pool.chunk_ref(layer, block) }
    }

    /// Stores keys and values (none in a latent cache) of tokens that follow each other, \[token\]\[kv heads\]\[dim\] each, rounded
    /// to the pool's element type (see [`write_kv`]). `layer` is one of a block's layers, `blocks` are the sequence's in its group, `position` the first
    /// token's place in the sequence.
    ///
    /// # Panics
    /// As [`Self::block`], if a block is claimed for reading only, if a position is behind the table or if the lengths do
    /// not fit the layout.
    pub fn write_rows(
        &mut self,
        cpu: &Cpu,
        layer: u32,
        (blocks, position): (GroupBlocks<'_>, usize),
        (keys, values): (&[f32], &[f32]),
    ) {
        let shape = KvShape::from(self.pool.layout());
        let width = shape.num_kv_heads * shape.head_dim;
        assert!(
            values.len() == if shape.latent { 0 } else { keys.len() } && keys.len().is_multiple_of(width),
            "a key and a value of the layout for every token"
        );
        let (mut position, mut keys, mut values) = (position, keys, values);
        while !keys.is_empty() {
            let slot = position % shape.block_tokens;
            let count = (shape.block_tokens - slot).min(keys.len() / width);
            let (now, later) = keys.split_at(count * width);
            let (values_now, values_later) = values.split_at(if shape.latent { 0 } else { count * width });
            // What is no block of a table is in no pool: the claim is asserted.
            let block = blocks.get(position / shape.block_tokens).unwrap_or(BlockId::NONE);
            let bytes = self.block_mut(layer, block);
            let written = write_kv(cpu, &shape, slot, (now, values_now), bytes);
            assert!(written.is_ok(), "the slots are in the block and the lengths are right");
            (position, keys, values) = (position + count, later, values_later);
        }
    }

    /// Asks for the memory that [`Self::write_rows`] of one token will write, so that it need not wait for it.
    pub fn expect_write(&self, cpu: &Cpu, layer: u32, block: BlockId, slot: usize) {
        let shape = KvShape::from(self.pool.layout());
        prefetch_slot(cpu, &shape, slot, self.block(layer, block));
    }

    fn block_mut(&mut self, layer: u32, block: BlockId) -> &mut [u8] {
        self.assert_claimed(block, STEP);
        let start = self.pool.chunk_ptr(layer, block);
        // SAFETY: `chunk` initialised bytes from there belong to the arena. The step's claim keeps other threads away,
        // and `&mut self` means that no other reference handed out by this step is alive.
        unsafe { std::slice::from_raw_parts_mut(start, self.pool.chunk) }
    }

    /// Panics unless the step holds a claim of one of the kinds `bits`.
    fn assert_claimed(&self, block: BlockId, bits: u32) {
        let word = self
            .pool
            .claims
            .get(block.0 as usize)
            .map_or(0, |w| w.load(Ordering::Relaxed));
        assert!(word & bits != 0, "block {} belongs to the running step", block.0);
    }
}

impl Drop for StepAccess<'_> {
    fn drop(&mut self) {
        self.pool.unclaim(self.blocks, STEP | SHARED);
        *lock(&self.pool.step) = None;
    }
}

/// The protected values stay meaningful whatever their holder did before it panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
