//! Which tensors are quantised when a model is loaded, and to what: the rules of llama.cpp's quantiser, without its mixtures.
//!
//! Matrices become the type that is asked for. The output matrix (and the embedding where it is the same) becomes Q6_K, or Q8_0
//! if that is asked for. Routers, norms and biases stay, and so do the matrices of latent attention that are held as f32. Rows
//! that are no multiple of a K type's 256 fall back to the type of 32 with about as many bits, as there: Q4_K to Q5_0, Q5_K to
//! Q5_1, Q6_K to Q8_0; and if they are no multiple of 32 either, the matrix stays as it is.

use config::Quantize;

use crate::kernels::GgmlType;
use crate::tensor_names::Tensor;

/// What a matrix becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// By the rules, if its rows fit.
    pub(super) wanted: GgmlType,
    /// What they fit; `None`: nothing.
    pub(super) fits: Option<GgmlType>,
}

/// The type that is asked for.
fn asked(quantize: Quantize) -> Option<GgmlType> {
    Some(match quantize {
        Quantize::None => return None,
        Quantize::Q8_0 => GgmlType::Q8_0,
        Quantize::Q6K => GgmlType::Q6K,
        Quantize::Q5K => GgmlType::Q5K,
        Quantize::Q4K => GgmlType::Q4K,
        Quantize::Q5_1 => GgmlType::Q5_1,
        Quantize::Q5_0 => GgmlType::Q5_0,
        Quantize::Q4_1 => GgmlType::Q4_1,
        Quantize::Q4_0 => GgmlType::Q4_0,
    })
}

/// What a matrix with rows of `k` becomes; `None`: it stays. `head`: it is the output matrix, maybe among others.
pub(super) fn choose(quantize: Quantize, tensor: Tensor, head: bool, k: usize) -> Option<Choice> {
    let asked = asked(quantize)?;
    if matches!(tensor, Tensor::Router(..)) {
        return None;
    }
    let wanted = match head {
        true if asked != GgmlType::Q8_0 => GgmlType::Q6K,
        _ => asked,
    };
    let fits = |kind: GgmlType| k.is_multiple_of(kind.block_len());
    let fallback = match wanted {
        GgmlType::Q4K => GgmlType::Q5_0,
        GgmlType::Q5K => GgmlType::Q5_1,
        GgmlType::Q6K => GgmlType::Q8_0,
        other => other,
    };
    let fits = [wanted, fallback].into_iter().find(|&kind| fits(kind));
    Some(Choice { wanted, fits })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor_names::Part;

    #[test]
    fn rows_that_do_not_fit_fall_back() {
        let up = Tensor::Weight(0, Part::Up);
        let fits = |quantize, head, k| choose(quantize, up, head, k).and_then(|choice| choice.fits);
        assert_eq!(fits(Quantize::Q4K, false, 512), Some(GgmlType::Q4K));
        assert_eq!(fits(Quantize::Q4K, false, 160), Some(GgmlType::Q5_0));
        assert_eq!(fits(Quantize::Q5K, false, 160), Some(GgmlType::Q5_1));
        assert_eq!(fits(Quantize::Q6K, false, 160), Some(GgmlType::Q8_0));
        assert_eq!(fits(Quantize::Q4_0, false, 160), Some(GgmlType::Q4_0));
        assert_eq!(fits(Quantize::Q4_0, false, 48), None);
        assert_eq!(fits(Quantize::Q4K, false, 48), None);
        // The output matrix.
        assert_eq!(fits(Quantize::Q4_0, true, 512), Some(GgmlType::Q6K));
        assert_eq!(fits(Quantize::Q4_0, true, 160), Some(GgmlType::Q8_0));
        assert_eq!(fits(Quantize::Q8_0, true, 512), Some(GgmlType::Q8_0));
        assert_eq!(choose(Quantize::None, up, false, 512), None);
        let router = Tensor::Router(0, crate::arch::ExpertNames::Mlp);
        assert_eq!(choose(Quantize::Q8_0, router, false, 512), None);
    }
}
