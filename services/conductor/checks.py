"""What a message has to say to be believed: everything that decisions are made from, but loads, passes here.

Raises ProtocolError that names field and limit. Pure.
"""

from cluster.errors import ProtocolError
from cluster.messages import MATCH_BLOCKS_MAX, Decision, MatchReply
from kvhash import BLOCK_TOKENS, HASH_BYTES
from kvindex.core import InstanceMatch
from policy.core import PRIORITY_MAX, PRIORITY_MIN, Placement, ScheduleRequest

EXCLUDED_MAX = 128
"""Instances that a request names as better avoided: more than a gateway can be told to try."""

NUMBER_MAX = 2**63 - 1
"""What the columns hold in which a view's numbers are added up."""

TEXT_CHARS_MAX = 1024
"""Of a name that a request brings: it is kept with bookings, learnt lengths and recordings."""


def checked_request(body: object) -> ScheduleRequest:
    if not isinstance(body, ScheduleRequest):
        raise ProtocolError(f"{type(body).__name__} is no schedule request")
    _check_work(body)
    _check_least("output_tokens_max", body.output_tokens_max, 1)
    _check_text("model", body.model)
    _check_text("tenant", body.tenant)
    if len(body.excluded) > EXCLUDED_MAX:
        raise ProtocolError(f"excluded: {len(body.excluded)} instances, must be at most {EXCLUDED_MAX}")
    blocks, rest = divmod(len(body.block_hashes), HASH_BYTES)
    blocks_max = min(MATCH_BLOCKS_MAX, body.prompt_tokens // BLOCK_TOKENS)
    if rest or blocks > blocks_max:
        raise ProtocolError(
            f"block_hashes: {len(body.block_hashes)} bytes, must be {HASH_BYTES} for each of at most "
            f"{blocks_max} full blocks"
        )
    return body


def checked_decision(body: object) -> Decision:
    """Another conductor's."""
    if not isinstance(body, Decision):
        raise ProtocolError(f"{type(body).__name__} is no decision")
    _check_work(body)
    if body.placement is not None:
        _check_placement(body.placement, body)
    return body


def checked_matches(body: object, blocks_asked: int) -> tuple[InstanceMatch, ...]:
    """kvmeta's, of a prompt of which it was asked for so many blocks."""
    if not isinstance(body, MatchReply):
        raise ProtocolError(f"{type(body).__name__} is no answer to a match")
    for match in body.matches:
        if not 0 <= match.prefix_blocks <= blocks_asked:
            raise ProtocolError(
                f"prefix_blocks: {match.prefix_blocks} at {match.instance}, must be 0 to {blocks_asked}"
            )
    return body.matches


def _check_work(body: ScheduleRequest | Decision) -> None:
    _check_text("request_id", body.request_id)
    _check_least("prompt_tokens", body.prompt_tokens, 1)
    _check_least("samples", body.samples, 1)
    _check_least("attempt", body.attempt, 0)
    if not PRIORITY_MIN <= body.priority <= PRIORITY_MAX:
        raise ProtocolError(f"priority: {body.priority}, must be {PRIORITY_MIN} to {PRIORITY_MAX}")


def _check_placement(placement: Placement, decision: Decision) -> None:
    if (placement.request_id, placement.attempt) != (decision.request_id, decision.attempt):
        raise ProtocolError("placement: of another request or attempt than its decision")
    prefix_blocks_max = -(-decision.prompt_tokens // BLOCK_TOKENS)
    if not 0 <= placement.prefix_blocks <= prefix_blocks_max:
        raise ProtocolError(f"prefix_blocks: {placement.prefix_blocks}, must be 0 to {prefix_blocks_max}")


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ProtocolError(f"{name}: {value}, must be at least {least}")
    if value > NUMBER_MAX:
        raise ProtocolError(f"{name}: {value}, must be at most {NUMBER_MAX}")


def _check_text(name: str, text: str) -> None:
    if len(text) > TEXT_CHARS_MAX:
        raise ProtocolError(f"{name}: {len(text)} characters, must be at most {TEXT_CHARS_MAX}")
