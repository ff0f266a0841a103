"""Whether a placement meets the request's targets, asked before any work is done for it (early rejection).

Modes: `none` asks nothing, decode has the last word when it reserves. `snapshot` compares with decodes as
they are loaded now. `predictive` compares with decodes as they will be loaded from the request's first token
to its last, as far as the horizon reaches.

Priorities: while requests of a higher one are about, a lower one leaves them a share of the slack, so under
pressure it is refused first. That costs it nothing where there is no pressure, and a fixed share of lower
requests, drawn by name, leaves nothing: they never starve, and who asks again is drawn again.

Work may have a price (`policy.adapt`): while queues are long, a request may wait the less the more work it
brings. Under overload the queue then stands where those are refused that cost most, and with one of them many
others would be. A fixed share, drawn by name, pays no price.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import xxhash

from policy.choice import AdmissionMode, PlacementLimits
from policy.columns import Floats
from policy.core import RejectReason, RequestId, ScheduleRequest
from policy.cost import step_s
from policy.details import told_s
from policy.forecast import Forecast, Stay, drains_at_s, forecast, room_during_blocks, step_peak_s
from policy.place_decode import DecodeCandidate, DecodeCandidates
from policy.place_prefill import PrefillCandidate
from policy.predict import Outlook, present_load, step_with_s

FORECASTS_MAX = 4
"""Decodes that are looked at over time for one request: those that come closest as they are."""
SLACK_LEFT_PER_LEVEL = 0.15
"""Share of the slack that a request leaves for each level between it and the highest priority about."""
SLACK_LEFT_MAX = 0.6
LOWER_SERVED_SHARE = 0.1
"""Of lower requests, those that are treated like the highest."""
WORK_FREE_SHARE = 0.05
"""Of requests, those whose work has no price."""
_DRAWS = 1 << 64


@dataclass(frozen=True, slots=True)
class Targets:
    """What predictions for the request are held to; `slack_share` is what it may use of what lies between the
    least it could take and these."""

    ttft_s_max: float
    tbt_s_max: float
    slack_share: float
    work_price: float = 1.0
    """As PlacementLimits has it; 1 for who pays none."""


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: RejectReason
    detail: str
    wait_s: float
    """Until the load is expected to have drained enough."""


def targets_of(request: ScheduleRequest, outlook: Outlook, limits: PlacementLimits) -> Targets:
    """Of the request's own targets, else the cluster's, the share that predictions may use; its deadline is
    one for the first token."""
    ttft_ms = ttft_target_ms(request, limits)
    tbt_ms = tbt_target_ms(request, limits)
    return Targets(
        min(request.deadline_s, inf if ttft_ms is None else limits.target_share * ttft_ms / 1e3),
        inf if tbt_ms is None else limits.target_share * tbt_ms / 1e3,
        _slack_share(request, outlook.priority_max),
        1.0 if _drawn("free", request.request_id) < WORK_FREE_SHARE else limits.work_price,
    )


def ttft_target_ms(request: ScheduleRequest, limits: PlacementLimits) -> float | None:
    """The request's own target for its first token, else the cluster's; None: no target."""
    return limits.ttft_ms_default if request.ttft_ms_max is None else request.ttft_ms_max


def tbt_target_ms(request: ScheduleRequest, limits: PlacementLimits) -> float | None:
    """The request's own target between tokens, else the cluster's; None: no target."""
    return limits.tbt_ms_default if request.tbt_ms_max is None else request.tbt_ms_max


def ttft_refusal(prefill: PrefillCandidate, targets: Targets) -> Refusal | None:
    """The slack is what may be waited."""
    if prefill.ttft_s > targets.ttft_s_max:
        detail = f"first token predicted after {told_s(prefill.ttft_s)}, held to {told_s(targets.ttft_s_max)}"
        return Refusal(RejectReason.TTFT, detail, prefill.ttft_s - targets.ttft_s_max)
    wait_s, busy_s = prefill.backlog.wait_s, prefill.fetch_s + prefill.compute_s
    wait_s_max = (targets.ttft_s_max - busy_s) * targets.slack_share
    if wait_s > wait_s_max:
        detail = f"{told_s(wait_s)} in the queue predicted, {told_s(wait_s_max)} left by higher priorities"
        return Refusal(RejectReason.TTFT, detail, wait_s - wait_s_max)
    wait_s_max *= _work_share(prefill, targets)
    if wait_s > wait_s_max:
        detail = (
            f"{told_s(wait_s)} in the queue predicted, {told_s(wait_s_max)} allowed under this load for "
            f"{told_s(prefill.compute_s)} of computing"
        )
        return Refusal(RejectReason.TTFT, detail, wait_s - wait_s_max)
    return None


def _work_share(prefill: PrefillCandidate, targets: Targets) -> float:
    """Of what a request could wait, what it may by the price of its work."""
    paid_s = targets.work_price * prefill.compute_s
    return 1.0 if paid_s <= targets.ttft_s_max else targets.ttft_s_max / paid_s


@dataclass(frozen=True, slots=True)
class Joining:
    """A request on its way to a decode, and what it is held to there."""

    request: ScheduleRequest
    prefill: PrefillCandidate
    output_tokens_expected: int
    targets: Targets
    outlook: Outlook
    limits: PlacementLimits
    now_s: float
    turn: int
    """See `policy.choice.turn_of`."""


def with_room(joining: Joining, candidates: DecodeCandidates) -> DecodeCandidates:
    """Those that are taken to have the blocks when prefill asks for them, at the beginning of its work."""
    mode, spare_blocks = joining.limits.admission, _spare_blocks(joining, candidates)
    if mode is AdmissionMode.SNAPSHOT:
        spare_blocks = spare_blocks + candidates.decodes.columns.pending_blocks
    roomy = (spare_blocks >= 0).nonzero()[0]
    if len(roomy) == len(candidates):
        return candidates
    if len(roomy) or mode is not AdmissionMode.PREDICTIVE:
        return candidates.take(roomy)
    later = [place for place, candidate in _roomiest(joining, candidates) if _finds_room(joining, candidate)]
    return candidates.take(np.array(later, np.intp))


def room_refusal(joining: Joining, candidates: DecodeCandidates) -> Refusal:
    """Where none of them has room."""
    detail = f"no decode instance has room for {joining.request.prompt_tokens} tokens"
    nearest = [candidate for _, candidate in _roomiest(joining, candidates)]
    return Refusal(RejectReason.OVERLOADED, detail, _drain_s(joining, nearest))


def steps_in_time(joining: Joining, chosen: int, candidates: DecodeCandidates) -> DecodeCandidate | Refusal:
    """The one at `chosen`, or where it misses the target the next best that does not; with the step that it
    was admitted by."""
    if joining.targets.tbt_s_max == inf:
        return candidates.at(chosen, joining.outlook)
    shortest = np.argsort(candidates.step_s, kind="stable")[:FORECASTS_MAX].tolist()
    others = [place for place in shortest if place != chosen][: FORECASTS_MAX - 1]
    tried: list[DecodeCandidate] = []
    least_s = inf
    for place in (chosen, *others):
        candidate = candidates.at(place, joining.outlook)
        tried.append(candidate)
        step_s_max = _step_s_max(joining, candidate)
        predicted_s = _predicted_step_s(joining, candidate)
        if predicted_s <= step_s_max:
            return replace(candidate, step_s=predicted_s)
        least_s = min(least_s, predicted_s)
    detail = f"{told_s(least_s)} between tokens predicted, held to {told_s(joining.targets.tbt_s_max)}"
    return Refusal(RejectReason.TBT, detail, _drain_s(joining, tried))


def _slack_share(request: ScheduleRequest, priority_max: int) -> float:
    levels = max(0, priority_max - request.priority)
    if not levels or _drawn("served", request.request_id) < LOWER_SERVED_SHARE:
        return 1.0
    return 1.0 - min(SLACK_LEFT_MAX, SLACK_LEFT_PER_LEVEL * levels)


def _drawn(what: str, request_id: RequestId) -> float:
    """From 0 up to 1, the same in every conductor."""
    return xxhash.xxh3_64_intdigest(f"{what}/{request_id}".encode()) / _DRAWS


def _blocks_wanted(joining: Joining, candidate: DecodeCandidate) -> int:
    left_free = (1.0 - joining.targets.slack_share) * candidate.instance.blocks
    return candidate.blocks + int(left_free)


def _spare_blocks(joining: Joining, candidates: DecodeCandidates) -> Floats:
    """Were all there that is on its way, and nothing ended."""
    columns = candidates.decodes.columns
    left_free = np.floor((1.0 - joining.targets.slack_share) * columns.blocks)
    return columns.free_blocks - columns.pending_blocks - (candidates.blocks + left_free)


def _finds_room(joining: Joining, candidate: DecodeCandidate) -> bool:
    """With what is expected to end, and to come, from when it reserves to its end."""
    seen = _forecast(joining, candidate)
    stay = _stay(joining, candidate, seen)
    return room_during_blocks(seen, stay) >= stay.blocks


def _roomiest(joining: Joining, candidates: DecodeCandidates) -> list[tuple[int, DecodeCandidate]]:
    """And the place of each."""
    most = np.argsort(-_spare_blocks(joining, candidates), kind="stable")[:FORECASTS_MAX]
    return [(place, candidates.at(place, joining.outlook)) for place in most.tolist()]


def _step_s_max(joining: Joining, candidate: DecodeCandidate) -> float:
    """The slack is what others may add to the step of the request alone."""
    samples, targets = joining.request.samples, joining.targets
    alone_s = step_s(candidate.instance.cost, samples, samples * joining.request.prompt_tokens)
    return min(targets.tbt_s_max, alone_s + (targets.tbt_s_max - alone_s) * targets.slack_share)


def _predicted_step_s(joining: Joining, candidate: DecodeCandidate) -> float:
    if joining.limits.admission is AdmissionMode.SNAPSHOT:
        request, present = joining.request, present_load(candidate.instance)
        return step_with_s(candidate.instance, present, request.prompt_tokens, request.samples)
    seen = _forecast(joining, candidate)
    return step_peak_s(seen, _stay(joining, candidate, seen))


def _forecast(joining: Joining, candidate: DecodeCandidate) -> Forecast:
    arrivals = joining.outlook.arrivals(candidate.instance.instance)
    return forecast(candidate.instance, candidate.load, arrivals, joining.now_s)


def _stay(joining: Joining, candidate: DecodeCandidate, seen: Forecast) -> Stay:
    """As far as the horizon reaches; what arrives behind it meets what will be there then."""
    request, begins_s = joining.request, joining.prefill.ttft_s
    reserves_s = joining.prefill.backlog.wait_s
    ends_s = begins_s + joining.output_tokens_expected * seen.pace_s
    ends_s = max(begins_s, min(ends_s, joining.limits.decode_horizon_s))
    kv_tokens = request.samples * request.prompt_tokens
    blocks = _blocks_wanted(joining, candidate)
    return Stay(reserves_s, begins_s, ends_s, request.samples, kv_tokens, blocks)


def _drain_s(joining: Joining, candidates: Sequence[DecodeCandidate]) -> float:
    """The soonest that one of them is expected to have drained enough; now where all did."""
    drains = []
    for candidate in candidates:
        seen = _forecast(joining, candidate)
        stay = _stay(joining, candidate, seen)
        drains.append(drains_at_s(seen, stay, _step_s_max(joining, candidate)))
    return min(drains, default=0.0)
