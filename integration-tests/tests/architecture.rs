//! The rules of the repository that a machine can check: who may depend on whom, what a core may not touch, file sizes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use integration_tests::files::root;

/// Which of our crates each of our crates may depend on. The absences carry the load: see ARCHITECTURE.md.
const ARROWS: &[(&str, &[&str])] = &[
    ("protocol", &[]),
    ("config", &[]),
    ("model-files", &[]),
    ("model-hub", &["config"]),
    ("runtime", &["protocol", "config"]),
    ("engine", &["protocol", "config"]),
    ("grammar", &["protocol", "model-files"]),
    (
        "model",
        &["engine", "protocol", "config", "model-files", "model-hub", "grammar"],
    ),
    ("kv-transfer", &["protocol", "config", "runtime"]),
    ("discovery", &["config", "runtime"]),
    (
        "coordinator",
        &[
            "protocol",
            "config",
            "runtime",
            "model-files",
            "model-hub",
            "grammar",
            "discovery",
        ],
    ),
    (
        "node-shell",
        &[
            "protocol",
            "config",
            "runtime",
            "engine",
            "model",
            "model-hub",
            "grammar",
            "discovery",
        ],
    ),
    (
        "prefill-node",
        &[
            "protocol",
            "config",
            "runtime",
            "engine",
            "model",
            "kv-transfer",
            "node-shell",
        ],
    ),
    (
        "decode-node",
        &[
            "protocol",
            "config",
            "runtime",
            "engine",
            "model",
            "kv-transfer",
            "node-shell",
        ],
    ),
    (
        "node",
        &[
            "protocol",
            "config",
            "runtime",
            "engine",
            "model",
            "kv-transfer",
            "node-shell",
            "prefill-node",
            "decode-node",
        ],
    ),
    (
        "simulator",
        &[
            "protocol",
            "config",
            "runtime",
            "engine",
            "kv-transfer",
            "prefill-node",
            "coordinator",
        ],
    ),
    ("load-generator", &["runtime"]),
];
/// What the simulator may use of crates that are not pure, by the beginning of a path: their cores, the settings that
/// production gives to the coordinator's core, and an instant from which virtual time counts.
const SIMULATED: &[(&str, &[&str])] = &[
    ("coordinator::", &["core::", "driver::settings"]),
    ("kv_transfer::", &["core::"]),
    ("prefill_node::", &["core::"]),
    ("runtime::", &["clock::Clock"]),
    ("tokio::", &[]),
];
/// May depend on everything; nobody depends on it.
const TOP: &str = "integration-tests";
/// Longest source file, in lines.
const MAX_LINES: usize = 500;
/// What the code of a core may not contain.
const IMPURE: &[&str] = &[
    "async fn",
    "async move",
    ".await",
    "tokio::",
    "std::net",
    "std::fs",
    "std::thread",
    "std::env",
    "Instant::now",
    "SystemTime::now",
    "getrandom",
    "Clock",
];

fn sources(dir: &Path, out: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, out)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
    Ok(())
}

fn members() -> Vec<&'static str> {
    ARROWS.iter().map(|(name, _)| *name).chain([TOP]).collect()
}

#[test]
fn crates_depend_only_on_what_the_table_allows() -> Result<()> {
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .no_deps()
        .exec()?;
    let allowed: BTreeMap<_, _> = ARROWS.iter().copied().collect();
    let ours = members();
    let mut found: Vec<_> = metadata.packages.iter().map(|p| p.name.to_string()).collect();
    found.sort();
    let mut expected: Vec<_> = ours.iter().map(ToString::to_string).collect();
    expected.sort();
    assert_eq!(found, expected, "the table must list every crate of the workspace");
    for package in &metadata.packages {
        let name = package.name.to_string();
        for dependency in &package.dependencies {
            let target = dependency.name.as_str();
            if !ours.contains(&target) {
                continue;
            }
            assert_ne!(target, TOP, "{name} depends on {TOP}");
            let Some(may) = allowed.get(name.as_str()) else {
                continue;
            };
            assert!(may.contains(&target), "{name} must not depend on {target}");
        }
    }
    Ok(())
}

#[test]
fn cores_are_pure() -> Result<()> {
    let mut cores = vec![root().join("engine/src")];
    for member in members() {
        let core = root().join(member).join("src/core");
        if core.is_dir() {
            cores.push(core);
        }
    }
    assert!(
        cores.len() >= 3,
        "coordinator, kv-transfer and prefill-node have cores: {cores:?}"
    );
    let mut files = Vec::new();
    for core in &cores {
        sources(core, &mut files)?;
    }
    let mut problems = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file)?;
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or(line);
            for word in IMPURE {
                if code.contains(word) {
                    problems.push(format!("{}:{}: {word}", file.display(), number + 1));
                }
            }
        }
    }
    assert!(problems.is_empty(), "impure cores:\n{}", problems.join("\n"));
    Ok(())
}

#[test]
fn the_simulator_uses_cores_and_no_shells() -> Result<()> {
    let mut files = Vec::new();
    sources(&root().join("simulator/src"), &mut files)?;
    assert!(files.len() > 10, "only {} files of the simulator found", files.len());
    let (mut problems, mut uses) = (Vec::new(), 0);
    for file in files {
        let text = fs::read_to_string(&file)?;
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or(line);
            for (of, permitted) in SIMULATED {
                for (at, _) in code.match_indices(of) {
                    uses += 1;
                    let rest = &code[at + of.len()..];
                    if !permitted.iter().any(|path| rest.starts_with(path)) {
                        problems.push(format!("{}:{}: {code}", file.display(), number + 1));
                    }
                }
            }
        }
    }
    assert!(problems.is_empty(), "more than cores:\n{}", problems.join("\n"));
    assert!(uses > 10, "only {uses} uses found");
    Ok(())
}

#[test]
fn files_are_short() -> Result<()> {
    let mut files = Vec::new();
    for member in members() {
        sources(&root().join(member), &mut files)?;
    }
    assert!(files.len() > 50, "only {} source files found", files.len());
    let mut long = Vec::new();
    for file in files {
        let lines = fs::read_to_string(&file)?.lines().count();
        if lines > MAX_LINES {
            long.push(format!("{} has {lines} lines", file.display()));
        }
    }
    assert!(long.is_empty(), "longer than {MAX_LINES} lines:\n{}", long.join("\n"));
    Ok(())
}

#[test]
fn every_crate_says_why_it_exists() -> Result<()> {
    for member in members() {
        let text = fs::read_to_string(root().join(member).join("src/lib.rs"))?;
        let first = text.lines().next().unwrap_or_default();
        assert!(
            first.starts_with("//! ") && first.len() > 30,
            "{member}/src/lib.rs opens with {first:?}"
        );
        assert!(text.contains("//! "), "{member} has no crate documentation");
    }
    Ok(())
}
