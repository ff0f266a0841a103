"""What is simulated: how many instances, what each can hold, how decisions are made, and all bounds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf, isfinite

from kvindex.core import InstanceId
from policy.choice import PlacementLimits
from policy.core import CostCoefficients, Role
from policy.cost import step_s
from policy.evict import EvictionOrder
from policy.replicate import ReplicationLimits
from simulator.reference_hardware import (
    HOST_BYTES_PER_S,
    KV_BYTES_PER_TOKEN,
    KV_TOKENS_MAX,
    NODE_BYTES_PER_S,
    POOL_TOKENS,
    REFERENCE_COST,
)
from simulator.results import TbtMeasure
from simulator.trace import TRACE_BLOCK_TOKENS

INSTANCES_MAX = 1024
SPEEDUP_MAX = 1000.0
BLOCK_TOKENS_MAX = 65_536
FAILURES_MAX = 4096
CONDUCTORS_MAX = 64
ARRIVALS_S_MAX = 1e7
"""From the first request to the last: load is looked at every few seconds, to the end."""
OUTPUT_TOKENS_LIMIT = 2048
"""What every request names as its most: a client does not know how long its answer will be. One whose answer
is longer names that."""


REPLICATION_LIMITS = ReplicationLimits(
    bytes_per_s=0.05 * NODE_BYTES_PER_S, burst_bytes=0.2 * NODE_BYTES_PER_S
)
"""All copies together have a twentieth of a card, or a fifth of a second's bytes of it at once."""


class SetupError(Exception):
    """The cluster cannot be simulated; the text names field and limit."""


@dataclass(frozen=True, slots=True)
class NodeShape:
    """One instance; every one has the same, unless those that only decode have another."""

    cost: CostCoefficients = REFERENCE_COST
    """At the start: see `ClusterSetup.announced`."""
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN
    card_bytes_per_s: float = NODE_BYTES_PER_S
    """Of its network card, each way."""
    host_bytes_per_s: float = HOST_BYTES_PER_S
    """From DRAM to where it computes: a cached prefix is brought there layer by layer beside the compute."""
    layers: int = 80
    device_blocks: int = KV_TOKENS_MAX // TRACE_BLOCK_TOKENS
    """KV of what is prefilled, reserved and decoded. All blocks are of the cluster's `block_tokens`."""
    pool_blocks: int = POOL_TOKENS // TRACE_BLOCK_TOKENS
    """Cached prefixes, in DRAM."""
    ssd_blocks: int = 0
    """Cached prefixes, on SSD, read as `cost` says; 0: there is none."""
    eviction: EvictionOrder = EvictionOrder.LRU
    prefill_step_tokens_max: int = 8192
    """Of an instance that only prefills, in one step."""
    coupled_step_tokens_max: int = 512
    """Of one that also decodes: how long a chunk keeps a decode waiting."""
    batch_requests_max: int = 256
    """Reserved and running ones of a decode."""
    prefill_requests_max: int = 4
    """Taken off the queue and not handed over yet."""
    queue_requests_max: int = 4096

    def __post_init__(self) -> None:
        measures = asdict(self)
        del measures["cost"], measures["eviction"], measures["ssd_blocks"]
        if self.ssd_blocks < 0:
            raise SetupError(f"ssd_blocks: {self.ssd_blocks}, at least 0")
        _check_positive(measures)
        _check_positive({"step_per_request_s and step_fixed_s": step_s(self.cost, 1, 0)})


