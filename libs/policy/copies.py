"""The copies that one replicator has under way, has done and has tried: bookkeeping, bounded. Time is an
argument."""

from policy.replicate import CopyKey, Replication

SETTLE_S = 5.0
"""A copy that is done counts as one until the target's events tell of it."""
TRIED_MAX = 4096
"""Copies remembered as tried; of more those that ended first are forgotten."""


class Copies:
    """In flight, settling and avoided, as `policy.replicate` wants to know them."""

    def __init__(self, pause_s: float) -> None:
        """The same copy is avoided for `pause_s` after it ended, however it did: where it did not last,
        there was no room for it."""
        self._pause_s = pause_s
        self._in_flight: dict[CopyKey, Replication] = {}
        self._settling: dict[CopyKey, tuple[Replication, float]] = {}
        self._tried: dict[CopyKey, float] = {}
        """When each ended, in that order."""

    @property
    def in_flight(self) -> tuple[Replication, ...]:
        return tuple(self._in_flight.values())

    @property
    def settling(self) -> tuple[Replication, ...]:
        return tuple(replication for replication, _ in self._settling.values())

    @property
    def avoided(self) -> frozenset[CopyKey]:
        return frozenset(self._tried)

    def begin(self, replication: Replication) -> None:
        self._in_flight[replication.key] = replication

    def end(self, replication: Replication, now_s: float, *, done: bool) -> None:
        """`done`: the target holds the whole chain."""
        key = replication.key
        self._in_flight.pop(key, None)
        self._tried.pop(key, None)
        self._tried[key] = now_s
        if done:
            self._settling[key] = (replication, now_s)
        while len(self._tried) > TRIED_MAX:
            del self._tried[next(iter(self._tried))]

    def end_all(self, now_s: float) -> None:
        """Nobody waits for those in flight any more; how they end is not known."""
        for replication in self.in_flight:
            self.end(replication, now_s, done=False)

    def forget(self, now_s: float) -> None:
        """What was done or tried long enough ago."""
        for key, (_, done_s) in tuple(self._settling.items()):
            if now_s - done_s > SETTLE_S:
                del self._settling[key]
        for key, ended_s in tuple(self._tried.items()):
            if now_s - ended_s <= self._pause_s:
                break
            del self._tried[key]
