"""One instance of the simulated cluster: its memory, its pool, its engine, and what it tells of its load.

Load is told one interval apart, as of the same moments whoever asks. A snapshot is made only where something
changes after such a moment, or a decision wants it: nothing else can tell the difference.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import floor

from kvindex.core import InstanceId
from policy.core import (
    ENDED_LISTED_MAX,
    CostCoefficients,
    EndedRequest,
    InstanceState,
    LoadSnapshot,
    Placement,
    QueuedRequest,
    Role,
    RunningRequest,
)
from policy.plan_step import StepLimits
from simulator.batch import Decoding
from simulator.device_memory import DeviceMemory
from simulator.engine import Engine
from simulator.events import Events
from simulator.links import Flow
from simulator.node_pool import HeldPrefix, NodePool
from simulator.prefill_job import PrefillJob
from simulator.request import SimulatedRequest
from simulator.setup import ClusterSetup

SNAPSHOTS_KEPT = 2
"""The latest that a change came after: a message takes at most one interval."""


@dataclass(frozen=True, slots=True)
class Told:
    """A snapshot as of the moment `moment` of the instance, counted in intervals."""

    moment: int
    load: LoadSnapshot


class LoadTeller:
    """When snapshots are made, and which one has arrived."""

    def __init__(
        self, events: Events, interval_s: float, message_s: float, load: Callable[[float], LoadSnapshot]
    ) -> None:
        self._events = events
        self._interval_s = interval_s
        self._message_s = message_s
        self._load = load
        self._changed_at_s = events.now_s
        self._stopped = False
        self._told: list[Told] = []

    def before_change(self) -> None:
        """Whatever changes an instance calls this first."""
        now_s = self._events.now_s
        latest = self._moment(now_s)
        for moment in range(self._moment(now_s - self._message_s), latest + 1):
            self._tell(moment)
        self._changed_at_s = now_s

    def stop(self) -> None:
        """Nothing more is told than what is under way."""
        self.before_change()
        self._stopped = True

    def arrived(self) -> Told | None:
        """The latest snapshot that has come to who is told; None before the first."""
        moment = self._moment(self._events.now_s - self._message_s)
        self._tell(moment)
        return next((told for told in reversed(self._told) if told.moment <= moment), None)

    def _moment(self, at_s: float) -> int:
        return floor(at_s / self._interval_s)

    def _tell(self, moment: int) -> None:
        at_s = min(moment * self._interval_s, self._events.now_s)
        late = at_s < self._changed_at_s or (self._told and self._told[-1].moment >= moment)
        if late or self._stopped:
            return
        self._told = [*self._told[1 - SNAPSHOTS_KEPT :], Told(moment, self._load(at_s))]


@dataclass(slots=True, eq=False)
class Prefilling:
    """A request that prefill has accepted and not handed over."""

    request: SimulatedRequest
    placement: Placement
    prefix_blocks: int
    """Cached: as placed, then as found."""
    own_blocks: int = 0
    """Of those, that were in this instance's pool."""
    own: HeldPrefix | None = None
    """Its hold on them."""
    blocks: int = 0
    """Of device memory, that it holds here."""
    held_blocks: int = 0
    """Of its prompt, that decode has already."""
    job: PrefillJob | None = None
    """Once it can be computed."""
    flow: Flow | None = None
    """To decode, once there is something to send."""
    dropped: bool = False
    """Nobody wants it any more."""

    @property
    def decode(self) -> InstanceId:
        return self.placement.decode

    @property
    def new_tokens(self) -> int:
        """Still to be computed, as of the last part that is done."""
        if self.job is not None:
            return self.job.new_tokens
        return self.request.input_tokens - self.prefix_blocks * self.request.block_tokens


