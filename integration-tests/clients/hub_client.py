"""huggingface_hub's InferenceClient against a running cluster."""

import functools
import json

from huggingface_hub import InferenceClient
from huggingface_hub.errors import BadRequestError, ValidationError

from checks import equal, holds, raises, run

TIMEOUT_S = 60


@functools.cache
def client(reference):
    """One for all: a client that is forgotten closes its streams."""
    return InferenceClient(model=reference.url, timeout=TIMEOUT_S)


def generate(reference, **options):
    return client(reference).text_generation(reference.prompt, max_new_tokens=reference.max_tokens, **options)


def case_plain_text(reference):
    equal("text", generate(reference), reference.text)


def case_details(reference):
    answer = generate(reference, details=True, decoder_input_details=True)
    equal("text", answer.generated_text, reference.text)
    equal("ids", [token.id for token in answer.details.tokens], reference.ids)
    equal("log-probabilities", [token.logprob for token in answer.details.tokens], reference.logprobs)
    equal("prompt ids", [token.id for token in answer.details.prefill], reference.prompt_ids)
    equal("why", answer.details.finish_reason, "length")


def case_streams(reference):
    equal("texts", "".join(generate(reference, stream=True)), reference.text)
    events = list(generate(reference, stream=True, details=True))
    equal("ids", [event.token.id for event in events], reference.ids)
    equal("text", events[-1].generated_text, reference.text)
    equal("why", events[-1].details.finish_reason, "length")


def case_stop(reference):
    for name in ("stop", "stop_sequences"):
        try:
            text = generate(reference, **{name: [reference.stop]})
        except TypeError:
            continue  # this version has one of the two names
        equal(name, text, reference.stopped_text)
        return
    raise AssertionError("neither name of stop strings is known")


def case_sampled_with_a_seed(reference):
    options = {"do_sample": True, "temperature": 0.8, "seed": 5, "top_k": 40, "top_p": 0.9, "typical_p": 0.95}
    first = generate(reference, **options)
    equal("the same seed", generate(reference, **options), first)
    equal("streamed", "".join(generate(reference, stream=True, **options)), first)


def case_best_of(reference):
    answer = generate(reference, details=True, do_sample=True, temperature=0.8, best_of=3)
    equal("other sequences", len(answer.details.best_of_sequences), 2)


def case_watermark(reference):
    holds("a text", generate(reference, watermark=True))


def case_chat(reference):
    messages = [{"role": "user", "content": reference.chat_question}]
    # The client calls the model "dummy".
    whole = client(reference).chat_completion(messages, max_tokens=64, temperature=0)
    equal("text", whole.choices[0].message.content, reference.chat_text)
    equal("why", whole.choices[0].finish_reason, "stop")
    chunks = client(reference).chat_completion(messages, max_tokens=64, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    equal("streamed", text, reference.chat_text)


def case_chat_with_a_schema(reference):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = client(reference).chat_completion(
        [{"role": "user", "content": reference.chat_question}],
        max_tokens=80,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content)
    equal("keys", sorted(found), ["big", "city"])


def case_wrong_requests(reference):
    error = raises(BadRequestError, lambda: client(reference).chat_completion([{"role": "nobody", "content": "a"}]))
    equal("status", error.response.status_code, 400)
    raises(ValidationError, lambda: generate(reference, temperature=-1.0), "temperature")


if __name__ == "__main__":
    run(dict(globals()))
