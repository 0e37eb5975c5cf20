//! Mutations: of bits and bytes, of numbers, of pieces of the input, with words and pieces of other inputs.

use integration_tests::random::Random;

/// Longest input, in bytes.
pub(crate) const MAX_INPUT: usize = 16 << 10;
/// Most mutations of one input.
const MOST: u64 = 6;
/// Bytes at borders: of signs, of lengths in the codec's variable-length integers, of text.
const BYTES: [u8; 14] = [
    0, 1, 2, 0x7f, 0x80, 0xff, 0xfa, 0xfb, 0xfc, 0xfd, b'"', b'{', b'\n', b'0',
];
/// Numbers at borders.
const NUMBERS: [u64; 16] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
];
/// Numbers as text.
const DIGITS: [&str; 14] = [
    "0",
    "-1",
    "1",
    "1e309",
    "-0.0",
    "1e-400",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "0.1",
    "4294967296",
    "null",
    "true",
    "00",
];

/// Makes a new input from one of `corpus`, with words of `words`.
pub(crate) fn mutate(random: &mut Random, corpus: &[Vec<u8>], words: &[Vec<u8>]) -> Vec<u8> {
    // Newer entries are less explored.
    let newest = corpus.len() as u64 - 1;
    let index = newest - random.below(newest + 1).min(random.below(newest + 1));
    let mut input = corpus[index as usize].clone();
    for _ in 0..=random.below(MOST) {
        once(random, &mut input, corpus, words);
    }
    input.truncate(MAX_INPUT);
    input
}

fn once(random: &mut Random, input: &mut Vec<u8>, corpus: &[Vec<u8>], words: &[Vec<u8>]) {
    if input.is_empty() {
        input.clone_from(random.pick(corpus));
        return;
    }
    let at = random.below(input.len() as u64) as usize;
    match random.below(12) {
        0 => input[at] ^= 1 << random.below(8),
        1 => input[at] = *random.pick(&BYTES),
        2 => input[at] = random.bits() as u8,
        3 => number(random, input, at),
        4 => {
            let to = end(random, input, at);
            input.drain(at..to);
        }
        5 => {
            let piece = input[at..end(random, input, at)].to_vec();
            insert(input, at, &piece);
        }
        6 => splice(random, input, corpus),
        7 => {
            if !words.is_empty() {
                let word = random.pick(words).clone();
                if random.below(2) == 0 {
                    insert(input, at, &word);
                } else {
                    overwrite(input, at, &word);
                }
            }
        }
        8 => digits(random, input, at),
        9 => insert(input, at, &[*random.pick(&BYTES)]),
        10 => {
            // The same piece many times: depth, and long lists.
            let piece = input[at..end(random, input, at).min(at + 64)].to_vec();
            let times = 1 << random.below(10);
            insert(input, at, &piece.repeat(times.min(MAX_INPUT / piece.len().max(1))));
        }
        _ => input.truncate(at.max(1)),
    }
}

/// The end of a piece that begins at `at`: short ones more often.
fn end(random: &mut Random, input: &[u8], at: usize) -> usize {
    let most = 1_u64 << random.below(9);
    (at + 1 + random.below(most) as usize).min(input.len())
}

fn insert(input: &mut Vec<u8>, at: usize, piece: &[u8]) {
    if input.len() + piece.len() <= MAX_INPUT {
        input.splice(at..at, piece.iter().copied());
    }
}

fn overwrite(input: &mut [u8], at: usize, piece: &[u8]) {
    let to = (at + piece.len()).min(input.len());
    input[at..to].copy_from_slice(&piece[..to - at]);
}

/// A number of 2, 4 or 8 bytes: at a border, near the input's length, or near what it was.
fn number(random: &mut Random, input: &mut [u8], at: usize) {
    let width = 2 << random.below(3);
    let Some(place) = input.get_mut(at..at + width) else {
        return;
    };
    let mut bytes = [0; 8];
    bytes[..width].copy_from_slice(place);
    let was = u64::from_le_bytes(bytes);
    let now = match random.below(3) {
        0 => *random.pick(&NUMBERS),
        1 => was.wrapping_add(random.below(17)).wrapping_sub(8),
        _ => random.bits() >> random.below(64),
    };
    place.copy_from_slice(&now.to_le_bytes()[..width]);
}

/// A number in text, the next one from `at` on, is replaced.
fn digits(random: &mut Random, input: &mut Vec<u8>, at: usize) {
    let Some(from) = input[at..].iter().position(u8::is_ascii_digit).map(|n| at + n) else {
        return;
    };
    let length = input[from..].iter().take_while(|b| b.is_ascii_digit()).count();
    input.splice(from..from + length, random.pick(&DIGITS).bytes());
}

/// The beginning of this input and the end of another one.
fn splice(random: &mut Random, input: &mut Vec<u8>, corpus: &[Vec<u8>]) {
    let other = random.pick(corpus);
    if other.is_empty() {
        return;
    }
    let (here, there) = (random.below(input.len() as u64 + 1), random.below(other.len() as u64));
    input.truncate(here as usize);
    input.extend_from_slice(&other[there as usize..]);
}
