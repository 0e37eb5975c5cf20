//! What is in `deploy/`, as far as a machine without a cluster can tell.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use integration_tests::cluster::run;
use integration_tests::files::{binary, root};
use integration_tests::python::Script;
use serde_json::json;

const UNITS: [(&str, &str); 3] = [
    ("baton-coordinator", "coordinator"),
    ("baton-prefill-node", "prefill-node"),
    ("baton-decode-node", "decode-node"),
];
/// Cases in clients/kubernetes_manifests.py.
const CASES: u32 = 9;

/// A program on this machine; its absence is told.
fn found(name: &str) -> Option<PathBuf> {
    let which = Command::new("sh")
        .args(["-c", &format!("command -v {name}")])
        .output()
        .ok()?;
    let path = String::from_utf8(which.stdout).ok()?;
    let path = path.trim();
    (!path.is_empty()).then(|| PathBuf::from(path))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

#[test]
fn kubernetes_manifests_hold() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let built = dir.path().join("kubernetes");
    copy(&root().join("deploy/kubernetes"), &built)?;
    let certs = built.join("certs");
    let certs = certs.to_str().context("UTF-8")?;
    let coordinator = binary("coordinator")?;
    run(&coordinator, &["certs", "init", "--dir", certs])?;
    let names = ["coordinator", "prefill-0", "prefill-1", "decode-0", "decode-1"];
    for name in names {
        let role = name.split('-').next().unwrap_or(name);
        run(
            &coordinator,
            &["certs", "issue", "--dir", certs, "--role", role, "--node", name],
        )?;
    }
    let reference = json!({
        "root": root(),
        "programs": coordinator.parent(),
        "kubectl": found("kubectl"),
        "built": built,
    });
    let passed = Script::start("kubernetes", "kubernetes_manifests.py", dir.path(), &reference)?.finish()?;
    ensure!(passed == CASES, "{passed} cases");
    Ok(())
}

#[test]
fn systemd_units_hold() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let units = root().join("deploy/systemd");
    ensure!(
        std::fs::read_dir(&units)?.count() == UNITS.len(),
        "every unit is tested"
    );
    for (unit, program) in UNITS {
        let text = std::fs::read_to_string(units.join(format!("{unit}.service")))?;
        let installed = format!("/usr/bin/{program} ");
        ensure!(
            text.matches(&installed).count() == 2,
            "{unit} starts and checks {program}"
        );
        for line in [
            "KillSignal=SIGTERM",
            "ExecReload=/bin/kill -HUP $MAINPID",
            "Restart=on-failure",
        ] {
            ensure!(text.lines().any(|found| found == line), "{unit} lacks {line}");
        }
        // The programs are where they were built.
        let here = format!("{} ", binary(program)?.display());
        std::fs::write(
            dir.path().join(format!("{unit}.service")),
            text.replace(&installed, &here),
        )?;
    }
    let Some(analyze) = found("systemd-analyze") else {
        eprintln!("SKIPPED: no systemd-analyze here (package systemd), so the units are not verified.");
        return Ok(());
    };
    for (unit, _) in UNITS {
        let path = dir.path().join(format!("{unit}.service"));
        let verified = Command::new(&analyze)
            .args(["verify", "--man=no"])
            .arg(&path)
            .output()?;
        let said = format!(
            "{}{}",
            String::from_utf8_lossy(&verified.stdout),
            String::from_utf8_lossy(&verified.stderr)
        );
        let about: Vec<&str> = said.lines().filter(|line| line.contains(unit)).collect();
        ensure!(verified.status.success() && about.is_empty(), "{unit}: {said}");
        // Exposure from 0 to 100, as systemd rates it; a unit without protection has 96.
        let rated = Command::new(&analyze)
            .args(["security", "--offline=yes", "--threshold=25", "--no-pager"])
            .arg(&path)
            .output()?;
        let said = String::from_utf8_lossy(&rated.stdout);
        ensure!(
            rated.status.success(),
            "{unit}: {said}{}",
            String::from_utf8_lossy(&rated.stderr)
        );
    }
    // What verifies must also be able to fail.
    let broken = dir.path().join("broken.service");
    std::fs::write(&broken, "[Service]\nExecStart=/nonexistent/program\n")?;
    let verified = Command::new(&analyze)
        .args(["verify", "--man=no"])
        .arg(&broken)
        .output()?;
    ensure!(!verified.stderr.is_empty(), "a unit without its program passed");
    Ok(())
}

#[test]
fn the_image_has_the_programs_and_no_root() -> Result<()> {
    let text = std::fs::read_to_string(root().join("deploy/Containerfile"))?;
    let rust = std::fs::read_to_string(root().join("Cargo.toml"))?;
    let version = rust
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = \""))
        .context("the workspace names its Rust version")?
        .trim_end_matches('"');
    ensure!(text.contains(&format!("/rust:{version}-")), "the compiler is {version}");
    for (_, program) in UNITS {
        ensure!(text.contains(&format!("--bin {program}")), "{program} is built");
        ensure!(
            text.contains(&format!("/src/target/release/{program} ")),
            "{program} is copied"
        );
    }
    let last = text.rsplit("FROM ").next().unwrap_or_default();
    ensure!(
        last.lines().any(|line| line == "USER 10001:10001"),
        "the image runs as root"
    );
    for word in [".gguf", "fetch-model", "safetensors"] {
        ensure!(!last.contains(word), "no model inside: {word}");
    }
    let manifests = std::fs::read_to_string(root().join("deploy/kubernetes/coordinator.yaml"))?;
    ensure!(
        manifests.contains("runAsUser: 10001"),
        "image and pods agree about the user"
    );
    Ok(())
}
