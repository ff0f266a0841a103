"""Priority and targets, by field and by header."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.api_errors import ApiError
from gateway.api.request_types import GenerationRequest
from gateway.api.urgency import Urgency, urgency_of

pytestmark = pytest.mark.unit


def asked(headers: dict[str, str] | None = None, **fields: float) -> Urgency:
    return urgency_of(GenerationRequest(model="tiny", **fields), headers or {})


def refused(headers: dict[str, str], **fields: float) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(headers, **fields)
    assert caught.value.kind.status == 400
    return caught.value


HEADERS = {"x-priority": "5", "x-slo-ttft-ms": "1500", "x-slo-tbt-ms": "49.5"}
URGENCY = Urgency(priority=5, ttft_ms_max=1500.0, tbt_ms_max=49.5)


def test_nothing_asked_is_the_clusters_own() -> None:
    assert asked() == Urgency(0, None, None)


def test_headers_say_what_fields_say() -> None:
    assert asked(HEADERS) == URGENCY
    assert asked(priority=5, ttft_ms_max=1500.0, tbt_ms_max=49.5) == URGENCY
    assert asked(HEADERS, priority=5, ttft_ms_max=1500.0, tbt_ms_max=49.5) == URGENCY
    assert asked({"x-priority": "+5"}, ttft_ms_max=1500.0, tbt_ms_max=49.5) == URGENCY


@pytest.mark.parametrize(
    ("header", "field", "value", "said"),
    [
        ("x-priority", "priority", 4, "priority is 4 and x-priority is 5; give only one"),
        ("x-priority", "priority", 0, "priority is 0 and x-priority is 5; give only one"),
        (
            "x-slo-ttft-ms",
            "ttft_ms_max",
            9.0,
            "ttft_ms_max is 9.0 and x-slo-ttft-ms is 1500.0; give only one",
        ),
        ("x-slo-tbt-ms", "tbt_ms_max", 9.0, "tbt_ms_max is 9.0 and x-slo-tbt-ms is 49.5; give only one"),
    ],
)
def test_a_field_and_a_header_that_differ_are_refused(
    header: str, field: str, value: float, said: str
) -> None:
    error = refused(HEADERS, **{field: value})
    assert (error.param, error.message) == (header, said)


@pytest.mark.parametrize(
    ("header", "text", "said"),
    [
        ("x-priority", "high", "is 'high', must be a whole number from -100 to 100"),
        ("x-priority", "1.5", "is '1.5', must be a whole number from -100 to 100"),
        ("x-priority", "101", "is 101, must be -100 to 100"),
        ("x-priority", "", "is '', must be a whole number from -100 to 100"),
        ("x-slo-ttft-ms", "0.5", "is 0.5, must be 1.0 to 3600000.0"),
        ("x-slo-ttft-ms", "nan", "is 'nan', must be a number from 1.0 to 3600000.0"),
        ("x-slo-ttft-ms", "1e3", "is '1e3', must be a number from 1.0 to 3600000.0"),
        ("x-slo-ttft-ms", "500, 300", "is '500, 300', must be a number from 1.0 to 3600000.0"),
        ("x-slo-tbt-ms", "60001", "is 60001.0, must be 0.1 to 60000.0"),
        ("x-slo-tbt-ms", "9" * 200, f"is '{'9' * 64}', must be a number from 0.1 to 60000.0"),
    ],
)
def test_a_bad_header_is_refused_by_name_and_limit(header: str, text: str, said: str) -> None:
    error = refused({header: text})
    assert (error.param, error.message) == (header, f"{header} {said}")


@given(st.sampled_from(sorted(HEADERS)), st.text(max_size=24))
def test_any_text_is_taken_within_the_limits_or_refused(header: str, text: str) -> None:
    try:
        urgency = asked({header: text})
    except ApiError:
        assert refused({header: text}).param == header
        return
    assert -100 <= urgency.priority <= 100
    assert urgency.ttft_ms_max is None or 1.0 <= urgency.ttft_ms_max <= 3_600_000.0
    assert urgency.tbt_ms_max is None or 0.1 <= urgency.tbt_ms_max <= 60_000.0
