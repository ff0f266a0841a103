"""Which decode a request goes to, and whether it is let in, looking at one candidate after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from math import inf

from tests.support.plain_outlook import PlainOutlook
from tests.support.plain_ways import Extent, in_turn, nearly_least

from kvindex.core import InstanceId
from policy.admit import FORECASTS_MAX, Refusal, Targets
from policy.choice import AdmissionMode, PlacementLimits, Strategy, spread
from policy.core import RejectReason, ScheduleRequest
from policy.cost import step_s, transfer_s
from policy.details import told_s
from policy.forecast import Forecast, Stay, drains_at_s, forecast, room_during_blocks, step_peak_s
from policy.load_sums import DecodeLoad
from policy.place_decode import DecodeCandidate
from policy.place_prefill import PrefillCandidate
from policy.predict import present_load, room_blocks, step_with_s
from policy.view import InstanceView


def taken(candidate: DecodeCandidate, request: ScheduleRequest) -> DecodeCandidate:
    """With one more request like this there."""
    load = replace(
        candidate.load,
        sequences=candidate.load.sequences + request.samples,
        kv_tokens=candidate.load.kv_tokens + request.samples * request.prompt_tokens,
    )
    step_s = step_with_s(candidate.instance, load, request.prompt_tokens, request.samples)
    return replace(candidate, load=load, step_s=step_s)


def decode_candidates(
    decodes: Sequence[InstanceView],
    loads: Mapping[InstanceId, DecodeLoad],
    prefill: PrefillCandidate,
    request: ScheduleRequest,
    extents: Mapping[InstanceId, Extent],
) -> list[DecodeCandidate]:
    return [
        _candidate(instance, loads[instance.instance], prefill, request, extents.get(instance.instance))
        for instance in decodes
    ]


def _candidate(
    decode: InstanceView,
    load: DecodeLoad,
    prefill: PrefillCandidate,
    request: ScheduleRequest,
    cached: Extent | None,
) -> DecodeCandidate:
    # What it can decode on without reading it back: blocks on SSD take room and are sent like others.
    held_blocks = 0 if cached is None else cached.memory_blocks
    prompt_blocks = -(-request.prompt_tokens // decode.block_tokens)
    sent_bytes = max(0, prompt_blocks - held_blocks) * decode.block_bytes
    is_own = decode.instance == prefill.instance.instance
    return DecodeCandidate(
        decode,
        load,
        step_with_s(decode, load, request.prompt_tokens, request.samples),
        0.0 if is_own else transfer_s(prefill.instance.cost, sent_bytes),
        # Decode counts again when it reserves.
        max(0, prompt_blocks - held_blocks) + request.samples,
    )


def choose_decode(
    candidates: Sequence[DecodeCandidate],
    prefill: PrefillCandidate,
    request: ScheduleRequest,
    limits: PlacementLimits,
    tbt_s_max: float,
    turn: int,
) -> DecodeCandidate:
    """`random`: by the request's name. Others: the least step time; `joint` then asks what need not be
    sent. A coupled instance keeps what it prefills, for `joint` only among equals."""
    own = [candidate for candidate in candidates if candidate.instance.instance == prefill.instance.instance]
    if own and limits.strategy is not Strategy.JOINT:
        return own[0]

    def first(equals: Sequence[DecodeCandidate]) -> DecodeCandidate:
        return min(equals, key=lambda candidate: spread(request.request_id, candidate.instance.instance))

    if limits.strategy is Strategy.RANDOM:
        return first(candidates)

    def choose(candidates: Sequence[DecodeCandidate]) -> DecodeCandidate:
        equals = nearly_least(candidates, lambda candidate: candidate.step_s, limits, tbt_s_max)
        if limits.strategy is not Strategy.JOINT:
            return first(equals)
        equals = nearly_least(equals, lambda candidate: candidate.send_s, limits, inf)
        for candidate in equals:
            if candidate.instance.instance == prefill.instance.instance:
                return candidate
        least = min(candidate.load.sequences for candidate in equals)
        return first([candidate for candidate in equals if candidate.load.sequences == least])

    return in_turn(
        candidates,
        turn,
        choose,
        lambda candidate: taken(candidate, request),
        lambda candidate: candidate.step_s,
        tbt_s_max,
    )


@dataclass(frozen=True, slots=True)
class PlainJoining:
    """A request on its way to a decode, and what it is held to there."""

    request: ScheduleRequest
    prefill: PrefillCandidate
    output_tokens_expected: int
    targets: Targets
    outlook: PlainOutlook
    limits: PlacementLimits
    now_s: float
    turn: int
    """See `policy.choice.turn_of`."""


def with_room(joining: PlainJoining, candidates: Sequence[DecodeCandidate]) -> list[DecodeCandidate]:
    """Those that are taken to have the blocks when prefill asks for them, at the beginning of its work."""
    if joining.limits.admission is AdmissionMode.SNAPSHOT:
        return [
            candidate
            for candidate in candidates
            if room_blocks(candidate.instance, present_load(candidate.instance))
            >= _blocks_wanted(joining, candidate)
        ]
    roomy = [candidate for candidate in candidates if _spare_blocks(joining, candidate) >= 0]
    if roomy or joining.limits.admission is AdmissionMode.NONE:
        return roomy
    return [candidate for candidate in _roomiest(joining, candidates) if _finds_room(joining, candidate)]


def room_refusal(joining: PlainJoining, candidates: Sequence[DecodeCandidate]) -> Refusal:
    """Where none of them has room."""
    detail = f"no decode instance has room for {joining.request.prompt_tokens} tokens"
    return Refusal(RejectReason.OVERLOADED, detail, _drain_s(joining, _roomiest(joining, candidates)))


def steps_in_time(
    joining: PlainJoining, chosen: DecodeCandidate, candidates: Sequence[DecodeCandidate]
) -> DecodeCandidate | Refusal:
    """`chosen`, or where it misses the target the next best that does not; with the step that it was
    admitted by."""
    if joining.targets.tbt_s_max == inf:
        return chosen
    others = [candidate for candidate in candidates if candidate is not chosen]
    nearest = nsmallest(FORECASTS_MAX - 1, others, key=lambda candidate: candidate.step_s)
    least_s = inf
    for candidate in (chosen, *nearest):
        step_s_max = _step_s_max(joining, candidate)
        predicted_s = _predicted_step_s(joining, candidate)
        if predicted_s <= step_s_max:
            return replace(candidate, step_s=predicted_s)
        least_s = min(least_s, predicted_s)
    detail = f"{told_s(least_s)} between tokens predicted, held to {told_s(joining.targets.tbt_s_max)}"
    return Refusal(RejectReason.TBT, detail, _drain_s(joining, (chosen, *nearest)))


def _blocks_wanted(joining: PlainJoining, candidate: DecodeCandidate) -> int:
    left_free = (1.0 - joining.targets.slack_share) * candidate.instance.blocks
    return candidate.blocks + int(left_free)


def _spare_blocks(joining: PlainJoining, candidate: DecodeCandidate) -> int:
    """Were all there that is on its way, and nothing ended."""
    return room_blocks(candidate.instance, candidate.load) - _blocks_wanted(joining, candidate)


def _finds_room(joining: PlainJoining, candidate: DecodeCandidate) -> bool:
    """With what is expected to end, and to come, from when it reserves to its end."""
    seen = _forecast(joining, candidate)
    stay = _stay(joining, candidate, seen)
    return room_during_blocks(seen, stay) >= stay.blocks


def _roomiest(joining: PlainJoining, candidates: Sequence[DecodeCandidate]) -> list[DecodeCandidate]:
    return nsmallest(FORECASTS_MAX, candidates, key=lambda candidate: -_spare_blocks(joining, candidate))


def _step_s_max(joining: PlainJoining, candidate: DecodeCandidate) -> float:
    """The slack is what others may add to the step of the request alone."""
    samples, targets = joining.request.samples, joining.targets
    alone_s = step_s(candidate.instance.cost, samples, samples * joining.request.prompt_tokens)
    return min(targets.tbt_s_max, alone_s + (targets.tbt_s_max - alone_s) * targets.slack_share)


def _predicted_step_s(joining: PlainJoining, candidate: DecodeCandidate) -> float:
    if joining.limits.admission is AdmissionMode.SNAPSHOT:
        request, present = joining.request, present_load(candidate.instance)
        return step_with_s(candidate.instance, present, request.prompt_tokens, request.samples)
    seen = _forecast(joining, candidate)
    return step_peak_s(seen, _stay(joining, candidate, seen))


def _forecast(joining: PlainJoining, candidate: DecodeCandidate) -> Forecast:
    arrivals = joining.outlook.arrivals(candidate.instance.instance)
    return forecast(candidate.instance, candidate.load, arrivals, joining.now_s)


def _stay(joining: PlainJoining, candidate: DecodeCandidate, seen: Forecast) -> Stay:
    """As far as the horizon reaches; what arrives behind it meets what will be there then."""
    request, begins_s = joining.request, joining.prefill.ttft_s
    reserves_s = joining.prefill.backlog.wait_s
    ends_s = begins_s + joining.output_tokens_expected * seen.pace_s
    ends_s = max(begins_s, min(ends_s, joining.limits.decode_horizon_s))
    kv_tokens = request.samples * request.prompt_tokens
    blocks = _blocks_wanted(joining, candidate)
    return Stay(reserves_s, begins_s, ends_s, request.samples, kv_tokens, blocks)


def _drain_s(joining: PlainJoining, candidates: Sequence[DecodeCandidate]) -> float:
    """The soonest that one of them is expected to have drained enough; now where all did."""
    drains = []
    for candidate in candidates:
        seen = _forecast(joining, candidate)
        stay = _stay(joining, candidate, seen)
        drains.append(drains_at_s(seen, stay, _step_s_max(joining, candidate)))
    return min(drains, default=0.0)
