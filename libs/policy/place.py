"""Where a request runs, or why it is turned away: one pure function over a frozen view.

Prefill is chosen by predicted time to the first token (see `policy.place_prefill`), decode by predicted
step time and room, then by what need not be sent. Admission compares both predictions
with the request's targets before any work is done for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from kvindex.core import InstanceId, InstanceMatch
from policy.choice import AdmissionMode, PlacementLimits, nearly_least, silent, spread
from policy.core import Placement, Rejection, RejectReason, Role, ScheduleRequest
from policy.cost import transfer_s
from policy.place_prefill import NOTHING_CACHED, Extent, PrefillCandidate, extents_of, prefill_question
from policy.predict import (
    DecodeLoad,
    cost_of,
    decode_loads,
    next_finish_s,
    present_loads,
    reserved_blocks,
    room_blocks,
    step_with_s,
)
from policy.strategies import STRATEGIES
from policy.view import ClusterView, InstanceView


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    instance: InstanceView
    load: DecodeLoad
    step_s: float
    send_s: float
    """Time to bring it what of the prompt's KV it lacks; 0 where prefill is the same instance."""


def place(
    view: ClusterView,
    request: ScheduleRequest,
    matches: Sequence[InstanceMatch],
    limits: PlacementLimits,
    now_s: float,
) -> Placement | Rejection:
    """The cheapest placement that meets the request's targets, or the reason why there is none.

    `matches` is what kvmeta knows of the request's hashes; none is a valid answer. The placement's source
    and `prefix_blocks` say whose prefix is used and how long it is in all, prefill's own included. A
    `resumed` request already streams to a client: it is turned away only where no instance could ever
    hold it.
    """
    extents = extents_of(matches)
    able = _able(view, request)
    prefills = _preferred(able, Role.PREFILL, request, limits, now_s)
    decodes = _preferred(able, Role.DECODE, request, limits, now_s)
    if not prefills or not decodes:
        missing = Role.DECODE if prefills else Role.PREFILL
        detail = (
            f"no {missing} instance serves {request.model!r} with room for {request.prompt_tokens} tokens"
        )
        return _rejection(request, RejectReason.NO_INSTANCE, detail, 0.0, limits)

    refuses = limits.admission is not AdmissionMode.NONE and not request.resumed
    ttft_s_max = _ttft_s_max(request, limits)
    question = prefill_question(prefills, view, request, extents, limits, now_s, ttft_s_max)
    prefill = STRATEGIES[limits.strategy](question)
    if refuses and prefill.ttft_s > ttft_s_max:
        detail = f"first token predicted after {prefill.ttft_s:.3f} s, wanted within {ttft_s_max:.3f} s"
        return _rejection(request, RejectReason.TTFT, detail, prefill.ttft_s - ttft_s_max, limits)

    loads = decode_loads(view)
    admitted = present_loads(view) if limits.admission is AdmissionMode.SNAPSHOT else loads
    roomy = [instance for instance in decodes if _has_room(instance, admitted, request, extents)]
    if not roomy and refuses:
        wait_s = min(next_finish_s(instance, loads[instance.instance]) for instance in decodes)
        detail = f"no decode instance has room for {request.prompt_tokens} tokens"
        return _rejection(request, RejectReason.OVERLOADED, detail, wait_s, limits)

    decode = _choose_decode(roomy or decodes, loads, prefill, request, extents, limits)
    tbt_s_max = _tbt_s_max(request, limits)
    step_s = step_with_s(decode.instance, admitted[decode.instance.instance], request.prompt_tokens)
    if refuses and step_s > tbt_s_max:
        wait_s = next_finish_s(decode.instance, decode.load)
        detail = f"{step_s:.4f} s between tokens predicted, wanted within {tbt_s_max:.4f} s"
        return _rejection(request, RejectReason.TBT, detail, wait_s, limits)

    return Placement(
        request_id=request.request_id,
        attempt=request.attempt,
        prefill=prefill.instance.instance,
        decode=decode.instance.instance,
        source=prefill.source,
        prefix_blocks=prefill.prefix_blocks,
        predicted_ttft_ms=prefill.ttft_s * 1e3,
        predicted_tbt_ms=decode.step_s * 1e3,
    )