@dataclass(frozen=True, slots=True)
class NodeJoin:
    """An instance that is not there from the start: it comes empty."""

    instance: InstanceId
    at_s: float


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """An instance is gone at once, with all that it holds. It comes back empty, or never (None)."""

    instance: InstanceId
    at_s: float
    back_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class AnnouncedCost:
    """From `at_s` of the simulation on, what an instance does takes other times: it corrects its cost."""

    at_s: float
    instance: InstanceId
    cost: CostCoefficients


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """`prefill` and `decode` instances, and `coupled` ones that do both."""

    prefill: int = 0
    decode: int = 0
    coupled: int = 0
    node: NodeShape = field(default_factory=NodeShape)
    decode_node: NodeShape | None = None
    """Of those that only decode, where they are not as `node`."""
    announced: tuple[AnnouncedCost, ...] = ()
    """Of recorded runs: how costs changed."""
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Of a block, in every instance and in the requests' block ids."""
    placement: PlacementLimits = field(default_factory=PlacementLimits)
    speedup: float = 1.0
    ttft_s_max: float = 30.0
    tbt_s_max: float = 0.1
    tbt_measure: TbtMeasure = TbtMeasure.TAIL
    """Of a request's gaps, held against the target and told."""
    seed: int = 0
    message_s: float = 0.0005
    """Any message, from sender to receiver."""
    load_interval_s: float = 0.1
    booking_ttl_s: float = 2.0
    placement_attempts_max: int = 4
    backoff_s: float = 0.05
    """Before a second placement, at most; twice that before each next one."""
    sample_interval_s: float = 10.0
    """Of the load over time."""
    conductors: int = 1
    replication: bool = False
    """Hot prefixes are copied."""
    replication_limits: ReplicationLimits = REPLICATION_LIMITS
    joins: tuple[NodeJoin, ...] = ()
    failures: tuple[NodeFailure, ...] = ()
    lost_after_s: float = 5.0
    """Of silence, an instance is taken as lost; one that comes back sooner, then."""
    replacements_in_flight_max: int = 16
    """Requests that ask for another place at once."""

    def __post_init__(self) -> None:
        if not 1 <= self.prefill + self.decode + self.coupled <= INSTANCES_MAX:
            raise SetupError(f"instances: 1 to {INSTANCES_MAX} in all")
        if not self.coupled and not (self.prefill and self.decode):
            raise SetupError("instances: without coupled ones there must be both prefill and decode")
        if not 1 <= self.conductors <= CONDUCTORS_MAX:
            raise SetupError(f"conductors: {self.conductors}, 1 to {CONDUCTORS_MAX}")
        if not 0 < self.speedup <= SPEEDUP_MAX:
            raise SetupError(f"speedup: {self.speedup}, above 0 and at most {SPEEDUP_MAX:g}")
        _check_positive(
            {
                "ttft_s_max": self.ttft_s_max,
                "tbt_s_max": self.tbt_s_max,
                "load_interval_s": self.load_interval_s,
                "sample_interval_s": self.sample_interval_s,
                "placement_attempts_max": self.placement_attempts_max,
                "lost_after_s": self.lost_after_s,
                "replacements_in_flight_max": self.replacements_in_flight_max,
            }
        )
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise SetupError(f"block_tokens: {self.block_tokens}, 1 to {BLOCK_TOKENS_MAX}")
        if self.message_s < 0 or self.message_s > self.load_interval_s:
            raise SetupError(f"message_s: {self.message_s}, at least 0 and at most load_interval_s")
        if self.node.coupled_step_tokens_max <= self.node.batch_requests_max:
            raise SetupError(
                f"coupled_step_tokens_max: {self.node.coupled_step_tokens_max}, must be above "
                f"batch_requests_max, {self.node.batch_requests_max}"
            )

        _check_lives(self)

    @property
    def instances(self) -> tuple[tuple[InstanceId, tuple[Role, ...]], ...]:
        """All that there will ever be: prefill-0, …, then decode-P, …, then coupled-…"""
        kinds = [("prefill", (Role.PREFILL,))] * self.prefill
        kinds_of_decode = [("decode", (Role.DECODE,))] * self.decode
        coupled = [("coupled", (Role.PREFILL, Role.DECODE))] * self.coupled
        return tuple(
            (InstanceId(f"{name}-{number}"), roles)
            for number, (name, roles) in enumerate([*kinds, *kinds_of_decode, *coupled])
        )

    def shape_of(self, roles: tuple[Role, ...]) -> NodeShape:
        return self.node if Role.PREFILL in roles or self.decode_node is None else self.decode_node

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.node.kv_bytes_per_token


def _check_lives(setup: ClusterSetup) -> None:
    """Each instance joins at most once, fails only while it is there, and comes back after that."""
    if len(setup.joins) > INSTANCES_MAX:
        raise SetupError(f"joins: {len(setup.joins)}, at most {INSTANCES_MAX}")
    if len(setup.failures) > FAILURES_MAX:
        raise SetupError(f"failures: {len(setup.failures)}, at most {FAILURES_MAX}")
    there_at_s: dict[InstanceId, float | None] = {instance: 0.0 for instance, _ in setup.instances}
    joined: set[InstanceId] = set()
    for join in setup.joins:
        if join.instance not in there_at_s:
            raise SetupError(f"joins: {join.instance!r} is no instance, there are {_names(setup)}")
        if join.instance in joined:
            raise SetupError(f"joins: {join.instance} comes twice")
        if not 0 <= join.at_s < inf:
            raise SetupError(f"joins: {join.instance} at {join.at_s} s, at least 0")
        joined.add(join.instance)
        there_at_s[join.instance] = join.at_s
    for failure in sorted(setup.failures, key=lambda failure: failure.at_s):
        if failure.instance not in there_at_s:
            raise SetupError(f"failures: {failure.instance!r} is no instance, there are {_names(setup)}")
        there = there_at_s[failure.instance]
        if there is None or not there <= failure.at_s < inf:
            raise SetupError(f"failures: {failure.instance} at {failure.at_s} s is not there to fail")
        if failure.back_at_s is not None and not failure.at_s < failure.back_at_s < inf:
            raise SetupError(f"failures: {failure.instance} back at {failure.back_at_s} s, after it failed")
        there_at_s[failure.instance] = failure.back_at_s


def _names(setup: ClusterSetup) -> str:
    """Of all its instances, first and last of each kind."""
    kinds: dict[tuple[Role, ...], list[InstanceId]] = {}
    for instance, roles in setup.instances:
        kinds.setdefault(roles, []).append(instance)
    return ", ".join(
        names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in kinds.values()
    )


def _check_positive(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not (isfinite(value) and value > 0):
            raise SetupError(f"{name}: {value}, must be above 0")
