//! Which layers of a model share blocks of KV.
//!
//! Layers with a window let go of what lies before it, and layers without need it to the end; so they are in different blocks
//! ([`protocol::window::Groups`]). Blocks are of one size, so groups are of as many layers each. The last group of either kind
//! may be short of some: its blocks have room that nobody uses, and that no handoff moves. How many layers a group has is chosen so that this room is small, and
//! groups are few.

use protocol::kv::KvPlace;
use protocol::window::Groups;

use crate::arch::ArchConfig;

/// Most groups of a model: each has its own list of blocks for every sequence.
const MOST_GROUPS: usize = 8;

/// How much more it matters to have no unused room in blocks that are kept to the end than in those of a window.
const FULL_WEIGHT: usize = 8;

/// The groups of a model's layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerGroups {
    pub(crate) groups: Groups,
    /// Layers of a block.
    pub(crate) layers: usize,
    /// Where each layer's KV is.
    pub(crate) places: Vec<KvPlace>,
}

impl LayerGroups {
    /// Those of a model. A window that holds all positions that it knows is none.
    pub(crate) fn of(arch: &ArchConfig) -> Self {
        let window = |layer: usize| {
            let window = arch.windows.get(layer).copied().flatten();
            window.filter(|window| *window < arch.max_positions)
        };
        Self::new(&(0..arch.num_layers).map(window).collect::<Vec<_>>())
    }

    /// For layers with these windows.
    fn new(windows: &[Option<usize>]) -> Self {
        let sliding = windows.iter().flatten().count();
        let full = windows.len() - sliding;
        // No row sees more, in any of them.
        let widest = windows.iter().copied().flatten().max().unwrap_or(0);
        // Windows and layers have been checked to be far below.
        let widest = u32::try_from(widest).unwrap_or(u32::MAX);
        let layers = layers_of_a_block(full, sliding);
        let of_kind = |count: usize| count.div_ceil(layers) as u32;
        let groups = match (of_kind(full), of_kind(sliding)) {
            (_, 0) => Groups::ONE,
            (0, _) => Groups::sliding(widest),
            (many, more) => {
                let spare = |groups: u32, of_kind: usize| groups * layers as u32 - of_kind as u32;
                Groups::mixed(many, more, widest).with_spare(spare(many, full), spare(more, sliding))
            }
        };
        let (mut next_full, mut next_sliding) = (0, 0);
        let places = windows.iter().map(|window| {
            let (next, first) = match window {
                None => (&mut next_full, 0),
                Some(_) => (&mut next_sliding, full.div_ceil(layers)),
            };
            let (group, layer) = (first + *next / layers, *next % layers);
            *next += 1;
            KvPlace {
                group: group as u32,
                layer: layer as u32,
            }
        });
        Self {
            groups,
            layers,
            places: places.collect(),
        }
    }
}

/// How many layers a block has, of so many with and without a window; at least 1.
fn layers_of_a_block(full: usize, sliding: usize) -> usize {
    if full == 0 || sliding == 0 {
        return (full + sliding).max(1);
    }
    let groups = |layers: &usize| full.div_ceil(*layers) + sliding.div_ceil(*layers);
    let most = full.max(sliding);
    let few = (1..=most).filter(|layers| groups(layers) <= MOST_GROUPS);
    let room = |layers: &usize| {
        let (of_full, of_sliding) = (full.div_ceil(*layers), sliding.div_ceil(*layers));
        (of_full * FULL_WEIGHT + of_sliding) * layers
    };
    // Of as little room the larger groups: they are fewer.
    few.min_by_key(|layers| (room(layers), std::cmp::Reverse(*layers)))
        .unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every `nth` layer sees everything.
    fn every(nth: usize, layers: usize) -> LayerGroups {
        let windows: Vec<_> = (1..=layers).map(|layer| (layer % nth > 0).then_some(512)).collect();
        LayerGroups::new(&windows)
    }

    #[test]
    fn layers_of_one_kind_are_one_group() {
        for (windows, groups) in [
            (vec![None; 5], Groups::ONE),
            (vec![Some(7), Some(9)], Groups::sliding(9)),
        ] {
            let found = LayerGroups::new(&windows);
            let places: Vec<_> = (0..windows.len() as u32).map(KvPlace::in_one_group).collect();
            assert_eq!(
                (found.groups, found.layers, found.places),
                (groups, windows.len(), places)
            );
        }
        assert_eq!(LayerGroups::new(&[]).layers, 1);
    }

    #[test]
    fn real_models_waste_little() {
        // Gemma 3 of 270M, 1B, 4B, 12B and 27B; Gemma 2 of 2B; Qwen 2 whose last 7 of 28 layers slide.
        let of = |groups: &LayerGroups| (groups.groups, groups.layers);
        assert_eq!(of(&every(6, 18)), (Groups::mixed(1, 5, 512), 3));
        assert_eq!(of(&every(6, 26)), (Groups::mixed(1, 6, 512).with_spare(0, 2), 4));
        assert_eq!(of(&every(6, 34)), (Groups::mixed(1, 6, 512).with_spare(0, 1), 5));
        assert_eq!(of(&every(6, 48)), (Groups::mixed(1, 5, 512), 8));
        assert_eq!(of(&every(6, 62)), (Groups::mixed(1, 6, 512).with_spare(0, 8), 10));
        assert_eq!(of(&every(2, 26)), (Groups::mixed(1, 1, 512), 13));
        let late: Vec<_> = (0..28).map(|layer| (layer >= 21).then_some(9)).collect();
        assert_eq!(of(&LayerGroups::new(&late)), (Groups::mixed(3, 1, 9), 7));
    }

    #[test]
    fn every_layer_has_a_place_of_its_own_and_groups_are_filled_in_order() {
        for layers in 1..40 {
            for nth in 2..9 {
                let found = every(nth, layers);
                let mut seen = std::collections::BTreeSet::new();
                let mut filled = vec![0; found.groups.count()];
                for (layer, place) in found.places.iter().enumerate() {
                    assert!(seen.insert((place.group, place.layer)), "{layer} of {layers}");
                    assert_eq!(found.groups.slides(place.group as usize), (layer + 1) % nth > 0);
                    assert_eq!(filled[place.group as usize], place.layer, "in order");
                    filled[place.group as usize] += 1;
                }
                let expected = (0..filled.len()).map(|group| found.layers as u32 - found.groups.spare(group));
                assert_eq!(filled, expected.collect::<Vec<_>>());
            }
        }
    }
}
