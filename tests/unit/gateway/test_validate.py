"""What the API takes and what it refuses, each refusal by the name of its parameter."""

import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api_errors import ApiError
from gateway.api_types import CHAT_NEUTRAL, COMPLETION_NEUTRAL, ChatRequest, CompletionRequest
from gateway.request_body import decode_chat, decode_completion
from gateway.urgency import Urgency
from gateway.validate import (
    COMPLETION_TOKENS_DEFAULT,
    STOP_STRINGS_MAX,
    Generation,
    ModelLimits,
    check_chat,
    check_completion,
    check_model,
    sampling,
)
from policy.core import SamplingParams
from policy.sampling_limits import LOGIT_BIAS_ENTRIES_MAX, sampling_problem

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
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop": [str(i) for i in range(STOP_STRINGS_MAX + 1)]}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop_token_ids": [50]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": list(range(50)) * 2}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"bogus": 1}}, "stream_options"),
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
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": "0"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
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


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"model": "tiny", "temperature": NaN}',
        b'{"model": "tiny", "temperature": Infinity}',
        b"[" * 100_000,
        b'{"model":' * 100_000,
    ],
)
def test_what_is_no_json_object_is_400(body: bytes) -> None:
    for decode in (decode_chat, decode_completion):
        with pytest.raises(ApiError) as caught:
            decode(body)
        assert caught.value.kind.status == 400
        assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    "param", ["prompt", "messages", "stop", "stop_token_ids", "tools", "logit_bias", "x"]
)
@pytest.mark.parametrize("junk", [b"[]", b"{}", b'{"role":"user"}', b'"a"'])
def test_junk_is_refused_without_making_objects_of_it(param: str, junk: bytes) -> None:
    """Millions of empty lists held up the event loop for seconds: every stream stood still, and placements
    that other requests waited for timed out."""
    body = b'{"model": "tiny", "%s": [%s]}' % (param.encode(), b",".join([junk] * 200_000))
    decode = decode_completion if param == "prompt" else decode_chat
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            decode(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (caught.value.param or "").startswith(param)
    assert peak_bytes < len(body) / 2


def test_a_body_of_unknown_names_ends_at_the_first() -> None:
    body = b'{"model": "tiny", %s}' % b",".join(b'"x%d": 1' % i for i in range(100_000))
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            decode_chat(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (caught.value.param, caught.value.code) == ("x0", "unknown_parameter")
    assert peak_bytes < len(body) / 2


def test_missing_parameters_are_named() -> None:
    for body, param in ((b"{}", "model"), (b'{"model": "tiny"}', "messages")):
        with pytest.raises(ApiError) as caught:
            decode_chat(body)
        assert caught.value.param == param
    with pytest.raises(ApiError) as caught:
        decode_completion(b'{"model": "tiny"}')
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(("neutral", "generation"), [(CHAT_NEUTRAL, chat), (COMPLETION_NEUTRAL, completion)])
def test_unsupported_parameters_are_taken_where_they_ask_for_nothing(neutral, generation) -> None:
    for name, values in neutral.items():
        for value in values:
            assert generation(**{name: value}) == generation()


def test_no_parameter_is_both_supported_and_neutral() -> None:
    for request_class, neutral in ((ChatRequest, CHAT_NEUTRAL), (CompletionRequest, COMPLETION_NEUTRAL)):
        assert not {field.name for field in msgspec.structs.fields(request_class)} & set(neutral)


def test_an_answer_of_ours_may_be_sent_back() -> None:
    message = {
        "role": "assistant",
        "content": "Paris",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    request = decode_chat(json.dumps({"model": "tiny", "messages": [*HELLO, message]}).encode())
    assert request.messages[1].content == "Paris"


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


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        ([], "prompt", None),
        ([50], "prompt[0]", None),
        ([1, 2, -1], "prompt[2]", None),
        ([1, "a"], "prompt[1]", "invalid_type"),
        ([[1]], "prompt[0]", "invalid_type"),
        ({}, "prompt", "invalid_type"),
        (None, "prompt", "invalid_type"),
        ([7] * 100, "prompt", "context_length_exceeded"),
        ([10**30] * 100, "prompt", "context_length_exceeded"),
    ],
)
def test_bad_prompts_are_refused(prompt: object, param: str, code: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        completion(prompt=prompt)
    assert (caught.value.kind.status, caught.value.param, caught.value.code) == (400, param, code)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PARAMETERS = st.sampled_from(
    sorted(
        {field.name for field in msgspec.structs.fields(ChatRequest)}
        | set(CHAT_NEUTRAL)
        | {"prompt", "x", ""}
    )
)


@given(st.dictionaries(PARAMETERS, JSON_VALUES, max_size=6))
def test_any_json_is_taken_or_refused_with_a_sentence(parameters: dict[str, object]) -> None:
    body = msgspec.json.encode({"model": "tiny", "messages": HELLO} | parameters)
    outcome: ApiError | SamplingParams
    try:
        outcome = sampling(check_chat(decode_chat(body), LIMITS), 10, LIMITS, 0)
    except ApiError as error:
        outcome = error
    if isinstance(outcome, ApiError):
        assert outcome.kind.status == 400
        assert len(outcome.message) < 1000
    else:
        assert 1 <= outcome.output_tokens_max <= 90
        assert sampling_problem(outcome, LIMITS.vocabulary_tokens) is None


@given(st.binary(max_size=64))
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    for decode in (decode_chat, decode_completion):
        with pytest.raises(ApiError):
            decode(body)


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
