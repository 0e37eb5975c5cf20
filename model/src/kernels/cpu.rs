//! Where kernels run: the instruction set, found once, and the threads.
#![allow(unsafe_code, reason = "threads work on different parts of one borrowed slice")]

#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::KernelError;
use super::shared::SharedMut;
use super::team::Team;

/// Instruction sets with kernels of their own, of an architecture from least to most capable. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CpuLevel {
    /// Plain Rust.
    Portable,
    /// aarch64 NEON with the dot product instruction for integer products.
    NeonDotprod,
    /// x86 AVX2 with FMA and F16C.
    Avx2,
    /// The same with AVX-VNNI for integer products.
    AvxVnni,
    /// x86 AVX-512 F, BW and VL; integer products as with AVX2.
    Avx512,
    /// The same with VNNI for integer products.
    Avx512Vnni,
}

impl CpuLevel {
    /// All levels, of an architecture from least to most capable.
    pub const ALL: [Self; 6] = [
        Self::Portable,
        Self::NeonDotprod,
        Self::Avx2,
        Self::AvxVnni,
        Self::Avx512,
        Self::Avx512Vnni,
    ];

    /// The best level of this CPU.
    pub fn detect() -> Self {
        let found = Self::ALL.into_iter().rev().find(|level| level.is_supported());
        found.unwrap_or(Self::Portable)
    }

    /// Whether this CPU has the level.
    pub fn is_supported(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            match self {
                Self::Portable => true,
                Self::NeonDotprod => false,
                Self::Avx2 => avx2,
                Self::AvxVnni => avx2 && is_x86_feature_detected!("avxvnni"),
                Self::Avx512 => avx512,
                Self::Avx512Vnni => avx512 && is_x86_feature_detected!("avx512vnni"),
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            let neon = is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod");
            match self {
                Self::Portable => true,
                Self::NeonDotprod => neon,
                Self::Avx2 | Self::AvxVnni | Self::Avx512 | Self::Avx512Vnni => false,
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            self == Self::Portable
        }
    }

    /// The level's word in a model identity.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::NeonDotprod => "neon-dotprod",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avx-vnni",
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
    team: Option<Team>,
}

impl Cpu {
    /// The best level of this CPU with `threads` threads (1: the caller's alone).
    ///
    /// # Errors
    /// If `threads` is zero or absurd, or the system gives no threads.
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        Self::with_level(CpuLevel::detect(), threads)
    }

    /// The same with helper threads pinned: thread i of the call runs on `cores[i]`. The caller's own thread is number 0,
    /// and pinning it is the caller's affair ([`super::pin_current_thread`]). No cores: nothing is pinned.
    ///
    /// # Errors
    /// As [`Cpu::new`], and if the number of cores is neither 0 nor that of the threads, or a core cannot be used.
    pub fn pinned(threads: usize, cores: &[usize]) -> Result<Self, KernelError> {
        if !cores.is_empty() {
            KernelError::check("number of cores to pin compute threads to", threads, cores.len())?;
        }
        Self::start(CpuLevel::detect(), threads, cores)
    }

    /// A given level, for tests and comparisons.
    ///
    /// # Errors
    /// As [`Cpu::new`], and if this CPU lacks the level.
    pub fn with_level(level: CpuLevel, threads: usize) -> Result<Self, KernelError> {
        Self::start(level, threads, &[])
    }

    fn start(level: CpuLevel, threads: usize, cores: &[usize]) -> Result<Self, KernelError> {
        if !level.is_supported() {
            let best = CpuLevel::detect();
            return Err(KernelError::UnsupportedLevel { wanted: level, best });
        }
        if threads == 0 || threads > KernelError::MAX_THREADS {
            let reason = "out of range".to_owned();
            return Err(KernelError::Threads { threads, reason });
        }
        let helpers = cores.get(1..).unwrap_or(&[]);
        let team = (threads > 1).then(|| Team::new(threads - 1, helpers)).transpose()?;
        Ok(Self { level, threads, team })
    }

    /// Plain Rust on the caller's thread: what every machine has.
    pub fn portable() -> Self {
        Self {
            level: CpuLevel::Portable,
            threads: 1,
            team: None,
        }
    }

    /// The instruction set in use. This CPU has it.
    pub fn level(&self) -> CpuLevel {
        self.level
    }

    /// Threads that share the work of one call.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `f` on every part; part i runs on thread i, the first on the caller's. There must not be more parts than
    /// threads.
    pub(super) fn each<T: Send>(&self, parts: &mut [T], f: impl Fn(&mut T) + Sync) {
        let Some(team) = self.team.as_ref().filter(|_| parts.len() > 1) else {
            return parts.iter_mut().for_each(f);
        };
        assert!(parts.len() <= self.threads, "a part for every thread at most");
        let (count, parts) = (parts.len(), SharedMut::new(parts));
        team.run(&|i| {
            if i < count {
                // SAFETY: each thread of a call has another number.
                f(unsafe { &mut parts.part(i..i + 1)[0] });
            }
        });
    }

    /// Cuts 0..count into even ranges, one a thread, and calls `f` with the thread's number and its range unless that is
    /// empty.
    pub(super) fn ranges(&self, count: usize, f: impl Fn(usize, Range<usize>) + Sync) {
        match &self.team {
            Some(team) if count > 1 => team.run(&|i| {
                let (start, end) = (count * i / self.threads, count * (i + 1) / self.threads);
                if start < end {
                    f(i, start..end);
                }
            }),
            _ if count > 0 => f(0, 0..count),
            _ => {}
        }
    }

    /// Calls `f` with each item, its index and the state of the thread that works on it; items are handed out as threads
    /// come for them.
    ///
    /// # Panics
    /// If there are fewer states than threads.
    pub(crate) fn each_item<T: Send, S: Send>(
        &self,
        items: &mut [T],
        states: &mut [S],
        f: impl Fn(usize, &mut T, &mut S) + Sync,
    ) {
        assert!(states.len() >= self.threads, "a state for every thread");
        let Some(team) = self.team.as_ref().filter(|_| items.len() > 1) else {
            for (i, item) in items.iter_mut().enumerate() {
                f(i, item, &mut states[0]);
            }
            return;
        };
        let (next, count) = (AtomicUsize::new(0), items.len());
        let (items, states) = (SharedMut::new(items), SharedMut::new(states));
        team.run(&|thread| {
            // SAFETY: each thread of a call has another number.
            let state = unsafe { &mut states.part(thread..thread + 1)[0] };
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= count {
                    break;
                }
                // SAFETY: the counter gives each index to one thread.
                f(i, unsafe { &mut items.part(i..i + 1)[0] }, state);
            }
        });
    }

    /// Hands out the indices 0..count to the threads as they come, and calls `f` with each.
    pub(super) fn share(&self, count: usize, f: impl Fn(usize) + Sync) {
        match &self.team {
            Some(team) if count > 1 => {
                let next = AtomicUsize::new(0);
                team.run(&|_| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= count {
                            break;
                        }
                        f(index);
                    }
                });
            }
            _ => (0..count).for_each(f),
        }
    }
}
