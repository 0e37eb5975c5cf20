//! Several answers to a prompt, several prompts in a call, beam search: `/v1/completions` and `best_of` of `/generate`.

mod http_support;

use coordinator::core::types::ServeErrorKind;
use http_support::backend::Script;
use http_support::client::post;
use http_support::completions::{chunks, complete, whole};
use http_support::model::{BOS, EOS, bytes};
use http_support::{start, start_with};
use serde_json::{Value, json};

fn list<'a>(choices: &'a Value, field: &str) -> Vec<&'a Value> {
    let choices = choices["choices"].as_array().expect("choices");
    choices.iter().map(|choice| &choice[field]).collect()
}

/// The joined texts of a stream by index, and the finish reasons.
fn joined(chunks: &[Value], choices: usize) -> Vec<(String, Vec<Value>)> {
    let mut all = vec![(String::new(), Vec::new()); choices];
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array()).flatten() {
        let index = choice["index"].as_u64().expect("an index") as usize;
        all[index].0.push_str(choice["text"].as_str().expect("a text"));
        all[index]
            .1
            .extend(Some(choice["finish_reason"].clone()).filter(|reason| !reason.is_null()));
    }
    all
}

/// Three choices of different lengths.
fn three() -> Script {
    let ended = |text: &str| [bytes(text), vec![EOS]].concat();
    Script::Choices(vec![ended("ab"), ended("cdef"), ended("g")])
}

#[test]
fn choices_come_in_order_and_usage_is_their_sum() {
    let front = start();
    front.backend.play(three());
    let answer = whole(&front, "\"prompt\":\"hi\",\"n\":3,\"logprobs\":0");
    assert_eq!(list(&answer, "index"), [&json!(0), &json!(1), &json!(2)]);
    assert_eq!(list(&answer, "text"), [&json!("ab"), &json!("cdef"), &json!("g")]);
    let usage = &answer["usage"];
    assert_eq!(
        (
            &usage["prompt_tokens"],
            &usage["completion_tokens"],
            &usage["total_tokens"]
        ),
        (&json!(3), &json!(3 + 5 + 2), &json!(13))
    );
    assert_eq!(usage["batch_size"], json!([1, 2, 3, 4, 5]), "of the longest sequence");
    let offsets: Vec<_> = list(&answer, "logprobs")
        .into_iter()
        .map(|of| of["text_offset"].clone())
        .collect();
    assert_eq!(offsets, [json!([0, 1, 2]), json!([2, 3, 4, 5, 6]), json!([6, 7])]);
    let request = front.backend.last();
    assert_eq!(
        (request.choices, request.beam_width, front.backend.count()),
        (3, None, 1)
    );
}

#[test]
fn a_stream_has_every_choice_with_one_end_each() {
    let front = start();
    front.backend.play(three());
    let fields = "\"prompt\":\"hi\",\"n\":3,\"max_tokens\":3,\"logprobs\":1";
    let expected = whole(&front, fields);
    let chunks = chunks(&front, fields);
    for (index, (text, ends)) in joined(&chunks, 3).into_iter().enumerate() {
        assert_eq!(json!(text), expected["choices"][index]["text"]);
        assert_eq!(json!(ends), json!([expected["choices"][index]["finish_reason"]]));
        let of = |chunk: &&Value| chunk["choices"][0]["index"] == index;
        let of_choice: Vec<&Value> = chunks.iter().filter(of).collect();
        assert!(of_choice.len() <= 3, "never more chunks than tokens");
        assert_eq!(of_choice[0]["choices"][0]["logprobs"]["text_offset"], json!([0]));
    }
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk["choices"].as_array().map(Vec::len) == Some(1))
    );
}

