"""Both clients against a cluster that is full: the errors they know."""

import openai
from text_generation import Client
from text_generation.errors import OverloadedError

from checks import equal, raises, run


def case_the_text_generation_client_is_told_to_come_back(reference):
    client = Client(reference.url, timeout=60)
    raises(OverloadedError, lambda: client.generate("x"), "Model is overloaded")
    raises(OverloadedError, lambda: list(client.generate_stream("x")), "Model is overloaded")


def case_the_openai_client_is_told_to_come_back(reference):
    client = openai.OpenAI(base_url=f"{reference.url}/v1", api_key="unused", max_retries=0, timeout=60)
    for stream in (False, True):
        error = raises(
            openai.RateLimitError,
            lambda: client.completions.create(model=reference.model, prompt="x", stream=stream),
        )
        equal("status, type", (error.status_code, error.type), (429, "rate_limit_exceeded"))
        equal("when to come back", int(error.response.headers["retry-after"]) >= 1, True)


if __name__ == "__main__":
    run(dict(globals()))
