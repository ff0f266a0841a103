"""The load of one decode over the coming seconds: what runs, what arrives, and when each will end.

A request whose prefill takes long meets another decode than the one of now: what runs has ended, what is
still prefilling has come. That is what early rejection by prediction looks at (DESIGN §8). Every request
is a stay from its arrival to its expected end, and grows by a token a sample and step meanwhile; its blocks
are taken before that, when its prefill begins. Times are seconds from now.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policy.columns import Floats
from policy.cost import step_s
from policy.load_sums import DecodeLoad
from policy.predict import Arrival, room_blocks
from policy.view import InstanceView

TOKENS_UNKNOWN = 4096
"""Stay of a request on its way of which nothing is expected, in tokens: beyond most horizons."""


@dataclass(frozen=True, slots=True)
class Stay:
    """Sequences that a decode steps from `begins_s` to `ends_s`."""

    reserves_s: float
    """When their blocks are taken."""
    begins_s: float
    ends_s: float
    sequences: int
    kv_tokens: int
    """At `begins_s`, of all of them."""
    blocks: int
    """Taken from `reserves_s` to `ends_s`."""


@dataclass(frozen=True, slots=True)
class Stays:
    """Several, in columns."""

    reserves_s: Floats
    begins_s: Floats
    ends_s: Floats
    sequences: Floats
    kv_tokens: Floats
    blocks: Floats


@dataclass(frozen=True, slots=True)
class Forecast:
    """`present` holds its blocks already, `coming` will take them. `pace_s` is the time of a step."""

    instance: InstanceView
    present: Stays
    coming: Stays
    pace_s: float


def stays_of(stays: Sequence[Stay]) -> Stays:
    return Stays(
        np.array([stay.reserves_s for stay in stays], np.float64),
        np.array([stay.begins_s for stay in stays], np.float64),
        np.array([stay.ends_s for stay in stays], np.float64),
        np.array([stay.sequences for stay in stays], np.float64),
        np.array([stay.kv_tokens for stay in stays], np.float64),
        np.array([stay.blocks for stay in stays], np.float64),
    )


def forecast(instance: InstanceView, load: DecodeLoad, arrivals: Sequence[Arrival], now_s: float) -> Forecast:
    """`load` is what the instance holds once all of `arrivals` are there: its step is the pace, so nothing
    is taken to end sooner than it will."""
    pace_s = step_s(instance.cost, load.sequences, load.kv_tokens)
    return Forecast(instance, _present(instance, now_s, pace_s), _coming(arrivals, pace_s), pace_s)


def step_peak_s(forecast: Forecast, stay: Stay) -> float:
    """The longest step that a further request meets during its stay.

    Between two ends the load only grows: it is highest whenever a stay ends, that one still there, and at the
    end of the request's own.
    """
    stays = _joined(forecast.present, forecast.coming, stays_of([stay]))
    meets = (stays.ends_s > stay.begins_s) & (stays.ends_s < stay.ends_s)
    at_s = np.append(stays.ends_s[meets], stay.ends_s)
    # By time and stay: 1 where it is there.
    there = ((stays.begins_s <= at_s[:, None]) & (stays.ends_s >= at_s[:, None])).astype(np.float64)
    sequences, kv_tokens = there @ stays.sequences, there @ stays.kv_tokens
    if forecast.pace_s:  # each sequence has grown by a token a step since it began
        begun_s = there @ (stays.sequences * stays.begins_s)
        kv_tokens = kv_tokens + np.round((sequences * at_s - begun_s) / forecast.pace_s)
    return float(step_s(forecast.instance.cost, sequences, kv_tokens).max())


def room_during_blocks(forecast: Forecast, stay: Stay) -> int:
    """Blocks that are free for a request from when it reserves to its end, when all that is on its way takes
    its own: the least at any moment. What reserves meanwhile was promised room; what reserves later finds
    what the request gives back.

    Between two reservations blocks only come free: there are least at one of them, or at the request's own.
    """
    coming, present = forecast.coming, forecast.present
    meanwhile = (coming.reserves_s > stay.reserves_s) & (coming.reserves_s < stay.ends_s)
    at_s = np.append(coming.reserves_s[meanwhile], stay.reserves_s)
    freed_blocks = _sums_at(present.ends_s, present.blocks, at_s)
    taken_blocks = _sums_at(coming.reserves_s, coming.blocks, at_s)
    given_back_blocks = _sums_at(coming.ends_s, coming.blocks, at_s)
    return forecast.instance.free_blocks + int((freed_blocks - taken_blocks + given_back_blocks).min())


def drains_at_s(forecast: Forecast, joining: Stay, tbt_s_max: float) -> float:
    """When enough is expected to have ended for a request to fit, in blocks and step time; the last end
    where never all at once."""
    stays = _joined(forecast.present, forecast.coming)
    if not len(stays.ends_s):
        return 0.0
    first_to_end = stays.ends_s.argsort(kind="stable")
    sequences, kv_tokens = stays.sequences[first_to_end], stays.kv_tokens[first_to_end]
    left_sequences = joining.sequences + sequences.sum() - sequences.cumsum()
    left_kv_tokens = joining.kv_tokens + kv_tokens.sum() - kv_tokens.cumsum()
    pending = DecodeLoad(blocks_pending=int(forecast.coming.blocks.sum()))
    free_blocks = room_blocks(forecast.instance, pending) + stays.blocks[first_to_end].cumsum()
    steps_s = step_s(forecast.instance.cost, left_sequences, left_kv_tokens)
    fits = (free_blocks >= joining.blocks) & (steps_s <= tbt_s_max)
    return float(stays.ends_s[first_to_end[fits.argmax() if fits.any() else -1]])


def _present(instance: InstanceView, now_s: float, pace_s: float) -> Stays:
    """Counted from when we heard of them; what should have ended since then is taken to end now."""
    running = instance.sums.running_columns
    ends_s = np.maximum(0.0, (instance.heard_at_s - now_s) + running.tokens_left * pace_s)
    here_s = np.zeros(len(ends_s))
    return Stays(here_s, here_s, ends_s, running.sequences, running.kv_tokens, running.blocks)


def _sums_at(times_s: Floats, values: Floats, at_s: Floats) -> Floats:
    """At each of `at_s`, the sum of the values whose time has come."""
    in_order = times_s.argsort()
    sums = np.append(0.0, values[in_order].cumsum())
    return sums[times_s[in_order].searchsorted(at_s, side="right")]


def _joined(*some: Stays) -> Stays:
    return Stays(
        np.concatenate([stays.reserves_s for stays in some]),
        np.concatenate([stays.begins_s for stays in some]),
        np.concatenate([stays.ends_s for stays in some]),
        np.concatenate([stays.sequences for stays in some]),
        np.concatenate([stays.kv_tokens for stays in some]),
        np.concatenate([stays.blocks for stays in some]),
    )


def _coming(arrivals: Sequence[Arrival], pace_s: float) -> Stays:
    begins_s = np.array([arrival.at_s for arrival in arrivals], np.float64)
    samples = np.array([arrival.samples for arrival in arrivals], np.float64)
    return Stays(
        np.array([arrival.reserves_s for arrival in arrivals], np.float64),
        begins_s,
        begins_s + pace_s * np.array([_tokens(arrival) for arrival in arrivals], np.float64),
        samples,
        samples * np.array([arrival.kv_tokens for arrival in arrivals], np.float64),
        np.array([arrival.blocks for arrival in arrivals], np.float64),
    )


def _tokens(arrival: Arrival) -> int:
    return TOKENS_UNKNOWN if arrival.output_tokens_expected is None else arrival.output_tokens_expected