#[test]
fn usage_of_a_stream_with_several_choices() {
    let front = start();
    front.backend.play(three());
    let prompt = "\"prompt\":\"hi\",\"n\":3";
    let total = whole(&front, prompt)["usage"].clone();

    let absent = chunks(&front, prompt);
    let (last, before) = absent.split_last().expect("chunks");
    assert!(before.iter().all(|chunk| chunk.get("usage").is_none()));
    assert_eq!(
        (&last["usage"], &last["choices"][0]["finish_reason"]),
        (&total, &json!("stop"))
    );

    let extra = chunks(
        &front,
        &format!("{prompt},\"stream_options\":{{\"include_usage\":true}}"),
    );
    let (last, before) = extra.split_last().expect("chunks");
    assert!(
        before
            .iter()
            .all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some())
    );
    assert_eq!((&last["usage"], &last["choices"]), (&total, &json!([])));

    let options = "\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true}";
    let every = chunks(&front, &format!("{prompt},{options}"));
    for index in 0..3 {
        let of = |chunk: &&Value| chunk["choices"][0]["index"] == index;
        let counts: Vec<_> = every
            .iter()
            .filter(of)
            .map(|chunk| chunk["usage"]["completion_tokens"].clone())
            .collect();
        assert_eq!(json!(counts), json!((1..=counts.len()).collect::<Vec<_>>()));
    }
    assert_eq!(every.last().expect("chunks")["usage"], total);
}

#[test]
fn a_stop_string_of_one_choice_ends_only_that_one() {
    let front = start();
    front
        .backend
        .play(Script::Choices(vec![bytes("ab--cd"), bytes("abcdef"), bytes("--")]));
    let fields = "\"prompt\":\"hi\",\"n\":3,\"max_tokens\":6,\"stop\":\"--\"";
    let answer = whole(&front, fields);
    assert_eq!(list(&answer, "text"), [&json!("ab"), &json!("abcdef"), &json!("")]);
    assert_eq!(list(&answer, "stop_reason"), [&json!("--"), &json!(null), &json!("--")]);
    let streamed = joined(&chunks(&front, fields), 3);
    let texts: Vec<_> = streamed.iter().map(|(text, _)| text.as_str()).collect();
    assert_eq!(texts, ["ab", "abcdef", ""]);
}

#[test]
fn best_of_sorts_by_probability_and_returns_all_or_n() {
    // All have one length; the later ones are more probable.
    let script = || Script::Choices(vec![bytes("ab"), bytes("cd"), bytes("ef")]);
    let front = start();
    front.backend.play(script());
    let fields = "\"prompt\":\"hi\",\"max_tokens\":2,\"best_of\":3";
    let answer = whole(&front, fields);
    assert_eq!(list(&answer, "text"), [&json!("ef"), &json!("cd"), &json!("ab")]);
    assert_eq!(list(&answer, "index"), [&json!(0), &json!(1), &json!(2)]);
    assert_eq!(answer["usage"]["completion_tokens"], 6);
    let plain = whole(
        &front,
        "\"prompt\":\"hi\",\"max_tokens\":2,\"n\":3,\"best_of\":3,\"stream\":false",
    );
    assert_eq!(list(&plain, "text"), list(&answer, "text"));
    let streamed = joined(
        &chunks(&front, "\"prompt\":\"hi\",\"max_tokens\":2,\"n\":3,\"best_of\":3"),
        3,
    );
    assert_eq!(streamed[0].0, "ab", "a stream cannot be sorted");

    let openai = start_with(|config| config.coordinator.best_of = config::BestOf::Openai);
    openai.backend.play(script());
    let answer = whole(&openai, &format!("{fields},\"n\":2"));
    assert_eq!(list(&answer, "text"), [&json!("ef"), &json!("cd")]);
    assert_eq!(answer["usage"]["completion_tokens"], 4, "of what is returned");
}

