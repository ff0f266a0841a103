"""Which of many candidates count as equal to the best, and which of them a request gets.

Candidates stand in columns; a choice among them is a place in them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from kvindex.core import InstanceId
from policy.choice import UNHEARD_MAX, PlacementLimits, equals_bound_s, spread
from policy.columns import Floats, Ints
from policy.core import RequestId


class Candidates(Protocol):
    def take(self: "CandidatesT", places: Ints) -> "CandidatesT":
        """Those alone, in that order."""
        ...

    def taken(self: "CandidatesT", place: int) -> "CandidatesT":
        """All of them, that one with one more request like this."""
        ...


_ONLY: Ints = np.zeros(1, np.intp)
CandidatesT = TypeVar("CandidatesT", bound=Candidates)


def nearly_least(values_s: Floats, limits: PlacementLimits, target_s: float) -> Ints:
    """The equals of the best, at least one. One that misses the target is no equal of one that meets it."""
    if len(values_s) == 1:
        return _ONLY
    least_s = float(values_s.min())
    bound_s = equals_bound_s(least_s, limits)
    if least_s <= target_s:
        bound_s = min(bound_s, target_s)
    return (values_s <= bound_s).nonzero()[0]


def first_by_name(request_id: RequestId, names: Sequence[InstanceId], equals: Ints) -> int:
    """Each request orders equals its own way, the same in every process."""
    places = equals.tolist()
    if len(places) == 1:
        return int(places[0])
    return int(min(places, key=lambda place: spread(request_id, names[place])))


def in_turn(
    candidates: CandidatesT,
    turn: int,
    choose: Callable[[CandidatesT], int],
    value_s: Callable[[CandidatesT], Floats],
    target_s: float,
) -> int:
    """What `choose` chooses once `turn` others have each chosen. Others are only taken to be there: nobody is
    sent where the target is missed for them."""
    if not turn:
        return choose(candidates)
    values_s = value_s(candidates)
    # No more than these can be the best of anybody.
    near = np.sort(np.argsort(values_s, kind="stable")[: UNHEARD_MAX + 1])
    left = candidates.take(near)
    for _ in range(turn):
        left = left.taken(choose(left))
    found = int(near[choose(left)])
    return found if values_s[found] <= target_s else choose(candidates)
