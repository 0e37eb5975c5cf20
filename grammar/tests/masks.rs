//! What may follow, seen from outside: right tokens, the same from any beginning, and grammars that are none.

use std::collections::BTreeSet;
use std::path::Path;

use grammar::{GrammarError, GrammarState, Grammars, Vocabulary};
use model_files::{ModelFiles, TextModel};
use protocol::sampling::Grammar;

/// The tiny model that the model crate tests with.
fn text() -> TextModel {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama");
    ModelFiles::open(path)
        .and_then(|files| files.text())
        .expect("the tiny model")
}

fn grammars(text: &TextModel) -> Grammars {
    Grammars::new(Vocabulary::Text(Box::new(text.clone())))
}

fn ids(mask: &[u32]) -> BTreeSet<u32> {
    (0..mask.len() as u32 * 32)
        .filter(|id| mask[(id / 32) as usize] >> (id % 32) & 1 == 1)
        .collect()
}

fn allowed(state: &mut GrammarState, output: &[u32]) -> BTreeSet<u32> {
    ids(&state.mask(output).expect("the output fits"))
}

fn ends(text: &TextModel) -> BTreeSet<u32> {
    text.eos_token_ids.iter().copied().collect()
}

/// Tokens whose text `fits` accepts.
fn fitting(text: &TextModel, fits: impl Fn(&str) -> bool) -> BTreeSet<u32> {
    let ordinary = (0..text.vocab_size as u32).filter(|&id| !text.tokenizer.is_special(id));
    let fits = |id: &u32| {
        let bytes = text.tokenizer.token_bytes(*id);
        !bytes.is_empty() && std::str::from_utf8(bytes).is_ok_and(&fits)
    };
    ordinary.filter(fits).collect()
}

/// A walk through a grammar: any allowed token, by a fixed rule.
fn walk(state: &mut GrammarState, text: &TextModel, salt: usize, most: usize) -> Vec<u32> {
    let mut output = Vec::new();
    for step in 0..most {
        let choices = allowed(state, &output);
        let choices: Vec<u32> = choices.into_iter().collect();
        let token = choices[(step * 7_919 + salt * 104_729) % choices.len()];
        output.push(token);
        if text.eos_token_ids.contains(&token) {
            break;
        }
    }
    output
}

#[test]
fn exactly_what_fits_is_allowed() {
    let text = text();
    let choice = Grammar::Choice(vec!["he said".into(), "he".into(), "the \"end\"\n".into()]);
    let mut state = grammars(&text).start(&choice).expect("a grammar");
    let starts = |prefix: &str| ["he said", "he", "the \"end\"\n"].iter().any(|c| c.starts_with(prefix));
    assert_eq!(allowed(&mut state, &[]), fitting(&text, starts));
    let he = text.tokenizer.encode_plain("he").expect("text");
    let mut expected = fitting(&text, |token| starts(&format!("he{token}")));
    expected.extend(ends(&text));
    assert_eq!(allowed(&mut state, &he), expected);
    let whole = text.tokenizer.encode_plain("he said").expect("text");
    assert_eq!(allowed(&mut state, &whole), ends(&text));
    // Behind its end an output has nothing but end tokens.
    let ended = [whole, vec![text.eos_token_ids[0]]].concat();
    assert_eq!(allowed(&mut state, &ended), ends(&text));

    let gbnf = "root ::= he (\" said\" | \" is\")?\nhe ::= [h] \"e\"";
    let mut state = grammars(&text).start(&Grammar::Lark(gbnf.into())).expect("a grammar");
    let starts = |prefix: &str| ["he said", "he is"].iter().any(|c| c.starts_with(prefix));
    assert_eq!(allowed(&mut state, &[]), fitting(&text, starts));
    assert!(allowed(&mut state, &he).is_superset(&ends(&text)));

    let mut state = grammars(&text)
        .start(&Grammar::Regex("[ab]{2,3}".into()))
        .expect("a grammar");
    let letters = |token: &str| token.len() <= 3 && token.bytes().all(|b| b == b'a' || b == b'b');
    assert_eq!(allowed(&mut state, &[]), fitting(&text, letters));
}

#[test]
fn answers_depend_on_the_tokens_alone() {
    let text = text();
    let schema = r#"{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"array","items":{"enum":["x","yz",null]}}},
        "required":["a","b"],"additionalProperties":false}"#;
    let list = Grammar::Lark("start: item (\", \" item)*\nitem: /[a-z]{1,4}/\n".into());
    for grammar in [
        Grammar::JsonSchema(schema.into()),
        list,
        Grammar::Regex("(ab|c[0-9])+é?".into()),
    ] {
        let shared = grammars(&text);
        let mut old = shared.start(&grammar).expect("a grammar");
        for salt in 0..6 {
            // The same state goes from walk to walk, so it begins again and again.
            let output = walk(&mut old, &text, salt, 40);
            for at in (0..output.len()).step_by(3) {
                let fresh = allowed(&mut shared.start(&grammar).expect("a grammar"), &output[..at]);
                let other = allowed(&mut grammars(&text).start(&grammar).expect("a grammar"), &output[..at]);
                assert_eq!(fresh, other);
                assert_eq!(allowed(&mut old, &output[..at]), fresh, "{grammar:?} after {at} tokens");
                assert!(fresh.contains(&output[at]));
            }
        }
    }
}

