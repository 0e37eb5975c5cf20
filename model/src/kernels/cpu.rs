//! Where kernels run: the instruction set, found once, and the threads.

use super::KernelError;

/// Instruction sets with kernels of their own, from least to most capable. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CpuLevel {
    /// Plain Rust.
    Portable,
    /// x86 AVX2 with FMA and F16C.
    Avx2,
    /// x86 AVX-512 F, BW and VL; integer products as with AVX2.
    Avx512,
    /// The same with VNNI for integer products.
    Avx512Vnni,
}

impl CpuLevel {
    /// All levels, from least to most capable.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Vnni];

    /// The best level of this CPU.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            if avx512 && is_x86_feature_detected!("avx512vnni") {
                return Self::Avx512Vnni;
            }
            if avx512 {
                return Self::Avx512;
            }
            if avx2 {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// The level's word in a model identity.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512-vnni",
        }
    }
}

/// A CPU as the kernels see it: a level that it really has, and how many threads may work on one call.
#[derive(Debug)]
pub struct Cpu {
    level: CpuLevel,
    threads: usize,
    /// `threads - 1` helpers; the caller's thread does its share.
    pool: Option<rayon::ThreadPool>,
}

impl Cpu {
    /// The best level of this CPU with `threads` threads (1: the caller's alone, no pool).
    ///
    /// # Errors
    /// If `threads` is zero or absurd, or the system gives no threads.
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        Self::with_level(CpuLevel::detect(), threads)
    }

    /// A given level, for tests and comparisons.
    ///
    /// # Errors
    /// As [`Cpu::new`], and if this CPU lacks the level.
    pub fn with_level(level: CpuLevel, threads: usize) -> Result<Self, KernelError> {
        let best = CpuLevel::detect();
        if level > best {
            return Err(KernelError::UnsupportedLevel { wanted: level, best });
        }
        let fail = |reason: String| KernelError::Threads { threads, reason };
        if threads == 0 || threads > KernelError::MAX_THREADS {
            return Err(fail("out of range".to_owned()));
        }
        let pool = if threads == 1 {
            None
        } else {
            let name = |i| format!("kernels-{i}");
            let builder = rayon::ThreadPoolBuilder::new()
                .num_threads(threads - 1)
                .thread_name(name);
            Some(builder.build().map_err(|e| fail(e.to_string()))?)
        };
        Ok(Self { level, threads, pool })
    }

    /// The instruction set in use. This CPU has it.
    pub fn level(&self) -> CpuLevel {
        self.level
    }

    /// Threads that share the work of one call.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `f` on every part, each on some thread; the first part runs on the caller's.
    pub(super) fn each<T: Send>(&self, parts: &mut [T], f: impl Fn(&mut T) + Sync) {
        match (&self.pool, parts) {
            (Some(pool), [first, rest @ ..]) if !rest.is_empty() => pool.in_place_scope(|scope| {
                let f = &f;
                for part in rest {
                    scope.spawn(move |_| f(part));
                }
                f(first);
            }),
            (_, parts) => parts.iter_mut().for_each(f),
        }
    }
}
