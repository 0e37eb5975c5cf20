//! The nodes with the least predicted time: what is ahead on the prefill node, the part of the prompt that it has not
//! cached, what the decode node waits for the bytes it does not have, and what the sequences cost the others there. Among
//! about equal ones those with the most blocks left; then by name. Nodes where the request has failed before are the last choice.

use std::cmp::Reverse;

use super::{Candidate, DecodeOption, Options, PrefillOption, Relation};

/// Costs that differ by no more than this share, or by [`NEAR_US`], are equal: predictions are not better than that, and
/// all requests would go to whichever node measured a little less.
const NEAR_SHARE: u64 = 50;
/// Microseconds.
const NEAR_US: u64 = 1_000;

/// A prefill and a decode node that have room, by number, perhaps twice the same node; `None` if one of the sides has none.
pub fn pair(options: &Options) -> Option<(usize, usize)> {
    let prefill = || options.prefill.iter().enumerate().filter(|(_, p)| p.node.free);
    let decode = || options.decode.iter().enumerate().filter(|(_, d)| d.node.free);
    let allowed = |(i, j)| options.relation(i, j) != Relation::AgainstTheOrder;
    let pairs = || {
        let all = prefill().flat_map(|p| decode().map(move |d| (p, d)));
        all.filter(|((i, _), (j, _))| allowed((*i, *j)))
    };
    let rank = |((i, p), (j, d)): &((usize, &PrefillOption), (usize, &DecodeOption))| {
        let avoided = u8::from(p.node.avoided) + u8::from(d.node.avoided);
        (avoided, options.pair_us(*i, *j))
    };
    let most = near(pairs().map(|pair| rank(&pair)).min()?);
    pairs()
        .filter(|pair| rank(pair) <= most)
        .min_by_key(|((_, p), (_, d))| {
            let blocks = (Reverse(p.node.blocks_left), Reverse(d.node.blocks_left));
            (blocks, &p.node.name, &d.node.name)
        })
        .map(|((i, _), (j, _))| (i, j))
}

/// A prefill node for a prompt whose KV goes nowhere.
pub fn prefill(options: &Options) -> Option<usize> {
    cheapest(options.prefill.iter().map(|p| (&p.node, p.cost_us(), true)))
}

/// A decode node that computes a prompt that has not been begun.
pub fn local(options: &Options) -> Option<usize> {
    let decode = options.decode.iter();
    cheapest(decode.map(|d| (&d.node, d.local_us(), d.has_credit)))
}

/// A decode node that computes the prompt itself.
pub fn decode(options: &Options) -> Option<usize> {
    cheapest(options.decode.iter().map(|d| (&d.node, d.local_us(), true)))
}

fn cheapest<'a>(nodes: impl Iterator<Item = (&'a Candidate, u64, bool)> + Clone) -> Option<usize> {
    let free = nodes.enumerate().filter(|(_, (node, _, may))| node.free && *may);
    let rank = |node: &Candidate, cost| (u8::from(node.avoided), cost);
    let most = near(free.clone().map(|(_, (node, cost, _))| rank(node, cost)).min()?);
    free.filter(|(_, (node, cost, _))| rank(node, *cost) <= most)
        .min_by_key(|(_, (node, ..))| (Reverse(node.blocks_left), &node.name))
        .map(|(number, _)| number)
}

/// The most that is as good as `least`, among nodes that have failed as often.
fn near((avoided, least): (u8, u64)) -> (u8, u64) {
    (avoided, least.saturating_add((least / NEAR_SHARE).max(NEAR_US)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::nodes::{Beside, LinkId, Work};

    fn node(name: &str) -> Candidate {
        Candidate {
            link: LinkId(u64::from(name.starts_with('d'))),
            name: name.into(),
            both: false,
            avoided: false,
            free: true,
            load: 0,
            blocks_left: 10,
        }
    }

    fn prefill_node(name: &str, queue_us: u64, compute_us: u64) -> PrefillOption {
        PrefillOption {
            node: node(name),
            queue_us: 1_000 * queue_us,
            cached_tokens: 0,
            work: Work {
                tokens: 1,
                us: 1_000 * compute_us,
            },
        }
    }

    fn decode_node(name: &str, join_us: u64, compute_us: u64) -> DecodeOption {
        DecodeOption {
            node: node(name),
            cached_blocks: 0,
            missing_bytes: 0,
            grant_us: 0,
            has_credit: true,
            join_us: 1_000 * join_us,
            queue_us: 0,
            work: Work::default(),
            beside: Beside {
                compute_us: 10_000 * compute_us,
                damage_us: 0,
            },
        }
    }

    fn two_of_each(transfer_us: [u64; 4]) -> Options {
        Options {
            prefill: vec![prefill_node("p0", 0, 1_000), prefill_node("p1", 600, 300)],
            decode: vec![decode_node("d0", 50, 7), decode_node("d1", 50, 6)],
            transfer_us: transfer_us.map(|ms| 1_000 * ms).into(),
        }
    }

    #[test]
    fn the_pair_with_the_least_sum_is_chosen() {
        assert_eq!(pair(&Options::default()), None);
        // p1 has most of the prompt cached, and a queue.
        assert_eq!(pair(&two_of_each([10, 10, 10, 10])), Some((1, 0)));
        assert_eq!(pair(&two_of_each([10, 10, 200, 200])), Some((0, 0)));
        assert_eq!(pair(&two_of_each([10, 10, 200, 60])), Some((1, 1)));
        let mut options = two_of_each([0; 4]);
        assert_eq!((prefill(&options), decode(&options)), (Some(1), Some(1)));
        options.decode[1].join_us = 100_000;
        assert_eq!((pair(&options), decode(&options)), (Some((1, 0)), Some(0)));
    }

    #[test]
    fn costs_that_hardly_differ_are_equal() {
        let mut options = two_of_each([10, 10, 110, 110]);
        options.decode[1].node.blocks_left = 11;
        // 1,060 and 1,060 ms; the transfers to d1 take a little longer.
        options.transfer_us[1] += 20_000;
        options.transfer_us[3] += 20_000;
        assert_eq!(pair(&options), Some((0, 1)));
        options.transfer_us[1] += 2_000;
        options.transfer_us[3] += 2_000;
        assert_eq!(pair(&options), Some((0, 0)));
    }

    #[test]
    fn blocks_and_names_decide_between_equals_and_room_is_needed() {
        let mut options = two_of_each([0; 4]);
        options.prefill[1] = prefill_node("a", 0, 1_000);
        options.decode[1].node.blocks_left = 11;
        assert_eq!(pair(&options), Some((1, 1)));
        options.prefill[1].node.free = false;
        options.decode[1].node.avoided = true;
        assert_eq!(pair(&options), Some((0, 0)));
        options.decode[0].node.free = false;
        assert_eq!(pair(&options), Some((0, 1)), "better a node that has failed than none");
        options.decode[1].node.free = false;
        assert_eq!((pair(&options), decode(&options)), (None, None));
    }
}
