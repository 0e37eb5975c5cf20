//! Resident memory of the process by part: said at start, and kept up to date as metrics.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use model::ModelMemory;
use model::kv_pool::KvPool;
use runtime::shutdown::Shutdown;

use crate::stats;

/// How often the metrics are refreshed.
const REFRESH: Duration = Duration::from_secs(60);
/// Type of the entry of `/proc/self/auxv` that holds the size of a page.
const AT_PAGESZ: u64 = 6;
/// An entry of `/proc/self/pagemap` whose page is in memory.
const PRESENT: u64 = 1 << 63;

/// What is resident, in bytes. The parts add up to `resident` unless some of them have been swapped out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryReport {
    /// All resident memory of the process.
    pub resident: u64,
    /// The part of it on huge pages.
    pub huge_pages: u64,
    /// Packed matrices.
    pub weights: u64,
    /// The embedding matrix beside them.
    pub embedding: u64,
    /// Norms, biases, rotary angles.
    pub tables: u64,
    /// Pages of the KV pool that have been used.
    pub kv_pool: u64,
    /// Everything else: program, activations, network buffers.
    pub other: u64,
    /// Address space of the KV pool: what it takes once all of it has been used.
    pub kv_pool_size: u64,
}

impl MemoryReport {
    /// What the process holds now; `None` where the system does not say.
    pub fn read(model: &ModelMemory, pool: &KvPool) -> Option<Self> {
        let (resident, huge_pages) = rollup(&std::fs::read_to_string("/proc/self/smaps_rollup").ok()?)?;
        let kv_pool = resident_of(pool.address_range())?;
        let known = model.weights + model.embedding + model.tables + kv_pool;
        Some(Self {
            resident,
            huge_pages,
            weights: model.weights,
            embedding: model.embedding,
            tables: model.tables,
            kv_pool,
            other: resident.saturating_sub(known),
            kv_pool_size: model.kv_pool,
        })
    }
}

/// Resident bytes and those on huge pages, out of `/proc/self/smaps_rollup`.
fn rollup(text: &str) -> Option<(u64, u64)> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
        Some(kib << 10)
    };
    let huge = ["AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"];
    Some((field("Rss:")?, huge.iter().filter_map(|name| field(name)).sum()))
}

/// Bytes of an address range that are in memory.
fn resident_of(range: Range<usize>) -> Option<u64> {
    let page = page_size()?;
    let pages = range.start / page..range.end.div_ceil(page);
    let mut file = File::open("/proc/self/pagemap").ok()?;
    file.seek(SeekFrom::Start(8 * pages.start as u64)).ok()?;
    let mut entries = BufReader::with_capacity(1 << 16, file).take(8 * pages.len() as u64);
    let (mut entry, mut present) = ([0; 8], 0);
    for _ in pages {
        entries.read_exact(&mut entry).ok()?;
        present += u64::from(u64::from_ne_bytes(entry) & PRESENT != 0);
    }
    Some(present * page as u64)
}

/// Bytes of a page, from the pairs of words that the kernel gives a new process.
fn page_size() -> Option<usize> {
    let words = std::fs::read("/proc/self/auxv").ok()?;
    let pairs = words.as_chunks::<{ 2 * size_of::<usize>() }>().0;
    let mut pairs = pairs.iter().map(|pair| {
        let (kind, value) = pair.split_at(size_of::<usize>());
        let word = |bytes: &[u8]| bytes.try_into().map(usize::from_ne_bytes).unwrap_or(0);
        (word(kind), word(value))
    });
    let (_, size) = pairs.find(|(kind, _)| *kind as u64 == AT_PAGESZ)?;
    size.is_power_of_two().then_some(size)
}

/// Logs what is resident now and publishes it, then again and again until the process stops.
pub(crate) fn watch(model: ModelMemory, pool: Arc<KvPool>, shutdown: Shutdown) {
    let Some(report) = MemoryReport::read(&model, &pool) else {
        tracing::info!(
            weights = model.weights,
            kv_pool_size = model.kv_pool,
            "memory in bytes; this system does not say what is resident"
        );
        return;
    };
    log(&report);
    stats::memory(&report);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = shutdown.wait() => return,
                () = tokio::time::sleep(REFRESH) => {}
            }
            let pool = Arc::clone(&pool);
            // Page tables of large pools take a while to read.
            let read = tokio::task::spawn_blocking(move || MemoryReport::read(&model, &pool)).await;
            if let Ok(Some(report)) = read {
                stats::memory(&report);
            }
        }
    });
}

fn log(report: &MemoryReport) {
    let mib = |bytes: u64| bytes >> 20;
    tracing::info!(
        resident = mib(report.resident),
        weights = mib(report.weights),
        embedding = mib(report.embedding),
        tables = mib(report.tables),
        kv_pool = mib(report.kv_pool),
        other = mib(report.other),
        huge_pages = mib(report.huge_pages),
        kv_pool_size = mib(report.kv_pool_size),
        "resident memory in MiB"
    );
}

#[cfg(test)]
mod tests {
    use engine::plan::BlockId;
    use protocol::kv::{KvDtype, KvLayout};
    use protocol::window::Groups;

    use super::*;

    #[test]
    fn the_kernels_words() {
        let text = "55d0-7ffe ---p 00000000 00:00 0 [rollup]\nRss:  1024 kB\nPss:  9 kB\nAnonHugePages:   512 kB\n\
                    FilePmdMapped:  256 kB\n";
        assert_eq!(rollup(text), Some((1 << 20, 768 << 10)));
        assert_eq!(rollup("Pss: 9 kB\n"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_pool_becomes_resident_as_it_is_used() {
        let layout = KvLayout {
            num_layers: 1,
            num_kv_heads: 8,
            head_dim: 64,
            block_tokens: 16,
            dtype: KvDtype::F32,
            latent: false,
            groups: Groups::ONE,
        };
        let pool = Arc::new(KvPool::new(layout, 1024).unwrap());
        let size = (1024 * layout.block_bytes()) as u64;
        assert_eq!(resident_of(pool.address_range()), Some(0));
        let writer = pool.writer((0..1024).map(BlockId).collect()).unwrap();
        writer.write(0, 1, 0, 1024, &vec![1; size as usize]).unwrap();
        let model = ModelMemory {
            weights: 3,
            kv_pool: size,
            ..ModelMemory::default()
        };
        let report = MemoryReport::read(&model, &pool).unwrap();
        assert_eq!(report.kv_pool, size);
        assert_eq!(
            report.resident,
            report.weights + report.kv_pool + report.other,
            "{report:?}"
        );
        assert!(report.huge_pages <= report.resident, "{report:?}");
    }
}
