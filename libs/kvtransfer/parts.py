"""Cuts a call into parts: for several streams or devices, or for a limit of a frame. Pure."""

import itertools
from dataclasses import dataclass

import numpy as np

from kvtransfer.memory import Ranges, no_ranges
from kvtransfer.transport import Call, LocalMemory


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a call's bytes: `call` moves it alone, `start` is where it begins in the whole call."""

    start: int
    call: Call


def sliced(ranges: Ranges, start: int, count: int) -> Ranges:
    """The ranges that hold `count` bytes from byte `start` on; both lie within the ranges' total."""
    if count == 0:
        return no_ranges()
    ends = np.cumsum(ranges[:, 1])
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, start + count, side="left"))
    cut = ranges[first : last + 1].copy()
    cut[-1, 1] -= int(ends[last]) - (start + count)
    skipped = start - (int(ends[first - 1]) if first else 0)
    cut[0, 0] += skipped
    cut[0, 1] -= skipped
    return cut


def cut(call: Call, parts: int) -> list[Part]:
    """At most `parts` parts of nearly the same size, without the tag: a tag follows when all have landed.

    One part is the call itself, with its tag.
    """
    total = call.memory.payload_bytes
    if parts <= 1 or total < parts:
        return [Part(0, call)]
    marks = [total * number // parts for number in range(parts + 1)]
    return [Part(begin, _part(call, begin, end - begin)) for begin, end in itertools.pairwise(marks)]


def _part(call: Call, start: int, count: int) -> Call:
    memory = LocalMemory(call.memory.region, sliced(call.memory.ranges, start, count), count)
    return Call(
        memory,
        call.token,
        sliced(call.remote, start, count),
        verify=call.verify,
        piece_bytes_max=call.piece_bytes_max,
    )
