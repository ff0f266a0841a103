"""Whether answers met their targets: what conductors tune admission by, told in the gateway's load.

TBT is the mean of the longest tenth of an answer's gaps between tokens, as FAST'25 counts it. Gaps are kept
in buckets that grow by a tenth each, with their sum, so that a long answer takes no more room than a short
one and the mean is off by less than a bucket's width.
"""

from dataclasses import dataclass, field
from math import ceil, log

from policy.core import Placement

TAIL_SHARE = 0.1
BUCKET_GROWTH = 1.1
GAP_S_MIN = 1e-4
"""All below count as one bucket."""
BUCKETS_MAX = 200
"""The last one holds what is above 5 hours."""


@dataclass(slots=True)
class OutcomeCounts:
    """Since the gateway's start; who leaves before the end counts nowhere."""

    answered: int = 0
    in_targets: int = 0
    rejected: int = 0

    def ended(self, times: "AnswerTimes") -> None:
        """An answer came to its end."""
        self.answered += 1
        self.in_targets += times.in_targets

    def failed(self, times: "AnswerTimes") -> None:
        """None did: rejected, where it never began."""
        self.answered += 1
        self.rejected += not times.began


@dataclass(slots=True)
class _Bucket:
    gaps: int = 0
    sum_s: float = 0.0


@dataclass(slots=True)
class AnswerTimes:
    """One answer's, as its tokens come."""

    began: bool = False
    _ttft_met: bool = True
    _tbt_s_max: float | None = None
    _gaps: int = 0
    _buckets: dict[int, _Bucket] = field(default_factory=dict)

    def first(self, placement: Placement | None, waited_s: float) -> None:
        """The first token came `waited_s` after its placement was asked for."""
        self.began = True
        if placement is None:
            return
        self._ttft_met = placement.ttft_ms_max is None or waited_s * 1e3 <= placement.ttft_ms_max
        self._tbt_s_max = None if placement.tbt_ms_max is None else placement.tbt_ms_max / 1e3

    def next(self, gap_s: float, tokens: int) -> None:
        """`tokens` came together, `gap_s` after those before: between them there is no gap."""
        self._gaps += tokens
        bucket = self._buckets.setdefault(_bucket_of(gap_s), _Bucket())
        bucket.gaps += 1
        bucket.sum_s += gap_s

    @property
    def tbt_s(self) -> float | None:
        """None where there is no gap."""
        if not self._gaps:
            return None
        wanted = ceil(TAIL_SHARE * self._gaps)
        left, sum_s = wanted, 0.0
        for number in sorted(self._buckets, reverse=True):
            bucket = self._buckets[number]
            taken = min(left, bucket.gaps)
            sum_s += bucket.sum_s * taken / bucket.gaps
            left -= taken
            if not left:
                break
        return sum_s / wanted

    @property
    def in_targets(self) -> bool:
        if not self.began or not self._ttft_met:
            return False
        tbt_s = self.tbt_s
        return self._tbt_s_max is None or tbt_s is None or tbt_s <= self._tbt_s_max


def _bucket_of(gap_s: float) -> int:
    if gap_s <= GAP_S_MIN:
        return 0
    return min(BUCKETS_MAX, ceil(log(gap_s / GAP_S_MIN) / log(BUCKET_GROWTH)))
