"""What gateways tell of their requests' ends, as what is new in each of their snapshots."""

from cluster.logs import Logger
from kvindex.core import InstanceId
from policy.adapt import Outcomes
from policy.core import LoadSnapshot, Role

GATEWAYS_MAX = 1024
"""Known at once; of more the one heard of longest ago is forgotten, and begins anew."""


class OutcomesHeard:
    def __init__(self, log: Logger) -> None:
        self._log = log
        self._known: dict[InstanceId, tuple[int, Outcomes]] = {}
        """Incarnation and what it had counted; longest ago first."""

    def newly(self, load: LoadSnapshot, incarnation: int) -> Outcomes:
        """Since the gateway's last snapshot. Nothing for the first one that is heard of a process: how long
        ago its requests ended is not known."""
        nothing = Outcomes()
        if Role.GATEWAY not in load.roles:
            return nothing
        missed = load.answered_total - load.in_targets_total - load.rejected_total
        if min(missed, load.in_targets_total, load.rejected_total) < 0:
            self._log.warning("gateway's counts ignored: they do not add up", peer=load.instance)
            return nothing
        total = Outcomes(load.in_targets_total, missed, load.rejected_total)
        known = self._known.pop(load.instance, None)
        self._known[load.instance] = (incarnation, total)
        while len(self._known) > GATEWAYS_MAX:
            del self._known[next(iter(self._known))]
        if known is None or known[0] != incarnation:
            return nothing
        before = known[1]
        new = Outcomes(
            total.in_targets - before.in_targets,
            total.missed - before.missed,
            total.rejected - before.rejected,
        )
        # An older snapshot that came late says nothing new.
        return nothing if min(new.in_targets, new.missed, new.rejected) < 0 else new
