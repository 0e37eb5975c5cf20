//! Tools for models whose chat template knows none: the functions are described in a system message, in the words that
//! Hermes models were taught, and earlier calls and their results are written into the messages.

use crate::http::json::tree::Tree;

const BEFORE: &str = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n\
    You are provided with function signatures within <tools></tools> XML tags:\n<tools>";
const AFTER: &str = "\n</tools>\n\nFor each function call, return a json object with function name and arguments within \
    <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>";

/// Writes `tools` and everything about calls into the contents of `messages`.
pub fn describe(messages: &mut Vec<Tree>, tools: &Tree) {
    for message in messages.iter_mut() {
        write_calls(message);
    }
    let mut text = BEFORE.to_owned();
    if let Tree::List(tools) = tools {
        for tool in tools {
            text.push('\n');
            text.push_str(&json(tool));
        }
    }
    text.push_str(AFTER);
    match messages.first_mut() {
        Some(first) if string(first, "role") == "system" => {
            let own = string(first, "content").to_owned();
            set(first, "content", format!("{own}\n\n{text}"));
        }
        _ => messages.insert(
            0,
            Tree::Object(vec![
                ("role".to_owned(), Tree::from("system")),
                ("content".to_owned(), Tree::from(text)),
            ]),
        ),
    }
}

/// An assistant's calls follow what it said; a result is told by the user.
fn write_calls(message: &mut Tree) {
    if string(message, "role") == "tool" {
        let result = format!("<tool_response>\n{}\n</tool_response>", string(message, "content"));
        set(message, "role", "user".to_owned());
        set(message, "content", result);
    }
    let Some(Tree::List(calls)) = message.get("tool_calls") else {
        return;
    };
    let calls = calls.iter().filter_map(|call| call.get("function"));
    let calls: Vec<String> = calls
        .map(|call| format!("<tool_call>\n{}\n</tool_call>", json(call)))
        .collect();
    let said = string(message, "content");
    let gap = if said.is_empty() { "" } else { "\n" };
    let content = format!("{said}{gap}{}", calls.join("\n"));
    set(message, "content", content);
}

fn string<'a>(message: &'a Tree, name: &str) -> &'a str {
    match message.get(name) {
        Some(Tree::String(text)) => text,
        _ => "",
    }
}

fn set(message: &mut Tree, wanted: &str, text: String) {
    if let Tree::Object(members) = message {
        for (name, value) in members {
            if name == wanted {
                *value = Tree::String(text);
                return;
            }
        }
    }
}

fn json(value: &Tree) -> String {
    // Strings, finite numbers and maps with text keys always serialise.
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::json::scan::check;

    fn tree(text: &str) -> Tree {
        Tree::of(check(text.as_bytes()).expect("valid")).expect("finite")
    }

    fn described(messages: &str) -> Vec<(String, String)> {
        let Tree::List(mut messages) = tree(messages) else {
            panic!("a list")
        };
        describe(&mut messages, &tree(r#"[{"type":"function","function":{"name":"f"}}]"#));
        let pair = |message: &Tree| {
            (
                string(message, "role").to_owned(),
                string(message, "content").to_owned(),
            )
        };
        messages.iter().map(pair).collect()
    }

    #[test]
    fn tools_are_described_once_in_the_system_message() {
        let signature = "<tools>\n{\"type\":\"function\",\"function\":{\"name\":\"f\"}}\n</tools>";
        let own = described(r#"[{"role":"system","content":"Be kind."},{"role":"user","content":"a"}]"#);
        assert_eq!(own.len(), 2);
        assert!(own[0].1.starts_with("Be kind.\n\n# Tools") && own[0].1.contains(signature));
        let new = described(r#"[{"role":"user","content":"a"}]"#);
        assert_eq!((new.len(), new[0].0.as_str()), (2, "system"));
        assert!(new[0].1.contains(signature));
    }

    #[test]
    fn calls_and_results_become_text() {
        let messages = described(
            r#"[{"role":"system","content":""},{"role":"assistant","content":"ok","tool_calls":[{"id":"1","type":"function",
                "function":{"name":"f","arguments":{"a":1}}}]},{"role":"tool","content":"5"}]"#,
        );
        let call = "ok\n<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>";
        assert_eq!(messages[1], ("assistant".to_owned(), call.to_owned()));
        let result = "<tool_response>\n5\n</tool_response>";
        assert_eq!(messages[2], ("user".to_owned(), result.to_owned()));
    }
}
