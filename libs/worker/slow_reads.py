"""How much slower an instance's SSD reads now than was measured at its start.

Knows no disk: it is told what reads took. What it has learnt it forgets by and by, because a disk that is
left alone says nothing of having recovered.
"""

from dataclasses import replace

from policy.core import CostCoefficients

NOTICEABLE_S = 0.5
"""Quicker reads teach nothing: on a busy machine an event loop alone may be as late as that."""
HALF_LIFE_S = 30.0
"""After this, half of the slowness is forgotten; then reads are tried again."""
FACTOR_MAX = 10_000.0


class SlowReads:
    """Times are of one clock that only rises."""

    def __init__(self) -> None:
        self._excess = 0.0
        """Of the factor above 1, as of `_at_s`."""
        self._at_s = 0.0

    def took(self, expected_s: float, elapsed_s: float, now_s: float) -> None:
        """A read took `elapsed_s`, where `expected_s` had been measured at the start."""
        if elapsed_s < NOTICEABLE_S:
            return
        excess = min(FACTOR_MAX, elapsed_s / max(expected_s, elapsed_s / FACTOR_MAX)) - 1.0
        if excess > self.factor(now_s) - 1.0:
            self._excess, self._at_s = excess, now_s

    def factor(self, now_s: float) -> float:
        """By which reads take longer; at least 1."""
        remembered: float = 0.5 ** (max(0.0, now_s - self._at_s) / HALF_LIFE_S)
        return 1.0 + self._excess * remembered

    def corrected(self, cost: CostCoefficients, now_s: float) -> CostCoefficients:
        """`cost`, as measured at the start, with reads as they are now."""
        factor = self.factor(now_s)
        if factor == 1.0:
            return cost
        return replace(
            cost, ssd_fixed_s=cost.ssd_fixed_s * factor, ssd_bytes_per_s=cost.ssd_bytes_per_s / factor
        )
