"""Prefill: take requests in, compute what is not cached, hand the KV over to decode.

Owns the queue and the table of requests; the life of one is `prefill_request`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from cluster.bus import Handler, Received
from cluster.messages import Accepted, RefusalReason, Refused, Submit
from cluster.tracing import TraceContext
from kvindex.core import InstanceId
from policy.core import QueuedRequest, RequestId
from protocol import prefill
from protocol.parts import PartBuffer
from structures.matcher import Matcher
from worker.intake import WorkError, checked_prompt
from worker.node import Node
from worker.prefill_request import PrefillRequest
from worker.sequence import Sequence
from worker.structures import compiled, resumed

TICK_S = 0.5
"""How often renewals and deadlines are looked at."""
REMEMBERED_MAX = 65_536
"""Finished and cancelled attempts remembered, oldest forgotten first: a late submit meets its end."""


class PrefillDuty:
    """`adopt` takes a sequence over that is to be decoded here (coupled)."""

    def __init__(
        self, node: Node, parts: PartBuffer, adopt: Callable[[Sequence, int], bool] | None = None
    ) -> None:
        self._node = node
        self._parts = parts
        self._adopt = adopt
        self._queue: deque[PrefillRequest] = deque()
        self._active: list[PrefillRequest] = []
        self._ended_attempts: dict[RequestId, int] = {}
        self._draining = False
        self._changed = asyncio.Event()
        node.on_room_change(self._take_next)
        node.on_promise(self._blocks_to_take)

    def handlers(self) -> Mapping[type, Handler]:
        return {Submit: self._on_submit}

    def queued(self) -> tuple[QueuedRequest, ...]:
        """Everything accepted and not yet handed over, in order."""
        return tuple(request.queued() for request in (*self._active, *self._queue))

    def works_on(self, request_id: RequestId, attempt: int) -> bool:
        return any(request.is_for(request_id, attempt) for request in (*self._active, *self._queue))

    async def run(self) -> None:
        """Let time pass for every request, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            for request in [*self._active, *self._queue]:
                request.time_passed()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for those here; what is left then is handed back to its gateway,
        which places it elsewhere."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._active or self._queue:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.hand_back("the instance drains")

    def hand_back(self, detail: str) -> None:
        """Give up what is here: its gateways are told, and place it elsewhere."""
        self._draining = True
        for request in [*self._active, *self._queue]:
            request.feed(prefill.Failed(detail))

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Drop this request up to `attempt`; a submit that comes late is refused."""
        self._remember_end(request_id, attempt)
        for request in [*self._active, *self._queue]:
            if request.sequence.request_id == request_id and request.sequence.work.attempt <= attempt:
                request.feed(prefill.CancelAsked())

    def gateways(self) -> set[InstanceId]:
        return {request.sequence.work.gateway for request in (*self._active, *self._queue)}

    def cancel_gateway(self, gateway: InstanceId) -> None:
        """The gateway is lost: nobody waits for its answers."""
        for request in [*self._active, *self._queue]:
            if request.sequence.work.gateway == gateway:
                request.feed(prefill.CancelAsked())

    async def _on_submit(self, received: Received) -> Accepted | Refused:
        submit = received.body
        assert isinstance(submit, Submit)
        work = submit.work
        try:
            structure = await compiled(self._node.structures, work.sampling.structure)
        except WorkError as error:
            self._parts.discard(work.request_id, work.attempt)
            return Refused(work.request_id, work.attempt, error.reason, error.detail, error.retry_after_s)
        # Nothing is awaited from here on: whatever came meanwhile is seen now.
        ended_attempt = self._ended_attempts.get(work.request_id)
        ended = ended_attempt is not None and work.attempt <= ended_attempt
        if not ended and self.works_on(work.request_id, work.attempt):
            return Accepted(work.request_id, work.attempt)
        refusal = self._refusal(work.request_id, work.attempt, ended)
        if refusal is not None:
            self._parts.discard(work.request_id, work.attempt)
            return refusal
        if work.attempt > 0:
            # The gateway gave up what is older; its cancel may still be on the way, or lost.
            self.cancel(work.request_id, work.attempt - 1)
        try:
            prompt = checked_prompt(work, self._parts, self._node.work_limits)
            matcher = resumed(structure, work.output_token_ids)
        except WorkError as error:
            return Refused(work.request_id, work.attempt, error.reason, error.detail)
        self._enqueue(submit, prompt, matcher, received.trace)
        return Accepted(work.request_id, work.attempt)

    def _refusal(self, request_id: RequestId, attempt: int, ended: bool) -> Refused | None:
        if ended:
            return Refused(request_id, attempt, RefusalReason.CANCELLED, "this attempt has ended here")
        if self._draining:
            return Refused(request_id, attempt, RefusalReason.DRAINING, "the instance drains", 1.0)
        queue_max = self._node.config.queue_requests_max
        if len(self._queue) >= queue_max:
            detail = f"{queue_max} requests are waiting already"
            return Refused(request_id, attempt, RefusalReason.QUEUE_FULL, detail, 1.0)
        return None

    def _enqueue(
        self, submit: Submit, prompt: bytes, matcher: Matcher | None, trace: TraceContext | None
    ) -> None:
        work = submit.work
        space = self._node.space(work)
        sequence = Sequence.of(work, prompt, space, self._node.model.context_tokens_max, matcher)
        alone = not self._active and not self._queue
        request = PrefillRequest(
            self._node, submit, prompt, sequence, trace, self._adopt, self._left, alone=alone
        )
        self._queue.append(request)
        self._take_next()
        self._node.context.load_changed()

    def _take_next(self) -> None:
        """First come, first served, while blocks last; looked at again whenever there may be more room."""
        while self._queue and len(self._active) < self._node.config.prefill_requests_max:
            if self._must_wait(self._queue[0]):
                return
            request = self._queue.popleft()
            self._active.append(request)
            request.take()

    def _must_wait(self, request: PrefillRequest) -> bool:
        """Preempted sequences go first, and blocks must suffice beside those that others will take. Where
        nobody holds any there is nothing to wait for."""
        node = self._node
        if node.steps.preempted:
            return True
        if not self._active and node.pool.stats().in_use == 0:
            return False
        blocks = node.steps.blocks_to_allocate() + self._blocks_to_take() + request.blocks_to_take()
        return blocks > node.pool.available()

    def _blocks_to_take(self) -> int:
        """Of the available blocks, those that the requests under way will still take."""
        return sum(request.blocks_to_take() for request in self._active)

    def _left(self, request: PrefillRequest) -> None:
        """The request is done here and holds nothing any more."""
        self._active = [other for other in self._active if other is not request]
        if request in self._queue:
            self._queue.remove(request)
        self._remember_end(request.sequence.request_id, request.sequence.work.attempt)
        self._changed.set()
        self._take_next()
        self._node.context.load_changed()

    def _remember_end(self, request_id: RequestId, attempt: int) -> None:
        attempt = max(attempt, self._ended_attempts.pop(request_id, attempt))
        self._ended_attempts[request_id] = attempt
        if len(self._ended_attempts) > REMEMBERED_MAX:
            self._ended_attempts.pop(next(iter(self._ended_attempts)))
