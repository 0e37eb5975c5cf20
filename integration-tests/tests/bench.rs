//! The measuring program: what it refuses, and the form of what it finds. Its figures are nobody's test.

use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use integration_tests::files::{root, tiny_model};
use serde_json::{Value, json};
use tempfile::TempDir;

fn bench(arguments: &[&str]) -> Result<Output> {
    Ok(Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(arguments)
        .env("PATH", "/nowhere")
        .output()?)
}

/// Runs a wrong call; its complaint.
fn refused(arguments: &[&str]) -> Result<String> {
    let output = bench(arguments)?;
    ensure!(!output.status.success(), "{arguments:?} was accepted");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A quick run on the tiny model; its JSON and its text.
fn quick(more: &[&str]) -> Result<(Value, String)> {
    let dir = TempDir::new()?;
    let file = dir.path().join("figures.json");
    let (model, file) = (tiny_model(), file.to_str().context("not UTF-8")?.to_owned());
    let model = model.to_str().context("not UTF-8")?;
    let arguments = ["engine", "--quick", "--model", model, "--json", &file];
    let output = bench(&[&arguments, more].concat())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok((serde_json::from_str(&std::fs::read_to_string(file)?)?, text))
}

#[test]
fn the_script_names_what_it_can_measure() -> Result<()> {
    let script = root().join("scripts/bench");
    for (arguments, complaint) in [
        (&["speed"][..], "there is no 'speed' to measure; there is: engine"),
        (&[], "name what to measure: engine"),
    ] {
        let output = Command::new(&script).args(arguments).output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(text.contains(complaint), "{text}");
    }
    Ok(())
}

#[test]
fn wrong_arguments_are_refused_by_name() -> Result<()> {
    let model = tiny_model();
    let model = model.to_str().context("not UTF-8")?;
    let with = |more: &[&str]| refused(&[&["engine", "--quick", "--model", model], more].concat());
    for (arguments, words) in [
        (&["--threads", "0"][..], &["--threads", "0"][..]),
        (&["--threads", "two"], &["--threads", "two"]),
        (&["--rounds", "0"], &["--rounds", "0"]),
        (&["--context", "10"], &["--context", "10"]),
        (&["--kv-dtype", "f8"], &["kv_dtype", "f8", "f16"]),
        (&["--set", "engine.nothing=1"], &["engine.nothing"]),
        (&["--vs", "llama"], &["--vs", "llama-bench"]),
        (&["--vs", "llama-bench"], &["--vs llama-bench"]),
        (&["--yardstick", "/nowhere.json"], &["--yardstick", "/nowhere.json"]),
        (
            &["--json", "/nowhere/figures.json"],
            &["--json", "/nowhere/figures.json"],
        ),
        (
            &["--prefill", "600"],
            &["--prefill 600", "512 positions", "at most 511"],
        ),
    ] {
        let complaint = with(arguments)?;
        assert!(
            words.iter().all(|word| complaint.contains(word)),
            "{arguments:?}: {complaint}"
        );
    }
    assert!(refused(&["engine"])?.contains("--model"));
    assert!(refused(&["interfere", "--model", model, "--streams", "0"])?.contains("--streams"));
    assert!(refused(&["memory", "--model", model, "--kv-pool-tokens", "1"])?.contains("--kv-pool-tokens"));
    // llama-bench reads files, but there is none on the PATH.
    let file = Path::new(model).join("config.json");
    let file = file.to_str().context("not UTF-8")?;
    let complaint = refused(&["engine", "--model", file, "--vs", "llama-bench"])?;
    assert!(complaint.contains("llama-bench"), "{complaint}");
    Ok(())
}

#[test]
fn a_quick_run_writes_rows_and_a_roofline() -> Result<()> {
    let (found, text) = quick(&["--threads", "1,2"])?;
    let rows = found["rows"].as_array().context("no rows")?;
    let keys: Vec<_> = rows
        .iter()
        .map(|row| {
            let number = |name: &str| row[name].as_u64().unwrap_or(0);
            let work = row["work"].as_str().unwrap_or_default();
            (work, number("tokens"), number("batch"), number("threads"))
        })
        .collect();
    let expected: Vec<_> = [1, 2]
        .into_iter()
        .flat_map(|threads| {
            [
                ("prefill", 16, 1, threads),
                ("prefill", 64, 1, threads),
                ("decode", 64, 1, threads),
                ("decode", 64, 4, threads),
            ]
        })
        .collect();
    assert_eq!(keys, expected);
    for row in rows {
        assert!(row["tokens_per_s"].as_f64().is_some_and(|speed| speed > 0.0), "{row}");
        assert!(row["cpu_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{row}");
        assert!(row["ratio"].is_null(), "{row}");
        let measured = row["roofline_fraction"].is_number();
        assert_eq!(
            measured,
            cfg!(any(target_arch = "x86_64", target_arch = "aarch64")),
            "{row}"
        );
    }
    let peaks = found["roofline"]["peaks"].as_array().context("no peaks")?;
    assert_eq!(peaks.len(), 2);
    for peak in peaks {
        for place in ["l2", "l3", "dram"] {
            assert!(
                peak["read_gb_s"][place].as_f64().is_some_and(|rate| rate > 0.0),
                "{peak}"
            );
        }
    }
    assert_eq!(found["num_rounds"], json!(1));
    assert!(found["machine"]["cores"].as_u64().is_some_and(|cores| cores > 0));
    assert!(
        text.contains("prefill") && text.contains("decode") && text.contains("roofline"),
        "{text}"
    );
    Ok(())
}

#[test]
fn ratios_against_recorded_figures() -> Result<()> {
    let dir = TempDir::new()?;
    let file = dir.path().join("before.json");
    let path = file.to_str().context("not UTF-8")?.to_owned();
    let row = json!({"work": "prefill", "tokens": 16, "batch": 1, "threads": 1, "tokens_per_s": 0.5});
    std::fs::write(&file, json!({ "rows": [row] }).to_string())?;
    let (found, text) = quick(&["--threads", "1", "--yardstick", &path])?;
    assert!(text.contains("before"), "{text}");
    let first = &found["rows"][0];
    let speed = first["tokens_per_s"].as_f64().context("no speed")?;
    let ratio = first["ratio"].as_f64().context("no ratio")?;
    // Reading a number of 17 digits may miss its last bit.
    assert!((ratio * 0.5 / speed - 1.0).abs() < 1e-12, "{first}");
    assert!(found["rows"][1]["ratio"].is_null(), "not in the file");

    std::fs::write(
        &file,
        json!({ "rows": [{"work": "prefill", "tokens": 16, "batch": 1, "threads": 0}] }).to_string(),
    )?;
    let complaint = refused(&["engine", "--model", "x", "--yardstick", &path])?;
    assert!(
        complaint.contains("rows[0]") && complaint.contains("threads"),
        "{complaint}"
    );
    Ok(())
}

/// A trace of the two-column form, in miniature.
const TRACE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
    2023-11-16 18:17:03.9799600,40,8\n\
    2023-11-16 18:17:04.0319600,24,6\n\
    2023-11-16 18:17:04.0781600,64,4\n";

#[test]
fn splits_are_measured_with_real_processes_under_one_trace() -> Result<()> {
    let dir = TempDir::new()?;
    let (trace, figures) = (dir.path().join("trace.csv"), dir.path().join("figures.json"));
    std::fs::write(&trace, TRACE)?;
    let model = tiny_model();
    let words = |path: &Path| path.to_str().map(str::to_owned).context("not UTF-8");
    let (model, trace, json) = (words(&model)?, words(&trace)?, words(&figures)?);
    let ours = [
        "ratio",
        "--model",
        &model,
        "--cores",
        "0",
        "--splits",
        "1:1,both:2",
        "--rates",
        "20",
        "--json",
        &json,
    ];
    let load = [
        "--",
        "--dialect",
        "completions",
        "--trace",
        &trace,
        "--ignore-eos",
        "--slo-ttft-ms",
        "60000",
    ];
    // Not through `bench`: processes are put on cores by a program that is on the PATH.
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(ours)
        .args(load)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let found: Value = serde_json::from_str(&std::fs::read_to_string(&figures)?)?;
    let rows = found["rates"][0]["rows"].as_array().context("no rows")?;
    let splits: Vec<_> = rows.iter().map(|row| &row["split"]).collect();
    assert_eq!(splits, ["1:1", "both:2"]);
    for row in rows {
        assert_eq!(
            (&row["failed"], &row["in SLO %"]),
            (&json!(0.0), &json!(100.0)),
            "{row}"
        );
        assert!(row["D busy %"].as_f64() > Some(0.0), "{row}");
    }
    assert!(
        rows[0]["P busy %"].as_f64() > Some(0.0) && rows[1]["P busy %"].is_null(),
        "{found:#}"
    );
    assert!(text.contains("nodes share cores!") && text.contains("best: "), "{text}");
    Ok(())
}

#[test]
fn a_split_that_is_none_and_a_server_that_is_unknown_are_refused() -> Result<()> {
    let model = tiny_model();
    let model = model.to_str().context("not UTF-8")?;
    for (arguments, words) in [
        (&["--splits", "1:0"][..], &["--splits", "1:0", "P:D"][..]),
        (&["--rates", "0"], &["--rates", "above 0"]),
        (&["--vs", "tgi"], &["--vs tgi", "llama-server"]),
        (&["--vs", "llama-server"], &["--vs llama-server", "GGUF"]),
        (&["--", "--rate", "3"], &["--rate", "--rates"]),
    ] {
        let complaint = refused(&[&["ratio", "--model", model], arguments].concat())?;
        for word in words {
            assert!(complaint.contains(word), "{arguments:?}: no {word:?} in {complaint}");
        }
    }
    Ok(())
}
