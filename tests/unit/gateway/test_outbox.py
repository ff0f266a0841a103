import pytest

from gateway.answers.outbox import Outbox, UnsentRoom
from gateway.api.api_errors import INTERNAL, ApiError

pytestmark = pytest.mark.unit


def test_what_came_before_a_failure_is_handed_out_first() -> None:
    """Also tokens that make no text yet: whoever asked for token ids sees them all."""
    woken = []
    outbox = Outbox(UnsentRoom(100), lambda: woken.append(True))
    outbox.put("", [7, 8])
    outbox.end(ApiError(INTERNAL, "broken"))
    assert outbox.take().token_ids == [7, 8]
    assert len(woken) == 3, "again for the failure"
    with pytest.raises(ApiError, match="broken"):
        outbox.take()
