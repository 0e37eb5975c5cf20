//! The most that this CPU can do: loops of one arithmetic instruction that wait for nothing, and plain reads of memory.
//!
//! Nothing here reads a clock: whoever measures times the calls. Where the CPU (or this build) lacks an instruction the
//! answer is `None`: not measured.
#![allow(
    unsafe_code,
    reason = "calling functions compiled for instructions that were detected"
)]

#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;
use std::hint::black_box;

use memmap2::MmapMut;

/// Independent chains of sums: more than latency times instructions a cycle on any CPU known.
const CHAINS: usize = 16;
/// 64-bit words read in one turn of the loop: 8 cache lines.
const WORDS: usize = 64;

/// Kinds of multiply-add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// 8-bit products summed in 32 bits: `vpdpbusd` with AVX-512 VNNI, else AVX2's three instructions; `sdot` of
    /// aarch64.
    Int8,
    /// bf16 products summed in f32: `vdpbf16ps`. Not measured on aarch64.
    Bf16,
    /// f32 fused multiply-add.
    F32,
}

impl Arithmetic {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Int8, Self::Bf16, Self::F32];

    /// Its name in tables and files.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// Runs `turns` turns of the fastest loop of this kind on the calling thread. `None` if there is none here.
    pub fn run(self, turns: u32) -> Option<Work> {
        run_arithmetic(self, turns)
    }
}

/// What a loop did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Multiplications and additions.
    pub operations: f64,
    /// Sum over all lanes. Every factor is 1 and chain i starts at i in every lane, so it is known beforehand.
    pub sum: f64,
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn run_arithmetic(_kind: Arithmetic, _turns: u32) -> Option<Work> {
    None
}

#[cfg(target_arch = "x86_64")]
fn run_arithmetic(kind: Arithmetic, turns: u32) -> Option<Work> {
    let avx512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let (sum, each) = match kind {
        Arithmetic::Int8 if avx512 && is_x86_feature_detected!("avx512vnni") => {
            // SAFETY: the features were detected.
            (unsafe { loops::int8_avx512(turns) }, 128.0)
        }
        // SAFETY: as above.
        Arithmetic::Int8 if avx2 => (unsafe { loops::int8_avx2(turns) }, 64.0),
        Arithmetic::Bf16 if avx512 && is_x86_feature_detected!("avx512bf16") => {
            // SAFETY: as above.
            (unsafe { loops::bf16_avx512(turns) }, 64.0)
        }
        // SAFETY: as above.
        Arithmetic::F32 if avx512 => (unsafe { loops::f32_avx512(turns) }, 32.0),
        // SAFETY: as above.
        Arithmetic::F32 if avx2 => (unsafe { loops::f32_avx2(turns) }, 16.0),
        _ => return None,
    };
    let operations = f64::from(turns) * CHAINS as f64 * each;
    Some(Work { operations, sum })
}

#[cfg(target_arch = "aarch64")]
fn run_arithmetic(kind: Arithmetic, turns: u32) -> Option<Work> {
    let (sum, each) = match kind {
        Arithmetic::Int8 if is_aarch64_feature_detected!("dotprod") => {
            // SAFETY: the feature was detected.
            (unsafe { loops::int8_neon(turns) }, 32.0)
        }
        // SAFETY: as above.
        Arithmetic::F32 if is_aarch64_feature_detected!("neon") => (unsafe { loops::f32_neon(turns) }, 8.0),
        _ => return None,
    };
    let operations = f64::from(turns) * CHAINS as f64 * each;
    Some(Work { operations, sum })
}

#[cfg(target_arch = "aarch64")]
mod loops {
    use std::arch::aarch64::*;

    use super::super::aarch64::dot;
    use super::{CHAINS, black_box};

    /// The chains' starting values, which the compiler must not know: equal chains would be merged.
    fn starts() -> [i32; CHAINS] {
        black_box(std::array::from_fn(|i| i as i32))
    }

    #[target_feature(enable = "neon,dotprod")]
    pub(super) fn int8_neon(turns: u32) -> f64 {
        let ones = vdupq_n_s8(black_box(1));
        let mut chains = starts().map(|start| vdupq_n_s32(start));
        for _ in 0..turns {
            for chain in &mut chains {
                *chain = dot(*chain, ones, ones);
            }
        }
        chains.map(|c| f64::from(vaddvq_s32(c))).iter().sum()
    }

