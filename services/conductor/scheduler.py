"""One schedule request, from the bus to the answer: match, place, book, tell.

The decision itself is `policy.place`. Between the view it read and its booking nothing else runs, so
two requests that come together never both take the last free instance.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cluster import subjects
from cluster.bus import Bus, Received
from cluster.errors import DeadlineError, NoResponderError, ProtocolError, RetryableError
from cluster.folds import Decided
from cluster.logs import Logger
from cluster.messages import Decision, MatchRequest
from cluster.tracing import TraceContext, log_fields
from conductor.checks import checked_matches, checked_request
from conductor.cluster_state import ClusterState, lag_s
from conductor.metrics import ConductorMetrics, PrefixSource
from kvhash import BLOCK_TOKENS, HASH_BYTES
from kvindex.core import InstanceMatch
from policy.choice import PlacementLimits
from policy.core import Placement, Rejection, RejectReason, ScheduleRequest
from policy.place import place
from policy.view import ClusterView

FRESH_LOAD_S_MAX = 0.25
"""Nobody is turned away for loads that are older than the request, which come 10 times a second: so long
they are waited for."""
FRESH_LOAD_WAITS_MAX = 64
"""Requests that wait for them at once; further ones are turned away by the loads that there are. Or a crowd
that cannot be served would take all the places where others are decided, and have them wait too."""
PASSING_REASONS = frozenset({RejectReason.OVERLOADED, RejectReason.TTFT, RejectReason.TBT})


@dataclass(frozen=True, slots=True)
class _Coming:
    """How a request came: when, and how long after it was sent."""

    at_s: float
    lag_s: float


LimitsFor = Callable[[ClusterView, float], PlacementLimits]
"""What holds for a decision, by the view at that moment."""


class Scheduler:
    def __init__(
        self,
        bus: Bus,
        state: ClusterState,
        limits: LimitsFor,
        metrics: ConductorMetrics,
        log: Logger,
        clock: Callable[[], float],
        *,
        match_timeout_ms: float,
        placed: Callable[[ScheduleRequest], None],
    ) -> None:
        """`placed` is told of each request that got a placement."""
        self._bus = bus
        self._placed = placed
        self._state = state
        self._limits = limits
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._match_timeout_s = match_timeout_ms / 1e3
        self._in_flight = 0
        self._waiting = 0

    @property
    def in_flight(self) -> int:
        """Requests whose decision is under way."""
        return self._in_flight

    async def schedule(self, received: Received) -> Placement | Rejection:
        """Handler of the schedule subject. ProtocolError where the request makes no sense."""
        request = checked_request(received.body)
        came = _Coming(self._clock(), lag_s(received))
        self._in_flight += 1
        try:
            matches = await self._match(request, received.trace)
            decision = self._decide(request, matches, came)
            if self._may_pass(decision):
                await self._fresh_loads(came.at_s)
                decision = self._decide(request, matches, came)
            if isinstance(decision, Placement):
                self._placed(request)
            self._count(decision)
            self._metrics.decision_s.observe(self._clock() - came.at_s)
            await self._tell(request, matches, decision, received.trace)
        finally:
            self._in_flight -= 1
        return decision

    def _may_pass(self, decision: Placement | Rejection) -> bool:
        """Fresh loads may say something else, and there is a place to wait for them."""
        if self._waiting >= FRESH_LOAD_WAITS_MAX:
            return False
        return isinstance(decision, Rejection) and decision.reason in PASSING_REASONS

    async def _fresh_loads(self, came_at_s: float) -> None:
        self._waiting += 1
        try:
            await self._state.busy_heard_since(came_at_s, FRESH_LOAD_S_MAX)
        finally:
            self._waiting -= 1

    async def _match(self, request: ScheduleRequest, trace: TraceContext | None) -> tuple[InstanceMatch, ...]:
        """What kvmeta knows of the prompt; nothing where it does not answer in time."""
        usable_blocks = (request.prompt_tokens - 1) // BLOCK_TOKENS
        hashes = request.block_hashes[: usable_blocks * HASH_BYTES]
        if not hashes:
            return ()
        try:
            reply = await self._bus.request(
                subjects.KVMETA_MATCH, MatchRequest(hashes), timeout_s=self._match_timeout_s, trace=trace
            )
            matches = checked_matches(reply, len(hashes) // HASH_BYTES)
        except (RetryableError, ProtocolError) as error:
            self._metrics.matches.labels(_match_outcome(error)).inc()
            self._log.warning(
                "placing without prefixes",
                request_id=request.request_id,
                attempt=request.attempt,
                error=error,
            )
            return ()
        self._metrics.matches.labels("answered").inc()
        return matches

    def _decide(
        self, request: ScheduleRequest, matches: tuple[InstanceMatch, ...], came: _Coming
    ) -> Placement | Rejection:
        """Of one moment, with one answer of what the limits are: it can be made again from what is folded."""
        now_s = self._clock()
        view = self._state.as_of(now_s)
        limits = self._limits(view, now_s)
        decision = place(view, request, matches, limits, now_s)
        placement, rejection = (decision, None) if isinstance(decision, Placement) else (None, decision)
        self._state.fold(
            Decided(request, matches, limits, came.at_s, came.lag_s, placement, rejection), now_s
        )
        return decision

    def _count(self, decision: Placement | Rejection) -> None:
        if isinstance(decision, Rejection):
            self._metrics.decisions.labels(decision.reason.value).inc()
            return
        self._metrics.decisions.labels("placed").inc()
        self._metrics.predicted_ttft_s.observe(decision.predicted_ttft_ms / 1e3)
        source = prefix_source(decision)
        self._metrics.prefixes.labels(source).inc()
        self._metrics.prefix_blocks.labels(source).inc(decision.prefix_blocks)

    async def _tell(
        self,
        request: ScheduleRequest,
        matches: tuple[InstanceMatch, ...],
        decision: Placement | Rejection,
        trace: TraceContext | None,
    ) -> None:
        """Log it and tell the other conductors. They miss a booking where the bus is down, no more."""
        fields = {"request_id": request.request_id, "attempt": request.attempt, **log_fields(trace)}
        if isinstance(decision, Placement):
            placement, rejection = decision, None
            self._log.info(
                "placed",
                **fields,
                prefill=decision.prefill,
                decode=decision.decode,
                source=decision.source,
                prefix_blocks=decision.prefix_blocks,
                predicted_ttft_ms=decision.predicted_ttft_ms,
            )
        else:
            placement, rejection = None, decision
            self._log.info("rejected", **fields, reason=decision.reason, detail=decision.detail)
        told = Decision(
            request_id=request.request_id,
            attempt=request.attempt,
            prompt_tokens=request.prompt_tokens,
            output_tokens_max=request.output_tokens_max,
            last_block_hash=request.block_hashes[-HASH_BYTES:],
            matches=matches,
            placement=placement,
            rejection=rejection,
            samples=request.samples,
            priority=request.priority,
        )
        try:
            await self._bus.publish(subjects.DECISION, told, trace=trace)
        except (RetryableError, ProtocolError) as error:
            self._log.warning("decision not published", **fields, error=error)


def prefix_source(placement: Placement) -> PrefixSource:
    """Whose cached prefix the placement's prefill starts from."""
    if placement.source is None:
        return PrefixSource.NONE
    return PrefixSource.OWN if placement.source == placement.prefill else PrefixSource.REMOTE


def _match_outcome(error: Exception) -> str:
    match error:
        case DeadlineError():
            return "timeout"
        case NoResponderError():
            return "no_responder"
        case _:
            return "failed"
