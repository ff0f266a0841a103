"""The cluster without its machines: arrivals of a trace through conductor, prefill, links and decode.

Deterministic: the seed names the requests, by which equal instances are told apart, and draws how long a
refused one waits before it is placed again. Time is simulated; nothing here reads a clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from kvindex.core import InstanceId
from policy.adapt import Outcomes
from policy.core import Placement, Rejection, Role
from policy.load_sums import reserved_blocks
from simulator.conductor import Conductors
from simulator.events import Events
from simulator.instances import Instances
from simulator.node import Node
from simulator.replacements import Replacements
from simulator.replicator import Replicator
from simulator.request import SimulatedRequest, simulated
from simulator.results import LoadSample, RequestResult, Served, tbt_of
from simulator.setup import AnnouncedCost, ClusterSetup, NodeFailure
from simulator.trace import TracedRequest

TOO_LONG = "too_long"
"""No instance could hold it to its end."""
REFUSED = "refused"
"""By instances, until its attempts were used up."""
LOST = "lost"
"""With an instance, after its first token: no other could go on with it."""
BACKOFF_S_MAX = 1.0
DOUBLINGS_MAX = 20
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
    """Of each engine, over all its lives."""
    copied_prefixes: int = 0
    """Hot ones, to where they were not whole."""


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
        self._requests = simulated(requests, setup)
        self._results: dict[int, RequestResult] = {}
        self._placed: dict[int, SimulatedRequest] = {}
        """Those that instances work for, by index."""
        self._load: list[LoadSample] = []
        self._instances = Instances(setup, self._events, self)
        joining = {join.instance for join in setup.joins}
        for instance, _ in setup.instances:
            if instance not in joining:
                self._instances.start(instance)
        self._replicator = Replicator(
            setup,
            self._events,
            self._instances.nodes,
            self._instances.links,
            self._instances.ssds,
            lambda: len(self._results) < len(self._requests),
        )
        on_asked = self._replicator.asked if setup.replication else None
        self._conductors = Conductors(setup, self._instances.nodes.values(), self._events, on_asked)
        self._replacements = Replacements(
            self._events, setup.replacements_in_flight_max, setup.message_s, self._place
        )

    def run(self) -> SimulatedRun:
        for join in self._setup.joins:
            self._events.at(join.at_s, partial(self._start, join.instance))
        for failure in self._setup.failures:
            self._events.at(failure.at_s, partial(self._fail, failure))
        for announced in self._setup.announced:
            self._events.at(announced.at_s, partial(self._announce, announced))
        for request in self._requests:
            self._events.at(request.arrived_s + self._setup.message_s, partial(self._place, request))
        if self._setup.replication:
            self._replicator.start()
        self._sample()
        self._events.run()
        assert len(self._results) == len(self._requests), "requests without an end"
        self._instances.check_nothing_left()
        lives = self._instances.lives
        busy_s = dict.fromkeys((node.instance for node in lives), 0.0)
        for node in lives:
            busy_s[node.instance] += node.engine.busy_s
        return SimulatedRun(
            results=tuple(self._results[request.index] for request in self._requests),
            load=tuple(self._load),
            events=self._events.happened,
            preempted=sum(node.engine.preempted for node in lives),
            evicted_blocks=sum(node.pool.evicted_blocks for node in lives),
            moved_bytes=self._instances.links.bytes_total,
            busy_s=busy_s,
            copied_prefixes=self._replicator.copied,
        )

    def refused(self, request: SimulatedRequest, attempt: int, culprit: InstanceId) -> None:
        """Placed again after a while, elsewhere where that is possible."""
        if attempt == request.attempt and not request.ended:
            self._place_again(request, culprit)

    def lost(self, request: SimulatedRequest, attempt: int, culprit: InstanceId) -> None:
        """What is left of it is cancelled. Where only its end was lost, nothing is left to compute."""
        placement = request.placement
        if attempt != request.attempt or request.ended or placement is None:
            return
        request.losses += 1
        if request.tokens_out == request.output_tokens:
            self.finished(request)
            return
        for instance in dict.fromkeys((placement.prefill, placement.decode)):
            cancel = partial(self._instances.cancel, instance, request, attempt)
            self._events.after(self._setup.message_s, cancel)
        self._place_again(request, culprit)

    def finished(self, request: SimulatedRequest) -> None:
        placement, first_token_s = request.placement, request.first_token_s
        assert placement is not None
        assert first_token_s is not None
        assert len(request.gaps_s) == request.output_tokens - 1, "tokens lost or repeated"
        served = Served(
            ttft_s=first_token_s + self._setup.message_s - request.arrived_s,
            predicted_ttft_s=request.predicted_ttft_s,
            tbt_s=tbt_of(request.gaps_s, self._setup.tbt_measure),
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
        decision = self._conductors.decide(request)
        if isinstance(decision, Rejection):
            self._end_rejected(request, LOST if request.resumed_tokens else decision.reason.value)
            return
        self._submit(request, decision)

    def _submit(self, request: SimulatedRequest, placement: Placement) -> None:
        """By way of the gateway. What first tokens take beside the messages that are simulated goes by
        before."""
        request.placed(placement)
        self._placed[request.index] = request
        message_s, prefill = self._setup.message_s, self._instances.nodes.get(placement.prefill)
        fixed_s = 0.0 if prefill is None else prefill.cost.first_token_fixed_s
        beside_s = max(0.0, fixed_s - FIRST_TOKEN_MESSAGES * message_s)
        self._events.after(2 * message_s + beside_s, partial(self._arrived, request, placement))

    def _arrived(self, request: SimulatedRequest, placement: Placement) -> None:
        """At prefill, which may not be there to answer."""
        if placement.attempt != request.attempt:
            return
        prefill = self._instances.prefills.get(placement.prefill)
        if prefill is not None:
            prefill.submit(request, placement)
        else:
            unanswered = partial(self.refused, request, placement.attempt, placement.prefill)
            self._events.after(self._setup.message_s, unanswered)

    def _place_again(self, request: SimulatedRequest, culprit: InstanceId) -> None:
        del self._placed[request.index]
        request.place_again(culprit)
        if request.attempt >= self._setup.placement_attempts_max:
            self._end_rejected(request, LOST if request.resumed_tokens else REFUSED)
            return
        backoff_s = min(self._setup.backoff_s * 2 ** min(request.attempt, DOUBLINGS_MAX), BACKOFF_S_MAX)
        delay_s = backoff_s * self._random.uniform(0.5, 1.0) + self._setup.message_s
        self._events.after(delay_s, partial(self._replacements.ask, request))

    def _start(self, instance: InstanceId) -> None:
        node = self._instances.start(instance)
        self._events.after(self._setup.message_s, partial(self._conductors.joined, node))

    def _announce(self, announced: AnnouncedCost) -> None:
        node = self._instances.nodes.get(announced.instance)
        if node is not None:
            node.announce(announced.cost)

    def _fail(self, failure: NodeFailure) -> None:
        """Noticed by its silence, or by the name's next process."""
        node = self._instances.stop(failure.instance)
        noticed_at_s = failure.at_s + self._setup.lost_after_s
        if failure.back_at_s is not None:
            noticed_at_s = min(noticed_at_s, failure.back_at_s)
        self._events.at(noticed_at_s + self._setup.message_s, partial(self._noticed, node))
        if failure.back_at_s is not None:
            self._events.at(failure.back_at_s, partial(self._start, failure.instance))

    def _noticed(self, node: Node) -> None:
        self._conductors.lost(node)
        for request in sorted(self._placed.values(), key=lambda request: request.index):
            if node.instance in request.needed:
                self.lost(request, request.attempt, node.instance)

    def _end_rejected(self, request: SimulatedRequest, reason: str) -> None:
        self._end(request, None, reason)

    def _end(self, request: SimulatedRequest, served: Served | None, rejected: str | None) -> None:
        assert not request.ended, f"request {request.index} ended twice"
        request.ended = True
        self._placed.pop(request.index, None)
        self._results[request.index] = RequestResult(
            request.index,
            request.arrived_s,
            request.prompt_tokens,
            request.output_tokens,
            request.attempt + 1 if served is not None else max(1, request.attempt),
            served,
            rejected,
            request.priority,
            request.losses,
            request.resumed,
            request.recomputed_tokens,
        )
        request.gaps_s = request.gaps_s[:0]
        self._conductors.answered(self._outcome(served))
        if self._on_ended is not None:
            self._on_ended(len(self._results))

    def _outcome(self, served: Served | None) -> Outcomes:
        if served is None:
            return Outcomes(rejected=1)
        tbt_met = served.tbt_s is None or served.tbt_s <= self._setup.tbt_s_max
        met = served.ttft_s <= self._setup.ttft_s_max and tbt_met
        return Outcomes(in_targets=1) if met else Outcomes(missed=1)

    def _sample(self) -> None:
        """The load now, and again after an interval while there is any to come."""
        prefilling = [one for node in self._instances.nodes.values() for one in (*node.active, *node.queued)]
        decoding = [
            (one.kv_tokens + steps)
            for node in self._instances.nodes.values()
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
