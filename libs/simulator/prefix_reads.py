"""How a cached prefix comes to where it is computed on: from the instance's own SSD, then what follows from
one other instance, over the network.

What lies in DRAM there is brought up beside the compute, which is the engine's. Nothing is waited for that
cannot come: where the other instance fails, prefill goes on with what it has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvindex.core import InstanceId
from policy.evict import BlockUse
from simulator.events import Events
from simulator.links import Links
from simulator.node import Node, Prefilling
from simulator.node_pool import HeldPrefix


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Blocks of another instance, which are held there meanwhile."""

    prefilling: Prefilling
    source: Node
    held: HeldPrefix
    found: tuple[int, ...]
    """The prefix in all."""
    read_bytes: int
    """Of it, what is to come over the network."""


class PrefixReads:
    def __init__(
        self,
        node: Node,
        nodes: Mapping[InstanceId, Node],
        events: Events,
        links: Links,
        ssds: Links,
        on_there: Callable[[Prefilling], None],
    ) -> None:
        """`on_there` is called once for each prefilling that `bring` is called with, unless it is dropped."""
        self._node = node
        self._nodes = nodes
        self._events = events
        self._links = links
        self._ssds = ssds
        self._on_there = on_there

    def bring(self, prefilling: Prefilling) -> None:
        """Its own in DRAM as far as it reaches, and on SSD as far as it was placed to be used; what comes
        after from where it was placed to be read, if it still is there."""
        node = self._node
        node.teller.before_change()
        usable = prefilling.request.usable_block_ids
        in_memory = node.pool.memory_hits(usable)
        own = in_memory
        if in_memory < prefilling.placement.prefix_blocks:
            own = max(in_memory, min(node.pool.hits(usable), prefilling.placement.prefix_blocks))
        prefilling.own = node.pool.hold(usable[:own])
        prefilling.own_blocks = prefilling.prefix_blocks = own
        if own > in_memory:
            fetch = partial(self._fetch, prefilling)
            self._read_ssd(node, (own - in_memory) * node.block_bytes, fetch, fetch)
        else:
            self._fetch(prefilling)

    def _fetch(self, prefilling: Prefilling) -> None:
        if not self._wanted(prefilling):
            return
        node, placement = self._node, prefilling.placement
        source = None if placement.source is None else self._nodes.get(placement.source)
        if source is None or source is node:
            self._on_there(prefilling)
            return
        placed = prefilling.request.usable_block_ids[: placement.prefix_blocks]
        found = placed[: source.pool.hits(placed)]
        own_blocks = prefilling.own_blocks
        if len(found) <= own_blocks:
            self._on_there(prefilling)
            return
        read_bytes = (len(found) - own_blocks) * node.block_bytes
        fetch = _Fetch(prefilling, source, source.pool.hold(found), found, read_bytes)
        on_ssd = len(found) - max(own_blocks, source.pool.memory_hits(found))
        if on_ssd > 0:
            risen, broken = partial(self._risen, fetch), partial(self._broken, fetch)
            self._read_ssd(source, on_ssd * node.block_bytes, risen, broken)
        else:
            self._send(fetch)

    def _risen(self, fetch: _Fetch) -> None:
        fetch.source.pool.use(fetch.found, BlockUse(fetch.prefilling.request.priority))
        self._send(fetch)

    def _send(self, fetch: _Fetch) -> None:
        came, broken = partial(self._came, fetch), partial(self._broken, fetch)
        source, target = fetch.source, self._node
        fixed_s = target.cost.transfer_fixed_s
        begin_read(self._events, self._links, source, target, fixed_s, fetch.read_bytes, came, broken)

    def _came(self, fetch: _Fetch) -> None:
        fetch.source.pool.release(fetch.held)
        if self._wanted(fetch.prefilling):
            self._node.teller.before_change()
            fetch.prefilling.prefix_blocks = len(fetch.found)
            self._on_there(fetch.prefilling)

    def _broken(self, fetch: _Fetch) -> None:
        fetch.source.pool.release(fetch.held)
        if self._wanted(fetch.prefilling):
            self._on_there(fetch.prefilling)

    def _read_ssd(
        self, node: Node, read_bytes: int, done: Callable[[], None], broken: Callable[[], None]
    ) -> None:
        fixed_s = node.cost.ssd_fixed_s
        begin_read(self._events, self._ssds, node, node, fixed_s, read_bytes, done, broken)

    def _wanted(self, prefilling: Prefilling) -> bool:
        return self._node.alive and not prefilling.dropped


def begin_read(
    events: Events,
    links: Links,
    source: Node,
    target: Node,
    fixed_s: float,
    read_bytes: int,
    done: Callable[[], None],
    broken: Callable[[], None],
) -> None:
    """After `fixed_s` the bytes flow. Ends with one of the two calls: `broken` where an end is not alive."""

    def begin() -> None:
        if source.alive and target.alive:
            links.send(source.number, target.number, read_bytes, done, broken)
        else:
            broken()

    events.after(fixed_s, begin)
