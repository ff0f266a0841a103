"""What tenants may use: never more than the limit in any minute beyond one bucket, and never a wait that does
not end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway.api.api_errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.tenants.identity import Caller
from gateway.tenants.tenant_limits import (
    MINUTE_S,
    Reason,
    Refusal,
    Share,
    TenantLimits,
    Use,
    duration_text,
    entered,
    header_lines,
    left,
    reserved,
    share_of,
)
from gateway.tenants.tenant_use import OUTPUT_TOKENS_RESERVED_DEFAULT, TenantUse

pytestmark = pytest.mark.unit


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _use() -> tuple[TenantUse, Clock]:
    clock = Clock()
    return TenantUse(GatewayMetrics(CollectorRegistry()), clock), clock


def _caller(requests: int | None = None, tokens: int | None = None, at_once: int | None = None) -> Caller:
    return Caller("acme", TenantLimits(requests, tokens, at_once), "acme")


def test_requests_a_minute() -> None:
    use, clock = _use()
    caller = _caller(requests=6)
    for _ in range(6):
        with use.entered(caller):
            pass
    with pytest.raises(ApiError) as refused, use.entered(caller):
        pass
    assert refused.value.kind.status == 429
    assert refused.value.reason == "tenant_requests"
    assert refused.value.headers()["Retry-After"] == "10"
    assert refused.value.headers()["x-ratelimit-remaining-requests"] == "0"
    clock.now_s += 10.0
    with use.entered(caller) as entry:
        assert entry.headers["x-ratelimit-limit-requests"] == "6"
        assert entry.headers["x-ratelimit-reset-requests"] == "1m0s"


def test_requests_at_once_end_with_the_request_however_it_ends() -> None:
    use, _ = _use()
    caller = _caller(at_once=1)
    with use.entered(caller):
        with pytest.raises(ApiError) as refused, use.entered(caller):
            pass
        assert refused.value.reason == "tenant_concurrency"
    with pytest.raises(ZeroDivisionError), use.entered(caller):
        raise ZeroDivisionError
    with use.entered(caller):
        pass


def test_tokens_are_set_aside_and_corrected_by_what_was_used() -> None:
    use, _ = _use()
    caller = _caller(tokens=1000)
    with use.entered(caller) as entry:
        entry.reserve(100, 500, output_param="max_tokens")
        assert entry.headers["x-ratelimit-remaining-tokens"] == "400"
        with pytest.raises(ApiError) as refused, use.entered(caller) as other:
            other.reserve(100, 500, output_param="max_tokens")
        assert refused.value.reason == "tenant_tokens"
        assert refused.value.retry_after_s == pytest.approx(12.0)
        entry.answered(30)
        entry.answered(20)
    with use.entered(caller) as entry:
        assert entry.headers["x-ratelimit-remaining-tokens"] == "850"


def test_what_was_never_answered_costs_its_prompt_only() -> None:
    use, _ = _use()
    caller = _caller(tokens=1000)
    with use.entered(caller) as entry:
        entry.reserve(100, 900, output_param="max_tokens")
    with use.entered(caller) as entry:
        assert entry.headers["x-ratelimit-remaining-tokens"] == "900"


def test_a_request_that_the_whole_limit_has_no_room_for_is_a_400_that_names_it() -> None:
    use, _ = _use()
    with (
        use.entered(_caller(tokens=1000)) as entry,
        pytest.raises(ApiError, match="1000 tokens a minute") as no,
    ):
        entry.reserve(600, 401, output_param="max_completion_tokens")
    assert no.value.kind.status == 400
    assert no.value.param == "max_completion_tokens"
    assert no.value.code == "tokens_per_minute_exceeded"


def test_an_answer_without_a_bound_sets_a_usual_length_aside() -> None:
    use, _ = _use()
    with use.entered(_caller(tokens=100_000)) as entry:
        entry.reserve(100, 8000)
        assert entry.reserved_tokens == 100 + OUTPUT_TOKENS_RESERVED_DEFAULT
    with use.entered(Caller("small", TenantLimits(tokens_per_minute=200))) as entry:
        entry.reserve(150, 8000)
        assert entry.reserved_tokens == 200
    with (
        use.entered(Caller("small2", TenantLimits(tokens_per_minute=200))) as entry,
        pytest.raises(ApiError) as no,
    ):
        entry.reserve(200, 8000)
    assert no.value.kind.status == 400


def test_gateways_divide_and_a_change_takes_effect_at_once() -> None:
    use, clock = _use()
    caller = _caller(requests=60, at_once=3)
    use.share_among(2)
    with use.entered(caller) as entry:
        assert entry.headers["x-ratelimit-remaining-requests"] == "58"
        with use.entered(caller), pytest.raises(ApiError), use.entered(caller):
            pass
    for _ in range(28):
        with use.entered(caller):
            pass
    with (
        pytest.raises(ApiError, match=r"are used up at this gateway, whose part is one of 2$"),
        use.entered(caller),
    ):
        pass
    use.share_among(1)
    clock.now_s += 1.0
    with use.entered(caller):
        pass
    with pytest.raises(ApiError, match=r"are used up$"), use.entered(caller):
        pass


def test_tenants_do_not_take_from_each_other_and_the_open_one_has_no_limits() -> None:
    use, _ = _use()
    with use.entered(_caller(requests=1)), use.entered(Caller("beta", TenantLimits(1))):
        pass
    for _ in range(100):
        with use.entered(Caller()) as entry:
            entry.reserve(10**6, 10**6)
            assert entry.headers == {}


def test_tenants_that_are_gone_are_forgotten_once_nothing_of_theirs_runs() -> None:
    use, _ = _use()
    caller = _caller(requests=1)
    with use.entered(caller):
        use.keep_only({})
        with pytest.raises(ApiError), use.entered(caller):
            pass
    use.keep_only({})
    with use.entered(caller):
        pass


_limits = st.builds(
    TenantLimits,
    st.none() | st.integers(1, 50),
    st.none() | st.integers(1, 500),
    st.none() | st.integers(1, 5),
)
_steps = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "wait"]),
        st.integers(1, 600),
        st.integers(0, 600),
        st.floats(0.0, 90.0),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(_limits, st.integers(1, 4), _steps)
def test_whatever_comes_the_rates_hold_and_every_wait_that_is_told_is_enough(
    limits: TenantLimits, gateways: int, steps: list[tuple[str, int, int, float]]
) -> None:
    share = share_of(limits, gateways)
    use, now_s, began_s = Use(), 0.0, 0.0
    running: list[tuple[int, int]] = []
    requests, tokens = 0, 0
    for step, wanted, used, wait_s in steps:
        if step == "wait":
            now_s += wait_s
        elif step == "leave" and running:
            reserved_tokens, used_tokens = running.pop()
            use = left(use, share, reserved_tokens, used_tokens, now_s)
            tokens += used_tokens - reserved_tokens
        elif step == "enter":
            outcome = entered(use, share, now_s)
            if isinstance(outcome, Refusal):
                _check_wait(use, share, outcome, now_s)
                continue
            use, requests = outcome, requests + 1
            outcome = reserved(use, share, wanted, now_s)
            if isinstance(outcome, Refusal):
                use = left(use, share, 0, 0, now_s)
                continue
            use, tokens = outcome, tokens + wanted
            running.append((wanted, min(used, wanted)))
        assert use.concurrent == len(running)
        if share.concurrent_requests_max is not None:
            assert len(running) <= share.concurrent_requests_max
        minutes = 1 + (now_s - began_s) / MINUTE_S
        if share.requests_per_minute is not None:
            # One bucket, what was gained since, and at most one request that a full bucket is too small for.
            assert (
                requests
                <= share.requests_per_minute * minutes + max(0.0, 1 - share.requests_per_minute) + 1e-3
            )
        if share.tokens_per_minute is not None:
            debt = max(0.0, 600 - share.tokens_per_minute)
            assert tokens <= share.tokens_per_minute * minutes + debt + 1e-3
        for name, text in header_lines(use, limits, share, gateways).items():
            assert name.startswith("x-ratelimit-")
            if "remaining" in name:
                assert int(text) >= 0


def _check_wait(use: Use, share: Share, refusal: Refusal, now_s: float) -> None:
    if refusal.reason is Reason.CONCURRENCY:
        return
    assert refusal.retry_after_s > 0
    assert not isinstance(entered(use, share, now_s + refusal.retry_after_s), Refusal)
    half = entered(use, share, now_s + refusal.retry_after_s / 2)
    assert isinstance(half, Refusal) or refusal.retry_after_s < 1e-3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0201, "21ms"), (0.9991, "1s"), (6.0, "6s"), (90.0, "1m30s"), (3600.0, "1h0m0s")],
)
def test_times_are_told_as_openai_tells_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
