"""Which decode instance a request goes to: by step time and room, then by what need not be sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from kvindex.core import InstanceId
from policy.choice import PlacementLimits, Strategy, in_turn, nearly_least, spread
from policy.core import ScheduleRequest
from policy.cost import transfer_s
from policy.load_sums import DecodeLoad
from policy.place_prefill import Extent, PrefillCandidate
from policy.predict import cost_of, step_with_s
from policy.view import InstanceView


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    instance: InstanceView
    load: DecodeLoad
    """With all that is on its way."""
    step_s: float
    """With the request too."""
    send_s: float
    """Time to bring it what of the prompt's KV it lacks; 0 where prefill is the same instance."""
    blocks: int
    """That it has to find for the reservation: held blocks are shared, not taken anew."""

    def taken(self, request: ScheduleRequest) -> "DecodeCandidate":
        """With one more request like this there."""
        load = replace(
            self.load,
            sequences=self.load.sequences + request.samples,
            kv_tokens=self.load.kv_tokens + request.samples * request.prompt_tokens,
        )
        step_s = step_with_s(self.instance, load, request.prompt_tokens, request.samples)
        return replace(self, load=load, step_s=step_s)


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
        0.0 if is_own else transfer_s(cost_of(prefill.instance), sent_bytes),
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
        lambda candidate: candidate.taken(request),
        lambda candidate: candidate.step_s,
        tbt_s_max,
    )
