//! `coordinator status` and `coordinator nodes` for people.

use serde_json::Value;

use super::format::{Table, age, bar, count, list, ms, name, percent, plain, rate};

/// Columns of a bar of blocks.
const BAR: usize = 8;

/// The cluster at a glance.
pub(super) fn text(status: &Value) -> String {
    let about = &status["coordinator"];
    let recent = &status["recent"];
    let model = about["model"].as_str().unwrap_or("-");
    format!(
        "{}: {}, {}, up {} (Baton {})\n\n\
         queued {}   running {}   answered {}   failed {}   tokens in {}, out {}\n\n{}\n{}",
        name(&about["node"]),
        plain(model, 40),
        readiness(status),
        age(count(&about["up_ms"])),
        name(&about["version"]),
        count(&status["queued"]),
        count(&status["running"]),
        rate(&recent["answered_per_s"]),
        rate(&recent["failed_per_s"]),
        rate(&recent["prompt_tokens_per_s"]),
        rate(&recent["generated_tokens_per_s"]),
        latencies(recent),
        table(status),
    )
}

/// The nodes and nothing else.
pub(super) fn nodes(answer: &Value) -> String {
    table(answer)
}

fn readiness(status: &Value) -> &'static str {
    if status["draining"] == true {
        "stopping"
    } else if status["ready"] == true {
        "ready"
    } else {
        "NOT READY"
    }
}

fn latencies(recent: &Value) -> String {
    let window = age(count(&recent["window_ms"]));
    let mut table = Table::new(&["LAST MINUTE", ">P50", ">P90", ">P99", ">COUNT"]);
    for (title, of) in [
        ("first token", &recent["ttft_ms"]),
        ("between tokens", &recent["itl_ms"]),
    ] {
        let quantile = |which: &str| of[which].as_f64().map_or_else(|| "-".to_owned(), ms);
        let row = [
            quantile("p50"),
            quantile("p90"),
            quantile("p99"),
            count(&of["count"]).to_string(),
        ];
        table.row([vec![title.to_owned()], row.to_vec()].concat());
    }
    let text = table.text("");
    // A coordinator that has just started has not a minute behind it.
    if count(&recent["window_ms"]) < 55_000 {
        text.replacen("LAST MINUTE", &format!("LAST {window:<6}"), 1)
    } else {
        text
    }
}

fn table(answer: &Value) -> String {
    let titles = [
        "NODE",
        "ROLE",
        "STATE",
        "KV BLOCKS",
        ">IN USE",
        ">JOBS",
        ">RUN",
        ">WAIT",
        ">STEP",
        ">TOK/S",
    ];
    let mut table = Table::new(&titles);
    for node in list(&answer["nodes"]) {
        let (total, free) = (count(&node["total_blocks"]), count(&node["free_blocks"]));
        let cached = count(&node["cached_blocks"]);
        let used = total.saturating_sub(free + cached);
        let step = node["step_seconds"].as_f64().filter(|seconds| *seconds > 0.0);
        table.row(vec![
            name(&node["node"]),
            name(&node["role"]),
            state(node).to_owned(),
            bar(&[('#', used), (':', cached), ('.', free)], BAR),
            percent(used, total),
            count(&node["jobs"]).to_string(),
            count(&node["running"]).to_string(),
            count(&node["waiting"]).to_string(),
            step.map_or_else(|| "-".to_owned(), |seconds| ms(seconds * 1e3)),
            format!("{:.0}", node["computed_tokens_per_second"].as_f64().unwrap_or(0.0)),
        ]);
    }
    let mut text = if table.is_empty() {
        "no node is connected\n".to_owned()
    } else {
        table.text("")
    };
    for gone in list(&answer["gone"]) {
        text.push_str(&format!(
            "{} ({}) is not connected, for {}\n",
            name(&gone["node"]),
            name(&gone["role"]),
            age(count(&gone["age_ms"]))
        ));
    }
    text
}

/// Whether a node gets jobs, and why not.
pub(super) fn state(node: &Value) -> &'static str {
    if node["stalled"] == true {
        "stalled"
    } else if node["breaker"] == "open" {
        "failing"
    } else if node["draining"] == true {
        "draining"
    } else if node["breaker"] == "half_open" {
        "on trial"
    } else {
        "serving"
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::format::WIDTH;
    use super::*;

    #[test]
    fn nodes_are_lines_that_fit_and_steer_nothing() {
        let node = |node: &str, draining: bool| {
            json!({
                "node": node, "role": "prefill", "draining": draining, "stalled": false, "breaker": "closed",
                "total_blocks": 4_000_000_000_u64, "free_blocks": 1_000_000_000, "cached_blocks": 1_000_000_000,
                "jobs": 123_456, "running": 123_456, "waiting": 123_456,
                "step_seconds": 0.0123, "computed_tokens_per_second": 123_456.7,
            })
        };
        let answer = json!({
            "nodes": [node("\x1b[2J\x1b]0;evil\x07", true), node(&"n".repeat(64), false)],
            "gone": [{"node": "\x1b[31mlost", "role": "decode", "age_ms": 65_000}],
        });
        let text = nodes(&answer);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines.iter().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(!text.contains('\x1b') && !text.contains('\x07'), "{text:?}");
        assert!(
            lines[1].contains("draining") && lines[1].contains("[####::..]    50 %"),
            "{text}"
        );
        assert_eq!(lines[3], "?[31mlost (decode) is not connected, for 1 min 5 s");
        assert_eq!(nodes(&json!({"nodes": []})), "no node is connected\n");
    }

    #[test]
    fn every_state_has_its_word() {
        for (field, value, word) in [
            ("stalled", json!(true), "stalled"),
            ("breaker", json!("open"), "failing"),
            ("breaker", json!("half_open"), "on trial"),
            ("draining", json!(true), "draining"),
            ("breaker", json!("closed"), "serving"),
        ] {
            assert_eq!(state(&json!({ field: value })), word);
        }
    }
}
