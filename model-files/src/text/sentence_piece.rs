//! SentencePiece vocabularies of GGUF files: pieces with scores, of which the pair whose union has the best score is
//! merged first.
//!
//! The tokenizer wants a list of merges instead of scores. Each piece that is the union of two others gives merges, those of
//! better pieces come first, and of one piece those with longer halves, as Hugging Face transformers orders them when it
//! converts such a vocabulary.

use std::cmp::Ordering;
use std::collections::HashMap;

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::{NormalizerWrapper, Sequence};

/// What stands for a space within a piece.
const SPACE: &str = "▁";

/// A piece that text can become.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) text: &'a str,
    pub(super) id: u32,
    pub(super) score: f32,
}

/// Two pieces whose union is a piece.
struct Merge<'a> {
    left: (&'a str, u32),
    right: (&'a str, u32),
    score: f32,
}

/// All merges of the pieces, the best first.
pub(super) fn merges(pieces: &[Piece<'_>]) -> Vec<(String, String)> {
    let ids: HashMap<&str, u32> = pieces.iter().map(|piece| (piece.text, piece.id)).collect();
    let mut all: Vec<Merge<'_>> = Vec::new();
    for piece in pieces {
        let first = all.len();
        for (cut, _) in piece.text.char_indices().skip(1) {
            let (left, right) = piece.text.split_at(cut);
            if let (Some(&l), Some(&r)) = (ids.get(left), ids.get(right)) {
                all.push(Merge {
                    left: (left, l),
                    right: (right, r),
                    score: piece.score,
                });
            }
        }
        all[first..].sort_by_key(|merge| (merge.left.1, merge.right.1));
    }
    let letters = |text: &str| text.chars().count();
    all.sort_by(|a, b| {
        let by_score = b.score.partial_cmp(&a.score).unwrap_or(Ordering::Equal);
        let by_left = || letters(b.left.0).cmp(&letters(a.left.0));
        let by_right = || letters(b.right.0).cmp(&letters(a.right.0));
        by_score.then_with(by_left).then_with(by_right)
    });
    all.into_iter()
        .map(|merge| (merge.left.0.to_owned(), merge.right.0.to_owned()))
        .collect()
}

/// The model of a vocabulary. Characters that are no piece become bytes, or `unknown` where those are none either.
pub(super) fn model(vocabulary: Vocab, merges: Vec<(String, String)>, unknown: Option<&str>) -> Result<BPE, String> {
    let mut builder = BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .byte_fallback(true)
        .fuse_unk(true);
    if let Some(unknown) = unknown {
        builder = builder.unk_token(unknown.to_owned());
    }
    builder.build().map_err(|error| error.to_string())
}

/// How text becomes what pieces are made of. `prefix`: a space is put in front.
pub(super) fn normalizer(prefix: bool) -> Result<NormalizerWrapper, String> {
    let replace = Replace::new(" ", SPACE).map_err(|error| error.to_string())?;
    let replace = NormalizerWrapper::Replace(replace);
    if prefix {
        let prepend = NormalizerWrapper::Prepend(Prepend::new(SPACE.to_owned()));
        return Ok(NormalizerWrapper::Sequence(Sequence::new(vec![prepend, replace])));
    }
    Ok(replace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn better_pieces_are_merged_first_and_longer_halves_before_shorter() {
        let texts = [
            ("a", -9.0),
            ("b", -9.0),
            ("ab", -2.0),
            ("ba", -1.0),
            ("aba", -1.5),
            ("é", -9.0),
            ("éa", -3.0),
        ];
        let pieces: Vec<Piece<'_>> = (0..)
            .zip(texts)
            .map(|(id, (text, score))| Piece { text, id, score })
            .collect();
        let found = merges(&pieces);
        let found: Vec<(&str, &str)> = found.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(found, [("b", "a"), ("ab", "a"), ("a", "ba"), ("a", "b"), ("é", "a")]);
    }
}
