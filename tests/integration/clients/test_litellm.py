"""litellm against a live stack, as a provider that speaks OpenAI's API."""

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, Field
from tests.support.loopback import only_loopback
from tests.support.openai_clients import ANSWER_S_MAX, NO_KEY
from tests.support.stack import RunningStack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_population",
        "description": "Inhabitants of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)
    inhabitants: int = Field(ge=0, le=50_000_000)


@pytest.fixture(scope="module")
def litellm() -> Iterator[ModuleType]:
    """Imported within the guard: by itself it fetches a list of prices, at its import."""
    with only_loopback():
        import litellm

        litellm.telemetry = False
        litellm.suppress_debug_info = True
        yield litellm


@pytest.fixture
def asked(smollm2_stack: RunningStack) -> dict[str, Any]:
    return {
        "model": "openai/smollm2",
        "api_base": smollm2_stack.state.url,
        "api_key": NO_KEY,
        "messages": QUESTION,
        "max_tokens": 16,
        "temperature": 0,
        "timeout": ANSWER_S_MAX,
        "num_retries": 0,
    }


def test_a_chat(litellm: ModuleType, asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked)
    assert "Paris" in answer.choices[0].message.content
    assert answer.model == "smollm2"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream(litellm: ModuleType, asked: dict[str, Any]) -> None:
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


async def test_the_asynchronous_forms(litellm: ModuleType, asked: dict[str, Any]) -> None:
    whole = await litellm.acompletion(**asked)
    stream = await litellm.acompletion(**asked, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content


def test_a_text_completion(litellm: ModuleType, asked: dict[str, Any]) -> None:
    parameters = {name: value for name, value in asked.items() if name not in ("messages", "model")}
    answer = litellm.text_completion(
        model="text-completion-openai/smollm2", prompt="The capital of France is", **parameters
    )
    assert "Paris" in answer.choices[0].text


@pytest.mark.parametrize("streamed", [False, True])
def test_a_forced_tool_call(litellm: ModuleType, asked: dict[str, Any], streamed: bool) -> None:
    parameters = asked | {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_population"}},
        "max_tokens": 100,
    }
    if streamed:
        answer = litellm.stream_chunk_builder(list(litellm.completion(**parameters, stream=True)))
    else:
        answer = litellm.completion(**parameters)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_population"
    assert json.loads(call.function.arguments).keys() == {"city"}


def test_an_answer_by_a_model(litellm: ModuleType, asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked | {"response_format": City, "max_tokens": 200})
    City.model_validate_json(answer.choices[0].message.content)


def test_errors_have_its_types(litellm: ModuleType, asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked | {"model": "openai/no-such-model"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked | {"temperature": 9})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked | {"messages": [{"role": "user", "content": "word " * 20_000}]})
    with pytest.raises(litellm.RateLimitError):
        litellm.completion(**asked, extra_headers={"x-slo-ttft-ms": "1"})
