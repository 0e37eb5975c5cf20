//! Writing into the blocks of the KV cache.

use half::{bf16, f16};
use protocol::kv::{KvDtype, KvLayout};
use protocol::window::Groups;

use super::super::{Cpu, KvShape, prefetch_slot, write_kv};
use super::{Numbers, cpus};

/// What the cache holds of a head's row, and what that is to be multiplied with.
pub(super) fn stored(dtype: KvDtype, row: &[f32]) -> (Vec<f32>, f32) {
    let each = |f: &dyn Fn(f32) -> f32| row.iter().map(|&x| f(x)).collect();
    match dtype {
        KvDtype::F16 => (each(&|x| f16::from_f32(x).to_f32()), 1.0),
        KvDtype::Bf16 => (each(&|x| bf16::from_f32(x).to_f32()), 1.0),
        KvDtype::F32 => (row.to_vec(), 1.0),
        KvDtype::Int8 => {
            let scale = row.iter().fold(0.0f32, |a, x| a.max(x.abs())) / 127.0;
            let factor = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            (each(&|x| (x * factor).clamp(-127.0, 127.0).round_ties_even()), scale)
        }
    }
}

fn element(dtype: KvDtype, x: f32) -> Vec<u8> {
    match dtype {
        KvDtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        KvDtype::Bf16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        KvDtype::F32 => x.to_le_bytes().to_vec(),
        KvDtype::Int8 => vec![(x as i8).cast_unsigned()],
    }
}

/// The canonical bytes of a block whose tokens have these keys and values, \[token\]\[kv head\]\[dim\], written down
/// plainly.
fn canonical(shape: &KvShape, keys: &[f32], values: &[f32]) -> Vec<u8> {
    let (tokens, dim) = (shape.block_tokens, shape.head_dim);
    let mut out = Vec::new();
    for head in 0..shape.num_kv_heads {
        let rows = |x: &[f32]| -> Vec<(Vec<f32>, f32)> {
            (0..tokens)
                .map(|t| stored(shape.dtype, &x[(t * shape.num_kv_heads + head) * dim..][..dim]))
                .collect()
        };
        let (k, v) = (rows(keys), rows(values));
        for (d, t) in (0..dim).flat_map(|d| (0..tokens).map(move |t| (d, t))) {
            out.extend(element(shape.dtype, k[t].0[d]));
        }
        let v = if shape.latent { Vec::new() } else { v };
        for x in v.iter().flat_map(|row| &row.0) {
            out.extend(element(shape.dtype, *x));
        }
        if shape.dtype == KvDtype::Int8 {
            out.extend(k.iter().chain(&v).flat_map(|row| row.1.to_le_bytes()));
        }
    }
    out
}

fn kv_shape(dtype: KvDtype, head_dim: usize, block_tokens: usize) -> KvShape {
    KvShape {
        num_kv_heads: 2,
        head_dim,
        block_tokens,
        dtype,
        latent: false,
    }
}

#[test]
fn tokens_are_written_in_canonical_order_however_they_come() {
    for (dtype, head_dim, tokens, latent) in KvDtype::ALL
        .into_iter()
        .flat_map(|t| [(t, 8, 3), (t, 16, 16), (t, 40, 37), (t, 64, 16), (t, 20, 1)])
        .flat_map(|(t, dim, tokens)| [(t, dim, tokens, false), (t, dim, tokens, true)])
    {
        let shape = KvShape {
            latent,
            ..kv_shape(dtype, head_dim, tokens)
        };
        let layout = KvLayout {
            num_layers: 1,
            num_kv_heads: 2,
            head_dim: head_dim as u32,
            block_tokens: tokens as u32,
            dtype,
            latent,
            groups: Groups::ONE,
        };
        assert_eq!(shape.block_bytes(), layout.layer_block_bytes());
        assert_eq!(KvShape::from(&layout), shape);
        let (mut numbers, row) = (Numbers::new(61), 2 * head_dim);
        let (mut k, v) = (numbers.units(tokens * row), numbers.units(tokens * row));
        // A row of nothing, and numbers of very different size.
        k[..head_dim].fill(0.0);
        k.iter_mut().rev().take(head_dim).for_each(|x| *x *= 1e4);
        let expected = canonical(&shape, &k, &v);
        for cpu in cpus() {
            for step in [1, 2, 16, 17, tokens] {
                let mut block = vec![0xaa; shape.block_bytes()];
                // From the last to the first.
                for slot in (0..tokens).step_by(step).rev() {
                    let part = slot * row..tokens.min(slot + step) * row;
                    prefetch_slot(&cpu, &shape, slot, &block);
                    let values = if latent { &[] } else { &v[part.clone()] };
                    write_kv(&cpu, &shape, slot, (&k[part], values), &mut block).unwrap();
                }
                let level = cpu.level().as_str();
                assert!(block == expected, "{shape:?}, {step} tokens at a time, {level}");
            }
        }
    }
}

