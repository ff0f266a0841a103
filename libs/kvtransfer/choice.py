"""Which transport of a pair a call takes at which time: downgrade, and the way back. Pure.

Owns the waits between tries. Knows nothing of links: time and random numbers are passed in, what happened
is reported by `failed` and `carried`.
"""

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvtransfer.kinds import TransportKind
from kvtransfer.limits import Limits

NONE: frozenset[TransportKind] = frozenset()
_DOUBLINGS_MAX = 64
"""More failures in a row than any wait takes to reach its bound; keeps the power of two a float."""


@dataclass(frozen=True, slots=True)
class Use:
    """Call over the link that is up. `probe` is better and due: dial it meanwhile, nobody waits for it."""

    kind: TransportKind
    probe: TransportKind | None = None


@dataclass(frozen=True, slots=True)
class Dial:
    """No link is up that fits: dial this one and wait for it."""

    kind: TransportKind


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing may be tried before `until_s`; infinite if no transport fits the call."""

    until_s: float


Choice = Use | Dial | Wait


@dataclass(slots=True)
class _Rung:
    """`failures` since it was last trusted; `wait_s` is the wait that the last of them brought."""

    wait_s_min: float
    wait_s_max: float
    failures: int = 0
    wait_s: float = 0.0
    due_s: float = -math.inf


class Ladder:
    """The transports of one pair, best first, and when each may be tried.

    A transport that fails is not due before a wait that doubles with each failure, of which a part up to
    a half is taken off by chance so that many pairs do not come back at once. The last one is waited for,
    not given up: its waits are those of a dial that is made again (`dial_backoff_s_*`), the others' are
    those of a downgrade (`retry_s_*`). One that failed is trusted again (its waits begin anew) once it
    carried a call after it stood as long as it was waited for: a link that comes and goes stays on the long
    waits.
    """

    def __init__(self, kinds: Sequence[TransportKind], limits: Limits, uniform: Callable[[], float]) -> None:
        """`uniform` gives random numbers from 0 to 1. There is at least one kind."""
        self.kinds = tuple(kinds)
        self._uniform = uniform
        self._rungs = {kind: _Rung(limits.retry_s_min, limits.retry_s_max) for kind in self.kinds[:-1]}
        self._rungs[self.kinds[-1]] = _Rung(limits.dial_backoff_s_min, limits.dial_backoff_s_max)

    def choose(
        self, now_s: float, up: AbstractSet[TransportKind], unfit: AbstractSet[TransportKind] = NONE
    ) -> Choice:
        """For a call that the `unfit` ones cannot carry, while there are links of the kinds in `up`."""
        due: TransportKind | None = None
        until_s = math.inf
        for kind in self.kinds:
            if kind in unfit:
                continue
            if kind in up:
                return Use(kind, probe=due)
            rung = self._rungs[kind]
            until_s = min(until_s, rung.due_s)
            if due is None and rung.due_s <= now_s:
                due = kind
        return Wait(until_s) if due is None else Dial(due)

    def better_due_s(self, kind: TransportKind) -> float:
        """When one that is better than `kind` may be tried; infinite if there is none."""
        better = self.kinds[: self.kinds.index(kind)]
        return min((self._rungs[other].due_s for other in better), default=math.inf)

    def failed(self, kind: TransportKind, now_s: float) -> float:
        """A dial failed or a link was lost: the wait until it is due again."""
        rung = self._rungs[kind]
        doubled_s = rung.wait_s_min * 2.0 ** min(rung.failures, _DOUBLINGS_MAX)
        rung.failures += 1
        rung.wait_s = min(rung.wait_s_max, doubled_s) * (1 - self._uniform() / 2)
        rung.due_s = now_s + rung.wait_s
        return rung.wait_s

    def carried(self, kind: TransportKind, now_s: float) -> None:
        """A call went through."""
        rung = self._rungs[kind]
        if rung.failures and now_s >= rung.due_s + rung.wait_s:
            rung.failures, rung.wait_s, rung.due_s = 0, 0.0, -math.inf
