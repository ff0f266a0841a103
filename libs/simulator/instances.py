"""Which instances are there, each with its duties: they start, fail and come back empty.

Who is there is who answers messages now; that others notice is theirs. What an instance held is lost with it:
its requests, its pool, and what is on its way from it or to it.
"""

from functools import partial

from kvindex.core import InstanceId
from policy.core import Role
from simulator.batch import Decoding
from simulator.decode_node import DecodeDuty
from simulator.events import Events
from simulator.life import Lives
from simulator.links import Links
from simulator.node import Node
from simulator.prefill_node import PrefillDuty
from simulator.request import SimulatedRequest
from simulator.setup import ClusterSetup


class Instances:
    def __init__(self, setup: ClusterSetup, events: Events, lives: Lives) -> None:
        self.nodes: dict[InstanceId, Node] = {}
        self.prefills: dict[InstanceId, PrefillDuty] = {}
        self.decodes: dict[InstanceId, DecodeDuty] = {}
        self.lives: list[Node] = []
        """All that there were, those that are over included."""
        self.links = Links(events, setup.node.card_bytes_per_s)
        self.ssds = Links(events, setup.node.cost.ssd_bytes_per_s)
        self._setup = setup
        self._events = events
        self._told = lives
        self._kinds = {instance: (number, roles) for number, (instance, roles) in enumerate(setup.instances)}

    def start(self, instance: InstanceId) -> Node:
        """It is there from now on, empty."""
        setup, (number, roles) = self._setup, self._kinds[instance]
        incarnation = 1 + sum(node.instance == instance for node in self.lives)
        on_finished = partial(self._decoded, instance)
        node = Node(setup, self._events, number, instance, roles, incarnation, on_finished)
        self.lives.append(node)
        self.nodes[instance] = node
        if Role.PREFILL in roles:
            self.prefills[instance] = PrefillDuty(
                node,
                self.nodes,
                self.decodes,
                self._events,
                self.links,
                self.ssds,
                self._told,
                setup.message_s,
            )
        if Role.DECODE in roles:
            on_room = self.prefills[instance].take_next if Role.PREFILL in roles else _nothing_waits
            self.decodes[instance] = DecodeDuty(node, self._told, setup.tbt_s_max, on_room)
        return node

    def stop(self, instance: InstanceId) -> Node:
        """It is gone. Those that work for it as a decode find their connection closed."""
        node = self.nodes.pop(instance)
        self.prefills.pop(instance, None)
        self.decodes.pop(instance, None)
        node.stop()
        self.links.drop(node.number)
        self.ssds.drop(node.number)
        for request in node.reserved:
            if request.placement is not None:
                prefill, attempt = request.placement.prefill, request.attempt
                tell = partial(self._decode_lost, prefill, request, attempt, instance)
                self._events.after(self._setup.message_s, tell)
        return node

    def cancel(self, instance: InstanceId, request: SimulatedRequest, attempt: int) -> None:
        """Whatever is there of that attempt, if it is there."""
        if instance in self.prefills:
            self.prefills[instance].drop(request, attempt)
        if instance in self.decodes:
            self.decodes[instance].release(request, attempt, None)

    def check_nothing_left(self) -> None:
        """AssertionError where something of a request is left, or a block was lost."""
        assert not self.links.flows, "bytes on their way to nobody"
        assert not self.ssds.flows, "bytes read for nobody"
        for node in self.nodes.values():
            name = node.instance
            left = (*node.queued, *node.active, *node.reserved)
            assert not left, f"{name} works for nobody"
            assert node.memory.free == node.memory.blocks, f"{name} has lost blocks"
            assert not node.holding, f"{name} holds {node.holding} requests"
            node.pool.check_integrity()

    def _decode_lost(
        self, prefill: InstanceId, request: SimulatedRequest, attempt: int, decode: InstanceId
    ) -> None:
        duty = self.prefills.get(prefill)
        if duty is not None and duty.drop(request, attempt):
            self._told.lost(request, attempt, decode)

    def _decoded(self, instance: InstanceId, decoding: Decoding) -> None:
        self.decodes[instance].finished(decoding)


def _nothing_waits() -> None:
    """An instance that only decodes has no queue."""
