"""What the API takes and what it refuses, each refusal by the name of its parameter."""

import json

import pytest

from gateway.api.api_errors import ApiError
from gateway.api.model_limits import ModelLimits
from gateway.api.neutral_parameters import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from gateway.api.parameter_limits import CHOICES_MAX, STOP_STRINGS_MAX
from gateway.api.request_body import decode_chat, decode_completion
from gateway.api.urgency import Urgency
from gateway.api.validate import (
    COMPLETION_TOKENS_DEFAULT,
    Generation,
    check_chat,
    check_completion,
    check_model,
    sampling,
)
from policy.sampling_limits import LOGIT_BIAS_ENTRIES_MAX, LOGPROBS_MAX, STOP_TOKEN_IDS_MAX, sampling_problem

pytestmark = pytest.mark.unit

LIMITS = ModelLimits(name="tiny", context_tokens_max=100, vocabulary_tokens=50, end_token_ids=(2, 3))
HELLO = [{"role": "user", "content": "hello"}]


def chat(**parameters: object) -> Generation:
    body = json.dumps({"model": "tiny", "messages": HELLO} | parameters).encode()
    return check_chat(decode_chat(body), LIMITS)


def completion(**parameters: object) -> Generation:
    body = json.dumps({"model": "tiny", "prompt": "hello"} | parameters).encode()
    return check_completion(decode_completion(body), LIMITS)


def refused(**parameters: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        sampling(chat(**parameters), 10, LIMITS, 0)
    assert caught.value.kind.status == 400
    return caught.value


def test_defaults_are_those_of_the_api() -> None:
    generation = chat()
    params = sampling(generation, 40, LIMITS, drawn_seed=7)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (1.0, 1.0, 0, 7)
    assert params.output_tokens_max == 60
    assert params.stop_token_ids == (2, 3)
    assert not generation.stream
    assert not generation.include_usage
    assert sampling(completion(), 10, LIMITS, 0).output_tokens_max == COMPLETION_TOKENS_DEFAULT
    assert sampling(completion(), 95, LIMITS, 0).output_tokens_max == 5


@pytest.mark.parametrize(
    "held",
    [
        {"response_format": {"type": "json_object"}},
        {"guided_choice": ["a", "b"]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
)
def test_no_stop_ends_an_answer_that_is_held_to_a_form(held: dict[str, object]) -> None:
    generation = chat(stop=["a"], stop_token_ids=[9], ignore_eos=True, min_tokens=5, **held)
    assert (generation.stop, generation.stop_token_ids) == ((), LIMITS.end_token_ids)
    assert generation.output_tokens_min == 0


def test_hints_are_taken_and_bounded() -> None:
    hints = {"safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}}
    assert chat(**hints) == chat(user="u") == chat()
    assert completion(**hints) == completion()
    assert refused(metadata={str(n): "" for n in range(17)}).param == "metadata"
    assert refused(prompt_cache_key="x" * 513).param == "prompt_cache_key"


def test_everything_given_is_taken() -> None:
    generation = chat(
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=20,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={"7": -100, "49": 2.5},
        seed=-1,
        stop=["a", "b", "a"],
        stop_token_ids=[3, 9],
        ignore_eos=True,
        user="somebody",
    )
    params = sampling(generation, 10, LIMITS, drawn_seed=7)
    assert generation.stream
    assert generation.include_usage
    assert generation.stop == ("a", "b")
    assert params.output_tokens_max == 20
    assert params.output_tokens_min == 2
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.5, 0)
    assert (params.min_p, params.repetition_penalty) == (0.1, 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (-2.0, 0.5)
    assert params.logit_bias == ((7, -100.0), (49, 2.5))
    assert sampling_problem(params, LIMITS.vocabulary_tokens) is None
    assert params.seed == 2**63 - 1
    assert params.stop_token_ids == (3, 9)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["x" * 1025]}, "stop[0]"),
        ({"stop": [str(i) for i in range(STOP_STRINGS_MAX + 1)]}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop_token_ids": [50]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [7] * (STOP_TOKEN_IDS_MAX + 1)}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"bogus": 1}}, "stream_options.bogus"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"user": "u" * 513}, "user"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "bogus": 1}]}, "messages[0].bogus"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"n": 0}, "n"),
        ({"n": CHOICES_MAX + 1}, "n"),
        ({"n": True}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": "0"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": LOGPROBS_MAX + 1}, "top_logprobs"),
        ({"cache_salt": "s" * 257}, "cache_salt"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias"),
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"hello": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias[...]"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(LOGIT_BIAS_ENTRIES_MAX + 1)}}, "logit_bias"),
        ({"best_of": 1}, "best_of"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(parameters: dict[str, object], param: str) -> None:
    error = refused(**parameters)
    assert error.param == param
    assert param.split("[")[0].split(".")[0] in error.message


@pytest.mark.parametrize(("neutral", "generation"), [(CHAT_NEUTRAL, chat), (COMPLETION_NEUTRAL, completion)])
def test_unsupported_parameters_are_taken_where_they_ask_for_nothing(neutral, generation) -> None:
    for name, values in neutral.items():
        for value in values:
            assert generation(**{name: value}) == generation()


def test_an_unknown_model_is_404() -> None:
    check_model("tiny", LIMITS)
    with pytest.raises(ApiError) as caught:
        check_model("gpt-4o", LIMITS)
    assert (caught.value.kind.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "granted"),
    [
        (99, None, 1),
        (99, 1, 1),
        (60, 40, 40),
        (60, None, 40),
    ],
)
def test_what_just_fits_is_taken(prompt_tokens: int, max_tokens: int | None, granted: int) -> None:
    assert sampling(chat(max_tokens=max_tokens), prompt_tokens, LIMITS, 0).output_tokens_max == granted


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "param"),
    [
        (100, None, "messages"),
        (100, 1, "messages"),
        (99, 2, "max_tokens"),
        (60, 41, "max_tokens"),
        (1, 2**62, "max_tokens"),
    ],
)
def test_one_token_over_the_context_is_named(prompt_tokens: int, max_tokens: int | None, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        sampling(chat(max_tokens=max_tokens), prompt_tokens, LIMITS, 0)
    error = caught.value
    assert (error.kind.status, error.code, error.param) == (400, "context_length_exceeded", param)


def test_what_comes_with_answers_is_taken() -> None:
    asked = chat(n=3, logprobs=True, top_logprobs=2, cache_salt="s", skip_special_tokens=False)
    assert (asked.answers, asked.logprobs, asked.cache_salt) == (3, 2, "s")
    assert asked.keep_special_tokens
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=False, top_logprobs=0).logprobs is None
    assert completion(logprobs=0).logprobs == 0
    assert sampling(completion(logprobs=5), 10, LIMITS, 0).logprobs == 5
    assert completion(echo=True).echo
    assert completion(n=2, best_of=2).answers == 2


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"echo": True, "logprobs": 0}, "logprobs"),
        ({"logprobs": LOGPROBS_MAX + 1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ],
)
def test_what_completions_do_not_take_is_named(parameters: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**parameters)
    assert (caught.value.kind.status, caught.value.param) == (400, param)
    assert param in caught.value.message


