//! `/openapi.json` is true: its paths are the routes, its bodies have the fields that are read. `/docs` shows it alone.

mod http_support;

use std::collections::BTreeSet;

use coordinator::http::routes::{Methods, table};
use coordinator::http::{openai, tgi, tokens};
use http_support::client::{get, post, request};
use http_support::start_chat;
use serde_json::{Value, json};

fn published() -> Value {
    let front = start_chat("{{ messages[0].content }}");
    let answer = get(front.address, "/openapi.json");
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (200, Some("application/json"))
    );
    answer.json()
}

/// The schema that a reference leads to.
fn resolve<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(reference) => {
            let pointer = reference.strip_prefix('#').expect("a reference inside the document");
            let found = document.pointer(pointer);
            resolve(document, found.unwrap_or_else(|| panic!("{reference} leads nowhere")))
        }
        None => schema,
    }
}

/// The properties of a schema, those of its parts included.
fn properties(document: &Value, schema: &Value) -> BTreeSet<String> {
    let schema = resolve(document, schema);
    let own = schema["properties"].as_object().into_iter().flatten();
    let parts = ["allOf", "oneOf"]
        .into_iter()
        .filter_map(|word| schema[word].as_array())
        .flatten();
    let mut names: BTreeSet<String> = own.map(|(name, _)| name.clone()).collect();
    names.extend(parts.flat_map(|part| properties(document, part)));
    names
}

fn body(document: &Value, path: &str) -> BTreeSet<String> {
    let schema = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
    properties(document, schema)
}

