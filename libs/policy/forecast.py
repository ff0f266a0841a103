"""The load of one decode over the coming seconds: what runs, what arrives, and when each will end.

A request whose prefill takes long meets another decode than the one of now: what runs has ended, what is
still prefilling has come. That is what early rejection by prediction looks at (DESIGN §8). Every request
is a stay from its arrival to its expected end, and grows by a token a sample and step meanwhile. Times are
seconds from now.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

from policy.core import LoadSnapshot
from policy.cost import step_s
from policy.lengths import tokens_left
from policy.load_sums import DecodeLoad
from policy.predict import Arrival, room_blocks
from policy.view import InstanceView

_BEGINS, _ENDS = 1, 2
"""Of a stay, in the order in which they count at one instant."""
TOKENS_UNKNOWN = 4096
"""Stay of a request on its way of which nothing is expected, in tokens: beyond most horizons."""


@dataclass(frozen=True, slots=True)
class Stay:
    """Sequences that a decode steps from `begins_s` to `ends_s`."""

    begins_s: float
    ends_s: float
    sequences: int
    kv_tokens: int
    """At `begins_s`, of all of them."""
    blocks: int
    """What comes free when it ends, or will be taken before."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """`present` holds its blocks already, `coming` will take them. `pace_s` is the time of a step."""

    instance: InstanceView
    present: Sequence[Stay]
    coming: Sequence[Stay]
    pace_s: float


def forecast(instance: InstanceView, load: DecodeLoad, arrivals: Sequence[Arrival], now_s: float) -> Forecast:
    """`load` is what the instance holds once all of `arrivals` are there: its step is the pace, so nothing
    is taken to end sooner than it will."""
    pace_s = step_s(instance.cost, load.sequences, load.kv_tokens)
    present = _present(instance.load, instance.heard_at_s - now_s, pace_s, instance.block_tokens)
    coming = [_coming(arrival, pace_s) for arrival in arrivals]
    return Forecast(instance, tuple(present), coming, pace_s)


def step_peak_s(forecast: Forecast, stay: Stay) -> float:
    """The longest step that a further request meets during its stay."""
    others = (*forecast.present, *forecast.coming)
    return max(
        step_s(forecast.instance.cost, sequences, kv_tokens)
        for _, sequences, kv_tokens in _loads((*others, stay), forecast.pace_s, stay.begins_s, stay.ends_s)
    )


def room_at_blocks(forecast: Forecast, at_s: float) -> int:
    """Blocks that a reservation can take at `at_s`, when those that are expected to end before it have.
    All that is on its way and still there then counts, come or not: it was promised room."""
    coming_blocks = sum(stay.blocks for stay in forecast.coming if stay.ends_s > at_s)
    left_blocks = sum(stay.blocks for stay in forecast.present if stay.ends_s <= at_s)
    return room_blocks(forecast.instance, DecodeLoad(blocks_pending=coming_blocks)) + left_blocks


def drains_at_s(forecast: Forecast, joining: Stay, tbt_s_max: float) -> float:
    """When enough is expected to have ended for a request to fit, in blocks and step time; the last end
    where never all at once."""
    stays = sorted((*forecast.present, *forecast.coming), key=lambda stay: stay.ends_s)
    sequences = joining.sequences + sum(stay.sequences for stay in stays)
    kv_tokens = joining.kv_tokens + sum(stay.kv_tokens for stay in stays)
    blocks_pending = sum(stay.blocks for stay in forecast.coming)
    blocks = room_blocks(forecast.instance, DecodeLoad(blocks_pending=blocks_pending))
    cost = forecast.instance.cost
    for stay in stays:
        sequences -= stay.sequences
        kv_tokens -= stay.kv_tokens
        blocks += stay.blocks
        if blocks >= joining.blocks and step_s(cost, sequences, kv_tokens) <= tbt_s_max:
            return stay.ends_s
    return stays[-1].ends_s if stays else 0.0


def _present(load: LoadSnapshot | None, heard_s: float, pace_s: float, block_tokens: int) -> Iterator[Stay]:
    """Counted from when we heard of them; what should have ended since then is taken to end now."""
    for request in load.running if load is not None else ():
        left = tokens_left(request.output_tokens_expected, request.output_tokens, request.output_tokens_max)
        blocks = -(-request.kv_tokens // block_tokens)
        ends_s = max(0.0, heard_s + left * pace_s)
        yield Stay(0.0, ends_s, request.samples, request.kv_tokens, blocks)


def _coming(arrival: Arrival, pace_s: float) -> Stay:
    tokens = TOKENS_UNKNOWN if arrival.output_tokens_expected is None else arrival.output_tokens_expected
    kv_tokens = arrival.samples * arrival.kv_tokens
    ends_s = arrival.at_s + tokens * pace_s
    return Stay(arrival.at_s, ends_s, arrival.samples, kv_tokens, arrival.blocks)


def _loads(
    stays: Sequence[Stay], pace_s: float, from_s: float, until_s: float
) -> Iterator[tuple[float, int, int]]:
    """(time, sequences, KV tokens) wherever the load is highest before it falls: whenever a stay ends,
    that one still there, and at `until_s`. Between two such times it only grows."""
    begins = ((stay.begins_s, _BEGINS, stay) for stay in sorted(stays, key=lambda stay: stay.begins_s))
    ends = ((stay.ends_s, _ENDS, stay) for stay in sorted(stays, key=lambda stay: stay.ends_s))
    sequences, kv_tokens, begun_s = 0, 0, 0.0
    for at_s, kind, stay in merge(begins, ends, key=lambda event: event[:2]):
        if at_s > until_s or (at_s == until_s and kind == _ENDS):
            break
        if kind == _BEGINS:
            sequences += stay.sequences
            kv_tokens += stay.kv_tokens
            begun_s += stay.sequences * stay.begins_s
            continue
        if at_s > from_s:
            yield at_s, sequences, kv_tokens + _grown(sequences, begun_s, at_s, pace_s)
        sequences -= stay.sequences
        kv_tokens -= stay.kv_tokens
        begun_s -= stay.sequences * stay.begins_s
    yield until_s, sequences, kv_tokens + _grown(sequences, begun_s, until_s, pace_s)


def _grown(sequences: int, begun_s: float, at_s: float, pace_s: float) -> int:
    """Tokens since each stay began: one a sequence and step. `begun_s` sums when each sequence began."""
    return round((sequences * at_s - begun_s) / pace_s) if pace_s else 0
