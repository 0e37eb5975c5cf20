"""The official text-generation client against a running cluster."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError
from text_generation.types import FinishReason

from checks import equal, holds, raises, run

TIMEOUT_S = 60


def client(reference):
    return Client(reference.url, timeout=TIMEOUT_S)


def check_tokens(reference, tokens):
    equal("ids", [token.id for token in tokens], reference.ids)
    equal("logprobs", [token.logprob for token in tokens], reference.logprobs)
    equal("texts", "".join(token.text for token in tokens), reference.text)
    equal("special", [token.special for token in tokens], [False] * len(tokens))


def case_generate_with_everything_told(reference):
    answer = client(reference).generate(
        reference.prompt, max_new_tokens=reference.max_tokens, decoder_input_details=True
    )
    equal("text", answer.generated_text, reference.text)
    details = answer.details
    equal("finish reason", details.finish_reason, FinishReason.Length)
    equal("generated tokens", details.generated_tokens, reference.max_tokens)
    holds("a seed is told for greedy answers too", details.seed and details.seed > 0)
    check_tokens(reference, details.tokens)
    equal("prompt ids", [token.id for token in details.prefill], reference.prompt_ids)
    equal("prompt text", "".join(token.text for token in details.prefill), reference.prompt)
    holds("nothing predicts the first prompt token", details.prefill[0].logprob is None)
    for token in details.prefill[1:]:
        holds(f"a log-probability, not {token.logprob}", math.isfinite(token.logprob) and token.logprob <= 0)


def case_generate_stream(reference):
    events = list(client(reference).generate_stream(reference.prompt, max_new_tokens=reference.max_tokens))
    check_tokens(reference, [event.token for event in events])
    for event in events[:-1]:
        holds("only the last event has the whole", event.generated_text is None and event.details is None)
    equal("text", events[-1].generated_text, reference.text)
    equal("finish reason", events[-1].details.finish_reason, FinishReason.Length)
    equal("generated tokens", events[-1].details.generated_tokens, reference.max_tokens)


def case_the_end_token_ends_an_answer(reference):
    whole = client(reference).generate(reference.chat_prompt, max_new_tokens=64)
    equal("text", whole.generated_text, reference.chat_text)
    equal("finish reason", whole.details.finish_reason, FinishReason.EndOfSequenceToken)
    equal("generated tokens", whole.details.generated_tokens, len(whole.details.tokens))
    holds("the end token is special", whole.details.tokens[-1].special)
    holds("the end token is told literally", whole.details.tokens[-1].text.startswith("<|"))
    shown = "".join(token.text for token in whole.details.tokens if not token.special)
    equal("shown tokens", shown, reference.chat_text)
    events = list(client(reference).generate_stream(reference.chat_prompt, max_new_tokens=64))
    equal("streamed ids", [event.token.id for event in events], [token.id for token in whole.details.tokens])
    equal("streamed text", events[-1].generated_text, reference.chat_text)
    equal("streamed finish reason", events[-1].details.finish_reason, FinishReason.EndOfSequenceToken)


def case_a_stop_sequence_is_hidden(reference):
    stops = ["never in the answer", reference.stop]
    whole = client(reference).generate(reference.prompt, max_new_tokens=reference.max_tokens, stop_sequences=stops)
    equal("text", whole.generated_text, reference.stopped_text)
    equal("finish reason", whole.details.finish_reason, FinishReason.StopSequence)
    count = len(whole.details.tokens)
    equal("ids", [token.id for token in whole.details.tokens], reference.ids[:count])
    events = list(
        client(reference).generate_stream(reference.prompt, max_new_tokens=reference.max_tokens, stop_sequences=stops)
    )
    equal("streamed text", "".join(event.token.text for event in events), reference.stopped_text)
    equal("text of the last event", events[-1].generated_text, reference.stopped_text)
    equal("streamed ids", [event.token.id for event in events], reference.ids[:count])
    equal("streamed finish reason", events[-1].details.finish_reason, FinishReason.StopSequence)


def case_a_seed_repeats_an_answer(reference):
    def sampled(seed, **more):
        options = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "typical_p": 0.95, "repetition_penalty": 1.1}
        return client(reference).generate(
            reference.prompt, do_sample=True, seed=seed, max_new_tokens=12, **(options | more)
        )

    largest = 2**64 - 1
    first, again, other = sampled(largest), sampled(largest), sampled(5)
    equal("seed", first.details.seed, largest)
    equal("the same seed", again, first)
    holds("another seed, another answer", other.generated_text != first.generated_text)
    streamed = list(
        client(reference).generate_stream(
            reference.prompt,
            do_sample=True,
            seed=largest,
            max_new_tokens=12,
            temperature=0.9,
            top_k=40,
            top_p=0.95,
            typical_p=0.95,
            repetition_penalty=1.1,
        )
    )
    equal("streamed", streamed[-1].generated_text, first.generated_text)
    equal("streamed seed", streamed[-1].details.seed, largest)


def case_the_prompt_is_returned_and_truncated_if_asked(reference):
    answer = client(reference).generate(reference.prompt, max_new_tokens=reference.max_tokens, return_full_text=True)
    equal("text", answer.generated_text, reference.prompt + reference.text)
    answer = client(reference).generate(reference.prompt, max_new_tokens=1, truncate=2, decoder_input_details=True)
    equal("prompt ids", [token.id for token in answer.details.prefill], reference.prompt_ids[-2:])
    equal("generated tokens", answer.details.generated_tokens, 1)


def case_wrong_requests_raise_validation_errors(reference):
    # What the client itself would refuse is not sent to the server.
    wrong = [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2**31}, "max_new_tokens"),
        ({"temperature": 1e-6}, "temperature"),
        ({"top_k": 2**31}, "top_k"),
        ({"seed": 0}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop_sequences": [""]}, "stop"),
    ]
    for options, word in wrong:
        whole = raises(ValidationError, lambda: client(reference).generate(reference.prompt, **options), word)
        holds(f"the server says it: {whole}", str(whole).startswith("Input validation error: "))
        if "best_of" not in options:
            raises(
                ValidationError, lambda: list(client(reference).generate_stream(reference.prompt, **options)), str(whole)
            )
    raises(ValidationError, lambda: client(reference).generate("word " * 20_000), "inputs", "8191")
    raises(ValidationError, lambda: list(client(reference).generate_stream("word " * 20_000)), "inputs")


def case_many_at_once_get_the_same_answer(reference):
    def one(_):
        return client(reference).generate(reference.prompt, max_new_tokens=reference.max_tokens).generated_text

    with ThreadPoolExecutor(8) as pool:
        equal("texts", list(pool.map(one, range(8))), [reference.text] * 8)


def case_the_asynchronous_client(reference):
    async def ask():
        answers = AsyncClient(reference.url, timeout=TIMEOUT_S)
        options = {"max_new_tokens": reference.max_tokens}
        whole = await answers.generate(reference.prompt, decoder_input_details=True, **options)
        events = [event async for event in answers.generate_stream(reference.prompt, **options)]
        try:
            await answers.generate(reference.prompt, max_new_tokens=0)
        except ValidationError:
            return whole, events
        raise AssertionError("no error for max_new_tokens=0")

    whole, events = asyncio.run(ask())
    equal("text", whole.generated_text, reference.text)
    check_tokens(reference, whole.details.tokens)
    check_tokens(reference, [event.token for event in events])
    equal("streamed text", events[-1].generated_text, reference.text)


if __name__ == "__main__":
    run(dict(globals()))
