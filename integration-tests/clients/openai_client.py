"""The openai client against a running cluster: completions and models."""

import asyncio
import json
import math

import openai

from checks import equal, holds, raises, run

TIMEOUT_S = 60


def client(reference):
    return openai.OpenAI(base_url=f"{reference.url}/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_S)


def complete(reference, **options):
    usual = {
        "model": reference.model,
        "prompt": reference.prompt,
        "max_tokens": reference.max_tokens,
        "temperature": 0,
    }
    return client(reference).completions.create(**(usual | options))


def case_a_whole_completion(reference):
    answer = complete(reference)
    equal("object", answer.object, "text_completion")
    equal("model", answer.model, reference.model)
    holds("an id and a time", answer.id and answer.created > 1_600_000_000)
    equal("choices", len(answer.choices), 1)
    choice = answer.choices[0]
    equal("text", choice.text, reference.text)
    equal("index and logprobs", (choice.index, choice.logprobs), (0, None))
    equal("finish reason", choice.finish_reason, "length")
    equal("stop reason", choice.model_extra["stop_reason"], None)
    check_usage(reference, answer.usage)
    holds("every request has an id of its own", complete(reference).id != answer.id)


def check_usage(reference, usage):
    prompt, generated = len(reference.prompt_ids), reference.max_tokens
    equal("prompt tokens", usage.prompt_tokens, prompt)
    equal("completion tokens", usage.completion_tokens, generated)
    equal("total tokens", usage.total_tokens, prompt + generated)
    # Asked before, the prompt may be cached, but its last token never is.
    holds("cached tokens", 0 <= usage.prompt_tokens_details.cached_tokens < prompt)
    for name in ("batch_size", "queue_wait_time"):
        equal(f"entries of {name}", len(usage.model_extra[name]), generated)


def check_stream(reference, chunks):
    """All chunks with a choice: texts add up, one finish reason, one id."""
    equal("texts", "".join(chunk.choices[0].text for chunk in chunks), reference.text)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    equal("finish reasons", reasons, [None] * (len(chunks) - 1) + ["length"])
    equal("chunks", len(chunks), reference.max_tokens)
    heads = {(chunk.id, chunk.object, chunk.created, chunk.model) for chunk in chunks}
    equal("heads", len(heads), 1)


def case_a_stream_without_options_tells_usage_at_its_end(reference):
    chunks = list(complete(reference, stream=True))
    check_stream(reference, chunks)
    equal("usage before the end", [chunk.usage for chunk in chunks[:-1]], [None] * (len(chunks) - 1))
    check_usage(reference, chunks[-1].usage)


def case_a_stream_with_usage_tells_it_in_a_chunk_of_its_own(reference):
    *chunks, last = complete(reference, stream=True, stream_options={"include_usage": True})
    check_stream(reference, chunks)
    equal("usage before the end", [chunk.usage for chunk in chunks], [None] * len(chunks))
    equal("choices of the last chunk", last.choices, [])
    check_usage(reference, last.usage)
    chunks = list(complete(reference, stream=True, stream_options={"include_usage": False}))
    check_stream(reference, chunks)
    equal("usage", [chunk.usage for chunk in chunks], [None] * len(chunks))


def case_log_probabilities(reference):
    whole = complete(reference, logprobs=3).choices[0].logprobs
    equal("tokens", "".join(whole.tokens), reference.text)
    equal("log-probabilities", whole.token_logprobs, reference.logprobs)
    offset = 0
    for token, at, logprob, top in zip(whole.tokens, whole.text_offset, whole.token_logprobs, whole.top_logprobs):
        equal("offset", at, offset)
        offset += len(token)
        equal("the token among its alternatives", top[token], logprob)
        holds(f"greedy takes the best: {top}", logprob == max(top.values()))
        holds(f"3 or 4 alternatives: {top}", len(top) in (3, 4))
        holds(f"finite: {top}", all(math.isfinite(value) and value <= 0 for value in top.values()))
    parts = [chunk.choices[0].logprobs for chunk in complete(reference, logprobs=3, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for part in parts for value in getattr(part, name)]
        equal(f"streamed {name}", joined, getattr(whole, name))
    chosen = complete(reference, logprobs=0).choices[0].logprobs
    equal("only the chosen token", [len(top) for top in chosen.top_logprobs], [1] * reference.max_tokens)


def case_stops(reference):
    answer = complete(reference, stop=["never in the answer", reference.stop])
    choice = answer.choices[0]
    equal("text", choice.text, reference.stopped_text)
    equal("reasons", (choice.finish_reason, choice.model_extra["stop_reason"]), ("stop", reference.stop))
    chunks = list(complete(reference, stop=reference.stop, stream=True))
    equal("streamed text", "".join(chunk.choices[0].text for chunk in chunks), reference.stopped_text)
    last = chunks[-1].choices[0]
    equal("streamed reasons", (last.finish_reason, last.model_extra["stop_reason"]), ("stop", reference.stop))
    equal("streamed usage", chunks[-1].usage.completion_tokens, answer.usage.completion_tokens)
    kept = complete(reference, stop=reference.stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    equal("text with the stop", kept.text, reference.stopped_text + reference.stop)
    third = reference.ids[2]
    first = reference.ids.index(third)
    answer = complete(reference, extra_body={"stop_token_ids": [third]})
    equal("stop token", (answer.choices[0].finish_reason, answer.choices[0].model_extra["stop_reason"]), ("stop", third))
    equal("tokens with the stop token", answer.usage.completion_tokens, first + 1)
    holds("without its text", reference.text.startswith(answer.choices[0].text))


def case_the_end_token_ends_an_answer(reference):
    answer = complete(reference, prompt=reference.chat_prompt, max_tokens=64)
    choice = answer.choices[0]
    equal("text", choice.text, reference.chat_text)
    equal("reasons", (choice.finish_reason, choice.model_extra["stop_reason"]), ("stop", None))
    ignored = complete(reference, prompt=reference.chat_prompt, max_tokens=64, extra_body={"ignore_eos": True})
    equal("reason where it is ignored", ignored.choices[0].finish_reason, "length")
    equal("tokens where it is ignored", ignored.usage.completion_tokens, 64)
    holds("the answer goes on", ignored.choices[0].text.startswith(reference.chat_text))


def case_seeds(reference):
    def text(seed, stream=False):
        answer = complete(reference, temperature=1, seed=seed, stream=stream)
        if stream:
            return "".join(chunk.choices[0].text for chunk in answer)
        return answer.choices[0].text

    first = text(7)
    equal("the same seed", text(7), first)
    equal("the same seed streamed", text(7, stream=True), first)
    equal("different answers of different seeds", len({text(seed) for seed in range(1, 5)}), 4)
    text(2**64 - 1)


def case_prompts_of_every_shape(reference):
    for prompt in ([reference.prompt], reference.prompt_ids, [reference.prompt_ids]):
        answer = complete(reference, prompt=prompt)
        equal("text", answer.choices[0].text, reference.text)
        check_usage(reference, answer.usage)
    choice = complete(reference, extra_body={"return_token_ids": True}).choices[0]
    equal("ids", choice.model_extra["token_ids"], reference.ids)
    equal("prompt ids", choice.model_extra["prompt_token_ids"], reference.prompt_ids)


def case_choices(reference):
    def texts(**options):
        return [choice.text for choice in complete(reference, **options).choices]

    several = texts(n=3, temperature=1, seed=6)
    equal("choices", len(several), 3)
    holds("they differ", len(set(several)) == 3)
    equal("again", texts(n=3, temperature=1, seed=6), several)
    streamed = ["", "", ""]
    for chunk in complete(reference, n=3, temperature=1, seed=6, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    equal("streamed", streamed, several)
    equal("the best of four", len(texts(n=1, best_of=4, temperature=1, seed=6)), 4)
    beams = texts(n=2, extra_body={"use_beam_search": True})
    equal("beams", len(set(beams)), 2)
    equal("prompts", texts(prompt=[reference.prompt, reference.prompt]), [reference.text] * 2)


def case_echo(reference):
    choice = complete(reference, echo=True, logprobs=1).choices[0]
    equal("text", choice.text, reference.prompt + reference.text)
    equal("first log-probability", choice.logprobs.token_logprobs[0], None)
    equal("entries", len(choice.logprobs.tokens), len(reference.prompt_ids) + reference.max_tokens)
    alone = complete(reference, echo=True, logprobs=1, max_tokens=0)
    equal("the prompt alone", alone.choices[0].text, reference.prompt)
    equal("its log-probabilities", alone.choices[0].logprobs.token_logprobs, choice.logprobs.token_logprobs[: len(reference.prompt_ids)])


def case_chat(reference):
    chat = client(reference).chat.completions
    options = {"model": reference.model, "messages": [{"role": "user", "content": reference.chat_question}], "temperature": 0}
    whole = chat.create(**options, max_completion_tokens=64, logprobs=True, top_logprobs=3)
    equal("text", whole.choices[0].message.content, reference.chat_text)
    equal("reason", whole.choices[0].finish_reason, "stop")
    content = whole.choices[0].logprobs.content
    equal("text of the tokens", "".join(bytes(entry.bytes).decode() for entry in content[:-1]), reference.chat_text)
    holds("alternatives", all(len(entry.top_logprobs) == 3 for entry in content))
    chunks = list(chat.create(**options, max_tokens=64, stream=True, stream_options={"include_usage": True}))
    equal("streamed", "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), reference.chat_text)
    equal("usage", chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)


def case_structured_output(reference):
    chat = client(reference).chat.completions
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"], "additionalProperties": False}
    options = {"model": reference.model, "messages": [{"role": "user", "content": reference.chat_question}], "temperature": 0, "max_tokens": 60}
    kind = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    equal("keys", list(json.loads(chat.create(**options, response_format=kind).choices[0].message.content)), ["city"])
    tool = {"type": "function", "function": {"name": "find_city", "parameters": schema}}
    answer = chat.create(**options, tools=[tool], tool_choice="required").choices[0]
    equal("reason", answer.finish_reason, "tool_calls")
    call = answer.message.tool_calls[0].function
    equal("call", (call.name, list(json.loads(call.arguments))), ("find_city", ["city"]))
    choice = complete(reference, extra_body={"structured_outputs": {"choice": ["red", "green"]}}).choices[0]
    holds(f"one of two: {choice.text!r}", choice.text in ("red", "green"))


def case_models(reference):
    models = client(reference).models
    holds("the model is listed", reference.model in [model.id for model in models.list()])
    model = models.retrieve(reference.model)
    equal("model", (model.id, model.object), (reference.model, "model"))
    raises(openai.NotFoundError, lambda: models.retrieve("unknown"), "unknown")


def case_wrong_requests_raise_bad_request_errors(reference):
    wrong = [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 6}, "logprobs"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "word " * 20_000}, "prompt"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"suffix": "x"}, "suffix"),
        ({"extra_body": {"top_k": 0}}, "top_k"),
    ]
    for options, field in wrong:
        for stream in (False, True):
            error = raises(openai.BadRequestError, lambda: complete(reference, stream=stream, **options), field)
            told = (error.status_code, str(error.code), error.type)
            equal("status, code, type", told, (400, "400", "BadRequestError"))
            holds(f"param names {field}: {error.param}", error.param.startswith(field))
    raises(openai.BadRequestError, lambda: complete(reference, stream_options={"include_usage": True}), "stream_options")


def case_an_unknown_model_is_not_found(reference):
    for stream in (False, True):
        error = raises(openai.NotFoundError, lambda: complete(reference, model="unknown", stream=stream), "unknown")
        equal("param, type", (error.param, error.type), ("model", "NotFoundError"))
    messages = [{"role": "user", "content": "Hi"}]
    chat = client(reference).chat.completions
    raises(openai.NotFoundError, lambda: chat.create(model="unknown", messages=messages), "unknown")


def case_headers_and_a_stream_that_is_closed_early(reference):
    raw = client(reference).completions.with_raw_response.create(
        model=reference.model, prompt=reference.prompt, max_tokens=2, extra_headers={"x-request-id": "mine-7"}
    )
    equal("request id", raw.headers["x-request-id"], "mine-7")
    equal("choices", len(raw.parse().choices), 1)
    stream = complete(reference, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    holds("a first chunk", next(iter(stream)).choices)
    stream.close()


def case_the_asynchronous_client(reference):
    async def ask():
        options = {"base_url": f"{reference.url}/v1", "api_key": "unused", "max_retries": 0, "timeout": TIMEOUT_S}
        async with openai.AsyncOpenAI(**options) as answers:

            async def one(stream):
                answer = await answers.completions.create(
                    model=reference.model,
                    prompt=reference.prompt,
                    max_tokens=reference.max_tokens,
                    temperature=0,
                    stream=stream,
                )
                if stream:
                    return "".join([chunk.choices[0].text async for chunk in answer])
                return answer.choices[0].text

            return await asyncio.gather(*(one(index % 2 == 0) for index in range(8)))

    equal("texts", asyncio.run(ask()), [reference.text] * 8)


if __name__ == "__main__":
    run(dict(globals()))
