"""Bodies as JSON: names, types and ranges, each refusal with the name of what is wrong."""

import json
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.api_errors import ApiError
from gateway.api.model_limits import ModelLimits
from gateway.api.parameter_limits import MESSAGE_CALLS_MAX
from gateway.api.prompts import prompts_of
from gateway.api.request_body import (
    NEUTRAL_OF,
    decode_chat,
    decode_completion,
    decode_detokenize,
    decode_tokenize,
)

pytestmark = pytest.mark.unit

LIMITS = ModelLimits(name="tiny", context_tokens_max=100, vocabulary_tokens=50, end_token_ids=(2, 3))
HELLO = [{"role": "user", "content": "hello"}]
DECODERS = (decode_chat, decode_completion, decode_tokenize, decode_detokenize)


def refused(**parameters: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_chat(json.dumps({"model": "tiny", "messages": HELLO} | parameters).encode())
    return caught.value


def read_prompts(body: bytes) -> object:
    return prompts_of(decode_completion(body), LIMITS)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": Infinity}',
        b"[" * 100_000,
        b'{"model":' * 100_000,
    ],
)
def test_what_is_no_json_object_is_400(body: bytes) -> None:
    for decode in DECODERS:
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
    decode = read_prompts if param == "prompt" else decode_chat
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            decode(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (caught.value.param or "").startswith(param)
    copied_bytes = len(body) if param == "prompt" else 0
    assert peak_bytes < copied_bytes + len(body) / 2


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


def test_no_parameter_is_both_supported_and_neutral() -> None:
    for request_class, neutral in NEUTRAL_OF.items():
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


@given(st.binary(max_size=64))
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(ApiError):
            decode(body)


def test_messages_are_read_by_their_role() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    written = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]
    messages = decode_chat(json.dumps({"model": "tiny", "messages": written}).encode()).messages
    assert [message.role for message in messages] == ["developer", "user", "assistant", "tool"]
    assert messages[2].tool_calls[0].function.name == "f"
    assert messages[3].tool_call_id == "c1"


def test_a_range_is_told_with_what_breaks_it() -> None:
    assert refused(temperature=2.5).message == "temperature is 2.5, must be at most 2.0"
    assert refused(top_p=0).message == "top_p is 0, must be greater than 0.0"
    assert refused(seed=10**400).message == f"seed is beyond 64 bits, must be at most {2**63 - 1}"
    assert (
        refused(stop=["a", "x" * 1025]).message
        == "stop[1] has 1025 characters, must have at most 1024 characters"
    )
    assert refused(guided_choice=[]).message == "guided_choice has 0 entries, must have at least 1 entries"
    calls = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}] * (MESSAGE_CALLS_MAX + 1)
    too_many = refused(messages=[{"role": "assistant", "tool_calls": calls}])
    assert too_many.message == "messages[0].tool_calls must have at most 128 entries"
    assert refused(messages=[]).message == "messages must have at least 1 entries"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    sorted(
        {field.encode_name for cls in NEUTRAL_OF for field in msgspec.structs.fields(cls)}
        | {name for neutral in NEUTRAL_OF.values() for name in neutral}
        | {"x", "", "`", "a.b"}
    )
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "name", "refusal", "x"]),
        st.sampled_from(["user", "assistant", "tool", "system", "function"]) | JSON_VALUES,
        max_size=5,
    ),
    max_size=3,
)


@given(st.sampled_from(DECODERS), st.dictionaries(NAMES, JSON_VALUES, max_size=6), MESSAGES)
def test_any_json_is_read_or_refused_with_a_sentence(decode, parameters, messages) -> None:
    given_names = {"model": "tiny", "prompt": "p", "messages": messages} | parameters
    known = {field.encode_name for field in msgspec.structs.fields(decode.__annotations__["return"])}
    for body in (parameters, {name: given_names[name] for name in given_names if name in known}):
        outcome = read_or_refused(decode, json.dumps(body).encode())
        if isinstance(outcome, ApiError):
            assert outcome.kind.status == 400
            assert 0 < len(outcome.message) < 1000
            assert outcome.param is None or len(outcome.param) < 300
        else:
            assert outcome.model == body.get("model")


def read_or_refused(decode: Callable[[bytes], msgspec.Struct], body: bytes) -> msgspec.Struct | ApiError:
    try:
        return decode(body)
    except ApiError as error:
        return error