class Node:
    """One life of an instance: where it comes back after a failure it is another."""

    def __init__(
        self,
        setup: ClusterSetup,
        events: Events,
        number: int,
        instance: InstanceId,
        roles: tuple[Role, ...],
        incarnation: int,
        on_finished: Callable[[Decoding], None],
    ) -> None:
        shape = setup.shape_of(roles)
        self.number = number
        """Of its network card."""
        self.instance = instance
        self.roles = roles
        self.incarnation = incarnation
        self.alive = True
        self.shape = shape
        self.block_bytes = setup.block_bytes
        self.memory = DeviceMemory(shape.device_blocks, setup.block_tokens)
        self.pool = NodePool(shape, setup.block_tokens)
        self.teller = LoadTeller(events, setup.load_interval_s, setup.message_s, self.load)
        decodes = Role.DECODE in roles
        limits = StepLimits(
            tokens_max=shape.coupled_step_tokens_max if decodes else shape.prefill_step_tokens_max,
            requests_max=shape.batch_requests_max + shape.prefill_requests_max,
        )
        self.engine = Engine(events, shape.cost, limits, self.memory, self.teller.before_change, on_finished)
        self.queued: deque[Prefilling] = deque()
        """First come first; not taken off the queue."""
        self.active: list[Prefilling] = []
        self.reserved: dict[SimulatedRequest, int] = {}
        """For others that prefill, and not committed yet: with the blocks of each."""
        self.holding = 0
        """Requests that have blocks to decode on, or will have them once they are prefilled here."""
        self.ended: deque[EndedRequest] = deque(maxlen=ENDED_LISTED_MAX)
        self.ended_total = 0
        self.prefilled_tokens = 0
        self.cached_tokens = 0

    def stop(self) -> None:
        """It fails: what it holds is lost, and what its sequences have put out by now is told."""
        self.teller.stop()
        self.alive = False
        self.engine.stop()

    @property
    def cost(self) -> CostCoefficients:
        """As it is announced, and as it is."""
        return self.engine.cost

    def announce(self, cost: CostCoefficients) -> None:
        self.teller.before_change()
        self.engine.cost = cost

    def end(self, request: SimulatedRequest, attempt: int, output_tokens: int | None) -> None:
        """It is not here any more; None where its answer did not come to its end."""
        self.ended_total += 1
        self.ended.append(EndedRequest(request.request_id, attempt, output_tokens, family=request.family))

    def load(self, at_s: float) -> LoadSnapshot:
        """As of a time since which nothing changed."""
        decoding = self.engine.decoding(at_s)
        running = [_running(one, steps) for one, steps in decoding]
        running += [_reserved(request) for request in self.reserved]
        queued = tuple(_queued(prefilling) for prefilling in (*self.active, *self.queued))
        return LoadSnapshot(
            instance=self.instance,
            roles=self.roles,
            state=InstanceState.SERVING,
            queued=queued,
            running=tuple(running),
            requests=len(queued) + len(running),
            blocks=self.memory.blocks,
            blocks_free=self.memory.free,
            blocks_in_use=self.memory.blocks - self.memory.free,
            prefill_tokens_total=self.prefilled_tokens,
            cached_tokens_total=self.cached_tokens,
            cost=self.cost,
            ended=tuple(self.ended),
            ended_total=self.ended_total,
        )


def _queued(prefilling: Prefilling) -> QueuedRequest:
    request = prefilling.request
    return QueuedRequest(
        request.request_id,
        prefilling.placement.attempt,
        prefilling.decode,
        prefilling.new_tokens,
        request.input_tokens - prefilling.new_tokens,
        request.output_tokens_max,
        priority=request.priority,
        output_tokens_expected=request.output_tokens_expected,
    )


def _running(decoding: Decoding, steps: int) -> RunningRequest:
    request = decoding.request
    return RunningRequest(
        request.request_id,
        request.attempt,
        kv_tokens=decoding.kv_tokens + steps,
        output_tokens=request.output_tokens_left - decoding.left + steps,
        output_tokens_max=request.output_tokens_max,
        committed=True,
        priority=request.priority,
        output_tokens_expected=request.output_tokens_expected,
    )


def _reserved(request: SimulatedRequest) -> RunningRequest:
    return RunningRequest(
        request.request_id,
        request.attempt,
        kv_tokens=request.input_tokens,
        output_tokens=0,
        output_tokens_max=request.output_tokens_max,
        committed=False,
        priority=request.priority,
        output_tokens_expected=request.output_tokens_expected,
    )
