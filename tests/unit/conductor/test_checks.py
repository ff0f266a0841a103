"""What a conductor believes, and what it refuses by field and limit."""

from dataclasses import replace

import pytest
from tests.support.views import D1, P1, request

from cluster.errors import ProtocolError
from cluster.messages import Accepted, Decision, MatchReply
from conductor.checks import EXCLUDED_MAX, checked_decision, checked_matches, checked_request
from kvindex.core import InstanceId, InstanceMatch
from policy.core import Placement, RequestId

pytestmark = pytest.mark.unit

REQUEST = request("r", prompt_tokens=64, block_hashes=bytes(4 * 16))
PLACEMENT = Placement(RequestId("r"), 1, P1, D1, P1, prefix_blocks=4)
DECISION = Decision(RequestId("r"), 1, 64, 8, b"", (), PLACEMENT)
INT64_MAX = 2**63 - 1


def test_what_makes_sense_is_taken_as_it_is() -> None:
    assert checked_request(REQUEST) is REQUEST
    assert checked_decision(DECISION) is DECISION
    assert checked_matches(MatchReply((InstanceMatch(P1, 4),)), 4) == (InstanceMatch(P1, 4),)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_tokens": 0, "block_hashes": b""}, "prompt_tokens: 0, must be at least 1"),
        ({"output_tokens_max": -1}, "output_tokens_max: -1, must be at least 1"),
        ({"output_tokens_max": 2**63}, "output_tokens_max: 9223372036854775808, must be at most 92233720"),
        ({"samples": 0}, "samples: 0, must be at least 1"),
        ({"attempt": -1}, "attempt: -1, must be at least 0"),
        ({"request_id": "r" * 65_536}, "request_id: 65536 characters, must be at most 1024"),
        ({"tenant": "t" * 65_536}, "tenant: 65536 characters, must be at most 1024"),
        ({"model": "m" * 65_536}, "model: 65536 characters, must be at most 1024"),
        ({"priority": INT64_MAX}, f"priority: {INT64_MAX}, must be -100 to 100"),
        ({"priority": -101}, "priority: -101, must be -100 to 100"),
        ({"block_hashes": bytes(17)}, "block_hashes: 17 bytes, must be 16 for each of at most 4 full blocks"),
        ({"block_hashes": bytes(5 * 16)}, "block_hashes: 80 bytes, must be 16 for each of at most 4"),
        (
            {"excluded": tuple(InstanceId(str(n)) for n in range(100_000))},
            f"excluded: 100000 instances, must be at most {EXCLUDED_MAX}",
        ),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        checked_request(replace(REQUEST, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_tokens": -1}, "prompt_tokens: -1, must be at least 1"),
        ({"samples": -INT64_MAX}, "samples: -9223372036854775807, must be at least 1"),
        ({"priority": INT64_MAX}, "priority: 9223372036854775807, must be -100 to 100"),
        ({"attempt": 2}, "placement: of another request or attempt than its decision"),
        (
            {"placement": replace(PLACEMENT, prefix_blocks=-(10**15))},
            "prefix_blocks: -1000000000000000, must",
        ),
        ({"placement": replace(PLACEMENT, prefix_blocks=5)}, "prefix_blocks: 5, must be 0 to 4"),
    ],
)
def test_a_decision_that_makes_no_sense_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        checked_decision(replace(DECISION, **changes))


@pytest.mark.parametrize("blocks", [-1, 5, INT64_MAX])
def test_a_match_of_more_than_was_asked_for_is_refused(blocks: int) -> None:
    with pytest.raises(ProtocolError, match=f"prefix_blocks: {blocks} at p1, must be 0 to 4"):
        checked_matches(MatchReply((InstanceMatch(P1, 3), InstanceMatch(P1, blocks))), 4)


def test_another_kind_of_message_is_refused_by_its_name() -> None:
    other = Accepted(RequestId("r"), 0)
    with pytest.raises(ProtocolError, match="Accepted is no schedule request"):
        checked_request(other)
    with pytest.raises(ProtocolError, match="Accepted is no decision"):
        checked_decision(other)
    with pytest.raises(ProtocolError, match="Accepted is no answer to a match"):
        checked_matches(other, 4)
