//! Tests of the GGUF reader: right files are read in full, wrong ones are refused by name, no file makes it panic.

use proptest::prelude::*;

use super::testing::{Builder, Put};
use super::{GgmlType, GgufProblem, Header, Value};

/// A file with every part a header can have.
fn sample() -> Builder {
    let nested = {
        // An array of two arrays of u8: [[1, 2], [3]].
        let mut bytes = Vec::new();
        bytes.extend(9_u32.to_le_bytes());
        bytes.extend(2_u64.to_le_bytes());
        for part in [&[1_u8, 2][..], &[3]] {
            bytes.extend(0_u32.to_le_bytes());
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(part);
        }
        bytes
    };
    Builder::new()
        .put("general.architecture", "llama")
        .put("a.u8", Put::Raw(0, vec![200]))
        .put("a.i8", Put::Raw(1, (-3_i8).to_le_bytes().into()))
        .put("a.u16", Put::Raw(2, 60000_u16.to_le_bytes().into()))
        .put("a.i16", Put::Raw(3, (-300_i16).to_le_bytes().into()))
        .put("a.u32", 4_000_000_000)
        .put("a.i32", Put::Raw(5, (-5_i32).to_le_bytes().into()))
        .put("a.f32", Put::Raw(6, 1.5_f32.to_le_bytes().into()))
        .put("a.bool", true)
        .put("a.u64", Put::Raw(10, u64::MAX.to_le_bytes().into()))
        .put("a.i64", Put::Raw(11, i64::MIN.to_le_bytes().into()))
        .put("a.f64", Put::Raw(12, 0.1_f64.to_le_bytes().into()))
        .put("a.strings", Put::Strs(vec!["x".into(), String::new(), "Ġthe".into()]))
        .put("a.numbers", Put::U32s(vec![7, 8, 9]))
        .put("a.nested", Put::Raw(9, nested))
        .tensor("w", &[64, 3], GgmlType::Q4_1, 0)
        .tensor("norm", &[8], GgmlType::F32, 128)
        .data(160)
}

fn parse(builder: &Builder) -> Result<Header, GgufProblem> {
    Header::parse(&builder.build())
}

fn refuse(builder: &Builder) -> GgufProblem {
    parse(builder).expect_err("this file is wrong")
}

#[test]
fn every_kind_of_value_and_both_versions_are_read() {
    for version in [2, 3] {
        let mut builder = sample();
        builder.version = version;
        let bytes = builder.build();
        let header = Header::parse(&bytes).unwrap();
        let get = |key: &str| header.get(&bytes, key).unwrap();
        assert_eq!(header.version(), version);
        assert_eq!(header.keys().len(), 15);
        assert_eq!(header.keys()[1], "a.u8");
        assert_eq!(get("general.architecture").as_str(), Some("llama"));
        assert_eq!(get("a.u8"), Value::U8(200));
        assert_eq!(get("a.i8"), Value::I8(-3));
        assert_eq!(get("a.u16").as_u64(), Some(60000));
        assert_eq!(get("a.i16").as_u64(), None, "negative");
        assert_eq!(get("a.u32").as_u64(), Some(4_000_000_000));
        assert_eq!(get("a.i32").as_f64(), Some(-5.0));
        assert_eq!(get("a.f32").as_f64(), Some(1.5));
        assert_eq!(get("a.bool").as_bool(), Some(true));
        assert_eq!(get("a.u64").as_u64(), Some(u64::MAX));
        assert_eq!(get("a.i64"), Value::I64(i64::MIN));
        assert_eq!(get("a.f64"), Value::F64(0.1));
        let strings: Vec<_> = get("a.strings")
            .as_array()
            .unwrap()
            .iter()
            .map(|value| value.as_str().unwrap())
            .collect();
        assert_eq!(strings, ["x", "", "Ġthe"]);
        let numbers: Vec<_> = get("a.numbers")
            .as_array()
            .unwrap()
            .iter()
            .map(|value| value.as_u64().unwrap())
            .collect();
        assert_eq!(numbers, [7, 8, 9]);
        let nested = get("a.nested").as_array().unwrap();
        let lengths: Vec<_> = nested.iter().map(|value| value.as_array().unwrap().len()).collect();
        assert_eq!(lengths, [2, 1]);
        assert_eq!(header.get(&bytes, "absent"), None);
    }
}

#[test]
fn tensors_have_row_major_shapes_and_absolute_ranges() {
    let bytes = sample().build();
    let header = Header::parse(&bytes).unwrap();
    let weight = header.tensor("w").unwrap();
    assert_eq!(weight.shape, [3, 64]);
    assert_eq!(weight.elements(), 192);
    assert_eq!(weight.kind, GgmlType::Q4_1);
    assert_eq!(weight.bytes, header.data_start()..header.data_start() + 192 / 32 * 20);
    let norm = header.tensor("norm").unwrap();
    assert_eq!(norm.bytes.end - norm.bytes.start, 32);
    assert_eq!(norm.bytes.end, bytes.len() as u64);
    assert_eq!(header.data_start() % 32, 0);
    assert!(header.tensor("v").is_none());
}