    #[target_feature(enable = "neon")]
    pub(super) fn f32_neon(turns: u32) -> f64 {
        let ones = vdupq_n_f32(black_box(1.0));
        let mut chains = starts().map(|start| vdupq_n_f32(start as f32));
        for _ in 0..turns {
            for chain in &mut chains {
                *chain = vfmaq_f32(*chain, ones, ones);
            }
        }
        chains.map(|c| f64::from(vaddvq_f32(c))).iter().sum()
    }
}

#[cfg(target_arch = "x86_64")]
mod loops {
    use std::arch::x86_64::*;

    use super::{CHAINS, black_box};

    /// The chains' starting values, which the compiler must not know: equal chains would be merged.
    fn starts() -> [i32; CHAINS] {
        black_box(std::array::from_fn(|i| i as i32))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(super) fn int8_avx512(turns: u32) -> f64 {
        let ones = _mm512_set1_epi8(black_box(1));
        let mut chains = starts().map(|start| _mm512_set1_epi32(start));
        for _ in 0..turns {
            for chain in &mut chains {
                *chain = _mm512_dpbusd_epi32(*chain, ones, ones);
            }
        }
        chains.map(|c| f64::from(_mm512_reduce_add_epi32(c))).iter().sum()
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn bf16_avx512(turns: u32) -> f64 {
        let one = _mm512_set1_ps(black_box(1.0));
        let ones = _mm512_cvtne2ps_pbh(one, one);
        let mut chains = starts().map(|start| _mm512_set1_ps(start as f32));
        for _ in 0..turns {
            for chain in &mut chains {
                *chain = _mm512_dpbf16_ps(*chain, ones, ones);
            }
        }
        chains.map(|c| f64::from(_mm512_reduce_add_ps(c))).iter().sum()
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn f32_avx512(turns: u32) -> f64 {
        let ones = _mm512_set1_ps(black_box(1.0));
        let mut chains = starts().map(|start| _mm512_set1_ps(start as f32));
        for _ in 0..turns {
            for chain in &mut chains {
                *chain = _mm512_fmadd_ps(ones, ones, *chain);
            }
        }
        chains.map(|c| f64::from(_mm512_reduce_add_ps(c))).iter().sum()
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn int8_avx2(turns: u32) -> f64 {
        let (bytes, pairs) = (_mm256_set1_epi8(black_box(1)), _mm256_set1_epi16(black_box(1)));
        let mut chains = starts().map(|start| _mm256_set1_epi32(start));
        for _ in 0..turns {
            for chain in &mut chains {
                // As a kernel's weights: not the same in every turn, or the products would move out of the loop.
                let products = _mm256_maddubs_epi16(black_box(bytes), bytes);
                *chain = _mm256_add_epi32(*chain, _mm256_madd_epi16(products, pairs));
            }
        }
        let mut sum = 0.0;
        for chain in chains {
            let mut lanes = [0_i32; 8];
            // SAFETY: the array has the eight lanes.
            unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), chain) };
            sum += lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>();
        }
        sum
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn f32_avx2(turns: u32) -> f64 {
        let ones = _mm256_set1_ps(black_box(1.0));
        let mut chains = starts().map(|start| _mm256_set1_ps(start as f32));
        for _ in 0..turns {
            for chain in &mut chains {
                *chain = _mm256_fmadd_ps(ones, ones, *chain);
            }
        }
        let mut sum = 0.0;
        for chain in chains {
            let mut lanes = [0_f32; 8];
            // SAFETY: the array has the eight lanes.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), chain) };
            sum += lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>();
        }
        sum
    }

    /// Sum of 64-bit words, eight cache lines a turn.
    #[target_feature(enable = "avx512f")]
    pub(super) fn read_avx512(words: &[[u64; super::WORDS]]) -> u64 {
        let mut sums = [_mm512_setzero_si512(); 8];
        for turn in words {
            for (sum, line) in sums.iter_mut().zip(turn.as_chunks::<8>().0) {
                // SAFETY: a line has the 64 bytes that are loaded.
                *sum = _mm512_add_epi64(*sum, unsafe { _mm512_loadu_si512(line.as_ptr().cast()) });
            }
        }
        let total = sums
            .into_iter()
            .fold(_mm512_setzero_si512(), |a, b| _mm512_add_epi64(a, b));
        _mm512_reduce_add_epi64(total) as u64
    }

    /// The same with AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) fn read_avx2(words: &[[u64; super::WORDS]]) -> u64 {
        let mut sums = [_mm256_setzero_si256(); 8];
        for turn in words {
            for (i, half) in turn.as_chunks::<4>().0.iter().enumerate() {
                // SAFETY: half a line has the 32 bytes that are loaded.
                let half = unsafe { _mm256_loadu_si256(half.as_ptr().cast()) };
                sums[i % 8] = _mm256_add_epi64(sums[i % 8], half);
            }
        }
        let mut total = 0_u64;
        for sum in sums {
            let mut lanes = [0_u64; 4];
            // SAFETY: the array has the four lanes.
            unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), sum) };
            total = lanes.iter().fold(total, |a, b| a.wrapping_add(*b));
        }
        total
    }
}

