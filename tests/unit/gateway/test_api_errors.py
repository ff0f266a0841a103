"""What a client that is to come again is told of when."""

import pytest

from gateway.api.api_errors import DEADLINE, INVALID, OVERLOADED, RETRY_AFTER_S_MAX, UNAVAILABLE, ApiError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [
        (6.2, "7", "6200"),
        (7.0, "7", "7000"),
        (0.25, "1", "250"),
        (0.0101, "1", "11"),
        (0.0, "1", "1000"),
        (None, "1", "1000"),
        (1e9, str(round(RETRY_AFTER_S_MAX)), str(round(RETRY_AFTER_S_MAX * 1e3))),
    ],
)
@pytest.mark.parametrize("kind", [OVERLOADED, UNAVAILABLE])
def test_retry_after_is_rounded_up(kind, retry_after_s, seconds, milliseconds) -> None:
    headers = ApiError(kind, "no", retry_after_s=retry_after_s).headers()
    assert (headers["Retry-After"], headers["retry-after-ms"]) == (seconds, milliseconds)


def test_what_no_waiting_helps_has_none() -> None:
    assert ApiError(INVALID, "no", retry_after_s=5.0).headers() == {}


def test_a_client_is_told_not_to_send_again_what_took_too_long() -> None:
    assert ApiError(DEADLINE, "no").headers() == {"x-should-retry": "false"}
    assert "x-should-retry" not in ApiError(UNAVAILABLE, "no").headers()