#[test]
fn a_token_that_does_not_fit_is_told() {
    let text = text();
    let mut state = grammars(&text)
        .start(&Grammar::Regex("[0-9]+".into()))
        .expect("a grammar");
    let output = text.tokenizer.encode_plain("1a").expect("text");
    assert_eq!(output.len(), 2);
    let misfit = GrammarError::Misfit {
        token: output[1],
        position: 1,
    };
    assert_eq!(state.mask(&output), Err(misfit));
    assert!(state.mask(&output[..1]).is_ok(), "it goes on from the beginning");
}

#[test]
fn what_is_no_grammar_is_refused_in_one_line() {
    let text = text();
    let grammars = grammars(&text);
    let schema = |text: &str| Grammar::JsonSchema(text.to_owned());
    let deep = format!("start: {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000));
    let nested = format!("{}true{}", "{\"items\":".repeat(5_000), "}".repeat(5_000));
    let wrong = [
        Grammar::Regex("(".into()),
        Grammar::Regex("[z-a]".into()),
        Grammar::Regex("(".repeat(50_000)),
        Grammar::Lark("start: missing".into()),
        Grammar::Lark("nothing at all".into()),
        Grammar::Lark(deep),
        Grammar::Lark(String::new()),
        Grammar::Lark("root ::= missing".into()),
        Grammar::Lark("root ::= \"a".into()),
        Grammar::Choice(vec![]),
        Grammar::Choice(vec![String::new()]),
        schema("{"),
        schema("3"),
        schema("[]"),
        schema(&nested),
        schema(r#"{"type":"unknown"}"#),
        schema(r#"{"$ref":"http://127.0.0.1:1/other"}"#),
        schema(r##"{"$ref":"#/nowhere"}"##),
        schema(r#"{"type":"integer","minimum":3,"maximum":2}"#),
        schema(r#"{"enum":[]}"#),
        schema("false"),
    ];
    for grammar in wrong {
        let error = grammars.prepare(&grammar).expect_err("no grammar").to_string();
        let shown = format!("{grammar:?}").chars().take(80).collect::<String>();
        assert!(
            !error.is_empty() && error.len() < 1_500 && !error.contains('\n'),
            "{shown}: {error}"
        );
        assert!(!error.contains("panic"), "{shown}: {error}");
    }
}

#[test]
fn hostile_grammars_end_one_way_or_the_other() {
    let text = text();
    let grammars = grammars(&text);
    let schema = |text: &str| Grammar::JsonSchema(text.to_owned());
    let many: Vec<String> = (0..3_000)
        .map(|i| format!("\"p{i}\":{{\"type\":\"string\"}}"))
        .collect();
    let hostile = [
        schema(r##"{"$ref":"#"}"##),
        schema(r##"{"allOf":[{"$ref":"#"},{"$ref":"#"}]}"##),
        schema(r##"{"anyOf":[{"$ref":"#"},{"type":"null"}]}"##),
        schema(r##"{"type":"object","properties":{"next":{"$ref":"#"}},"required":["next"]}"##),
        schema(r#"{"type":"array","items":{"type":"integer"},"minItems":1000000,"maxItems":2000000}"#),
        schema(r#"{"type":"string","minLength":1000000,"maxLength":3000000}"#),
        schema(r#"{"type":"string","pattern":"((a{1,100}){1,100}){1,100}"}"#),
        schema(&format!(
            "{{\"type\":\"object\",\"properties\":{{{}}}}}",
            many.join(",")
        )),
        Grammar::Regex("(a|b|ab)*c{0,5000}(x+x+)+y".into()),
        Grammar::Regex("((((a{1,200}){1,200}){1,200}){1,200}){1,200}".into()),
        Grammar::Lark("start: start start | \"a\"".into()),
        Grammar::Lark("start: start".into()),
        Grammar::Lark("start: (\"a\"?)*".into()),
    ];
    for grammar in hostile {
        let shown = format!("{grammar:?}").chars().take(80).collect::<String>();
        if let Ok(mut state) = grammars.start(&grammar) {
            let mut output = Vec::new();
            for step in 0..12 {
                let Ok(mask) = state.mask(&output) else { break };
                let choices: Vec<u32> = ids(&mask).into_iter().collect();
                assert!(!choices.is_empty(), "{shown}: nothing may follow");
                output.push(choices[step * 31 % choices.len()]);
            }
        }
    }
}
