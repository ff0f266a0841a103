"""Where a request runs, or why it is turned away: one pure function over a frozen view.

Prefill is chosen by the strategy (`policy.strategies`), decode by predicted step time and room
(`policy.place_decode`). Admission (`policy.admit`) compares both predictions with the request's targets
before any work is done for it.
"""

from collections.abc import Sequence

import numpy as np

from kvhash import HASH_BYTES
from kvindex.core import InstanceMatch
from policy.admit import (
    Joining,
    Refusal,
    room_refusal,
    steps_in_time,
    targets_of,
    tbt_target_ms,
    ttft_refusal,
    ttft_target_ms,
    with_room,
)
from policy.choice import AdmissionMode, PlacementLimits
from policy.columns import Bools, RoleColumnsT, Table
from policy.core import Placement, Rejection, RejectReason, Role, ScheduleRequest
from policy.lengths import expected_tokens
from policy.load_sums import reserved_blocks
from policy.place_decode import DecodeCandidate, DecodeCandidates, choose_decode, decode_candidates
from policy.place_prefill import PrefillCandidate, prefill_question
from policy.predict import outlook
from policy.prefixes import held_prefixes
from policy.strategies import STRATEGIES
from policy.view import ClusterView


def place(
    view: ClusterView,
    request: ScheduleRequest,
    matches: Sequence[InstanceMatch],
    limits: PlacementLimits,
    now_s: float,
) -> Placement | Rejection:
    """The placement of the strategy where it meets the request's targets, or the reason why there is none.

    `matches` is what kvmeta knows of the request's hashes; none is a valid answer. The placement's source
    and `prefix_blocks` say whose prefix is used and how long it is in all, prefill's own included. A
    `resumed` request already streams to a client: it is turned away only where no instance could ever
    hold it.
    """
    ahead = outlook(view, now_s)
    fleet = ahead.board.fleet(request.model, request.fingerprint)
    if fleet is None:
        return _rejection(request, _no_instance(request, Role.PREFILL), limits)
    prefills = _preferred(fleet.prefills, fleet.block_tokens, request, limits, now_s)
    decodes = _preferred(fleet.decodes, fleet.block_tokens, request, limits, now_s)
    if not prefills.names or not decodes.names:
        missing = Role.DECODE if prefills.names else Role.PREFILL
        return _rejection(request, _no_instance(request, missing), limits)

    held, holders = held_prefixes(matches, ahead.board.row_of)
    targets = targets_of(request, ahead, limits)
    question = prefill_question(
        prefills,
        fleet.block_tokens,
        view,
        request,
        held,
        holders,
        ahead,
        limits,
        targets.ttft_s_max,
        targets.tbt_s_max,
    )
    prefill = STRATEGIES[limits.strategy](question)
    expected = expected_tokens(view.lengths, request.tenant, _family(request), request.output_tokens_max)
    joining = Joining(request, prefill, expected, targets, ahead, limits, now_s, question.turn)
    decode = _decode(joining, decode_candidates(decodes, fleet.block_tokens, prefill, request, held))
    if isinstance(decode, Refusal):
        return _rejection(request, decode, limits)
    return _placement(joining, prefill, decode)


def _decode(joining: Joining, candidates: DecodeCandidates) -> DecodeCandidate | Refusal:
    prefill, limits = joining.prefill, joining.limits
    asks = limits.admission is not AdmissionMode.NONE and not joining.request.resumed
    refusal = ttft_refusal(prefill, joining.targets) if asks else None
    if refusal is not None:
        return refusal
    roomy = with_room(joining, candidates)
    if asks and not roomy.names:
        return room_refusal(joining, candidates)
    left = roomy if roomy.names else candidates
    chosen = choose_decode(left, prefill, limits, joining.targets.tbt_s_max, joining.turn)
    return steps_in_time(joining, chosen, left) if asks else left.at(chosen, joining.outlook)


def _placement(joining: Joining, prefill: PrefillCandidate, decode: DecodeCandidate) -> Placement:
    return Placement(
        request_id=joining.request.request_id,
        attempt=joining.request.attempt,
        prefill=prefill.instance.instance,
        decode=decode.instance.instance,
        source=prefill.source,
        prefix_blocks=prefill.prefix_blocks,
        predicted_ttft_ms=prefill.ttft_s * 1e3,
        predicted_tbt_ms=decode.step_s * 1e3,
        output_tokens_expected=joining.output_tokens_expected,
        tbt_ms_max=None if joining.request.resumed else tbt_target_ms(joining.request, joining.limits),
        ttft_ms_max=None if joining.request.resumed else ttft_target_ms(joining.request, joining.limits),
    )


def _preferred(
    instances: Table[RoleColumnsT],
    block_tokens: int,
    request: ScheduleRequest,
    limits: PlacementLimits,
    now_s: float,
) -> Table[RoleColumnsT]:
    """Those that could hold the request at all, are not silent and have not failed it before.

    Where every one is silent it may be our own bus; where every one has failed it may have been a
    passing refusal: then the condition is dropped.
    """
    columns, blocks = instances.columns, reserved_blocks(request.prompt_tokens, block_tokens, request.samples)
    if not instances.names or (
        columns.blocks.min() >= blocks
        and now_s - columns.heard_at_s.min() <= limits.silence_s_max
        and not request.excluded
    ):
        return instances
    fit = columns.blocks >= blocks
    if request.excluded:
        fit = _if_any(fit, np.array([name not in request.excluded for name in instances.names], np.bool_))
    fit = _if_any(fit, now_s - columns.heard_at_s <= limits.silence_s_max)
    return instances.take(fit.nonzero()[0])


def _if_any(fit: Bools, condition: Bools) -> Bools:
    """Those of `fit` that meet the condition; all of `fit` where none does."""
    narrowed = fit & condition
    return narrowed if narrowed.any() else fit


def _family(request: ScheduleRequest) -> bytes:
    return request.block_hashes[:HASH_BYTES]


def _no_instance(request: ScheduleRequest, missing: Role) -> Refusal:
    detail = f"no {missing} instance serves {request.model!r} with room for {request.prompt_tokens} tokens"
    return Refusal(RejectReason.NO_INSTANCE, detail, 0.0)


def _rejection(request: ScheduleRequest, refusal: Refusal, limits: PlacementLimits) -> Rejection:
    retry_after_s = min(max(refusal.wait_s, limits.retry_after_s_min), limits.retry_after_s_max)
    return Rejection(request.request_id, request.attempt, refusal.reason, refusal.detail, retry_after_s)
