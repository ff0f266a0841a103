"""Calls of tools through the whole stack: forced ones fit their schemas whatever the model would say."""

import json
from typing import Any

import jsonschema
import pytest
from tests.support.models import smollm2_folder
from tests.support.stack import RunningStack
from tokenizers import Tokenizer

from moonpool.api import ApiError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
ROUTE = {
    "type": "object",
    "properties": {"begin": {"$ref": "#/$defs/place"}, "end": {"$ref": "#/$defs/place"}},
    "required": ["begin", "end"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
SCHEMA_OF = {"get_weather": WEATHER, "find_route": ROUTE}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMA_OF.items()
]
QUESTION = [{"role": "user", "content": "How will the weather be in Paris? Which way is it from Rome?"}]


def named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def body(stack: RunningStack, **parameters: Any) -> dict[str, Any]:
    return {"model": stack.state.model, "messages": QUESTION, "tools": TOOLS, "max_tokens": 400, **parameters}


def ask(stack: RunningStack, **parameters: Any) -> dict[str, Any]:
    """The choice of a whole answer."""
    (choice,) = stack.api.post("/chat/completions", body(stack, **parameters))["choices"]
    return choice


def streamed_arguments(stack: RunningStack, **parameters: Any) -> list[str]:
    """Of each call of a stream, the deltas joined."""
    calls: list[str] = []
    for event in stack.api.stream("/chat/completions", body(stack, **parameters)):
        for choice in event["choices"]:
            for delta in choice["delta"].get("tool_calls") or ():
                if delta["index"] == len(calls):
                    calls.append("")
                calls[delta["index"]] += delta["function"]["arguments"]
    return calls


def expect_valid(call: dict[str, Any]) -> str:
    """The function that is called, with arguments that fit."""
    name: str = call["function"]["name"]
    jsonschema.Draft202012Validator(SCHEMA_OF[name]).validate(json.loads(call["function"]["arguments"]))
    return name


@pytest.mark.parametrize(("name", "temperature"), [("get_weather", 0), ("find_route", 1.2)])
def test_a_named_call_has_valid_arguments(smollm2_stack: RunningStack, name: str, temperature: float) -> None:
    parameters = {"tool_choice": named(name), "temperature": temperature, "seed": 1}
    choice = ask(smollm2_stack, **parameters)
    (call,) = choice["message"]["tool_calls"]
    assert expect_valid(call) == name
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "stop")
    assert streamed_arguments(smollm2_stack, **parameters) == [call["function"]["arguments"]]


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_valid(smollm2_stack: RunningStack, parallel: bool) -> None:
    parameters = {"tool_choice": "required", "parallel_tool_calls": parallel, "temperature": 0.7, "seed": 3}
    choice = ask(smollm2_stack, **parameters)
    calls = choice["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == len(calls)
    if choice["finish_reason"] == "length":
        # A model of this size may list calls for ever; the last one is cut.
        assert parallel
        calls = calls[:-1]
    else:
        assert choice["finish_reason"] == "tool_calls"
    for call in calls:
        expect_valid(call)
    assert parallel or len(calls) == 1


@pytest.mark.parametrize(("begin", "calls"), [("<", True), ("{", False)])
def test_an_answer_has_the_form_or_calls(smollm2_stack: RunningStack, begin: str, calls: bool) -> None:
    """As the model pleases, which is made to begin with a character that only one of both begins with."""
    tokenizer = Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json"))
    response_format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    choice = ask(
        smollm2_stack,
        response_format=response_format,
        parallel_tool_calls=False,
        logit_bias={str(tokenizer.token_to_id(begin)): 100},
        temperature=0,
    )
    if calls:
        (call,) = choice["message"]["tool_calls"]
        expect_valid(call)
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    else:
        assert choice["message"].get("tool_calls") is None
        jsonschema.Draft202012Validator(WEATHER).validate(json.loads(choice["message"]["content"]))
        assert choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_says_so(smollm2_stack: RunningStack) -> None:
    whole = ask(smollm2_stack, tool_choice=named("get_weather"), temperature=0)
    cut = ask(smollm2_stack, tool_choice=named("get_weather"), temperature=0, max_tokens=5)
    arguments = cut["message"]["tool_calls"][0]["function"]["arguments"]
    assert cut["finish_reason"] == "length"
    assert arguments
    assert whole["message"]["tool_calls"][0]["function"]["arguments"].startswith(arguments)


def test_a_model_may_be_told_of_tools_and_of_what_they_gave(smollm2_stack: RunningStack) -> None:
    (call,) = ask(smollm2_stack, tool_choice=named("get_weather"), temperature=0)["message"]["tool_calls"]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "It will rain for three days."},
    ]
    choice = ask(smollm2_stack, messages=messages, temperature=0, max_tokens=40)
    assert choice["message"]["content"] or choice["message"]["tool_calls"]


def test_parameters_that_no_answer_can_be_held_to_are_refused(smollm2_stack: RunningStack) -> None:
    impossible = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    with pytest.raises(ApiError, match=r"tools\[0\].function.parameters") as refused:
        ask(smollm2_stack, tools=[impossible], tool_choice=named("f"))
    assert refused.value.status == 400
    with pytest.raises(ApiError, match="tools") as refused:
        ask(smollm2_stack, tools=[impossible], tool_choice="required")
    assert refused.value.status == 400
