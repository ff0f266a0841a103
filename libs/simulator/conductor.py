"""The conductor of the simulated cluster: view and decisions of the live one, fed by simulated messages.

Every decision folds the load snapshots that have arrived into a `policy.view.ClusterView` and asks
`policy.place`. The prefix match is exact: what a pool holds is known at once. Of a prompt's hashes `place` is
told the first, which is all that it looks at: the family of the prompt.
"""

from collections.abc import Iterable
from math import inf

from kvindex.core import InstanceMatch, Tier, TierRun
from policy.core import Placement, Rejection, ScheduleRequest
from policy.place import place
from policy.view import ClusterView, InstanceView, expire, with_instance, with_load, with_placement
from simulator.events import Events
from simulator.node import Node
from simulator.request import SimulatedRequest
from simulator.setup import ClusterSetup

MODEL = "simulated"
INCARNATION = 1


class Conductor:
    def __init__(self, setup: ClusterSetup, nodes: Iterable[Node], events: Events) -> None:
        self._setup = setup
        self._nodes = tuple(nodes)
        self._events = events
        self._folded = dict.fromkeys((node.instance for node in self._nodes), -1)
        """Moment of the latest snapshot in the view."""
        view = ClusterView()
        for node in self._nodes:
            view = with_instance(view, _registered(node, setup))
        self._view = view

    def decide(self, request: SimulatedRequest) -> Placement | Rejection:
        now_s = self._events.now_s
        self._fold_loads()
        self._view = expire(self._view, now_s, self._setup.booking_ttl_s)
        asked = ScheduleRequest(
            request.request_id,
            request.attempt,
            MODEL,
            MODEL,
            request.prompt_tokens,
            request.output_tokens_max,
            block_hashes=request.family,
            deadline_s=inf,
            priority=request.priority,
            ttft_ms_max=self._setup.ttft_s_max * 1e3,
            tbt_ms_max=self._setup.tbt_s_max * 1e3,
            excluded=request.excluded,
        )
        decision = place(self._view, asked, self._matches(request), self._setup.placement, now_s)
        if isinstance(decision, Placement):
            self._view = with_placement(
                self._view,
                decision,
                asked.prompt_tokens,
                now_s,
                samples=asked.samples,
                priority=asked.priority,
            )
        return decision

    def _fold_loads(self) -> None:
        interval_s, message_s = self._setup.load_interval_s, self._setup.message_s
        for node in self._nodes:
            told = node.teller.arrived()
            if told is not None and told.moment > self._folded[node.instance]:
                self._folded[node.instance] = told.moment
                heard_at_s = told.moment * interval_s + message_s
                self._view = with_load(self._view, told.load, INCARNATION, told.moment + 1, heard_at_s)

    def _matches(self, request: SimulatedRequest) -> list[InstanceMatch]:
        """As kvmeta answers: longest first, then by name."""
        usable = request.usable_block_ids
        found = [(node.pool.hits(usable), node.instance) for node in self._nodes]
        held = sorted((-blocks, instance) for blocks, instance in found if blocks)
        return [InstanceMatch(instance, -less, (TierRun(Tier.DRAM, -less),)) for less, instance in held]


def _registered(node: Node, setup: ClusterSetup) -> InstanceView:
    return InstanceView(
        instance=node.instance,
        incarnation=INCARNATION,
        roles=node.roles,
        host=node.instance,
        model=MODEL,
        fingerprint=MODEL,
        blocks=node.memory.blocks,
        block_bytes=setup.block_bytes,
        block_tokens=setup.block_tokens,
        heard_at_s=0.0,
    )
