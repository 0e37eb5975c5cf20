use super::latency::{BUCKETS, bucket};
use super::*;
use crate::origin::origin;

const STEP: Duration = Duration::from_secs(2);
const SHAPE: Shape = Shape { points: 4, window: 2 };

fn node(name: &str, role: Role, free: u32) -> NodeStatus {
    NodeStatus {
        node: name.to_owned(),
        role,
        total_blocks: 100,
        free_blocks: free,
        cached_blocks: 10,
        ..NodeStatus::default()
    }
}

fn cluster(nodes: Vec<NodeStatus>) -> ClusterStatus {
    ClusterStatus {
        nodes,
        queued: 3,
        running: 5,
        ..ClusterStatus::default()
    }
}

/// Totals after so many requests, each of 10 tokens in and out, with a first token after `ms`.
fn totals(requests: u64, ms: u64) -> Totals {
    let mut ttft = vec![0; BUCKETS];
    ttft[bucket(Duration::from_millis(ms))] = requests;
    Totals {
        answered: requests,
        prompt_tokens: 10 * requests,
        generated_tokens: 10 * requests,
        ttft: Counts::of(ttft),
        ..Totals::default()
    }
}

#[test]
fn a_point_says_what_was_added_since_the_one_before() {
    let start = origin();
    let mut series = Series::new(start, SHAPE);
    let status = cluster(vec![node("p0", Role::Prefill, 40), node("p1", Role::Prefill, 90)]);
    series.push(start + STEP, totals(4, 80), &status);
    series.push(start + STEP * 2, totals(4, 80), &status);
    let (first, points) = series.since(0);
    let points: Vec<_> = points.cloned().collect();
    assert_eq!((first, points.len(), series.next()), (0, 2, 2));
    assert_eq!((points[0].queued, points[0].running), (3, 5));
    assert_eq!((points[0].rates.answered, points[1].rates.answered), (2.0, 0.0));
    assert_eq!(points[0].rates.generated_tokens, 20.0);
    // In use are 50 of the first node's blocks and none of the other's.
    assert_eq!(points[0].kv_used, [Some(0.25), None, None]);
    let half = points[1].ttft.quantiles.expect("in the window")[0].as_millis();
    assert!((78..=82).contains(&half) && points[1].ttft.count == 4, "{half}");
    assert_eq!(points[0].itl, Spread::default());
}

#[test]
fn the_window_forgets() {
    let start = origin();
    let mut series = Series::new(start, SHAPE);
    for number in 1..=3 {
        series.push(start + STEP * number, totals(6, 10), &cluster(Vec::new()));
    }
    let (rates, time) = series.recent();
    assert_eq!((rates, time), (Rates::default(), STEP * 2));
    assert_eq!(series.spreads().0, Spread::default());
    let (_, mut points) = series.since(1);
    assert_eq!(
        points.next().map(|point| point.ttft.count),
        Some(6),
        "still in its window"
    );
}

#[test]
fn the_last_points_are_kept_under_their_numbers() {
    let start = origin();
    let mut series = Series::new(start, SHAPE);
    for number in 1..=9 {
        series.push(
            start + STEP * number,
            totals(u64::from(number), 10),
            &cluster(Vec::new()),
        );
    }
    let numbers = |since| {
        let (first, points) = series.since(since);
        (first, points.count())
    };
    assert_eq!(series.next(), 9);
    assert_eq!(numbers(0), (5, 4), "the others are gone");
    assert_eq!(numbers(7), (7, 2));
    assert_eq!(numbers(9), (9, 0));
    assert_eq!(numbers(u64::MAX), (9, 0), "from before a restart");
}

#[test]
fn nodes_that_have_gone_are_told_for_a_while() {
    let start = origin();
    let mut series = Series::new(start, SHAPE);
    let both = cluster(vec![node("d0", Role::Decode, 1), node("p0", Role::Prefill, 1)]);
    let one = cluster(vec![node("d0", Role::Decode, 1)]);
    series.push(start + STEP, Totals::default(), &both);
    series.push(start + STEP * 2, Totals::default(), &one);
    let gone = series.gone(start + STEP * 3, &one);
    let told = Gone {
        node: "p0".to_owned(),
        role: Role::Prefill,
        since: STEP * 2,
    };
    assert_eq!(gone, [told]);
    assert!(series.gone(start + STEP * 3, &both).is_empty(), "it is back");
    for number in 3..=5 {
        series.push(start + STEP * number, Totals::default(), &one);
    }
    assert!(series.gone(start + STEP * 5, &one).is_empty());
}

#[test]
fn nodes_that_come_and_go_under_ever_new_names_are_bounded() {
    let start = origin();
    let shape = Shape {
        points: 10_000,
        window: 2,
    };
    let mut series = Series::new(start, shape);
    for number in 0..2_000 {
        let status = cluster(vec![node(&format!("n{number}"), Role::Both, 1)]);
        series.push(start + STEP * number, Totals::default(), &status);
    }
    assert_eq!(series.gone(start, &ClusterStatus::default()).len(), MOST_GONE + 1);
}