#[test]
fn other_slots_are_left_alone() {
    for dtype in KvDtype::ALL {
        let shape = kv_shape(dtype, 24, 20);
        let (cpu, row) = (Cpu::new(1).unwrap(), 48);
        let mut numbers = Numbers::new(62);
        let (k, v) = (numbers.units(20 * row), numbers.units(20 * row));
        let mut block = vec![0; shape.block_bytes()];
        write_kv(&cpu, &shape, 0, (&k, &v), &mut block).unwrap();
        let before = block.clone();
        let new = numbers.units(18 * row);
        write_kv(&cpu, &shape, 1, (&new, &new), &mut block).unwrap();
        assert_ne!(block, before);
        write_kv(&cpu, &shape, 1, (&k[row..19 * row], &v[row..19 * row]), &mut block).unwrap();
        assert_eq!(block, before, "{dtype:?}");
    }
}

/// What is not a number must not come back as one.
#[test]
fn bytes_do_not_hide_infinities() {
    let shape = kv_shape(KvDtype::Int8, 16, 1);
    for cpu in cpus() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = vec![0.5; 32];
            row[3] = bad;
            let mut block = vec![0; shape.block_bytes()];
            write_kv(&cpu, &shape, 0, (&row, &[0.5; 32]), &mut block).unwrap();
            let scale = |at: usize| f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
            assert!(scale(32).is_nan(), "{bad}");
            // The value of this head, and the key of the other.
            assert_eq!([scale(36), scale(72)], [0.5 / 127.0; 2]);
        }
        // So small that its reciprocal is infinite.
        let mut block = vec![0xaa; shape.block_bytes()];
        write_kv(&cpu, &shape, 0, (&[1e-40; 32], &[0.0; 32]), &mut block).unwrap();
        assert!(block.iter().all(|&b| b == 0));
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let (cpu, shape) = (Cpu::new(1).unwrap(), kv_shape(KvDtype::F16, 8, 4));
    let write = |slot, k: usize, v: usize, block: usize| {
        let (k, v) = (vec![0.0; k], vec![0.0; v]);
        write_kv(&cpu, &shape, slot, (&k, &v), &mut vec![0; block]).map_err(|e| e.to_string())
    };
    assert_eq!(write(3, 16, 16, 256), Ok(()));
    assert_eq!(write(0, 64, 64, 256), Ok(()));
    assert_eq!(write(4, 0, 0, 256), Ok(()));
    let error = |r: Result<(), String>| r.unwrap_err();
    assert!(error(write(4, 16, 16, 256)).contains("slots of a KV block is 5, must be at most"));
    assert!(error(write(usize::MAX, 16, 16, 256)).contains("slots of a KV block"));
    assert!(error(write(0, 17, 16, 256)).contains("length of the tokens' keys is 17, must be 16"));
    assert!(error(write(0, 16, 17, 256)).contains("length of the tokens' values is 17, must be 16"));
    assert!(error(write(0, 16, 16, 255)).contains("is 255, must be 256"));
}
