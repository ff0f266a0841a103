"""What is remembered of a replay: one small record a request, and one histogram of all gaps. Pure.

The gaps between one answer's tokens are kept only while it is streamed.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

LONGEST_GAPS_ONE_IN = 10
"""A request's TBT is the mean of one in so many of its gaps, the longest ones (Mooncake, FAST'25)."""
GAP_BIN_RATIO = 1.02
"""A bin of the histogram ends where it begins, times this: a percentile from it is that exact."""
GAP_BIN_MIN_S = 1e-6
"""Shorter gaps are one bin, which counts as no gap at all."""
REASON_CHARS_MAX = 100
KINDS_MAX = 50
"""Different failures that are told apart; further ones are counted together."""
OTHER_KINDS = "other reasons"


class Outcome(StrEnum):
    SERVED = "served"
    """Streamed to its end."""
    REJECTED = "rejected"
    """Refused before anything of an answer came."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """In flight when the replay was stopped."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not served; `status` is 0 where no answer came, or one that broke off later."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request that was sent. Times in seconds since the replay's start. Tokens as the cluster counts
    them; `cached_tokens` None where it does not say, `tbt_s` where there is no gap."""

    due_s: float
    sent_s: float
    ended_s: float
    outcome: Outcome
    failure: Failure | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    short: bool = False
    """Its answer is shorter than it was asked to be."""
    ttft_s: float | None = None
    tbt_s: float | None = None

    @property
    def late_s(self) -> float:
        return max(0.0, self.sent_s - self.due_s)


@dataclass(slots=True)
class GapHistogram:
    """Gaps between tokens, in bins that are each GAP_BIN_RATIO as wide as the one before."""

    bins: Counter[int] = field(default_factory=Counter)

    def add(self, gap_s: float) -> None:
        self.bins[_bin(gap_s)] += 1

    def count(self) -> int:
        return self.bins.total()

    def percentile(self, share: float) -> float:
        """The upper end of the bin that the value is in; there is at least one gap."""
        left = max(1, math.ceil(share * self.count()))
        for number in sorted(self.bins):
            left -= self.bins[number]
            if left <= 0:
                return GAP_BIN_MIN_S * GAP_BIN_RATIO**number if number else 0.0
        raise ValueError(f"a share of {share}, at most 1")


@dataclass(slots=True)
class Results:
    """What a replay has found so far."""

    records: list[Record] = field(default_factory=list)
    gaps: GapHistogram = field(default_factory=GapHistogram)
    examples: dict[Failure, str] = field(default_factory=dict)
    """What the first failure of each kind said; at most KINDS_MAX."""
    in_flight: int = 0
    began_unix_s: float = 0.0
    """The time of day at its start."""

    def failure(self, status: int, reason: str, message: str) -> Failure:
        """The failure of this kind, to be put into a record."""
        failure = Failure(status, reason[:REASON_CHARS_MAX])
        if failure not in self.examples and len(self.examples) >= KINDS_MAX:
            return Failure(0, OTHER_KINDS)
        self.examples.setdefault(failure, message)
        return failure


def time_between_tokens_s(gaps_s: Sequence[float]) -> float | None:
    """The mean of the longest tenth of the gaps, of one at least; None without gaps."""
    if not gaps_s:
        return None
    longest = sorted(gaps_s, reverse=True)[: -(-len(gaps_s) // LONGEST_GAPS_ONE_IN)]
    return sum(longest) / len(longest)


def _bin(gap_s: float) -> int:
    if gap_s <= GAP_BIN_MIN_S:
        return 0
    return math.ceil(math.log(gap_s / GAP_BIN_MIN_S) / math.log(GAP_BIN_RATIO))