#[test]
fn its_paths_are_the_routes() {
    let document = published();
    let mut expected = BTreeSet::new();
    // What the page at /docs loads is a part of that page.
    for entry in table().iter().filter(|entry| entry.path != "/docs/{file}") {
        let path = entry.path.replace(":.+", "");
        if entry.methods != Methods::Post {
            expected.insert((path.clone(), "get".to_owned()));
        }
        if entry.methods != Methods::Read {
            expected.insert((path, "post".to_owned()));
        }
    }
    let paths = document["paths"].as_object().expect("paths");
    let found: BTreeSet<(String, String)> = paths
        .iter()
        .flat_map(|(path, item)| {
            let methods = item.as_object().into_iter().flatten();
            methods
                .map(|(method, _)| (path.clone(), method.clone()))
                .collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(found, expected);
}

/// Names that a reader knows only to refuse them, with a value that is refused.
const REFUSED: [(&str, &str); 10] = [
    ("best_of", "2"),
    ("chat_template", "\"x\""),
    ("documents", "[]"),
    ("echo", "true"),
    ("function_call", "\"auto\""),
    ("functions", "[]"),
    ("prompt_logprobs", "1"),
    ("suffix", "\"x\""),
    ("use_beam_search", "true"),
    ("response_format", "{\"type\":\"xml\"}"),
];

#[test]
fn its_bodies_have_the_fields_that_are_read() {
    let document = published();
    let names = |known: &[&str]| known.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let not_refused = |known: &[&str]| {
        let refused = |name: &&str| REFUSED[..9].iter().any(|(refused, _)| refused == name);
        names(&known.iter().copied().filter(|name| !refused(name)).collect::<Vec<_>>())
    };
    assert_eq!(body(&document, "/v1/completions"), names(openai::request::FIELDS));
    assert_eq!(
        body(&document, "/v1/chat/completions"),
        not_refused(openai::chat::request::FIELDS)
    );
    assert_eq!(body(&document, "/tokenize"), not_refused(tokens::TOKENIZE_FIELDS));
    assert_eq!(body(&document, "/detokenize"), names(tokens::DETOKENIZE_FIELDS));
    for path in ["/generate", "/generate_stream", "/", "/invocations"] {
        assert_eq!(body(&document, path), names(tgi::request::BODY_FIELDS), "{path}");
    }
    let parameters = json!({ "$ref": "#/components/schemas/GenerateParameters" });
    assert_eq!(
        properties(&document, &parameters),
        names(tgi::request::PARAMETER_FIELDS)
    );

    let front = start_chat("{{ messages[0].content }}");
    for (name, value) in REFUSED {
        let messages = r#"[{"role":"user","content":"a"}]"#;
        let body = format!("{{\"model\":\"tiny\",\"messages\":{messages},\"{name}\":{value}}}");
        let answer = post(front.address, "/v1/chat/completions", body);
        assert_eq!(answer.status, 400, "{name}: {}", answer.text());
    }
}

#[test]
fn every_field_is_described_and_every_reference_leads_somewhere() {
    let document = published();
    fn walk(document: &Value, value: &Value, references: &mut usize) {
        match value {
            Value::Object(members) => {
                if members.contains_key("$ref") {
                    resolve(document, value);
                    *references += 1;
                }
                for member in members.values() {
                    walk(document, member, references);
                }
            }
            Value::Array(list) => list.iter().for_each(|value| walk(document, value, references)),
            _ => {}
        }
    }
    let mut references = 0;
    walk(&document, &document, &mut references);
    assert!(references > 30, "{references}");
    for name in ["GenerateParameters", "Sampling", "ChatRequest", "CompletionRequest"] {
        let schema = &document["components"]["schemas"][name];
        let own = schema["properties"].as_object();
        let parts = schema["allOf"].as_array().into_iter().flatten();
        let inner = parts.filter_map(|part| part["properties"].as_object());
        for (field, schema) in own.into_iter().chain(inner).flatten() {
            // Of what may also be null, the other possibility is described.
            let described = |schema: &Value| schema["description"].as_str().map(str::to_owned);
            let other = || schema["oneOf"].as_array().into_iter().flatten().find_map(described);
            let text = described(schema).or_else(other);
            assert!(text.is_some_and(|text| text.len() > 5), "{name}.{field}: {schema}");
        }
    }
}

#[test]
fn ranges_and_defaults_are_told() {
    let document = published();
    let of = |name: &str, field: &str| document["components"]["schemas"][name]["properties"][field].clone();
    let limit = of("GenerateParameters", "max_new_tokens");
    assert_eq!(
        (&limit["minimum"], &limit["maximum"], &limit["default"]),
        (&json!(1), &json!(2_147_483_647), &json!(20))
    );
    let top_p = of("GenerateParameters", "top_p");
    assert_eq!(
        (&top_p["exclusiveMinimum"], &top_p["exclusiveMaximum"]),
        (&json!(1e-6), &json!(1))
    );
    let penalty = of("Sampling", "presence_penalty");
    assert_eq!((&penalty["minimum"], &penalty["maximum"]), (&json!(-2), &json!(2)));
    assert_eq!(limit["type"], json!(["integer", "null"]), "null equals absent");
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    let front = start_chat("x");
    let page = get(front.address, "/docs");
    assert_eq!(page.status, 200);
    assert!(
        page.header("content-type")
            .is_some_and(|kind| kind.starts_with("text/html"))
    );
    assert!(!page.text().contains("http"), "no address of another host");
    for (file, kind) in [
        ("swagger-ui-bundle.js", "text/javascript"),
        ("swagger-ui.css", "text/css"),
    ] {
        assert!(page.text().contains(&format!("docs/{file}")), "{file}");
        let answer = get(front.address, &format!("/docs/{file}"));
        assert_eq!(
            (answer.status, answer.header("content-encoding")),
            (200, Some("gzip")),
            "{file}"
        );
        assert!(
            answer
                .header("content-type")
                .is_some_and(|found| found.starts_with(kind))
        );
        assert_eq!(answer.body[..2], [0x1f, 0x8b], "{file}");
    }
    assert_eq!(get(front.address, "/docs/other.js").status, 404);
    assert_eq!(request(front.address, "POST", "/docs", "").status, 405);
}
