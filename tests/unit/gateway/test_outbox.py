import pytest

from gateway.api_errors import INTERNAL, ApiError
from gateway.outbox import Outbox

pytestmark = pytest.mark.unit


async def test_what_came_before_a_failure_is_handed_out_first() -> None:
    """Also tokens that make no text yet: whoever asked for token ids sees them all."""
    outbox = Outbox(100)
    outbox.put("", [7, 8])
    outbox.end(ApiError(INTERNAL, "broken"))
    assert (await outbox.take()).token_ids == [7, 8]
    with pytest.raises(ApiError, match="broken"):
        await outbox.take()
