"""The conductor of the simulated cluster: view and decisions of the live one, fed by simulated messages.

Every decision folds the load snapshots that have arrived into a `policy.view.ClusterView` and asks
`policy.place`. The prefix match is exact: what a pool holds is known at once. Of a prompt's hashes `place` is
told the first, which is all that it looks at: the family of the prompt.
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

import xxhash

from kvindex.core import InstanceId, InstanceMatch
from policy import adapt
from policy.adapt import Adaptation, Outcomes
from policy.choice import PlacementLimits
from policy.core import Placement, Rejection, ScheduleRequest
from policy.place import place
from policy.view import (
    ClusterView,
    expire,
    with_instance,
    with_load,
    with_placement,
    without_instance,
)
from simulator.events import Events
from simulator.node import Node
from simulator.request import SimulatedRequest
from simulator.setup import ClusterSetup
from simulator.views import MODEL, registered

DESCRIBED_SEQ = 0
"""Of the load that an instance tells when it is asked; its snapshots count from 1."""

Asked = Callable[[SimulatedRequest, int], None]
"""Told of each request for which a place is asked, with the length of its longest match, if there is one."""


class Conductor:
    def __init__(
        self, setup: ClusterSetup, nodes: Iterable[Node], events: Events, on_asked: Asked | None
    ) -> None:
        self._setup = setup
        self._events = events
        self._on_asked = on_asked
        self._nodes: dict[InstanceId, Node] = {}
        """Those that are taken to be there."""
        self._folded: dict[InstanceId, int] = {}
        """Moment of the latest snapshot in the view."""
        self._view = ClusterView()
        self._adaptation = Adaptation()
        for node in nodes:
            self._register(node)

    def joined(self, node: Node) -> None:
        """It is asked for its load at once."""
        self._register(node)
        now_s = self._events.now_s
        self._view = with_load(self._view, node.load(now_s), node.incarnation, DESCRIBED_SEQ, now_s)

    def lost(self, node: Node) -> None:
        if self._nodes.get(node.instance) is node:
            del self._nodes[node.instance]
            self._view = without_instance(self._view, node.instance)

    def heard(self, placement: Placement, prompt_tokens: int, priority: int) -> None:
        """Another conductor decided it."""
        self._book(placement, prompt_tokens, priority, elsewhere=True)

    def decide(self, request: SimulatedRequest) -> Placement | Rejection:
        now_s = self._events.now_s
        self._fold_loads()
        self._view = expire(self._view, now_s, self._setup.booking_ttl_s)
        asked = ScheduleRequest(
            request.request_id,
            request.attempt,
            MODEL,
            MODEL,
            request.input_tokens,
            request.output_tokens_max,
            block_hashes=request.family,
            deadline_s=inf,
            priority=request.priority,
            ttft_ms_max=self._ttft_s_left(request) * 1e3,
            tbt_ms_max=self._setup.tbt_s_max * 1e3,
            excluded=request.excluded,
            resumed=request.resumed_tokens > 0,
        )
        matches = self._matches(request)
        if matches and self._on_asked is not None:
            self._on_asked(request, matches[0].prefix_blocks)
        decision = place(self._view, asked, matches, self._limits(asked), now_s)
        if isinstance(decision, Placement):
            self._book(decision, asked.prompt_tokens, asked.priority, elsewhere=False)
        return decision

    def answered(self, outcomes: Outcomes) -> None:
        """A gateway tells what became of requests."""
        self._adaptation = adapt.observed(self._adaptation, outcomes, self._events.now_s)

    def _limits(self, asked: ScheduleRequest) -> PlacementLimits:
        placement = self._setup.placement
        if not placement.adaptive:
            return placement
        if not asked.attempt:
            self._adaptation = adapt.asked(self._adaptation, asked.ttft_ms_max, placement)
        self._adaptation = adapt.pressed(self._adaptation, self._view, self._events.now_s)
        return adapt.tuned(placement, self._adaptation)

    def _register(self, node: Node) -> None:
        self._nodes[node.instance] = node
        self._folded[node.instance] = -1
        self._view = with_instance(self._view, registered(node, self._setup, self._events.now_s))

    def _book(self, placement: Placement, prompt_tokens: int, priority: int, *, elsewhere: bool) -> None:
        self._view = with_placement(
            self._view,
            placement,
            prompt_tokens,
            self._events.now_s,
            priority=priority,
            elsewhere=elsewhere,
        )

    def _ttft_s_left(self, request: SimulatedRequest) -> float:
        """When its gateway asked."""
        if not request.attempt:
            return self._setup.ttft_s_max
        waited_s = self._events.now_s - self._setup.message_s - request.arrived_s
        return max(0.0, self._setup.ttft_s_max - waited_s)

    def _fold_loads(self) -> None:
        interval_s, message_s = self._setup.load_interval_s, self._setup.message_s
        for node in self._nodes.values():
            told = node.teller.arrived()
            if told is not None and told.moment > self._folded[node.instance]:
                self._folded[node.instance] = told.moment
                heard_at_s = told.moment * interval_s + message_s
                self._view = with_load(self._view, told.load, node.incarnation, told.moment + 1, heard_at_s)

    def _matches(self, request: SimulatedRequest) -> list[InstanceMatch]:
        """As kvmeta answers: longest first, then by name."""
        usable = request.usable_block_ids
        found = (node.pool.match(node.instance, usable) for node in self._nodes.values())
        matches = [match for match in found if match is not None]
        matches.sort(key=lambda match: (-match.prefix_blocks, match.instance))
        return matches


class Conductors:
    """All of them: each request asks one, as its name says, and that one tells the others."""

    def __init__(
        self,
        setup: ClusterSetup,
        nodes: Iterable[Node],
        events: Events,
        on_asked: Asked | None = None,
    ) -> None:
        nodes = tuple(nodes)
        self._all = tuple(Conductor(setup, nodes, events, on_asked) for _ in range(setup.conductors))
        self._events = events
        self._message_s = setup.message_s

    def decide(self, request: SimulatedRequest) -> Placement | Rejection:
        asked = self._asked(request)
        decision = asked.decide(request)
        if isinstance(decision, Placement):
            for other in self._all:
                if other is not asked:
                    heard = partial(other.heard, decision, request.input_tokens, request.priority)
                    self._events.after(self._message_s, heard)
        return decision

    def answered(self, outcomes: Outcomes) -> None:
        for conductor in self._all:
            conductor.answered(outcomes)

    def joined(self, node: Node) -> None:
        for conductor in self._all:
            conductor.joined(node)

    def lost(self, node: Node) -> None:
        for conductor in self._all:
            conductor.lost(node)

    def _asked(self, request: SimulatedRequest) -> Conductor:
        if len(self._all) == 1:
            return self._all[0]
        name = f"conductor/{request.request_id}/{request.attempt}"
        return self._all[xxhash.xxh3_64_intdigest(name.encode()) % len(self._all)]
