//! Promise 1 at the runner, with real weights.

mod support;

use std::path::Path;

use config::{Compute, KvDtypeConfig};
use support::one_answer::{alone, cases, handed_over, preempted, run};
use support::{Bench, Setup, smollm2, tiny_llama};

/// `variants`: (chunk, batch, block size, threads).
fn same_bits(path: &Path, setup: Setup, longest: usize, vocab: u32, variants: &[(usize, usize, usize, usize)]) {
    let outputs = 6;
    let cases = cases(16, longest, vocab);
    let expected = alone(&mut setup.bench(path), &cases, outputs);
    let distinct: std::collections::HashSet<_> = expected.iter().map(|b| b.tokens.clone()).collect();
    assert!(distinct.len() > 12, "the cases are too alike to show a mix-up");
    for &(chunk, batch, block_tokens, threads) in variants {
        let mut bench = Setup {
            block_tokens,
            threads,
            ..setup
        }
        .bench(path);
        let found = run(&mut bench, &cases, chunk, batch, outputs);
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(
                found, expected,
                "case {i}, chunk {chunk}, batch {batch}, block {block_tokens}, {threads} threads"
            );
        }
    }
    assert_eq!(
        preempted(&mut setup.bench(path), &cases, outputs),
        expected,
        "after preemption"
    );
    let (a, b) = (setup.load(path), setup.load(path));
    let total = a.pool.total_blocks();
    let mut prefill = Bench::new(a.runner, setup.block_tokens, total);
    let mut decode = Bench::new(b.runner, setup.block_tokens, total);
    let found = handed_over((&mut prefill, &a.pool), (&mut decode, &b.pool), &cases, outputs);
    assert_eq!(found, expected, "after the hand-over");
}

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
