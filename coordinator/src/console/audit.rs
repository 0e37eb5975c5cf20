//! `coordinator audit` for people.

use std::fmt::Write as _;

use serde_json::Value;

use super::Trouble;
use super::format::{Table, age, count, list, name, plain};

/// Lines of a list; whoever wants all of it takes `--json`.
const SHOWN: usize = 20;

/// Whether the books of all nodes agree.
///
/// # Errors
/// They do not, or not all have answered.
pub(super) fn verdict(report: &Value) -> Result<(), Trouble> {
    if report["agrees"] == true && report["complete"] == true {
        Ok(())
    } else {
        Err(Trouble::Told)
    }
}

/// The report.
pub(super) fn text(report: &Value) -> String {
    let verdict = match (report["agrees"] == true, report["complete"] == true) {
        (true, true) => "the books agree: every block has an owner",
        (true, false) => "NOT COMPLETE: the books of those that have answered agree",
        (false, _) => "THE BOOKS DO NOT AGREE",
    };
    let mut text = format!("{verdict}\n\n{}", nodes(report));
    let mut list_of = |title: &str, lines: Vec<String>| {
        if lines.is_empty() {
            return;
        }
        // Writing to a string cannot fail.
        let _written = write!(text, "\n{title}\n").is_ok();
        for line in lines.iter().take(SHOWN) {
            text.push_str(&format!("  {line}\n"));
        }
        if lines.len() > SHOWN {
            text.push_str(&format!("  and {} more (--json has all)\n", lines.len() - SHOWN));
        }
    };
    list_of("what is wrong", findings(report));
    list_of("who has most", owners(report));
    text
}

fn nodes(report: &Value) -> String {
    let titles = [
        "NODE", "ROLE", "BOOKS", ">TOTAL", ">FREE", ">CACHED", ">OWNED", ">BOOKED", ">OWNERS",
    ];
    let mut table = Table::new(&titles);
    for node in list(&report["nodes"]) {
        let books = match (node["answered"] == true, node["agrees"] == true) {
            (false, _) => "silent",
            (true, true) => "agree",
            (true, false) => "WRONG",
        };
        let blocks = &node["blocks"];
        let sum = |what: &str| count(&blocks[what]).to_string();
        let owners = list(&node["owners"]).len() as u64 + count(&node["further_owners"]);
        table.row(vec![
            name(&node["node"]),
            name(&node["role"]),
            books.to_owned(),
            sum("total"),
            sum("free"),
            sum("cached"),
            sum("owned"),
            sum("booked"),
            owners.to_string(),
        ]);
    }
    if table.is_empty() {
        return "no node is connected\n".to_owned();
    }
    table.text("")
}

fn findings(report: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for node in list(&report["nodes"]) {
        let who = name(&node["node"]);
        if let Some(silent) = node["silent"].as_str() {
            found.push(format!("{who}: {}", plain(silent, 70)));
        }
        for problem in list(&node["problems"]) {
            found.push(format!("{who}: {}", plain(problem.as_str().unwrap_or("-"), 70)));
        }
        for (kind, what) in [
            ("orphans", "it has, and the coordinator does not know,"),
            ("missing", "it does not know, and the coordinator has sent it,"),
            ("unconfirmed", "seen once only:"),
        ] {
            for job in list(&node[kind]) {
                let (request, attempt) = (job["request"].as_str().unwrap_or("-"), count(&job["attempt"]));
                let side = name(&job["job"]);
                found.push(format!("{who}: {what} {side} {} attempt {attempt}", plain(request, 32)));
            }
        }
    }
    found
}

fn owners(report: &Value) -> Vec<String> {
    let mut all: Vec<&Value> = list(&report["by_request"]).iter().collect();
    all.sort_by_key(|request| std::cmp::Reverse(count(&request["blocks"])));
    let line = |request: &&Value| {
        let old = request["age_ms"].as_u64().map_or_else(|| "age unknown".to_owned(), age);
        let of = request["coordinator"].as_str();
        let of = of.map_or_else(String::new, |other| format!(", of {}", plain(other, 16)));
        let id = plain(request["request"].as_str().unwrap_or("-"), 32);
        format!("{id}  {} blocks, {old}{of}", count(&request["blocks"]))
    };
    all.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::format::WIDTH;
    use super::*;

    fn report(agrees: bool, complete: bool) -> Value {
        json!({
            "complete": complete, "agrees": agrees,
            "by_request": [{"request": "0".repeat(32), "coordinator": null, "blocks": 7, "age_ms": 1_200, "nodes": ["d0"]}],
            "nodes": [
                {"node": "d0", "role": "decode", "answered": true, "agrees": agrees, "owners": [{}], "further_owners": 2,
                 "blocks": {"total": 100, "free": 60, "cached": 33, "owned": 7, "booked": 9},
                 "orphans": [{"request": "a\x1b".repeat(40), "attempt": 2, "job": "decode"}], "problems": []},
                {"node": "p0", "role": "prefill", "answered": complete, "agrees": complete, "blocks": {},
                 "silent": if complete { Value::Null } else { json!("it did not answer in time") }},
            ],
        })
    }

    #[test]
    fn a_report_names_what_is_wrong_and_who_has_what() {
        let wrong = text(&report(false, false));
        assert!(wrong.starts_with("THE BOOKS DO NOT AGREE\n"), "{wrong}");
        for line in [
            "p0: it did not answer in time",
            "d0: it has, and the coordinator does not know, decode",
            "7 blocks, 1 s",
        ] {
            assert!(wrong.contains(line), "{line} in {wrong}");
        }
        assert!(wrong.lines().all(|line| line.chars().count() <= WIDTH), "{wrong}");
        assert!(!wrong.contains('\x1b'), "{wrong:?}");
    }

    #[test]
    fn only_books_that_all_agree_are_fine() {
        for (agrees, complete, fine) in [(true, true, true), (true, false, false), (false, true, false)] {
            assert_eq!(verdict(&report(agrees, complete)).is_ok(), fine);
        }
    }
}
