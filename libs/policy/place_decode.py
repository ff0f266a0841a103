"""Which decode instance a request goes to: by step time and room, then by what need not be sent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from kvindex.core import InstanceId
from policy.choice import PlacementLimits, Strategy
from policy.columns import DecodeColumns, Floats, Ints, Table
from policy.core import ScheduleRequest
from policy.cost import step_s, transfer_s
from policy.load_sums import DecodeLoad
from policy.nearest import first_by_name, in_turn, nearly_least
from policy.place_prefill import PrefillCandidate
from policy.predict import Outlook
from policy.prefixes import HeldPrefixes
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


@dataclass(frozen=True, slots=True)
class DecodeCandidates:
    """DecodeCandidates in columns."""

    request: ScheduleRequest
    decodes: Table[DecodeColumns]
    sequences: Floats
    kv_tokens: Floats
    """Both with all that is on its way, without the request."""
    step_s: Floats
    send_s: Floats
    blocks: Floats

    @property
    def names(self) -> Sequence[InstanceId]:
        return self.decodes.names

    def __len__(self) -> int:
        return len(self.decodes.names)

    def at(self, place: int, ahead: Outlook) -> DecodeCandidate:
        name = self.decodes.names[place]
        return DecodeCandidate(
            ahead.board.instance(name),
            ahead.load(name),
            float(self.step_s[place]),
            float(self.send_s[place]),
            int(self.blocks[place]),
        )

    def take(self, places: Ints) -> "DecodeCandidates":
        return DecodeCandidates(
            self.request,
            self.decodes.take(places),
            self.sequences[places],
            self.kv_tokens[places],
            self.step_s[places],
            self.send_s[places],
            self.blocks[places],
        )

    def taken(self, place: int) -> "DecodeCandidates":
        """With one more request like this at the one at `place`."""
        samples, kv_tokens = self.request.samples, self.request.samples * self.request.prompt_tokens
        sequences, all_kv_tokens = self.sequences.copy(), self.kv_tokens.copy()
        sequences[place] += samples
        all_kv_tokens[place] += kv_tokens
        with_it_s = step_s(self.decodes.columns, sequences + samples, all_kv_tokens + kv_tokens)
        return replace(self, sequences=sequences, kv_tokens=all_kv_tokens, step_s=with_it_s)


def decode_candidates(
    decodes: Table[DecodeColumns],
    block_tokens: int,
    prefill: PrefillCandidate,
    request: ScheduleRequest,
    held: HeldPrefixes,
) -> DecodeCandidates:
    """`held` by row of the board."""
    columns, samples = decodes.columns, request.samples
    # What it can decode on without reading it back: blocks on SSD take room and are sent like others.
    prompt_blocks = -(-request.prompt_tokens // block_tokens)
    lacking_blocks = np.maximum(0.0, prompt_blocks - held.memory_blocks[decodes.rows])
    send_s = transfer_s(prefill.instance.cost, lacking_blocks * columns.block_bytes)
    if prefill.instance.instance in decodes.names:
        send_s[decodes.names.index(prefill.instance.instance)] = 0.0
    return DecodeCandidates(
        request,
        decodes,
        columns.sequences,
        columns.kv_tokens,
        step_s(columns, columns.sequences + samples, columns.kv_tokens + samples * request.prompt_tokens),
        send_s,
        # Decode counts again when it reserves.
        lacking_blocks + samples,
    )


def choose_decode(
    candidates: DecodeCandidates,
    prefill: PrefillCandidate,
    limits: PlacementLimits,
    tbt_s_max: float,
    turn: int,
) -> int:
    """`random`: by the request's name. Others: the least step time; `joint` then asks what need not be
    sent. A coupled instance keeps what it prefills, for `joint` only among equals."""
    request_id, own = candidates.request.request_id, prefill.instance.instance
    if limits.strategy is not Strategy.JOINT and own in candidates.names:
        return candidates.names.index(own)
    if limits.strategy is Strategy.RANDOM:
        return first_by_name(request_id, candidates.names, np.arange(len(candidates)))

    def choose(candidates: DecodeCandidates) -> int:
        equals = nearly_least(candidates.step_s, limits, tbt_s_max)
        if limits.strategy is not Strategy.JOINT:
            return first_by_name(request_id, candidates.names, equals)
        equals = equals[nearly_least(candidates.send_s[equals], limits, inf)]
        for place in equals.tolist():
            if candidates.names[place] == own:
                return int(place)
        sequences = candidates.sequences[equals]
        return first_by_name(request_id, candidates.names, equals[sequences == sequences.min()])

    return in_turn(candidates, turn, choose, _step_s, tbt_s_max)


def _step_s(candidates: DecodeCandidates) -> Floats:
    return candidates.step_s
