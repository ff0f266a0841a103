"""Copies of hot prefixes in the simulated cluster: counted, chosen and paced as live, by the same code.

What decisions ask for is counted (`policy.heat`), once a round it is asked what to copy where
(`policy.replicate`), and the targets read it over the network beside all else. Room at a target is that of
its pool in DRAM.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kvhash import HASH_BYTES
from kvindex.core import InstanceId, InstanceMatch
from policy.copies import Copies
from policy.evict import UNKNOWN_USE
from policy.heat import Asked, HeatCounter, HeatWindow
from policy.replicate import Budget, HotPrefix, Replication, ReplicationView, replicate
from policy.view import ClusterView, InstanceView
from simulator.events import Events
from simulator.links import Links
from simulator.node import Node
from simulator.node_pool import HeldPrefix
from simulator.prefix_reads import begin_read
from simulator.request import SimulatedRequest
from simulator.setup import ClusterSetup
from simulator.views import registered

ROUND_S = 1.0
WINDOW_S = 30.0
PAUSE_S = 60.0
"""Until the same copy is tried again."""
HOT_PREFIXES_MAX = 32
"""Looked at in one round. All four as a kvmeta's settings are where nobody sets them."""


@dataclass(frozen=True, slots=True)
class _Copy:
    replication: Replication
    block_ids: tuple[int, ...]
    source: Node
    target: Node
    held: HeldPrefix
    kept: HeldPrefix
    """What the target has of it already."""
    read_bytes: int


class Replicator:
    def __init__(
        self,
        setup: ClusterSetup,
        events: Events,
        nodes: Mapping[InstanceId, Node],
        links: Links,
        ssds: Links,
        working: Callable[[], bool],
    ) -> None:
        """`nodes` are those that are there; rounds go on while there is work."""
        self.copied = 0
        """Copies that are whole."""
        self._setup = setup
        self._events = events
        self._nodes = nodes
        self._links = links
        self._ssds = ssds
        self._working = working
        self._counter = HeatCounter()
        self._window = HeatWindow(WINDOW_S)
        self._copies = Copies(PAUSE_S)
        self._budget = Budget(0.0, 0.0)

    def start(self) -> None:
        self._events.after(ROUND_S, self._round)

    def asked(self, request: SimulatedRequest, match_blocks: int) -> None:
        """A decision was asked for, and the longest match has so many of the prompt's blocks."""
        self._counter.count(request.block_hashes(match_blocks), match_blocks, self._events.now_s)

    def _round(self) -> None:
        if not self._working():
            return
        now_s, limits = self._events.now_s, self._setup.replication_limits
        self._window.add(self._counter.take(now_s, WINDOW_S), now_s)
        hot = self._window.hot(limits.requests_min, HOT_PREFIXES_MAX, now_s)
        self._copies.forget(now_s)
        if hot:
            view = ReplicationView(
                self._view(),
                tuple(HotPrefix(one.block_hashes, one.requests, self._holders(one)) for one in hot),
                self._budget,
                self._copies.in_flight,
                self._copies.settling,
                self._copies.avoided,
            )
            plan = replicate(view, limits, now_s)
            self._budget = plan.budget
            for replication in plan.replications:
                self._begin(replication)
        self._events.after(ROUND_S, self._round)

    def _view(self) -> ClusterView:
        """Loads as they were told, without the requests: only how many there are is looked at."""
        views: dict[InstanceId, InstanceView] = {}
        for node in self._nodes.values():
            told = node.teller.arrived()
            if told is not None:
                room = self._setup.shape_of(node.roles).pool_blocks - node.pool.memory_blocks
                load = replace(
                    told.load,
                    queued=(),
                    running=(),
                    ended=(),
                    blocks_free=room,
                    blocks_cached=node.pool.memory_blocks,
                )
                view = registered(node, self._setup, self._events.now_s)
                views[node.instance] = replace(view, load=load)
        return ClusterView(views)

    def _holders(self, asked: Asked) -> tuple[InstanceMatch, ...]:
        block_ids = _block_ids(asked.block_hashes)
        found = (node.pool.match(node.instance, block_ids) for node in self._nodes.values())
        return tuple(match for match in found if match is not None)

    def _begin(self, replication: Replication) -> None:
        """The target reads what it lacks, if the source still has it."""
        self._copies.begin(replication)
        source, target = self._nodes[replication.source], self._nodes[replication.target]
        block_ids = _block_ids(replication.block_hashes)
        kept = block_ids[: target.pool.hits(block_ids)]
        read_blocks = len(block_ids) - len(kept)
        copy = _Copy(
            replication,
            block_ids,
            source,
            target,
            source.pool.hold(block_ids),
            target.pool.hold(kept),
            read_blocks * target.block_bytes,
        )
        on_ssd = len(block_ids) - max(len(kept), source.pool.memory_hits(block_ids))
        send, broken = partial(self._send, copy), partial(self._end, copy)
        if on_ssd > 0:
            fixed_s = source.cost.ssd_fixed_s
            begin_read(
                self._events, self._ssds, source, source, fixed_s, on_ssd * source.block_bytes, send, broken
            )
        else:
            self._send(copy)

    def _send(self, copy: _Copy) -> None:
        came, broken = partial(self._came, copy), partial(self._end, copy)
        source, target = copy.source, copy.target
        fixed_s = target.cost.transfer_fixed_s
        begin_read(self._events, self._links, source, target, fixed_s, copy.read_bytes, came, broken)

    def _came(self, copy: _Copy) -> None:
        copy.target.pool.use(copy.block_ids, UNKNOWN_USE)
        self._end(copy)

    def _end(self, copy: _Copy) -> None:
        """However it ended: what a failed instance held does not count."""
        copy.source.pool.release(copy.held)
        copy.target.pool.release(copy.kept)
        target = copy.target
        done = target.alive and target.pool.hits(copy.block_ids) == len(copy.block_ids)
        self.copied += done
        self._copies.end(copy.replication, self._events.now_s, done=done)


def _block_ids(block_hashes: bytes) -> tuple[int, ...]:
    return tuple(
        int.from_bytes(block_hashes[first : first + HASH_BYTES], "little", signed=True)
        for first in range(0, len(block_hashes), HASH_BYTES)
    )
