"""OpenAI's own client against a live stack when something is wrong: its typed errors, its retries and
timeouts, and streams that it leaves."""

import time
from itertools import pairwise
from typing import Any

import openai
import pytest
from tests.support.openai_clients import client_of
from tests.support.stack import RunningStack, Status

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CONTEXT_TOKENS = 8192
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}
OUT_OF_REACH = {"x-slo-ttft-ms": "1"}
"""A target that no instance meets: the conductor refuses."""


def ask(client: openai.OpenAI, **parameters: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "smollm2", "messages": QUESTION, "max_tokens": 4} | parameters
    )


@pytest.mark.parametrize(
    ("parameters", "param", "code", "limit"),
    [
        ({"temperature": 2.5}, "temperature", None, "2"),
        ({"top_p": 0}, "top_p", None, "0"),
        ({"max_tokens": 0}, "max_tokens", None, "1"),
        ({"n": 1000}, "n", None, "128"),
        ({"top_logprobs": 2}, "top_logprobs", None, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None, "20"),
        ({"messages": []}, "messages", None, "1"),
        ({"max_tokens": CONTEXT_TOKENS}, "max_tokens", "context_length_exceeded", str(CONTEXT_TOKENS)),
        ({"extra_body": {"beam_width": 4}}, "beam_width", "unknown_parameter", "beam_width"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio", "unsupported_parameter", "audio"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}},
            None,
            None,
            "",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_request_names_parameter_and_limit(
    client: openai.OpenAI, parameters: dict[str, Any], param: str | None, code: str | None, limit: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **parameters)
    error = raised.value
    assert error.type == "invalid_request_error"
    assert error.request_id
    if param is not None:
        assert (error.param, error.code) == (param, code)
        assert param in error.message
    assert limit in error.message


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model") as raised:
        ask(client, model="no-such-model")
    assert (raised.value.param, raised.value.code) == ("model", "model_not_found")


def test_a_stream_that_is_refused_has_its_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(client, stream=True, temperature=-1)


def test_a_refusal_says_why_and_when_to_come_back(client: openai.OpenAI) -> None:
    with pytest.raises(openai.RateLimitError) as raised:
        ask(client, extra_headers=OUT_OF_REACH)
    error = raised.value
    assert error.type == "rate_limit_error"
    assert error.response.headers["x-moonpool-rejected-reason"]
    assert int(error.response.headers["retry-after"]) >= 1
    assert float(error.response.headers["retry-after-ms"]) > 0


def test_the_clients_own_retries_wait_as_long_as_they_are_told(smollm2_stack: RunningStack) -> None:
    answered_at_s: list[float] = []
    told_s: list[float] = []

    def keep(response: Any) -> None:
        answered_at_s.append(time.monotonic())
        told_s.append(float(response.headers["retry-after-ms"]) / 1e3)

    with (
        openai.DefaultHttpx2Client(event_hooks={"response": [keep]}) as http_client,
        client_of(smollm2_stack, max_retries=2, http_client=http_client) as client,
        pytest.raises(openai.RateLimitError),
    ):
        ask(client, extra_headers=OUT_OF_REACH)
    assert len(answered_at_s) == 3
    waits_s = [later - earlier for earlier, later in pairwise(answered_at_s)]
    assert all(waited_s >= told for waited_s, told in zip(waits_s, told_s, strict=False))


def requests_in_progress(status: Status) -> int:
    total: int = status["totals"]["requests"]
    return total


def test_an_answer_that_takes_too_long_is_given_up(
    client: openai.OpenAI, smollm2_stack: RunningStack
) -> None:
    with pytest.raises(openai.APITimeoutError):
        ask(client, max_tokens=2000, timeout=0.5, extra_body={"ignore_eos": True})
    smollm2_stack.wait_status(lambda status: requests_in_progress(status) == 0)


def test_a_stream_that_is_left_frees_everything(client: openai.OpenAI, smollm2_stack: RunningStack) -> None:
    stream = ask(client, max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    for _, chunk in zip(range(3), stream, strict=False):
        assert chunk.choices
    stream.close()
    smollm2_stack.wait_status(lambda status: requests_in_progress(status) == 0)
    assert ask(client).choices[0].finish_reason == "length"
