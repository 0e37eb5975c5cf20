//! Promise 1 at the runner, with real weights.

mod support;

use config::{Compute, KvDtypeConfig};
use support::one_answer::same_bits;
use support::{Setup, smollm2, tiny_llama};

const WHOLE: usize = usize::MAX;

#[test]
fn tiny_llama_quantised() {
    let mut variants = Vec::new();
    for chunk in [1, 16, 64, WHOLE] {
        for batch in [1, 2, 5, 16] {
            for (block, threads) in [(16, 1), (32, 2), (16, 2), (32, 1)] {
                variants.push((chunk, batch, block, threads));
            }
        }
    }
    same_bits(&tiny_llama(), Setup::quantised(), 200, 512, &variants);
}

#[test]
fn tiny_llama_precise() {
    let setup = Setup {
        compute: Compute::Precise,
        ..Setup::quantised()
    };
    let variants = [
        (1, 16, 32, 2),
        (16, 3, 16, 1),
        (64, 9, 8, 2),
        (WHOLE, 16, 16, 1),
        (7, 1, 16, 2),
    ];
    same_bits(&tiny_llama(), setup, 200, 512, &variants);
}

#[test]
fn tiny_llama_in_float() {
    let variants = [(1, 16, 32, 2), (16, 3, 16, 1), (64, 9, 8, 2), (WHOLE, 16, 1, 1)];
    same_bits(&tiny_llama(), Setup::float(), 200, 512, &variants);
}

#[test]
fn tiny_llama_with_other_caches() {
    let variants = [
        (1, 16, 32, 2),
        (16, 3, 16, 1),
        (64, 9, 8, 2),
        (WHOLE, 16, 24, 1),
        (2, 5, 1, 2),
    ];
    for kv_dtype in [KvDtypeConfig::Bf16, KvDtypeConfig::Int8] {
        let setup = Setup {
            kv_dtype,
            ..Setup::quantised()
        };
        same_bits(&tiny_llama(), setup, 200, 512, &variants);
    }
}

#[test]
fn smollm2_quantised() {
    let variants = [
        (1, 16, 16, 1),
        (16, 1, 32, 1),
        (16, 7, 16, 2),
        (64, 16, 32, 2),
        (WHOLE, 16, 16, 1),
        (WHOLE, 3, 32, 2),
    ];
    same_bits(&smollm2(), Setup::quantised(), 90, 49_152, &variants);
}