#[test]
fn a_beam_search_is_answered_whole_also_as_a_stream() {
    let front = start();
    front.backend.play(three());
    let fields = "\"prompt\":\"hi\",\"temperature\":0,\"use_beam_search\":true,\"n\":3,\"best_of\":2,\"logprobs\":1";
    let answer = whole(&front, fields);
    assert_eq!(list(&answer, "text"), [&json!("ab"), &json!("cdef"), &json!("g")]);
    let request = front.backend.last();
    assert_eq!((request.choices, request.beam_width), (3, Some(3)));

    let events = chunks(&front, fields);
    assert_eq!(events.len(), 1);
    for field in ["choices", "usage", "model"] {
        assert_eq!(events[0][field], answer[field], "{field}");
    }
    whole(&front, "\"prompt\":\"hi\",\"use_beam_search\":true");
    assert_eq!(front.backend.last().beam_width, Some(1));
}

#[test]
fn what_a_beam_search_cannot_heed_is_refused_by_name() {
    let front = start();
    for (field, value) in [
        ("repetition_penalty", "1.5"),
        ("presence_penalty", "1"),
        ("frequency_penalty", "-1"),
        ("bad_words", "[\"x\"]"),
        ("structured_outputs", "{\"regex\":\"a+\"}"),
    ] {
        let fields = format!("\"prompt\":\"hi\",\"temperature\":1,\"use_beam_search\":true,\"{field}\":{value}");
        let answer = complete(&front, &fields);
        let error = answer.json()["error"].clone();
        assert_eq!(answer.status, 400, "{field}: {error}");
        let param = error["param"].as_str().unwrap_or_default();
        assert!(param.starts_with(field), "{field}: {error}");
    }
    assert_eq!(front.backend.count(), 0, "nothing was served");
}

#[test]
fn every_prompt_of_a_list_has_its_answers() {
    let front = start();
    let ended = |text: &str| [bytes(text), vec![EOS]].concat();
    front
        .backend
        .play(Script::Choices(vec![ended("a"), ended("bc"), ended("def"), ended("g")]));
    for (prompts, n) in [("[\"w\",\"x\",\"yy\",\"z\"]", 1), ("[[1,2],[3]]", 2)] {
        let calls = front.backend.calls();
        let fields = format!("\"prompt\":{prompts},\"n\":{n}");
        let answer = whole(&front, &fields);
        assert_eq!(list(&answer, "index"), [&json!(0), &json!(1), &json!(2), &json!(3)]);
        assert_eq!(
            list(&answer, "text"),
            [&json!("a"), &json!("bc"), &json!("def"), &json!("g")]
        );
        assert_eq!(answer["usage"]["completion_tokens"], 2 + 3 + 4 + 2);
        let prompt_tokens = if n == 1 { 2 + 2 + 3 + 2 } else { 3 };
        assert_eq!(answer["usage"]["prompt_tokens"], prompt_tokens, "not multiplied by n");
        assert_eq!(front.backend.calls(), calls + 1, "one call");
        let chunks = chunks(&front, &fields);
        let texts: Vec<_> = joined(&chunks, 4).into_iter().map(|(text, _)| text).collect();
        assert_eq!(texts, ["a", "bc", "def", "g"]);
        assert_eq!(chunks.last().expect("chunks")["usage"], answer["usage"]);
    }
    let ids: std::collections::HashSet<_> = front.backend.all().into_iter().map(|request| request.id).collect();
    assert_eq!(ids.len(), front.backend.count(), "every request has a name of its own");
}

#[test]
fn a_call_is_refused_as_a_whole_before_any_work() {
    let front = start_with(|config| config.limits.max_prompts = 2);
    for prompts in [
        "[\"a\",\"\"]",
        "[[1],[259]]",
        "[[1],[-1]]",
        "[\"a\",\"b\",\"c\"]",
        "[\"a\",[1]]",
    ] {
        let answer = complete(&front, &format!("\"prompt\":{prompts}"));
        assert_eq!(answer.status, 400, "{prompts}");
    }
    let long = format!("[\"a\",\"{}\"]", "b".repeat(250));
    assert_eq!(complete(&front, &format!("\"prompt\":{long}")).status, 400);
    assert_eq!(front.backend.count(), 0);
    front
        .backend
        .play(Script::Refuse(ServeErrorKind::Overloaded { retry_after_s: 3 }));
    for stream in ["true", "false"] {
        let answer = complete(&front, &format!("\"prompt\":[\"a\",\"b\"],\"n\":2,\"stream\":{stream}"));
        assert_eq!((answer.status, answer.header("retry-after")), (429, Some("3")));
    }
    front.backend.wait_for_live(0);
}

