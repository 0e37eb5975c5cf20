"""Both clients while their answers fail in the middle: they must learn it, and not take a part for the whole.

Writes "begun" when both streams have their first token; the test then ends the decode node."""

import threading

import openai
from text_generation import Client
from text_generation.errors import GenerationError

from checks import equal, holds, raises, run


def case_streams_that_break_raise_errors(reference):
    begun = threading.Barrier(2, action=lambda: print("begun", flush=True))
    found = {}

    def text_generation():
        events = Client(reference.url, timeout=60).generate_stream(reference.prompt, max_new_tokens=100_000)
        found["first event"] = next(events)
        begun.wait(60)
        found["generation error"] = raises(GenerationError, lambda: list(events), "Request failed during generation")

    def completions():
        client = openai.OpenAI(base_url=f"{reference.url}/v1", api_key="unused", max_retries=0, timeout=60)
        chunks = client.completions.create(
            model=reference.model,
            prompt=reference.prompt,
            max_tokens=100_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        found["first chunk"] = next(iter(chunks))
        begun.wait(60)
        found["api error"] = raises(openai.APIError, lambda: list(chunks))

    threads = [threading.Thread(target=task) for task in (text_generation, completions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    holds(f"one client did not learn of the failure: {found}", "generation error" in found and "api error" in found)
    equal("type", found["api error"].type, "ServiceUnavailableError")


if __name__ == "__main__":
    run(dict(globals()))
