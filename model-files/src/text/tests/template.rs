//! Chat templates.

use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{copy_of_tiny, text_of, tiny};
use crate::error::TextError;
use crate::text::strftime::strftime;
use crate::text::{ChatTemplate, RenderInput};

fn render(source: &str, messages: &Value) -> Result<String, TextError> {
    ChatTemplate::new(source, "<s>", "</s>").render(&RenderInput::new(messages))
}

fn text(source: &str) -> String {
    render(source, &json!([{"role": "user", "content": "Hi"}])).unwrap()
}

#[test]
fn the_tiny_template_renders() {
    let template = tiny().chat_template.unwrap();
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]);
    let mut input = RenderInput::new(&messages);
    assert_eq!(
        template.render(&input).unwrap(),
        "<s>user\nHi</s>\n<s>assistant\nHello</s>\n<s>assistant\n"
    );
    input.add_generation_prompt = false;
    assert_eq!(
        template.render(&input).unwrap(),
        "<s>user\nHi</s>\n<s>assistant\nHello</s>\n"
    );
}

#[test]
fn blocks_are_trimmed_as_in_transformers() {
    assert_eq!(text("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
    assert_eq!(text("{{ bos_token }}{{ eos_token }}{{ missing }}"), "<s></s>");
    assert_eq!(
        text("{% for m in messages %}{{ m.role }}{% continue %}x{% endfor %}"),
        "user"
    );
    assert_eq!(text("{{ '<b>' }}{{ '&' }}"), "<b>&", "a prompt is not HTML");
}

#[test]
fn python_methods_work() {
    assert_eq!(
        text("{{ ' x '.strip() }}{{ 'abc'.startswith('ab') }}{{ 'a,b'.split(',')[1] }}"),
        "xTrueb"
    );
    assert_eq!(
        text("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}"),
        "a=1"
    );
    assert_eq!(text("{{ messages[0].get('name', 'none') }}"), "none");
    assert_eq!(
        text("{{ messages[-1]['content'] | upper }}{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}"),
        "HI2"
    );
}

#[test]
fn values_print_as_in_python() {
    let messages =
        json!([{"role": "user", "content": {"a": [1, 2.5, null, true], "it's": "q\"\\\n\u{1b}\u{2028}é", "m": {}}}]);
    let shown = r#"{'a': [1, 2.5, None, True], "it's": 'q"\\\n\x1b\u2028é', 'm': {}}"#;
    for source in [
        "{{ messages[0].content }}",
        "{{ messages[0].content | string }}",
        "{{ messages[0].content | trim }}",
    ] {
        assert_eq!(render(source, &messages).unwrap(), shown, "{source}");
    }
    assert_eq!(text("{{ [1, 'A'] | lower }}{{ ['b'] | upper }}"), "[1, 'a']['B']");
    assert_eq!(text("{{ \"21 °C it's o'clock\".title() }}"), "21 °C It'S O'Clock");
    assert_eq!(text("{{ 'xxaxx' | trim('x') }}{{ none }}"), "aNone");
    assert_eq!(text("{{ '<a b=\"c\">' | e }}"), "&lt;a b=&#34;c&#34;&gt;");
    assert_eq!(
        text(
            "{{ none is iterable }} {{ missing is iterable }} {{ 'x' is iterable }} {{ 1 is iterable }} {{ 'x' is sequence }}"
        ),
        "False True True False True"
    );
}

#[test]
fn a_template_engine_that_panics_is_an_error() {
    let nothing = json!([]);
    for source in ["{{ messages[::-1] | list }}", "{{ ''[::-1] }}"] {
        // Either the engine has learnt it, or it says that it cannot.
        match render(source, &nothing) {
            Ok(text) => assert!(["[]", ""].contains(&text.as_str()), "{text:?}"),
            Err(error) => assert!(error.to_string().contains("gave up"), "{error}"),
        }
    }
    assert_eq!(text("{{ 'abc'[::-1] }}"), "cba");
}

#[test]
fn a_template_can_refuse_a_conversation() {
    let source =
        "{% if messages[0].role != 'system' %}{{ raise_exception('a system message must come first') }}{% endif %}";
    let error = render(source, &json!([{"role": "user", "content": "x"}])).unwrap_err();
    assert!(matches!(error, TextError::TemplateRender(_)));
    assert_eq!(
        error.to_string(),
        "chat template: a system message must come first (line 1)"
    );
}

#[test]
fn a_template_that_does_not_compile_says_so_when_used() {
    let template = ChatTemplate::new("{% if %}", "", "");
    assert!(matches!(template.problem(), Some(TextError::TemplateSyntax(_))));
    assert!(matches!(
        template.render(&RenderInput::new(&json!([]))),
        Err(TextError::TemplateSyntax(_))
    ));
    assert_eq!(template.source(), "{% if %}");
}

#[test]
fn json_is_written_as_python_writes_it() {
    let value = json!([{"role": "user", "content": {"a": [1, 2.5, null, true], "b": "<é'&>", "c": [], "d": {}}}]);
    let written = |filter: &str| render(&format!("{{{{ messages[0].content | {filter} }}}}"), &value);
    assert_eq!(
        written("tojson").unwrap(),
        r#"{"a": [1, 2.5, null, true], "b": "<é'&>", "c": [], "d": {}}"#
    );
    assert_eq!(
        written("tojson(ensure_ascii=true)").unwrap(),
        r#"{"a": [1, 2.5, null, true], "b": "<\u00e9'&>", "c": [], "d": {}}"#
    );
    let indented =
        "{\n  \"a\": [\n    1,\n    2.5,\n    null,\n    true\n  ],\n  \"b\": \"<é'&>\",\n  \"c\": [],\n  \"d\": {}\n}";
    assert_eq!(written("tojson(indent=2)").unwrap(), indented);
    assert_eq!(written("tojson(2)").unwrap(), indented);
    assert!(
        written("tojson(sort_keys=true)")
            .unwrap_err()
            .to_string()
            .contains("sort_keys")
    );
    assert!(
        written("tojson(indent=99)")
            .unwrap_err()
            .to_string()
            .contains("at most 16")
    );
    assert_eq!(text("{{ '😀' | tojson(ensure_ascii=true) }}"), r#""\ud83d\ude00""#);
}

#[test]
fn tools_time_and_variables_reach_the_template() {
    let template = ChatTemplate::new(
        "{{ tools[0].name }} {{ strftime_now('%d %b %Y') }} {{ enable_thinking }} {{ messages | length }}",
        "",
        "",
    );
    let (messages, tools) = (json!([]), json!([{"name": "f"}]));
    let variables = json!({"enable_thinking": false, "messages": [1, 2, 3]});
    let mut input = RenderInput::new(&messages);
    input.tools = Some(&tools);
    input.variables = variables.as_object();
    assert!(
        template
            .render(&input)
            .unwrap_err()
            .to_string()
            .contains("strftime_now needs the current time")
    );
    input.now = Some(UNIX_EPOCH + Duration::from_secs(1_722_470_400));
    assert_eq!(
        template.render(&input).unwrap(),
        "f 01 Aug 2024 False 0",
        "variables replace nothing"
    );
}

#[test]
fn generation_tags_mean_nothing() {
    let source = "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration %}{% endfor %}{% if add_generation_prompt %}!{% endif %}";
    assert_eq!(text(source), "Hi!");
    assert_eq!(
        text("no tags, but generation {{ '{%' }} text"),
        "no tags, but generation {% text"
    );
}

#[test]
fn dates_are_right() {
    let at = |seconds: u64| UNIX_EPOCH + Duration::from_secs(seconds);
    let full = "%Y-%m-%d %H:%M:%S %A %B %j %y %a %b %I %p %-d %-m %F %T %Z %z %%";
    let cases = [
        (
            0,
            "1970-01-01 00:00:00 Thursday January 001 70 Thu Jan 12 AM 1 1 1970-01-01 00:00:00 UTC +0000 %",
        ),
        (
            951_782_399,
            "2000-02-28 23:59:59 Monday February 059 00 Mon Feb 11 PM 28 2 2000-02-28 23:59:59 UTC +0000 %",
        ),
        (
            951_825_600,
            "2000-02-29 12:00:00 Tuesday February 060 00 Tue Feb 12 PM 29 2 2000-02-29 12:00:00 UTC +0000 %",
        ),
        (
            4_107_542_399,
            "2100-02-28 23:59:59 Sunday February 059 00 Sun Feb 11 PM 28 2 2100-02-28 23:59:59 UTC +0000 %",
        ),
        (
            4_107_542_400,
            "2100-03-01 00:00:00 Monday March 060 00 Mon Mar 12 AM 1 3 2100-03-01 00:00:00 UTC +0000 %",
        ),
        (
            1_735_689_599,
            "2024-12-31 23:59:59 Tuesday December 366 24 Tue Dec 11 PM 31 12 2024-12-31 23:59:59 UTC +0000 %",
        ),
    ];
    for (seconds, expected) in cases {
        assert_eq!(strftime(full, at(seconds)).unwrap(), expected);
    }
    assert_eq!(
        strftime("%F", UNIX_EPOCH - Duration::from_secs(1)).unwrap(),
        "1969-12-31"
    );
    assert!(strftime("%Q", at(0)).unwrap_err().contains("%Q"));
    assert!(strftime("%", at(0)).is_err());
}

#[test]
fn the_template_file_wins_over_the_tokenizer_config() {
    let directory = copy_of_tiny();
    let config = directory.path().join("tokenizer_config.json");
    let source =
        || text_of(directory.path()).map(|text| text.chat_template.map(|template| template.source().to_string()));
    std::fs::write(&config, json!({"chat_template": "from config"}).to_string()).unwrap();
    assert!(source().unwrap().unwrap().starts_with("{% for"));
    std::fs::remove_file(directory.path().join("chat_template.jinja")).unwrap();
    assert_eq!(source().unwrap().unwrap(), "from config");
    let list = json!([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]);
    std::fs::write(&config, json!({"chat_template": list}).to_string()).unwrap();
    assert_eq!(source().unwrap().unwrap(), "d");
    std::fs::write(&config, json!({"chat_template": 5}).to_string()).unwrap();
    assert!(source().unwrap_err().contains("key `chat_template` is 5"));
    std::fs::write(&config, "{}").unwrap();
    assert_eq!(source().unwrap(), None);
}

proptest! {
    #[test]
    fn no_template_panics(source in "[a-z{}%# '.()|\\[\\]-]{0,60}") {
        if let Ok(text) = render(&source, &json!([{"role": "user", "content": "x"}])) {
            prop_assert!(text.len() < 100_000);
        }
    }

    #[test]
    fn no_format_panics(format in "\\PC{0,20}", seconds in any::<u32>()) {
        if !format.contains('%') {
            prop_assert_eq!(strftime(&format, UNIX_EPOCH + Duration::from_secs(seconds.into())), Ok(format));
        } else {
            let _text_or_error = strftime(&format, UNIX_EPOCH + Duration::from_secs(seconds.into()));
        }
    }
}
