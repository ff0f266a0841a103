"""`policy.place` as a plain walk over frozen data, instance by instance and booking by booking.

Slow and easy to see through: what the one that keeps columns from one decision to the next has to agree with.
Shares with it what is decided for one request or one candidate at a time: costs, targets, forecasts.
"""

from collections.abc import Sequence

from tests.support.plain_decode import (
    PlainJoining,
    choose_decode,
    decode_candidates,
    room_refusal,
    steps_in_time,
    with_room,
)
from tests.support.plain_outlook import plain_outlook
from tests.support.plain_strategies import PLAIN_STRATEGIES
from tests.support.plain_ways import extents_of, prefill_question, silent

from kvhash import HASH_BYTES
from kvindex.core import InstanceMatch
from policy.admit import Refusal, targets_of, tbt_target_ms, ttft_refusal, ttft_target_ms
from policy.choice import AdmissionMode, PlacementLimits
from policy.core import Placement, Rejection, RejectReason, Role, ScheduleRequest
from policy.lengths import expected_tokens
from policy.load_sums import reserved_blocks
from policy.place_decode import DecodeCandidate
from policy.place_prefill import PrefillCandidate
from policy.view import ClusterView, InstanceView


def plain_place(
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
    able = _able(view, request)
    prefills = _preferred(able, Role.PREFILL, request, limits, now_s)
    decodes = _preferred(able, Role.DECODE, request, limits, now_s)
    if not prefills or not decodes:
        return _rejection(request, _no_instance(request, Role.DECODE if prefills else Role.PREFILL), limits)

    extents = extents_of(matches)
    ahead = plain_outlook(view, now_s)
    targets = targets_of(request, ahead, limits)
    question = prefill_question(prefills, view, request, extents, ahead, limits, targets)
    prefill = PLAIN_STRATEGIES[limits.strategy](question)
    expected = expected_tokens(
        view.lengths, request.tenant, request.block_hashes[:HASH_BYTES], request.output_tokens_max
    )
    joining = PlainJoining(request, prefill, expected, targets, ahead, limits, now_s, question.turn)
    decodes_known = decode_candidates(decodes, ahead.loads, prefill, request, extents)
    decode = _decode(joining, decodes_known)
    if isinstance(decode, Refusal):
        return _rejection(request, decode, limits)
    return _placement(joining, prefill, decode)


def _decode(joining: PlainJoining, candidates: Sequence[DecodeCandidate]) -> DecodeCandidate | Refusal:
    prefill, request, limits = joining.prefill, joining.request, joining.limits
    asks = limits.admission is not AdmissionMode.NONE and not request.resumed
    refusal = ttft_refusal(prefill, joining.targets) if asks else None
    if refusal is not None:
        return refusal
    roomy = with_room(joining, candidates)
    if asks and not roomy:
        return room_refusal(joining, candidates)
    chosen = choose_decode(
        roomy or candidates, prefill, request, limits, joining.targets.tbt_s_max, joining.turn
    )
    return steps_in_time(joining, chosen, roomy) if asks else chosen


def _placement(joining: PlainJoining, prefill: PrefillCandidate, decode: DecodeCandidate) -> Placement:
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


def _able(view: ClusterView, request: ScheduleRequest) -> list[InstanceView]:
    """Instances that may take the request at all, in the order of their names."""
    return [
        instance
        for _, instance in sorted(view.instances.items())
        if instance.model == request.model
        and instance.fingerprint == request.fingerprint
        and not instance.draining
        and instance.blocks >= reserved_blocks(request.prompt_tokens, instance.block_tokens, request.samples)
    ]


def _preferred(
    instances: Sequence[InstanceView],
    role: Role,
    request: ScheduleRequest,
    limits: PlacementLimits,
    now_s: float,
) -> list[InstanceView]:
    """Those of a role that are not silent and have not failed this request before.

    Where every one is silent it may be our own bus; where every one has failed it may have been a
    passing refusal: then the condition is dropped.
    """
    in_role = [instance for instance in instances if role in instance.roles]
    fit = [instance for instance in in_role if instance.instance not in request.excluded] or in_role
    return [instance for instance in fit if not silent(instance, limits, now_s)] or fit


def _no_instance(request: ScheduleRequest, missing: Role) -> Refusal:
    detail = f"no {missing} instance serves {request.model!r} with room for {request.prompt_tokens} tokens"
    return Refusal(RejectReason.NO_INSTANCE, detail, 0.0)


def _rejection(request: ScheduleRequest, refusal: Refusal, limits: PlacementLimits) -> Rejection:
    retry_after_s = min(max(refusal.wait_s, limits.retry_after_s_min), limits.retry_after_s_max)
    return Rejection(request.request_id, request.attempt, refusal.reason, refusal.detail, retry_after_s)
