"""The cluster without its machines: arrivals of a trace through conductor, prefill, links and decode.

Deterministic: the seed names the requests, by which equal instances are told apart, and draws how long a
refused one waits before it is placed again. Time is simulated; nothing here reads a clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from kvindex.core import InstanceId
from policy.core import Placement, Rejection, Role
from policy.load_sums import reserved_blocks
from simulator.batch import Decoding
from simulator.conductor import Conductor
from simulator.decode_node import DecodeDuty
from simulator.events import Events
from simulator.links import Links
from simulator.node import Node
from simulator.prefill_node import PrefillDuty
from simulator.request import SimulatedRequest, simulated
from simulator.results import LoadSample, RequestResult, Served, tail_mean_s
from simulator.setup import OUTPUT_TOKENS_LIMIT, ClusterSetup, SetupError
from simulator.trace import TracedRequest

TOO_LONG = "too_long"
"""No instance could hold it to its end."""
REFUSED = "refused"
"""By instances, until its attempts were used up."""
BACKOFF_S_MAX = 1.0
FIRST_TOKEN_MESSAGES = 5
"""One after the other before it is computed: schedule, its answer, submit, reserve, its answer."""

Ended = Callable[[int], None]
"""Told how many requests have ended."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    results: tuple[RequestResult, ...]
    """In the order of the trace."""
    load: tuple[LoadSample, ...]
    events: int
    preempted: int
    evicted_blocks: int
    moved_bytes: float
    busy_s: dict[InstanceId, float]
    """Of each engine."""


def simulate_cluster(
    requests: Sequence[TracedRequest], setup: ClusterSetup, on_ended: Ended | None = None
) -> SimulatedRun:
    """Every request of the trace, of which there is at least one, from its arrival to its end.
    SetupError where its block ids are those of blocks of another size."""
    return _Cluster(requests, setup, on_ended).run()


