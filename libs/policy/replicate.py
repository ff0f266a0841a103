"""Which hot prefixes are copied where (DESIGN §8): one pure function over a frozen view.

A prefix that many ask for is worth more than one copy: requests spread over the instances that hold it,
and none has to fetch it first. Knows neither where the counts come from nor how a copy is made.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvhash import HASH_BYTES, BlockHash
from kvindex.core import InstanceId, InstanceMatch
from policy.core import Role
from policy.view import ClusterView, InstanceView


@dataclass(frozen=True, slots=True)
class ReplicationLimits:
    """`requests_min` is counted over the window that the view's counts are of."""

    requests_min: int = 8
    copies_max: int = 3
    """Instances in service that hold the whole prefix, the first one included."""
    in_flight_max: int = 2
    bytes_per_s: float = 200e6
    burst_bytes: float = 1e9
    """What may be copied at once after a quiet time."""
    cached_share: float = 0.5
    """Of a target's cached blocks, that a copy may displace."""
    silence_s_max: float = 5.0


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A chain from a prompt's start, how often it was asked for, and who holds how much of it."""

    block_hashes: bytes
    requests: int
    holders: tuple[InstanceMatch, ...]

    @property
    def last_hash(self) -> BlockHash:
        """Names the chain."""
        return BlockHash(self.block_hashes[-HASH_BYTES:])

    @property
    def blocks(self) -> int:
        return len(self.block_hashes) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class Replication:
    """`target` reads from `source` what it lacks of the chain: `new_blocks`."""

    block_hashes: bytes
    fingerprint: str
    source: InstanceId
    target: InstanceId
    new_blocks: int
    new_bytes: int

    @property
    def key(self) -> "CopyKey":
        return (BlockHash(self.block_hashes[-HASH_BYTES:]), self.target)


CopyKey = tuple[BlockHash, InstanceId]
"""A chain, named by its last hash, at a target."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What may still be copied, as of `at_s`. Negative after a copy larger than was left: the next one
    waits until that is paid off, so over time no more than `bytes_per_s` flows."""

    left_bytes: float
    at_s: float

    def at(self, now_s: float, limits: ReplicationLimits) -> "Budget":
        grown = self.left_bytes + max(0.0, now_s - self.at_s) * limits.bytes_per_s
        return Budget(min(grown, limits.burst_bytes), now_s)

    def allows(self, copy_bytes: int, limits: ReplicationLimits) -> bool:
        """A copy larger than a burst needs a whole one, else it would wait for ever."""
        return self.left_bytes >= min(copy_bytes, limits.burst_bytes)


@dataclass(frozen=True, slots=True)
class ReplicationView:
    cluster: ClusterView
    prefixes: tuple[HotPrefix, ...]
    budget: Budget
    in_flight: tuple[Replication, ...] = ()
    settling: tuple[Replication, ...] = ()
    """Done a moment ago: who holds what does not show them yet."""
    avoided: frozenset[CopyKey] = field(default_factory=frozenset)
    """Tried before, and not to be tried again for now."""


@dataclass(frozen=True, slots=True)
class ReplicationPlan:
    replications: tuple[Replication, ...]
    budget: Budget


def replicate(view: ReplicationView, limits: ReplicationLimits, now_s: float) -> ReplicationPlan:
    """The copies to begin now, hottest prefix first: each goes to the least loaded instance with room.

    Deterministic. Begins none that would exceed a limit together with those in flight. What is not begun
    for lack of budget holds back what is less hot, so that small copies do not starve a large one.
    """
    begun: list[Replication] = []
    budget = view.budget.at(now_s, limits)
    for prefix in sorted(view.prefixes, key=lambda prefix: (-prefix.requests, prefix.block_hashes)):
        if prefix.requests < limits.requests_min:
            break
        for replication in _copies(prefix, view, begun, limits, now_s):
            full = len(view.in_flight) + len(begun) >= limits.in_flight_max
            if full or not budget.allows(replication.new_bytes, limits):
                return ReplicationPlan(tuple(begun), budget)
            budget = replace(budget, left_bytes=budget.left_bytes - replication.new_bytes)
            begun.append(replication)
    return ReplicationPlan(tuple(begun), budget)


def _copies(
    prefix: HotPrefix,
    view: ReplicationView,
    begun: Sequence[Replication],
    limits: ReplicationLimits,
    now_s: float,
) -> Iterator[Replication]:
    """What would bring the prefix to its number of copies, one after the other."""
    held = {holder.instance: holder.prefix_blocks for holder in prefix.holders}
    sources = [
        instance
        for name, instance in view.cluster.instances.items()
        if held.get(name, 0) >= prefix.blocks and _usable(instance, limits, now_s)
    ]
    if not sources:
        return
    coming = [*view.in_flight, *view.settling, *begun]
    copies = {source.instance for source in sources}
    copies |= {copy.target for copy in coming if copy.key[0] == prefix.last_hash}
    taken = _blocks_by_target(coming)
    source = min(sources, key=_load)
    for target in sorted(view.cluster.instances.values(), key=_fitness):
        if len(copies) >= limits.copies_max:
            return
        name = target.instance
        new_blocks = prefix.blocks - held.get(name, 0)
        if (
            name not in copies
            and (prefix.last_hash, name) not in view.avoided
            and target.fingerprint == source.fingerprint
            and _usable(target, limits, now_s)
            and new_blocks <= _room_blocks(target, limits) - taken.get(name, 0)
        ):
            copies.add(name)
            yield Replication(
                block_hashes=prefix.block_hashes,
                fingerprint=source.fingerprint,
                source=source.instance,
                target=name,
                new_blocks=new_blocks,
                new_bytes=new_blocks * target.block_bytes,
            )


def _usable(instance: InstanceView, limits: ReplicationLimits, now_s: float) -> bool:
    """One whose load is not known, or was not heard of for long, is left alone."""
    return (
        instance.load is not None
        and not instance.draining
        and now_s - instance.heard_at_s <= limits.silence_s_max
    )


def _room_blocks(target: InstanceView, limits: ReplicationLimits) -> int:
    if target.load is None:
        return 0
    return target.load.blocks_free + int(limits.cached_share * target.load.blocks_cached)


def _load(instance: InstanceView) -> tuple[int, InstanceId]:
    return (0 if instance.load is None else instance.load.requests, instance.instance)


def _fitness(target: InstanceView) -> tuple[bool, int, InstanceId]:
    """Who prefills needs prefixes most: decode holds blocks for others to read."""
    return (Role.PREFILL not in target.roles, *_load(target))


def _blocks_by_target(coming: Iterable[Replication]) -> Mapping[InstanceId, int]:
    blocks: dict[InstanceId, int] = {}
    for replication in coming:
        blocks[replication.target] = blocks.get(replication.target, 0) + replication.new_blocks
    return blocks
