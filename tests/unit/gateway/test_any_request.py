"""Any JSON is a request within all limits, or a 400 that says why: never anything else."""

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.api_errors import ApiError
from gateway.api.model_limits import ModelLimits
from gateway.api.neutral_parameters import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from gateway.api.prompts import prompts_of
from gateway.api.request_body import decode_chat, decode_completion
from gateway.api.request_types import ChatRequest, CompletionRequest
from gateway.api.validate import check_chat, check_completion, sampling
from policy.core import SamplingParams
from policy.sampling_limits import sampling_problem

pytestmark = pytest.mark.unit

LIMITS = ModelLimits(name="tiny", context_tokens_max=100, vocabulary_tokens=50, end_token_ids=(2, 3))
HELLO = [{"role": "user", "content": "hello"}]

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = {
    request: sorted({field.name for field in msgspec.structs.fields(request)} | set(neutral) | {"x", ""})
    for request, neutral in ((ChatRequest, CHAT_NEUTRAL), (CompletionRequest, COMPLETION_NEUTRAL))
}
FUNCTION = {"type": "function", "function": {"name": "f"}}
LIKELY_VALUES = st.sampled_from(
    [
        *(0, 1, 2, 20, 0.5, 1.5, True, False, "a", "none", "auto", "required"),
        *(["a"], [1, 49], [[1], [2]], {"7": 1}, [FUNCTION], FUNCTION),
        *({"type": "json_object"}, {"type": "text"}, {"include_usage": True}, {"regex": "a"}),
        [{"role": "tool", "content": "x", "tool_call_id": "c"}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    ]
)


def sampled_or_refused(
    request_class: type, body: bytes, headers: Mapping[str, str]
) -> list[SamplingParams] | ApiError:
    """What becomes of a body as the gateway reads it."""
    try:
        if request_class is ChatRequest:
            generation, prompts = check_chat(decode_chat(body), LIMITS, headers), (HELLO,)
        else:
            request = decode_completion(body)
            generation = check_completion(request, LIMITS, headers)
            prompts = prompts_of(request, LIMITS)
        return [sampling(generation, len(prompt) or 1, LIMITS, 0) for prompt in prompts]
    except ApiError as error:
        return error


@pytest.mark.parametrize("request_class", NAMES)
@given(data=st.data(), headers=st.dictionaries(st.sampled_from(["x-priority", "x-slo-ttft-ms"]), st.text()))
def test_any_json_is_taken_or_refused_with_a_sentence(request_class, data, headers) -> None:
    values = data.draw(
        st.dictionaries(st.sampled_from(NAMES[request_class]), LIKELY_VALUES | JSON_VALUES, max_size=5)
    )
    given_names = {"messages": HELLO} if request_class is ChatRequest else {"prompt": "hello"}
    outcome = sampled_or_refused(
        request_class, msgspec.json.encode({"model": "tiny"} | given_names | values), headers
    )
    if isinstance(outcome, ApiError):
        assert outcome.kind.status == 400
        assert 0 < len(outcome.message) < 1000
    else:
        assert outcome
        for params in outcome:
            assert 1 <= params.output_tokens_max <= 99
            assert sampling_problem(params, LIMITS.vocabulary_tokens) is None