class _Cluster:
    def __init__(
        self, requests: Sequence[TracedRequest], setup: ClusterSetup, on_ended: Ended | None
    ) -> None:
        self._setup = setup
        self._events = Events()
        self._random = Random(setup.seed)
        self._on_ended = on_ended
        _check_blocks(requests, setup.block_tokens)
        first_ms = min(request.arrived_ms for request in requests)
        self._requests = [
            simulated(
                traced,
                index,
                (traced.arrived_ms - first_ms) / 1e3 / setup.speedup,
                setup.seed,
                OUTPUT_TOKENS_LIMIT,
                setup.block_tokens,
            )
            for index, traced in enumerate(requests)
        ]
        self._results: dict[int, RequestResult] = {}
        self._load: list[LoadSample] = []
        self._prefills: dict[InstanceId, PrefillDuty] = {}
        self._decodes: dict[InstanceId, DecodeDuty] = {}
        self._nodes: dict[InstanceId, Node] = {}
        roles = [("prefill", (Role.PREFILL,))] * setup.prefill
        roles_of_decode = [("decode", (Role.DECODE,))] * setup.decode
        coupled = [("coupled", (Role.PREFILL, Role.DECODE))] * setup.coupled
        self._links = Links(self._events, setup.node.card_bytes_per_s)
        for number, (name, node_roles) in enumerate([*roles, *roles_of_decode, *coupled]):
            self._add_node(number, InstanceId(f"{name}-{number}"), node_roles)
        self._conductor = Conductor(setup, self._nodes.values(), self._events)

    def run(self) -> SimulatedRun:
        for request in self._requests:
            self._events.at(request.arrived_s + self._setup.message_s, partial(self._place, request))
        for announced in self._setup.announced:
            change = partial(self._nodes[announced.instance].announce, announced.cost)
            self._events.at(announced.at_s, change)
        self._sample()
        self._events.run()
        self._check_nothing_left()
        nodes = self._nodes.values()
        return SimulatedRun(
            results=tuple(self._results[request.index] for request in self._requests),
            load=tuple(self._load),
            events=self._events.happened,
            preempted=sum(node.engine.preempted for node in nodes),
            evicted_blocks=sum(node.pool.evicted_blocks for node in nodes),
            moved_bytes=self._links.bytes_total,
            busy_s={node.instance: node.engine.busy_s for node in nodes},
        )

    def refused(self, request: SimulatedRequest, instance: InstanceId) -> None:
        """By an instance: placed again after a while, elsewhere where that is possible."""
        request.excluded = (*request.excluded, instance)
        request.attempt += 1
        request.placement = None
        if request.attempt >= self._setup.placement_attempts_max:
            self._end_rejected(request, REFUSED)
            return
        backoff_s = min(self._setup.backoff_s * 2**request.attempt, BACKOFF_S_MAX)
        delay_s = backoff_s * self._random.uniform(0.5, 1.0) + 2 * self._setup.message_s
        self._events.after(delay_s, partial(self._place, request))

    def finished(self, request: SimulatedRequest) -> None:
        placement, first_token_s = request.placement, request.first_token_s
        assert placement is not None
        assert first_token_s is not None
        assert len(request.gaps_s) == request.output_tokens - 1, "tokens lost or repeated"
        served = Served(
            ttft_s=first_token_s + self._setup.message_s - request.arrived_s,
            predicted_ttft_s=placement.predicted_ttft_ms / 1e3,
            tbt_s=tail_mean_s(request.gaps_s),
            done_at_s=self._events.now_s + self._setup.message_s,
            prefill=placement.prefill,
            decode=placement.decode,
            cached_tokens=request.cached_tokens,
        )
        self._end(request, served, None)

    def _place(self, request: SimulatedRequest) -> None:
        tokens = request.prompt_tokens + request.output_tokens
        holding = self._setup.shape_of((Role.DECODE,))
        if reserved_blocks(tokens, self._setup.block_tokens) > holding.device_blocks:
            self._end_rejected(request, TOO_LONG)
            return
        decision = self._conductor.decide(request)
        if isinstance(decision, Rejection):
            self._end_rejected(request, decision.reason.value)
            return
        self._submit(request, decision)

    def _submit(self, request: SimulatedRequest, placement: Placement) -> None:
        """By way of the gateway. What first tokens take beside the messages that are simulated goes by
        before."""
        request.placement = placement
        submit = partial(self._prefills[placement.prefill].submit, request)
        message_s = self._setup.message_s
        fixed_s = self._nodes[placement.prefill].cost.first_token_fixed_s
        beside_s = max(0.0, fixed_s - FIRST_TOKEN_MESSAGES * message_s)
        self._events.after(2 * message_s + beside_s, submit)

    def _end_rejected(self, request: SimulatedRequest, reason: str) -> None:
        self._end(request, None, reason)

    def _end(self, request: SimulatedRequest, served: Served | None, rejected: str | None) -> None:
        assert not request.ended, f"request {request.index} ended twice"
        request.ended = True
        self._results[request.index] = RequestResult(
            request.index,
            request.arrived_s,
            request.prompt_tokens,
            request.output_tokens,
            request.attempt + 1 if served is not None else max(1, request.attempt),
            served,
            rejected,
            request.priority,
        )
        request.gaps_s = request.gaps_s[:0]
        if self._on_ended is not None:
            self._on_ended(len(self._results))

    def _add_node(self, number: int, instance: InstanceId, roles: tuple[Role, ...]) -> None:
        setup = self._setup
        node = Node(
            self._events,
            number,
            instance,
            roles,
            setup.shape_of(roles),
            setup.block_tokens,
            setup.load_interval_s,
            setup.message_s,
            partial(self._decoded, instance),
        )
        self._nodes[instance] = node
        if Role.PREFILL in roles:
            self._prefills[instance] = PrefillDuty(
                node, self._nodes, self._decodes, self._events, self._links, self, setup.message_s
            )
        if Role.DECODE in roles:
            on_room = self._prefills[instance].take_next if Role.PREFILL in roles else _nothing_waits
            self._decodes[instance] = DecodeDuty(node, self, setup.tbt_s_max, on_room)

    def _decoded(self, instance: InstanceId, decoding: Decoding) -> None:
        self._decodes[instance].finished(decoding)

    def _sample(self) -> None:
        """The load now, and again after an interval while there is any to come."""
        prefilling = [one for node in self._nodes.values() for one in (*node.active, *node.queued)]
        decoding = [
            (one.kv_tokens + steps)
            for node in self._nodes.values()
            for one, steps in node.engine.decoding(self._events.now_s)
        ]
        self._load.append(
            LoadSample(
                self._events.now_s,
                len(prefilling),
                sum(one.new_tokens for one in prefilling),
                len(decoding),
                sum(decoding),
            )
        )
        if len(self._results) < len(self._requests):
            self._events.after(self._setup.sample_interval_s, self._sample)

    def _check_nothing_left(self) -> None:
        """AssertionError where a request has no end or a block was lost."""
        assert len(self._results) == len(self._requests), "requests without an end"
        assert not self._links.flows, "bytes on their way to nobody"
        for node in self._nodes.values():
            assert node.memory.free == node.memory.blocks, f"{node.instance} has lost blocks"
            assert not node.holding, f"{node.instance} holds {node.holding} requests"
            node.pool.check_integrity()


def _check_blocks(requests: Sequence[TracedRequest], block_tokens: int) -> None:
    """The block that a prompt's last tokens fill in part may have an id or not."""
    for index, request in enumerate(requests):
        full = request.input_tokens // block_tokens
        if not full <= len(request.block_ids) <= full + (request.input_tokens % block_tokens > 0):
            raise SetupError(
                f"block_tokens: {block_tokens}, request {index} has {len(request.block_ids)} block ids for "
                f"{request.input_tokens} tokens"
            )


def _nothing_waits() -> None:
    """An instance that only decodes has no queue."""