#[test]
fn a_failure_of_one_choice_is_a_failure_of_the_call() {
    let front = start();
    front.backend.play(Script::Fail(vec![], ServeErrorKind::NodeLost));
    let fields = "\"prompt\":[\"a\",\"b\"],\"n\":2";
    assert_eq!(complete(&front, &format!("\"stream\":true,{fields}")).status, 500);
    front.backend.play(Script::Fail(bytes("ab"), ServeErrorKind::NodeLost));
    assert_eq!(complete(&front, fields).status, 500);
    let answer = complete(&front, &format!("\"stream\":true,{fields}"));
    let events = answer.events();
    let error: Value = serde_json::from_str(events[events.len() - 2]).expect("an error event");
    assert_eq!(error["error"]["type"], "InternalServerError");
    assert_eq!(events.last(), Some(&"[DONE]"));
    front.backend.wait_for_live(0);
}

#[test]
fn best_of_on_the_tgi_paths_is_several_sequences_with_seeds_of_their_own() {
    let front = start();
    // The second has the highest mean: it is the shortest.
    front.backend.play(Script::Choices(vec![
        bytes("abc"),
        [bytes("d"), vec![EOS]].concat(),
        bytes("efg"),
    ]));
    let body = "{\"inputs\":\"hi\",\"parameters\":{\"best_of\":3,\"do_sample\":true,\"max_new_tokens\":3,\
        \"decoder_input_details\":true}}";
    let answer = post(front.address, "/generate", body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    assert_eq!(answer["generated_text"], "d");
    let details = &answer["details"];
    assert_eq!(
        (&details["finish_reason"], &details["generated_tokens"]),
        (&json!("eos_token"), &json!(2))
    );
    assert_eq!(details["prefill"][0]["id"], BOS);
    let others = details["best_of_sequences"].as_array().expect("the others");
    let texts: Vec<_> = others.iter().map(|other| &other["generated_text"]).collect();
    assert_eq!(texts, [&json!("abc"), &json!("efg")]);
    let request = front.backend.last();
    let seeds = &request.sampling.choice_seeds;
    assert_eq!((request.choices, request.sampling.choice, seeds.len()), (3, 0, 3));
    assert_eq!(
        [&others[0]["seed"], &details["seed"], &others[1]["seed"]],
        [&json!(seeds[0]), &json!(seeds[1]), &json!(seeds[2])]
    );
    assert!(seeds[0] != seeds[1] && seeds[1] != seeds[2]);
    assert_eq!(seeds[0], request.sampling.seed);
    assert_eq!(front.backend.all().len(), 1, "one prefill for all");
    assert_eq!(front.backend.calls(), 1);

    for parameters in [
        "\"best_of\":2",
        "\"best_of\":2,\"do_sample\":false,\"temperature\":0.5",
        "\"best_of\":2,\"do_sample\":true,\"seed\":5",
    ] {
        let answer = post(
            front.address,
            "/generate",
            format!("{{\"inputs\":\"a\",\"parameters\":{{{parameters}}}}}"),
        );
        assert_eq!(answer.status, 422, "{parameters}");
        assert!(answer.text().contains("`parameters.best_of` is 2"), "{}", answer.text());
    }
    let stream = "{\"inputs\":\"a\",\"parameters\":{\"best_of\":2,\"do_sample\":true}}";
    assert_eq!(post(front.address, "/generate_stream", stream).status, 422);
}
