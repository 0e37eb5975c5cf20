//! `/v1/completions`, asked with the members of a body besides `model`.

use serde_json::Value;

use super::Front;
use super::client::{Response, post};

pub fn complete(front: &Front, fields: &str) -> Response {
    let body = format!("{{\"model\":\"tiny\",{fields}}}");
    post(front.address, "/v1/completions", body)
}

/// A whole answer.
pub fn whole(front: &Front, fields: &str) -> Value {
    let answer = complete(front, fields);
    assert_eq!(answer.status, 200, "{fields}: {}", answer.text());
    answer.json()
}

/// The chunks of a stream, which ends as streams do.
pub fn chunks(front: &Front, fields: &str) -> Vec<Value> {
    let answer = complete(front, &format!("\"stream\":true,{fields}"));
    assert_eq!(answer.status, 200, "{fields}: {}", answer.text());
    assert_eq!(answer.events().last(), Some(&"[DONE]"));
    answer.json_events()
}
