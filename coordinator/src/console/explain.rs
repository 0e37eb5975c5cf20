//! `coordinator explain`: the life of a request in words.

use serde_json::Value;

use super::format::{Table, age, bar, bytes, count, list, name, percent, plain, us};

/// Columns of the phase bar.
const BAR: usize = 72;
/// Pairs of nodes that are listed, the cheapest first.
const PAIRS: usize = 8;
/// Nodes of a side that are listed.
const NODES: usize = 24;

/// The phases in their order: the field, how it is called, its letter in the bar.
const PHASES: [(&str, &str, char); 7] = [
    ("queue_us", "queue", '.'),
    ("prefill_queue_us", "prefill queue", ':'),
    ("prefill_us", "prefill", 'P'),
    ("exposed_transfer_us", "exposed transfer", 'x'),
    ("decode_queue_us", "decode queue", ';'),
    ("decode_us", "decode", 'D'),
    ("client_write_us", "client write", 'w'),
];

/// What became of a request, and why.
pub(super) fn text(explained: &Value) -> String {
    let mut text = record(&explained["request"]);
    let decisions = list(&explained["decisions"]);
    if decisions.is_empty() {
        text.push_str("\nno decision about it is kept: it was not sent to a node, or that is too long ago\n");
    }
    for decision in decisions {
        text.push('\n');
        text.push_str(&attempt(decision));
    }
    text
}

fn record(request: &Value) -> String {
    if request.is_null() {
        return "what became of it is not kept any more, only why it went where it went\n".to_owned();
    }
    let phases = &request["phases"];
    let times = PHASES.map(|(field, ..)| count(&phases[field]));
    let whole: u64 = times.iter().sum();
    let ago = count(&request["age_ms"]);
    let id = plain(request["request"].as_str().unwrap_or("-"), 64);
    let mut text = format!(
        "request {id}\n{}, {}{}, {} in, {} out, {}\n",
        plain(request["outcome"].as_str().unwrap_or("-"), 32),
        many(count(&request["attempts"]), "attempt"),
        if ago > 0 {
            format!(", ended {} ago", age(ago))
        } else {
            String::new()
        },
        many(count(&request["prompt_tokens"]), "token"),
        many(count(&request["generated_tokens"]), "token"),
        us(whole),
    );
    for (title, field) in [("called", "client_request_id"), ("trace", "trace_id")] {
        if let Some(text_of_it) = request[field].as_str() {
            text.push_str(&format!("{title} {}\n", plain(text_of_it, 80)));
        }
    }
    text.push('\n');
    let letters: Vec<(char, u64)> = PHASES
        .iter()
        .zip(times)
        .map(|((_, _, letter), time)| (*letter, time))
        .collect();
    text.push_str(&format!("{}\n\n", bar(&letters, BAR)));
    let mut table = Table::new(&["", "PHASE", ">TIME", ">SHARE"]);
    for ((_, title, letter), time) in PHASES.iter().zip(times) {
        table.row(vec![
            letter.to_string(),
            (*title).to_owned(),
            us(time),
            percent(time, whole),
        ]);
    }
    text + &table.text("")
}