#[test]
fn sizes_are_those_candle_reads() {
    // Written out from candle-core 0.11's block structs.
    let sizes = [
        (GgmlType::F32, 0, 1, 4),
        (GgmlType::F16, 1, 1, 2),
        (GgmlType::Q4_0, 2, 32, 18),
        (GgmlType::Q4_1, 3, 32, 20),
        (GgmlType::Q5_0, 6, 32, 22),
        (GgmlType::Q5_1, 7, 32, 24),
        (GgmlType::Q8_0, 8, 32, 34),
        (GgmlType::Q8_1, 9, 32, 36),
        (GgmlType::Q2K, 10, 256, 84),
        (GgmlType::Q3K, 11, 256, 110),
        (GgmlType::Q4K, 12, 256, 144),
        (GgmlType::Q5K, 13, 256, 176),
        (GgmlType::Q6K, 14, 256, 210),
        (GgmlType::Q8K, 15, 256, 292),
        (GgmlType::BF16, 30, 1, 2),
    ];
    assert_eq!(sizes.len(), GgmlType::ALL.len());
    for (kind, id, elements, bytes) in sizes {
        assert_eq!(GgmlType::from_id(id), Some(kind));
        assert_eq!((kind.block_elements(), kind.block_bytes()), (elements, bytes), "{kind}");
    }
    assert_eq!(GgmlType::from_id(4), None);
}

#[test]
fn a_file_cut_at_any_byte_is_refused() {
    let bytes = sample().build();
    for length in 0..bytes.len() {
        let problem = Header::parse(&bytes[..length]).expect_err("cut");
        let text = problem.to_string();
        assert!(
            matches!(
                problem,
                GgufProblem::Cut { .. } | GgufProblem::Count { .. } | GgufProblem::OutOfFile { .. }
            ),
            "at {length}: {text}"
        );
    }
    assert!(Header::parse(&bytes).is_ok());
}

#[test]
fn what_is_no_gguf_is_named() {
    assert_eq!(
        Header::parse(b"PK\x03\x04 and more").unwrap_err(),
        GgufProblem::Magic(*b"PK\x03\x04")
    );
    let mut builder = sample();
    for version in [0, 1, 4] {
        builder.version = version;
        assert_eq!(refuse(&builder), GgufProblem::Version(version));
    }
    builder.version = 3_u32.swap_bytes();
    assert!(refuse(&builder).to_string().contains("big-endian"));
}

#[test]
fn counts_beyond_the_file_are_refused_before_anything_is_read() {
    for (at, what) in [(8, "tensor count"), (16, "metadata count")] {
        for count in [1_u64 << 40, u64::MAX, 1_000] {
            let mut bytes = sample().build();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            let problem = Header::parse(&bytes).unwrap_err();
            assert!(
                matches!(&problem, GgufProblem::Count { count: found, .. } if *found == count),
                "{problem}"
            );
            assert!(problem.to_string().contains(what));
        }
    }
    let array = |count: u64| {
        let mut bytes = 8_u32.to_le_bytes().to_vec();
        bytes.extend(count.to_le_bytes());
        Builder::new().put("k", Put::Raw(9, bytes)).data(64)
    };
    assert!(matches!(
        refuse(&array(u64::MAX)),
        GgufProblem::Count { most: 8..=16, .. }
    ));
    assert!(matches!(refuse(&array(1 << 32)), GgufProblem::Count { .. }));
    let long = Builder::new()
        .put("k", Put::Raw(8, u64::MAX.to_le_bytes().into()))
        .data(64);
    assert!(matches!(refuse(&long), GgufProblem::Cut { needed: u64::MAX, .. }));
}

#[test]
fn wrong_values_are_named() {
    let text = refuse(&Builder::new().put("k", Put::Raw(7, vec![2]))).to_string();
    assert_eq!(text, "key `k` is a bool with byte 2; 0 or 1 would be right");
    let text = refuse(&Builder::new().put("k", Put::Raw(13, vec![0; 8]))).to_string();
    assert_eq!(text, "key `k` has value type 13; types 0 to 12 exist");
    let mut bytes = 2_u64.to_le_bytes().to_vec();
    bytes.extend([b'a', 0xff]);
    assert!(matches!(
        refuse(&Builder::new().put("k", Put::Raw(8, bytes))),
        GgufProblem::NotUtf8 { .. }
    ));
    assert_eq!(
        refuse(&sample().put("a.u8", 1)),
        GgufProblem::DuplicateKey("a.u8".into())
    );
    for alignment in [0, 3, 1 << 21] {
        let problem = refuse(&sample().put("general.alignment", alignment));
        assert_eq!(problem, GgufProblem::Alignment(alignment.into()));
    }
    let problem = refuse(&sample().put("general.alignment", "32"));
    assert!(problem.to_string().contains("the string \"32\""), "{problem}");
    // Arrays in arrays in arrays, beyond the limit.
    let mut deep = Vec::new();
    for _ in 0..6 {
        deep.extend(9_u32.to_le_bytes());
        deep.extend(1_u64.to_le_bytes());
    }
    deep.extend([0; 32]);
    assert!(matches!(
        refuse(&Builder::new().put("k", Put::Raw(9, deep))),
        GgufProblem::Limit { limit: 4, .. }
    ));
}