def _able(view: ClusterView, request: ScheduleRequest) -> list[InstanceView]:
    """Instances that may take the request at all, in the order of their names."""
    return [
        instance
        for _, instance in sorted(view.instances.items())
        if instance.model == request.model
        and instance.fingerprint == request.fingerprint
        and not instance.draining
        and instance.blocks >= reserved_blocks(request.prompt_tokens, instance.block_tokens)
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


def _choose_decode(
    decodes: Sequence[InstanceView],
    loads: Mapping[InstanceId, DecodeLoad],
    prefill: PrefillCandidate,
    request: ScheduleRequest,
    extents: Mapping[InstanceId, Extent],
    limits: PlacementLimits,
) -> DecodeCandidate:
    """The least step time; among equals the least to send, then the fewest requests."""
    candidates = [
        DecodeCandidate(
            instance=instance,
            load=loads[instance.instance],
            step_s=step_with_s(instance, loads[instance.instance], request.prompt_tokens),
            send_s=_send_s(instance, prefill, request, extents),
        )
        for instance in decodes
    ]
    equals = nearly_least(candidates, lambda candidate: candidate.step_s, limits, _tbt_s_max(request, limits))
    equals = nearly_least(equals, lambda candidate: candidate.send_s, limits, inf)
    return min(
        equals,
        key=lambda candidate: (
            candidate.instance.instance != prefill.instance.instance,
            candidate.load.requests,
            spread(request.request_id, candidate.instance.instance),
        ),
    )


def _send_s(
    decode: InstanceView,
    prefill: PrefillCandidate,
    request: ScheduleRequest,
    extents: Mapping[InstanceId, Extent],
) -> float:
    if decode.instance == prefill.instance.instance:
        return 0.0
    prompt_blocks = -(-request.prompt_tokens // decode.block_tokens)
    sent_blocks = prompt_blocks - min(_held_blocks(decode, extents), prompt_blocks)
    return transfer_s(cost_of(prefill.instance), sent_blocks * decode.block_bytes)


def _has_room(
    instance: InstanceView,
    loads: Mapping[InstanceId, DecodeLoad],
    request: ScheduleRequest,
    extents: Mapping[InstanceId, Extent],
) -> bool:
    """Held blocks are shared, not taken anew. Decode counts again when it reserves."""
    needed = reserved_blocks(request.prompt_tokens, instance.block_tokens)
    needed -= min(_held_blocks(instance, extents), needed - 1)
    return needed <= room_blocks(instance, loads[instance.instance])


def _held_blocks(decode: InstanceView, extents: Mapping[InstanceId, Extent]) -> int:
    """What it can decode on without reading it back: blocks on SSD take room and are sent like others."""
    return extents.get(decode.instance, NOTHING_CACHED).memory_blocks


def _ttft_s_max(request: ScheduleRequest, limits: PlacementLimits) -> float:
    target_ms = limits.ttft_ms_default if request.ttft_ms_max is None else request.ttft_ms_max
    return min(request.deadline_s, inf if target_ms is None else target_ms / 1e3)


def _tbt_s_max(request: ScheduleRequest, limits: PlacementLimits) -> float:
    target_ms = limits.tbt_ms_default if request.tbt_ms_max is None else request.tbt_ms_max
    return inf if target_ms is None else target_ms / 1e3


def _rejection(
    request: ScheduleRequest, reason: RejectReason, detail: str, wait_s: float, limits: PlacementLimits
) -> Rejection:
    retry_after_s = min(max(wait_s, limits.retry_after_s_min), limits.retry_after_s_max)
    return Rejection(request.request_id, request.attempt, reason, detail, retry_after_s)