fn many(count: u64, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

fn attempt(decision: &Value) -> String {
    let mut text = format!(
        "attempt {}, decided {} ago: {}\n{}\n",
        count(&decision["attempt"]),
        age(count(&decision["age_ms"])),
        way(decision),
        why(decision)
    );
    let candidates = &decision["candidates"];
    let (prefill, decode) = (list(&candidates["prefill"]), list(&candidates["decode"]));
    if !prefill.is_empty() {
        text.push_str(&format!("\n{}", prefill_table(decision, prefill)));
    }
    if !decode.is_empty() {
        text.push_str(&format!("\n{}", decode_table(decision, decode)));
    }
    if !prefill.is_empty() && !decode.is_empty() {
        text.push_str(&format!("\n{}", pair_table(decision, prefill, decode)));
    }
    text
}

fn way(decision: &Value) -> String {
    let (prefill, decode) = (name(&decision["prefill"]), name(&decision["decode"]));
    match decision["way"].as_str() {
        Some("handoff") => format!("{prefill} computes the prompt and hands over to {decode}"),
        Some("prompt_only") => format!("{prefill} computes the prompt, and that is all"),
        Some("local") => format!("{decode} computes the prompt itself and goes on"),
        Some("resume") => format!("{decode} goes on with what another node had begun"),
        other => plain(other.unwrap_or("-"), 32),
    }
}

fn why(decision: &Value) -> String {
    let policy = plain(decision["policy"].as_str().unwrap_or("-"), 32);
    let local = plain(decision["local_prefill"].as_str().unwrap_or("-"), 16);
    let (remote_us, local_us) = (decision["remote_us"].as_u64(), decision["local_us"].as_u64());
    let costs = match (remote_us, local_us) {
        (Some(two), Some(one)) => format!("two nodes would take {}, a decode node alone {}", us(two), us(one)),
        (Some(two), None) => format!("two nodes would take {}; no decode node could do it alone now", us(two)),
        (None, Some(one)) => format!("a decode node alone would take {}; there was no pair of nodes", us(one)),
        (None, None) => "there was no choice between one node and two".to_owned(),
    };
    format!("  {costs}\n  policy {policy}, local_prefill = {local}")
}

/// What speaks against a node.
fn notes(node: &Value) -> String {
    let flags = [
        ("both", true, "both roles"),
        ("avoided", true, "failed before"),
        ("free", false, "no room"),
    ];
    let said = flags.iter().filter(|(flag, bad, _)| node[*flag] == *bad);
    said.map(|(.., text)| *text).collect::<Vec<_>>().join(", ")
}

fn mark(node: &Value, chosen: &Value) -> String {
    if node["name"] == *chosen { ">" } else { "" }.to_owned()
}

fn prefill_table(decision: &Value, nodes: &[Value]) -> String {
    let mut table = Table::new(&[
        "",
        "PREFILL NODE",
        ">QUEUE",
        ">CACHED",
        ">COMPUTE",
        ">PREDICTED",
        ">LOAD",
        "NOTE",
    ]);
    for node in nodes.iter().take(NODES) {
        let work = &node["work"];
        table.row(vec![
            mark(node, &decision["prefill"]),
            name(&node["name"]),
            us(count(&node["queue_us"])),
            format!("{} tok", count(&node["cached_tokens"])),
            format!("{} tok", count(&work["tokens"])),
            us(prompt_us(node)),
            percent(count(&node["load"]), 1_000),
            notes(node),
        ]);
    }
    table.text("  ") + &further(nodes.len(), NODES)
}

fn decode_table(decision: &Value, nodes: &[Value]) -> String {
    let mut table = Table::new(&[
        "",
        "DECODE NODE",
        ">RESERVE",
        ">JOIN",
        ">KV TO SEND",
        ">ALONE",
        ">LOAD",
        "NOTE",
    ]);
    for node in nodes.iter().take(NODES) {
        let alone = if node["has_credit"] == true {
            us(alone_us(node))
        } else {
            "busy".to_owned()
        };
        table.row(vec![
            mark(node, &decision["decode"]),
            name(&node["name"]),
            us(count(&node["grant_us"])),
            us(count(&node["join_us"])),
            bytes(count(&node["missing_bytes"])),
            alone,
            percent(count(&node["load"]), 1_000),
            notes(node),
        ]);
    }
    table.text("  ") + &further(nodes.len(), NODES)
}

fn further(all: usize, shown: usize) -> String {
    match all.saturating_sub(shown) {
        0 => String::new(),
        more => format!("  and {more} more (--json has all)\n"),
    }
}

/// Until the prompt is computed there.
fn prompt_us(prefill: &Value) -> u64 {
    count(&prefill["queue_us"]).saturating_add(count(&prefill["work"]["us"]))
}

/// If a decode node does everything.
fn alone_us(decode: &Value) -> u64 {
    let beside = &decode["beside"];
    [
        &decode["queue_us"],
        &beside["compute_us"],
        &beside["damage_us"],
        &decode["join_us"],
    ]
    .into_iter()
    .fold(0, |sum, part| sum.saturating_add(count(part)))
}

fn pair_table(decision: &Value, prefill: &[Value], decode: &[Value]) -> String {
    let transfer = list(&decision["candidates"]["transfer_us"]);
    let mut pairs: Vec<(u64, &Value, &Value, u64)> = Vec::new();
    for (row, from) in prefill.iter().enumerate() {
        for (column, to) in decode.iter().enumerate().filter(|(_, to)| to["name"] != from["name"]) {
            let transfer = transfer.get(row * decode.len() + column).map_or(0, count);
            let rest = count(&to["grant_us"]).saturating_add(count(&to["join_us"]));
            let sum = prompt_us(from).saturating_add(transfer).saturating_add(rest);
            pairs.push((sum, from, to, transfer));
        }
    }
    pairs.sort_by_key(|(sum, ..)| *sum);
    let chosen = |from: &Value, to: &Value| from["name"] == decision["prefill"] && to["name"] == decision["decode"];
    let titles = ["", "PAIR", ">PROMPT", ">TRANSFER", ">RESERVE", ">JOIN", ">SUM"];
    let mut table = Table::new(&titles);
    for (number, (sum, from, to, transfer)) in pairs.iter().enumerate() {
        let chosen = chosen(from, to);
        if number >= PAIRS && !chosen {
            continue;
        }
        table.row(vec![
            if chosen { ">" } else { "" }.to_owned(),
            format!("{} + {}", name(&from["name"]), name(&to["name"])),
            us(prompt_us(from)),
            us(*transfer),
            us(count(&to["grant_us"])),
            us(count(&to["join_us"])),
            us(*sum),
        ]);
    }
    if table.is_empty() {
        return String::new();
    }
    table.text("  ") + &further(pairs.len(), PAIRS)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::format::WIDTH;
    use super::*;

    fn node(name: &str, more: Value) -> Value {
        let mut node =
            json!({ "name": name, "both": false, "avoided": false, "free": true, "load": 120, "blocks_left": 9 });
        for (key, value) in more.as_object().into_iter().flatten() {
            node[key] = value.clone();
        }
        node
    }

    fn explained() -> Value {
        let work = json!({ "tokens": 84, "us": 41_000 });
        let prefill = json!({ "queue_us": 500, "cached_tokens": 16, "work": work });
        let decode = json!({
            "cached_blocks": 0, "missing_bytes": 1_048_576, "grant_us": 900, "join_us": 1_100, "queue_us": 0,
            "has_credit": true, "work": work, "beside": { "compute_us": 60_000, "damage_us": 9_000 },
        });
        json!({
            "request": {
                "request": "0".repeat(32), "outcome": "done", "age_ms": 3_000, "attempts": 1, "prompt_tokens": 100,
                "generated_tokens": 40,
                "phases": { "queue_us": 1_000, "prefill_us": 39_000, "decode_us": 160_000 },
            },
            "decisions": [{
                "attempt": 1, "age_ms": 3_200, "policy": "prefix_affinity", "local_prefill": "auto", "way": "handoff",
                "prefill": "p1", "decode": "d0", "remote_us": 44_500, "local_us": 70_100,
                "candidates": {
                    "prefill": [node("p0", prefill.clone()), node("p1", prefill)],
                    "decode": [node("d0", decode.clone()), node("d\x1b[1m1", decode)],
                    "transfer_us": [2_000, 7_000, 1_000, 7_000],
                },
            }],
        })
    }

    #[test]
    fn a_record_is_told_in_words_and_tables() {
        let text = text(&explained());
        for part in [
            "done, 1 attempt, ended 3 s ago, 100 tokens in, 40 tokens out, 200 ms",
            "attempt 1, decided 3 s ago: p1 computes the prompt and hands over to d0",
            "two nodes would take 44.5 ms, a decode node alone 70.1 ms",
            ">  p1 + d0",
            "44.5 ms",
            "1.0 MiB",
            "D  decode             160 ms   80 %",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(!text.contains('\x1b'), "{text:?}");
        let pairs: Vec<&str> = text.lines().filter(|line| line.contains(" + ")).collect();
        assert!(
            pairs[0].contains("p1 + d0") && pairs.len() == 4,
            "the cheapest first: {pairs:?}"
        );
    }

    #[test]
    fn what_is_not_kept_is_said() {
        let nothing = text(&json!({ "request": null, "decisions": [] }));
        assert!(
            nothing.contains("not kept any more") && nothing.contains("no decision"),
            "{nothing}"
        );
    }
}
