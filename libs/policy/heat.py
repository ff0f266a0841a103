"""Which prefixes are asked for often: counted where they are asked, summed over all who count.

A prefix is where the longest match of a prompt ended, and the blocks before it. Both tables are bounded in
entries and in bytes: what was not asked for the longest goes first. Time is an argument. Knows neither how
counts are told nor who holds what.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvhash import HASH_BYTES

PREFIXES_MAX = 1024
PREFIX_BYTES_MAX = 16 << 20
"""Of the chains in one table."""
HEATS_MAX = 64
"""Prefixes that are told at once."""
HEAT_BYTES_MAX = 384 << 10
"""Of the chains that are told at once: the longest prompt fits, and in base64 all stays under a bus's
limit."""
HEAT_REQUESTS_MIN = 2
"""A prefix is told once it was asked for again: most are asked for once."""
WINDOW_SLOTS = 12
"""Parts of the window: what is older than the window is forgotten a part at a time."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prefix and how often it was asked for."""

    block_hashes: bytes
    requests: int


@dataclass(slots=True)
class _Count:
    block_hashes: bytes
    requests: int
    asked_at_s: float


class HeatCounter:
    """What is asked in one place. `count` is on the way of every match: about a microsecond."""

    def __init__(self, prefixes_max: int = PREFIXES_MAX, bytes_max: int = PREFIX_BYTES_MAX) -> None:
        self._prefixes_max = prefixes_max
        self._bytes_max = bytes_max
        # Last asked for last.
        self._counts: OrderedDict[bytes, _Count] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def chain_bytes(self) -> int:
        return self._bytes

    def count(self, block_hashes: bytes, blocks: int, now_s: float) -> None:
        """A prompt's chain was asked for, and the longest match has `blocks` of it, at least one."""
        end = blocks * HASH_BYTES
        last_hash = block_hashes[end - HASH_BYTES : end]
        known = self._counts.get(last_hash)
        if known is not None:
            known.requests += 1
            known.asked_at_s = now_s
            self._counts.move_to_end(last_hash)
            return
        self._counts[last_hash] = _Count(block_hashes[:end], 1, now_s)
        self._bytes += end
        while len(self._counts) > self._prefixes_max or self._bytes > self._bytes_max:
            self._forget_oldest()

    def take(self, now_s: float, idle_s_max: float) -> tuple[Asked, ...]:
        """The hottest prefixes, no more than are told at once, with the requests since they were last taken.
        What was not asked for in `idle_s_max` is forgotten."""
        while self._counts and now_s - next(iter(self._counts.values())).asked_at_s > idle_s_max:
            self._forget_oldest()
        told: list[Asked] = []
        bytes_left = HEAT_BYTES_MAX
        asked = [count for count in self._counts.values() if count.requests >= HEAT_REQUESTS_MIN]
        for count in sorted(asked, key=lambda count: -count.requests):
            if len(told) == HEATS_MAX:
                break
            if len(count.block_hashes) <= bytes_left:
                bytes_left -= len(count.block_hashes)
                told.append(Asked(count.block_hashes, count.requests))
                count.requests = 0
        return tuple(told)

    def _forget_oldest(self) -> None:
        _, oldest = self._counts.popitem(last=False)
        self._bytes -= len(oldest.block_hashes)


@dataclass(slots=True)
class _Heat:
    block_hashes: bytes
    requests: dict[int, int] = field(default_factory=dict)
    """By part of the window, oldest first."""


class HeatWindow:
    """What was told, over the last `window_s` seconds, to a part of it."""

    def __init__(
        self, window_s: float, prefixes_max: int = PREFIXES_MAX, bytes_max: int = PREFIX_BYTES_MAX
    ) -> None:
        self._slot_s = window_s / WINDOW_SLOTS
        self._prefixes_max = prefixes_max
        self._bytes_max = bytes_max
        self._heats: OrderedDict[bytes, _Heat] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._heats)

    @property
    def chain_bytes(self) -> int:
        return self._bytes

    def add(self, prefixes: Iterable[Asked], now_s: float) -> None:
        """Each with a chain of at least one block, asked for at least once."""
        slot = self._slot(now_s)
        for asked in prefixes:
            self._add(asked, slot)

    def hot(self, requests_min: int, prefixes_max: int, now_s: float) -> tuple[Asked, ...]:
        """Those asked for at least so often, hottest first, at most `prefixes_max`."""
        slot = self._slot(now_s)
        for last_hash, heat in tuple(self._heats.items()):
            _forget_before(heat, slot - WINDOW_SLOTS + 1)
            if not heat.requests:
                del self._heats[last_hash]
                self._bytes -= len(heat.block_hashes)
        asked = (Asked(heat.block_hashes, sum(heat.requests.values())) for heat in self._heats.values())
        hot = [prefix for prefix in asked if prefix.requests >= requests_min]
        hot.sort(key=lambda prefix: (-prefix.requests, prefix.block_hashes))
        return tuple(hot[:prefixes_max])

    def _add(self, told: Asked, slot: int) -> None:
        last_hash = told.block_hashes[-HASH_BYTES:]
        heat = self._heats.get(last_hash)
        if heat is None:
            heat = self._heats[last_hash] = _Heat(told.block_hashes)
            self._bytes += len(told.block_hashes)
        else:
            self._heats.move_to_end(last_hash)
        _forget_before(heat, slot - WINDOW_SLOTS + 1)
        heat.requests[slot] = heat.requests.get(slot, 0) + told.requests
        while len(self._heats) > self._prefixes_max or self._bytes > self._bytes_max:
            _, oldest = self._heats.popitem(last=False)
            self._bytes -= len(oldest.block_hashes)

    def _slot(self, now_s: float) -> int:
        return int(now_s / self._slot_s)


def _forget_before(heat: _Heat, slot: int) -> None:
    while heat.requests and (oldest := next(iter(heat.requests))) < slot:
        del heat.requests[oldest]