/// Memory to be read, on huge pages where there are some.
pub struct ReadMemory {
    bytes: MmapMut,
}

impl ReadMemory {
    /// Takes at least `bytes` bytes from the system and writes all of them.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let mut map = MmapMut::map_anon(bytes.max(1).next_multiple_of(8 * WORDS))?;
        #[cfg(target_os = "linux")]
        if let Err(error) = map.advise(memmap2::Advice::HugePage) {
            tracing::debug!(%error, "no huge pages");
        }
        for (i, word) in bytemuck::cast_slice_mut::<u8, u64>(&mut map).iter_mut().enumerate() {
            *word = i as u64;
        }
        Ok(Self { bytes: map })
    }

    /// Bytes that a call of [`Self::read`] reads.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// False: there is always something to read.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Reads all of it once on the calling thread, from front to back; the wrapping sum of its 64-bit words, which are
    /// 0, 1, 2, ...
    pub fn read(&self) -> u64 {
        let (turns, _) = bytemuck::cast_slice::<u8, u64>(&self.bytes).as_chunks::<WORDS>();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the feature was detected.
                return unsafe { loops::read_avx512(turns) };
            }
            if is_x86_feature_detected!("avx2") {
                // SAFETY: as above.
                return unsafe { loops::read_avx2(turns) };
            }
        }
        plain_sum(turns)
    }
}

fn plain_sum(turns: &[[u64; WORDS]]) -> u64 {
    turns.as_flattened().iter().fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a loop's lanes add up to, by its definition.
    fn expected(turns: u32, lanes: usize, products: u32) -> f64 {
        (0..CHAINS)
            .map(|start| lanes as f64 * (start as f64 + f64::from(turns) * f64::from(products)))
            .sum()
    }

    #[test]
    fn every_loop_does_the_work_it_reports() {
        for kind in Arithmetic::ALL {
            let Some(work) = kind.run(1000) else { continue };
            let products = match kind {
                Arithmetic::Int8 => 4,
                Arithmetic::Bf16 => 2,
                Arithmetic::F32 => 1,
            };
            let lanes = work.operations / (2.0 * 1000.0 * CHAINS as f64 * f64::from(products));
            assert_eq!(work.sum, expected(1000, lanes as usize, products), "{kind:?}");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_loops_of_older_cpus_too() {
        if !is_x86_feature_detected!("avx2") || !is_x86_feature_detected!("fma") {
            return;
        }
        // SAFETY: the features were detected.
        let (int8, f32s) = unsafe { (loops::int8_avx2(1000), loops::f32_avx2(1000)) };
        assert_eq!(int8, expected(1000, 8, 4));
        assert_eq!(f32s, expected(1000, 8, 1));
    }

    #[test]
    fn reading_reads_everything() {
        let memory = ReadMemory::new(1_000_000).unwrap();
        assert!(memory.len() >= 1_000_000 && !memory.is_empty());
        let words = (memory.len() / 8) as u64;
        let expected = words * (words - 1) / 2;
        assert_eq!(memory.read(), expected);
        let (turns, _) = bytemuck::cast_slice::<u8, u64>(&memory.bytes).as_chunks::<WORDS>();
        assert_eq!(plain_sum(turns), expected);
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was detected.
            assert_eq!(unsafe { loops::read_avx2(turns) }, expected);
        }
    }
}
