"""A recording's decisions made once more: the same folds into the same view, and `policy.place` on it.

With the recorded limits each must come out as it did, to the last digit. With others it tells what would have
been placed otherwise: each decision by itself, in the cluster as it was, where the recorded ones were carried
out.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cluster.folds import Decided, folded
from cluster.recording import Begun, Ended, Line
from policy.choice import PlacementLimits
from policy.core import Placement, Rejection
from policy.place import place
from policy.view import ClusterView, expire

LimitsOf = Callable[[PlacementLimits], PlacementLimits]


@dataclass(frozen=True, slots=True)
class RemadeDecision:
    """One decision as it was recorded, and as it comes out now."""

    at_s: float
    """Since the recording began."""
    recorded: Placement | Rejection
    remade: Placement | Rejection

    @property
    def identical(self) -> bool:
        """In all that was decided and predicted."""
        return self.recorded == self.remade

    @property
    def same_place(self) -> bool:
        """The same instances and prefix, or turned away for the same reason, whatever was predicted."""
        return _place_of(self.recorded) == _place_of(self.remade)


def as_recorded(limits: PlacementLimits) -> PlacementLimits:
    return limits


def remade_decisions(lines: Iterable[Line], limits_of: LimitsOf = as_recorded) -> Iterator[RemadeDecision]:
    """Every decision of a recording, in order. `limits_of` gives the limits to decide with for those that
    were used."""
    view = ClusterView()
    begun_s = booking_ttl_s = 0.0
    for line in lines:
        entry = line.entry
        if isinstance(entry, Begun):
            begun_s, booking_ttl_s = line.at_s, entry.booking_ttl_s
            continue
        if isinstance(entry, Ended):
            continue
        if isinstance(entry, Decided):
            view = expire(view, line.at_s, booking_ttl_s)
            remade = place(view, entry.request, entry.matches, limits_of(entry.limits), line.at_s)
            yield RemadeDecision(line.at_s - begun_s, entry.decision, remade)
        view = folded(view, entry, line.at_s, booking_ttl_s)


def _place_of(decision: Placement | Rejection) -> tuple[object, ...]:
    if isinstance(decision, Rejection):
        return ("rejected", decision.reason)
    return ("placed", decision.prefill, decision.decode, decision.source, decision.prefix_blocks)
