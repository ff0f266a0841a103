"""What changes a conductor's view, as data, and how it does: the same for a live conductor and a recording.

Whoever keeps a view feeds it by `folded` alone, so a view follows from its folds and their times.
"""

from dataclasses import dataclass

from cluster.instance_view import instance_view
from cluster.messages import Decision, InstanceRecord
from kvindex.core import InstanceMatch
from policy.choice import PlacementLimits
from policy.core import LoadSnapshot, Placement, Rejection, ScheduleRequest
from policy.view import ClusterView, expire, with_instances, with_load, with_placement


@dataclass(frozen=True, slots=True)
class Registered:
    """The registry as a whole, in its order."""

    instances: tuple[InstanceRecord, ...]


@dataclass(frozen=True, slots=True)
class LoadHeard:
    load: LoadSnapshot
    incarnation: int
    seq: int
    lag_s: float | None = None
    """From its sending to its handling, by the clocks of both machines; None for an answer, which is not
    timed."""


@dataclass(frozen=True, slots=True)
class DecisionHeard:
    """Another conductor's."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Decided:
    """Our own decision with all that it was made from, beside the view: a placement or a rejection."""

    request: ScheduleRequest
    matches: tuple[InstanceMatch, ...]
    limits: PlacementLimits
    came_at_s: float
    """When the request came, by our clock."""
    lag_s: float
    """From its sending until then, as in LoadHeard."""
    placement: Placement | None = None
    rejection: Rejection | None = None

    def __post_init__(self) -> None:
        if (self.placement is None) == (self.rejection is None):
            raise ValueError("placement, rejection: exactly one of them must be there")

    @property
    def decision(self) -> Placement | Rejection:
        decision = self.placement if self.rejection is None else self.rejection
        assert decision is not None
        return decision


Fold = Registered | LoadHeard | DecisionHeard | Decided


def folded(view: ClusterView, fold: Fold, now_s: float, booking_ttl_s: float) -> ClusterView:
    """The next view. What happens between two folds, time alone, is `policy.view.expire`'s."""
    match fold:
        case Registered():
            workers = (instance_view(record, now_s) for record in fold.instances)
            return with_instances(view, (worker for worker in workers if worker is not None))
        case LoadHeard():
            return with_load(view, fold.load, fold.incarnation, fold.seq, now_s)
        case DecisionHeard():
            decision = fold.decision
            if decision.placement is None:
                return view
            return with_placement(
                expire(view, now_s, booking_ttl_s),
                decision.placement,
                decision.prompt_tokens,
                now_s,
                samples=decision.samples,
                priority=decision.priority,
                elsewhere=True,
            )
        case Decided():
            if fold.placement is None:
                return view
            return with_placement(
                expire(view, now_s, booking_ttl_s),
                fold.placement,
                fold.request.prompt_tokens,
                now_s,
                samples=fold.request.samples,
                priority=fold.request.priority,
            )