def test_urgency() -> None:
    assert chat().urgency == Urgency()
    asked = chat(priority=-3, ttft_ms_max=1500, tbt_ms_max=49.5).urgency
    assert asked == Urgency(priority=-3, ttft_ms_max=1500.0, tbt_ms_max=49.5)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("priority", 101),
        ("priority", -101),
        ("priority", 0.5),
        ("ttft_ms_max", 0),
        ("ttft_ms_max", 4_000_000),
        ("ttft_ms_max", "soon"),
        ("tbt_ms_max", 0.01),
        ("tbt_ms_max", 61_000),
    ],
)
def test_urgency_out_of_range_is_refused_by_name(param, value) -> None:
    assert refused(**{param: value}).param == param


def test_end_tokens_count_among_stop_tokens() -> None:
    """Workers take so many in all: one more is refused here, not there."""
    limits = ModelLimits("tiny", 100, 5000, end_token_ids=(2, 3))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}

    def checked(token_ids: list[int], **parameters: object) -> Generation:
        written = json.dumps(body | {"stop_token_ids": token_ids} | parameters).encode()
        return check_chat(decode_chat(written), limits)

    just = list(range(10, 10 + STOP_TOKEN_IDS_MAX - 2))
    assert checked(just).stop_token_ids == (2, 3, *just)
    assert len(checked([*just, 2, 3]).stop_token_ids) == STOP_TOKEN_IDS_MAX, "what is named twice counts once"
    assert checked([*just, 8, 9], ignore_eos=True).stop_token_ids == (*just, 8, 9)
    with pytest.raises(ApiError, match="1025 entries with the model's 2 end tokens, must have at most 1024"):
        checked([*just, 8])
