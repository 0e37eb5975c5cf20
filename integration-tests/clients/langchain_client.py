"""LangChain's OpenAI classes against a running cluster."""

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from checks import equal, holds, raises, run


def usual(reference):
    return {"base_url": f"{reference.url}/v1", "api_key": "unused", "model": reference.model, "max_retries": 0}


def model(reference, **options):
    return OpenAI(**usual(reference), **({"temperature": 0, "max_tokens": reference.max_tokens} | options))


def chat(reference, **options):
    return ChatOpenAI(**usual(reference), **({"temperature": 0, "max_tokens": 64} | options))


def case_invoke(reference):
    equal("text", model(reference).invoke(reference.prompt), reference.text)


def case_stream(reference):
    equal("text", "".join(model(reference).stream(reference.prompt)), reference.text)


def case_batch_and_choices(reference):
    equal("texts", model(reference).batch([reference.prompt] * 3), [reference.text] * 3)
    found = model(reference).generate([reference.prompt, reference.prompt])
    equal("generations", [[one.text for one in of] for of in found.generations], [[reference.text]] * 2)
    equal("tokens", found.llm_output["token_usage"]["completion_tokens"], 2 * reference.max_tokens)
    several = model(reference, temperature=0.7, n=2, best_of=2, seed=3).generate([reference.prompt])
    equal("choices", len(several.generations[0]), 2)


def case_stop(reference):
    equal("text", model(reference).invoke(reference.prompt, stop=[reference.stop]), reference.stopped_text)


def case_chat(reference):
    answer = chat(reference).invoke(reference.chat_question)
    equal("text", answer.content, reference.chat_text)
    equal("why", answer.response_metadata["finish_reason"], "stop")
    usage = answer.usage_metadata
    holds("usage", usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0)
    equal("streamed", "".join(part.content for part in chat(reference).stream(reference.chat_question)), reference.chat_text)


def case_a_conversation(reference):
    messages = [
        SystemMessage("You are brief."),
        HumanMessage(reference.chat_question),
        AIMessage(reference.chat_text),
        HumanMessage("And of Italy?"),
    ]
    first = chat(reference).invoke(messages).content
    equal("again", chat(reference).invoke(messages).content, first)


def case_log_probabilities(reference):
    answer = chat(reference, logprobs=True, top_logprobs=2).invoke(reference.chat_question)
    content = answer.response_metadata["logprobs"]["content"]
    holds("entries", content and all(len(entry["top_logprobs"]) == 2 for entry in content))


def case_a_required_tool(reference):
    @tool
    def population(city: str) -> int:
        """How many people live in a city."""
        return len(city)

    bound = chat(reference, max_tokens=120).bind_tools([population], tool_choice="population")
    calls = bound.invoke("How many people live in Paris?").tool_calls
    equal("the tool", [call["name"] for call in calls], ["population"])
    holds(f"its argument: {calls}", isinstance(calls[0]["args"]["city"], str))


def case_wrong_requests(reference):
    raises(openai.BadRequestError, lambda: model(reference, temperature=-1).invoke("a"), "temperature")


if __name__ == "__main__":
    run(dict(globals()))
