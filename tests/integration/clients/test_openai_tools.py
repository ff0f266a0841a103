"""OpenAI's own client against a live stack: tools, and answers as pydantic models.

SmolLM2-135M calls a tool of its own accord when it pleases; what must hold whatever it says are forced
calls, whose arguments are held to the schema, and the form of everything around them.
"""

import json
from enum import StrEnum
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel, Field
from tests.support.openai_clients import async_client_of
from tests.support.stack import RunningStack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 1, "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
FORCED = {"type": "function", "function": {"name": "get_weather"}}


class Continent(StrEnum):
    EUROPE = "Europe"
    ASIA = "Asia"


class City(BaseModel):
    """What the answers are parsed into."""

    name: str = Field(max_length=20)
    continent: Continent
    inhabitants: int = Field(ge=0, le=50_000_000)
    rivers: list[str] = Field(max_length=2)


class WeatherQuestion(BaseModel):
    """The weather in a city"""

    city: str = Field(max_length=20)
    celsius: bool


def ask(client: openai.OpenAI, **parameters: Any) -> Any:
    return client.chat.completions.create(
        **{
            "model": "smollm2",
            "messages": QUESTION,
            "tools": [WEATHER, CLOCK],
            "max_tokens": 150,
            "temperature": 0,
        }
        | parameters
    )


def expect_weather_call(message: ChatCompletionMessage) -> Any:
    """The one call of a message."""
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.id
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")
    return call


def test_a_forced_call_has_its_schema(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice=FORCED).choices
    expect_weather_call(choice.message)
    assert not choice.message.content


def test_some_call_is_forced(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice="required", parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name in ("get_weather", "get_time")
    assert json.loads(call.function.arguments)


def test_without_choice_the_model_decides(client: openai.OpenAI) -> None:
    """Whatever it decides is well formed, and said by the reason."""
    (choice,) = ask(client).choices
    if choice.message.tool_calls:
        assert choice.finish_reason == "tool_calls"
        assert all(json.loads(call.function.arguments) is not None for call in choice.message.tool_calls)
    else:
        assert choice.finish_reason in ("stop", "length")
        assert choice.message.content


def test_none_forbids_calls(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice="none", max_tokens=40).choices
    assert not choice.message.tool_calls
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    (whole,) = ask(client, tool_choice=FORCED).choices
    chunks = list(ask(client, tool_choice=FORCED, stream=True))
    deltas = [delta for chunk in chunks for piece in chunk.choices for delta in piece.delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    head, *rest = deltas
    assert head.id
    assert head.type == "function"
    assert head.function.name == "get_weather"
    assert all(delta.id is None and delta.function.name is None for delta in rest)
    assert len(rest) > 1, "arguments come as they are generated"
    arguments = "".join(delta.function.arguments or "" for delta in deltas)
    assert arguments == whole.message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    assert not any(piece.delta.content for chunk in chunks for piece in chunk.choices)


def test_the_stream_helper_parses_calls(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(WeatherQuestion)
    with client.chat.completions.stream(
        model="smollm2",
        messages=QUESTION,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "WeatherQuestion"}},
        max_tokens=150,
        temperature=0,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, WeatherQuestion)


def test_a_round_trip_through_a_tool(client: openai.OpenAI) -> None:
    (first,) = ask(client, tool_choice=FORCED).choices
    call = expect_weather_call(first.message)
    messages = [
        *QUESTION,
        first.message,
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 21})},
    ]
    answer = ask(client, messages=messages, tool_choice="none", max_tokens=30)
    assert answer.choices[0].message.content
    # What the tool said is in the prompt: another result is another prompt of the same length.
    messages[-1] = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 34})}
    other = ask(client, messages=messages, tool_choice="none", max_tokens=30)
    assert other.usage.prompt_tokens == answer.usage.prompt_tokens
    assert other.usage.prompt_tokens_details.cached_tokens < other.usage.prompt_tokens - 16


def test_an_answer_parsed_into_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Describe the city of Paris as JSON."}],
        response_format=City,
        max_tokens=400,
        temperature=0,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, City)


def test_a_streamed_answer_parsed_into_a_model(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="smollm2",
        messages=[{"role": "user", "content": "Describe the city of Paris as JSON."}],
        response_format=City,
        max_tokens=400,
        temperature=0,
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)


async def test_the_asynchronous_client_parses_too(smollm2_stack: RunningStack) -> None:
    async with async_client_of(smollm2_stack) as client:
        answer = await client.chat.completions.parse(
            model="smollm2",
            messages=[{"role": "user", "content": "Describe the city of Rome as JSON."}],
            response_format=City,
            max_tokens=400,
            temperature=0,
        )
        assert isinstance(answer.choices[0].message.parsed, City)
        called = await client.chat.completions.parse(
            model="smollm2",
            messages=QUESTION,
            tools=[openai.pydantic_function_tool(WeatherQuestion)],
            tool_choice="required",
            max_tokens=150,
            temperature=0,
        )
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, WeatherQuestion)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "no_such_tool"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "not a name"}}]}, "tools"),
    ],
    ids=("unknown", "twice", "none_there", "name"),
)
def test_what_is_wrong_with_tools_is_named(
    client: openai.OpenAI, parameters: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **parameters)
    assert (raised.value.param or "").startswith(param)
