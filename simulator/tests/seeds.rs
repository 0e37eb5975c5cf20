//! Some hundred seeds, and what makes them worth something: they replay, and they notice what is wrong.

use std::time::Duration;

use config::LocalPrefillConfig;
use protocol::window::Groups;
use simulator::scenario::{Faults, Scenario, Size};
use simulator::world::Tally;
use simulator::{run, run_late_frames, run_scenario};

fn run_all(seeds: std::ops::Range<u64>, one: impl Fn(u64) -> anyhow::Result<simulator::Outcome>) -> Tally {
    let mut total = Tally::default();
    for seed in seeds {
        match one(seed) {
            Ok(outcome) => total.add(&outcome.tally),
            Err(problem) => panic!("seed {seed}: {problem:#}"),
        }
    }
    total
}

#[test]
fn whatever_goes_wrong_answers_are_exact_or_end_with_an_error_and_nothing_is_left_over() {
    let total = run_all(0..300, |seed| run(seed, Size::default(), false));
    // A simulation in which nothing happens shows nothing.
    let counts = [
        ("restarted", total.restarted),
        ("moved", total.moved),
        ("late", total.late),
        ("wasted", total.wasted),
        ("links_lost", total.links_lost),
        ("deaths", total.deaths),
        ("cached_tokens", total.cached_tokens),
        ("frames_dropped", total.frames_dropped),
        ("frames_late", total.frames_late),
        ("frames_repeated", total.frames_repeated),
        ("busy", total.busy),
        ("ended_alone", total.ended_alone),
        ("failed", total.failed),
        ("audits", total.audits),
        ("audits_silent", total.audits_silent),
    ];
    for (what, count) in counts {
        assert!(count >= 20, "{what} is {count}: {total:?}");
    }
    assert!(total.preempted > 0, "{total:?}");
    assert!(total.answered > 10 * total.failed, "{total:?}");
}

#[test]
fn models_of_all_kinds_hand_over() {
    let kinds = [
        Groups::ONE,
        Groups::sliding(9),
        Groups::mixed(1, 1, 9),
        Groups::mixed(2, 3, 17).with_spare(1, 1),
    ];
    for groups in kinds {
        let total = run_all(0..12, |seed| {
            let calm = Scenario::calm(seed, Size::default());
            let (blocks, local_prefill) = (vec![80; calm.blocks.len()], LocalPrefillConfig::Never);
            let scenario = Scenario {
                groups,
                blocks,
                local_prefill,
                ..calm
            };
            run_scenario(seed, scenario, false)
        });
        assert!(total.handed_off > total.answered / 2, "{groups}: {total:?}");
        assert_eq!(
            (total.failed, total.restarted, total.moved),
            (0, 0, 0),
            "{groups}: {total:?}"
        );
    }
}

#[test]
fn without_faults_every_request_is_answered() {
    let total = run_all(0..60, |seed| {
        let calm = Scenario::calm(seed, Size::default());
        let blocks = vec![80; calm.blocks.len()];
        run_scenario(seed, Scenario { blocks, ..calm }, false)
    });
    assert_eq!(
        (total.failed, total.refused, total.restarted, total.moved),
        (0, 0, 0, 0),
        "{total:?}"
    );
    assert!(total.answered >= 60 * 48, "{total:?}");
}

/// Nodes of both roles with little room, and calls that come all at once: a prompt that waits for blocks which another handoff
/// has must not be what that one waits for. (Handing over in both directions, seeds 16 and 95 wait until the prompt's time is
/// over.)
#[test]
fn nodes_of_both_roles_never_wait_for_each_other_in_a_circle() {
    let total = run_all(0..150, |seed| {
        let size = Size {
            prefill: 1,
            decode: 1 + seed as usize % 2,
            ..Size::default()
        };
        let calm = Scenario::calm(seed, size);
        let scenario = Scenario {
            all_both: true,
            blocks: vec![24; calm.blocks.len()],
            busy: Duration::from_millis(20),
            latency_us: 20_000,
            horizon_tokens: 256,
            prefix_cache: false,
            local_prefill: LocalPrefillConfig::Never,
            ..calm
        };
        run_scenario(seed, scenario, false)
    });
    assert!(total.answered > 150 * 40 && total.restarted == 0, "{total:?}");
}

#[test]
fn late_frames_after_an_abort_change_nothing_of_others() {
    let total = run_all(0..400, |seed| run_late_frames(seed, false));
    assert!(total.frames_late > 1_000, "{total:?}");
    assert!(total.failed > 400, "clients leave: {total:?}");
    assert!(total.answered > 400, "and others stay: {total:?}");
}

#[test]
fn a_seed_is_a_history() {
    let mut hashes = Vec::new();
    for seed in 0..12 {
        let once = run(seed, Size::default(), false).expect("it passes");
        let again = run(seed, Size::default(), false).expect("it passes");
        assert_eq!(once.hash, again.hash, "seed {seed}");
        assert!(!hashes.contains(&once.hash), "seed {seed} is like an earlier one");
        hashes.push(once.hash);
    }
}

#[test]
fn one_wrong_bit_in_a_block_is_noticed() {
    let noticed = (0..40).filter(|seed| {
        let scenario = Scenario {
            faults: Faults {
                rot: 40,
                ..Faults::default()
            },
            ..Scenario::calm(*seed, Size::default())
        };
        run_scenario(*seed, scenario, false).is_err_and(|problem| problem.to_string().contains("tokens are"))
    });
    let noticed = noticed.count();
    assert!(noticed >= 30, "{noticed} of 40 seeds");
}

#[test]
fn audits_notice_jobs_that_only_one_side_knows() {
    let unheard = Faults {
        unheard: 30,
        ..Faults::default()
    };
    let forgotten = Faults {
        forgotten: 30,
        ..Faults::default()
    };
    for (faults, list) in [(unheard, "orphans: [JobReport"), (forgotten, "missing: [JobReport")] {
        let noticed = (0..40).filter(|seed| {
            let scenario = Scenario {
                faults,
                ..Scenario::calm(*seed, Size::default())
            };
            run_scenario(*seed, scenario, false).is_err_and(|problem| {
                let problem = problem.to_string();
                problem.contains("an audit does not agree") && problem.contains(list)
            })
        });
        // In the others no cancel was missed, or no job was there to be forgotten.
        let noticed = noticed.count();
        assert!(noticed >= 10, "{list}: {noticed} of 40 seeds");
    }
}