#[test]
fn wrong_tensors_are_named() {
    let base = || Builder::new().data(4096);
    let cases: Vec<(Builder, &str)> = vec![
        (
            base()
                .tensor("a", &[4], GgmlType::F32, 0)
                .tensor("a", &[4], GgmlType::F32, 32),
            "tensor `a` appears twice",
        ),
        (
            base().tensor("a", &[33], GgmlType::Q8_0, 0),
            "must be a multiple of 32 for type Q8_0",
        ),
        (
            base().tensor("a", &[256 + 32], GgmlType::Q4K, 0),
            "must be a multiple of 256 for type Q4_K",
        ),
        (
            base().tensor("a", &[32, 0], GgmlType::F32, 0),
            "every dimension must be at least 1",
        ),
        (
            base().tensor("a", &[1 << 40, 1 << 40], GgmlType::F32, 0),
            "does not fit in 64 bits",
        ),
        (
            base().tensor("a", &[1 << 62], GgmlType::F32, 0),
            "does not fit in 64 bits",
        ),
        (
            base().tensor("a", &[1, 1, 1, 1, 1], GgmlType::F32, 0),
            "dimension count of tensor `a` is 5; at most 4",
        ),
        (
            base().tensor("a", &[4], GgmlType::F32, 8),
            "not a multiple of the alignment 32",
        ),
        (
            base().tensor("a", &[4096], GgmlType::F32, 0),
            "needs 16384 bytes from byte",
        ),
        (
            base().tensor("a", &[4], GgmlType::F32, u64::MAX - 31),
            "cut or the offset is wrong",
        ),
        (
            base()
                .tensor("a", &[32], GgmlType::F32, 64)
                .tensor("b", &[32], GgmlType::F32, 0),
            "tensors `b` (bytes 96..224) and `a` (from byte 160) overlap",
        ),
    ];
    for (builder, expected) in cases {
        let text = refuse(&builder).to_string();
        assert!(text.contains(expected), "{text:?} should contain {expected:?}");
    }
    let mut unknown = base().tensor("a", &[4], GgmlType::F32, 0);
    unknown.tensors[0].kind = 23;
    let text = refuse(&unknown).to_string();
    assert!(text.contains("type id 23") && text.contains("Q4_K"), "{text}");
}

#[test]
fn alignment_of_the_file_counts() {
    let mut builder = sample().put("general.alignment", 64);
    builder.alignment = 64;
    let header = parse(&builder).unwrap();
    assert_eq!(header.alignment(), 64);
    assert_eq!(header.data_start() % 64, 0);
}

/// Whatever parsed must keep its promises: values can be read again, tensors lie in the file and apart.
fn check_promises(bytes: &[u8]) {
    let Ok(header) = Header::parse(bytes) else { return };
    for key in header.keys() {
        let value = header.get(bytes, key).expect("a parsed key can be read again");
        if let Some(array) = value.as_array() {
            assert_eq!(array.iter().count() as u64, array.len());
        }
    }
    let mut ranges: Vec<_> = header.tensors().iter().map(|tensor| tensor.bytes.clone()).collect();
    ranges.sort_by_key(|range| (range.start, range.end));
    for range in &ranges {
        assert!(range.start >= header.data_start() && range.end <= bytes.len() as u64);
    }
    for pair in ranges.windows(2) {
        assert!(pair[0].end <= pair[1].start);
    }
}

#[test]
fn every_single_byte_may_be_anything() {
    let bytes = sample().build();
    for at in 0..bytes.len() {
        for value in [0, 1, 2, 9, 0x7f, 0x80, 0xff, bytes[at] ^ 1, bytes[at].wrapping_add(1)] {
            let mut damaged = bytes.clone();
            damaged[at] = value;
            check_promises(&damaged);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damaged_files_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = sample().build();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        check_promises(&bytes);
    }

    #[test]
    fn numbers_in_the_header_may_be_anything(at in 0_usize..400, number in any::<u64>(), wide in any::<bool>()) {
        let mut bytes = sample().build();
        let number = if wide { number } else { number % 1024 };
        let at = at.min(bytes.len() - 8);
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        check_promises(&bytes);
    }

    #[test]
    fn noise_after_the_magic_never_panics(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(noise);
        check_promises(&bytes);
    }
}
