//! The files in `deploy/observability`, as far as promtool can tell.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use integration_tests::files::root;
use integration_tests::prometheus::Programs;

/// The words behind `key` in the lines of a file.
fn named(text: &str, key: &str) -> Vec<String> {
    let values = text.lines().filter_map(|line| line.split_once(key));
    values
        .filter_map(|(_, rest)| rest.split([',', '}', ' ']).find(|word| !word.is_empty()))
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_alert_has_a_test_in_which_it_comes_and_one_in_which_it_does_not() -> Result<()> {
    let folder = root().join("deploy/observability");
    let rules = std::fs::read_to_string(folder.join("alerts.yml"))?;
    let tests = std::fs::read_to_string(folder.join("alerts_test.yml"))?;
    let alerts: BTreeSet<String> = named(&rules, "- alert:").into_iter().collect();
    ensure!(alerts.len() >= 15, "{alerts:?}");
    let blocks: Vec<&str> = tests.split("eval_time:").skip(1).collect();
    let of = |comes: bool| -> BTreeSet<String> {
        let of_kind = blocks.iter().filter(|block| block.contains("exp_labels") == comes);
        of_kind.flat_map(|block| named(block, "alertname:")).collect()
    };
    ensure!(of(true) == alerts, "come: {:?}", of(true));
    ensure!(of(false) == alerts, "do not come: {:?}", of(false));
    let Some(programs) = Programs::find() else {
        return Ok(());
    };
    programs.promtool(&folder, &["check", "rules", "alerts.yml"], None)?;
    programs.promtool(&folder, &["check", "config", "prometheus.yml"], None)?;
    let said = programs.promtool(&folder, &["test", "rules", "alerts_test.yml"], None)?;
    ensure!(said.contains("SUCCESS"), "{said}");
    Ok(())
}
