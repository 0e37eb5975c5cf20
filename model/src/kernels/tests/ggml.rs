//! Reading ggml's types.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

use super::super::{Cpu, GgmlType, Linear, LinearMode, Scratch, dequantise, embedding_row};
use super::Numbers;

/// All types that candle can write, with candle's word for each.
const TYPES: [(u32, GgmlType, GgmlDType); 14] = [
    (0, GgmlType::F32, GgmlDType::F32),
    (1, GgmlType::F16, GgmlDType::F16),
    (30, GgmlType::Bf16, GgmlDType::BF16),
    (2, GgmlType::Q4_0, GgmlDType::Q4_0),
    (3, GgmlType::Q4_1, GgmlDType::Q4_1),
    (6, GgmlType::Q5_0, GgmlDType::Q5_0),
    (7, GgmlType::Q5_1, GgmlDType::Q5_1),
    (8, GgmlType::Q8_0, GgmlDType::Q8_0),
    (10, GgmlType::Q2K, GgmlDType::Q2K),
    (11, GgmlType::Q3K, GgmlDType::Q3K),
    (12, GgmlType::Q4K, GgmlDType::Q4K),
    (13, GgmlType::Q5K, GgmlDType::Q5K),
    (14, GgmlType::Q6K, GgmlDType::Q6K),
    (15, GgmlType::Q8K, GgmlDType::Q8K),
];

/// Random values quantised by candle: its bytes, and what it turns them back into.
fn quantised(dtype: GgmlDType, n: usize, k: usize) -> (Vec<u8>, Vec<f32>) {
    let values = Numbers::new(21).units(n * k);
    let tensor = Tensor::from_vec(values, (n, k), &Device::Cpu).unwrap();
    let tensor = QTensor::quantize(&tensor, dtype).unwrap();
    let values = tensor
        .dequantize(&Device::Cpu)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap();
    (tensor.data().unwrap().into_owned(), values)
}

#[test]
fn all_types_are_read_as_candle_reads_them() {
    for (id, ggml_type, dtype) in TYPES {
        assert_eq!(GgmlType::from_id(id).unwrap(), ggml_type);
        let (n, k) = (3, 512);
        let (bytes, expected) = quantised(dtype, n, k);
        // At an odd address, as a slice of a file may be.
        let mut shifted = vec![0u8];
        shifted.extend(&bytes);
        let mut found = vec![0.0; n * k];
        dequantise(ggml_type, &shifted[1..], &mut found).unwrap();
        assert_eq!(found, expected, "{ggml_type:?}");
        for row in 0..n {
            let mut found = vec![0.0; k];
            embedding_row(ggml_type, &shifted[1..], row, &mut found).unwrap();
            assert_eq!(found, expected[row * k..][..k], "{ggml_type:?}");
        }
    }
}

#[test]
fn any_type_makes_a_matrix() {
    let (n, k) = (19, 256);
    let cpu = Cpu::new(1).unwrap();
    let x = Numbers::new(22).units(k);
    for (_, ggml_type, dtype) in TYPES {
        let (bytes, values) = quantised(dtype, n, k);
        let run = |linear: Linear| {
            let mut y = vec![0.0; n];
            linear.forward(&cpu, &x, 1, &mut y, &mut Scratch::default()).unwrap();
            y
        };
        let expected = run(Linear::from_f32(n, k, &values).unwrap());
        assert_eq!(
            run(Linear::from_ggml(ggml_type, n, k, &bytes, LinearMode::Float32).unwrap()),
            expected
        );
        let found = run(Linear::from_ggml(ggml_type, n, k, &bytes, LinearMode::Quantised).unwrap());
        assert_eq!(found == expected, !ggml_type.has_int8_kernel(), "{ggml_type:?}");
    }
}

#[test]
fn bad_types_rows_and_sizes_are_named() {
    assert!(
        GgmlType::from_id(99)
            .unwrap_err()
            .to_string()
            .contains("ggml type 99 is not known")
    );
    let message = |row, out: usize, bytes: usize| {
        let mut out = vec![0.0; out];
        embedding_row(GgmlType::Q8_0, &vec![0; bytes], row, &mut out).map_err(|e| e.to_string())
    };
    assert_eq!(message(1, 32, 68), Ok(()));
    assert!(message(2, 32, 68).unwrap_err().contains("is 68, must be 102"));
    assert!(message(usize::MAX, 32, 68).unwrap_err().contains("is 68"));
    assert!(
        message(0, 33, 68)
            .unwrap_err()
            .contains("a row of 33 values cannot be Q8_0")
    );
}
