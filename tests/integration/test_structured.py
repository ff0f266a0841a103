"""Answers held to a form, through the whole stack: valid whatever the model would say, or refused by name."""

import json
import re
from typing import Any

import jsonschema
import pytest
from tests.support.stack import RunningStack

from moonpool.api import ApiError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 20_000_000},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["city", "country", "inhabitants", "rivers"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Describe the city of Paris as JSON."}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
GRAMMAR = 'start: NUMBER ("+" NUMBER)+\nNUMBER: /[1-9][0-9]?/\n'


def ask(stack: RunningStack, **parameters: Any) -> tuple[str, str]:
    """Text and finish reason of a chat answer."""
    body = {"model": stack.state.model, "messages": QUESTION, "max_tokens": 300, **parameters}
    (choice,) = stack.api.post("/chat/completions", body)["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def expect_valid(text: str) -> Any:
    value = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(value)
    return value


@pytest.mark.parametrize("seed", range(4))
def test_a_random_model_answers_by_the_schema(tiny_stack: RunningStack, seed: int) -> None:
    text, reason = ask(tiny_stack, response_format=FORMAT, seed=seed)
    expect_valid(text)
    assert reason == "stop"
    stream = tiny_stack.api.stream(
        "/chat/completions",
        {
            "model": tiny_stack.state.model,
            "messages": QUESTION,
            "max_tokens": 300,
            "response_format": FORMAT,
            "seed": seed,
        },
    )
    pieces = [event["choices"][0]["delta"].get("content", "") for event in stream if event["choices"]]
    assert "".join(pieces) == text


def test_every_form_holds(tiny_stack: RunningStack) -> None:
    text, _ = ask(tiny_stack, guided_choice=["yes", "no", "maybe ☃"])
    assert text in ("yes", "no", "maybe ☃")
    text, _ = ask(tiny_stack, guided_regex="[a-f]{3}-[0-9]{2}", ignore_eos=True, min_tokens=100)
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", text)
    text, reason = ask(tiny_stack, guided_grammar=GRAMMAR, logit_bias={"2": 5})
    assert reason == "stop"
    assert re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?)+", text)
    text, _ = ask(tiny_stack, structured_outputs={"json": SCHEMA})
    expect_valid(text)


def test_cut_by_max_tokens_it_says_length(tiny_stack: RunningStack) -> None:
    whole, _ = ask(tiny_stack, response_format=FORMAT, seed=1)
    text, reason = ask(tiny_stack, response_format=FORMAT, seed=1, max_tokens=12)
    assert reason == "length"
    assert whole.startswith(text)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "not"),
        ({"guided_regex": "(a"}, "guided_regex: .*unclosed"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar: .*nowhere"),
    ],
)
def test_a_form_that_does_not_compile_is_a_400(
    tiny_stack: RunningStack, parameters: dict[str, object], named: str
) -> None:
    with pytest.raises(ApiError, match=named) as refused:
        ask(tiny_stack, **parameters)
    assert refused.value.status == 400
    status = tiny_stack.wait_status(lambda s: s["totals"]["blocks_in_use"] == 0)
    assert status["totals"]["queued"] == status["totals"]["running"] == 0


def test_a_real_model_says_what_it_knows_in_the_form(smollm2_stack: RunningStack) -> None:
    text, reason = ask(smollm2_stack, response_format=FORMAT, temperature=0, max_tokens=120)
    assert reason == "stop"
    value = expect_valid(text)
    assert value["city"] == "Paris"
    assert value["country"] == "France"
