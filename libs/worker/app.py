"""A worker as a service: node and duties behind the lifecycle's hooks, for prefill, decode and both."""

import asyncio
from collections.abc import Mapping
from typing import Self

from aiohttp import web

from cluster.bus import Handler, Received
from cluster.messages import Accepted, Cancel, InstanceRecord, PromptPart, RefusalReason, Refused, Resume
from cluster.service import ServiceContext
from kvindex.core import InstanceId
from policy.core import InstanceState, LoadSnapshot, Role, TierUse
from protocol.parts import PartBuffer, PartsError, PartsFullError
from worker.config import WorkerConfig
from worker.decode_duty import DecodeDuty
from worker.node import Node
from worker.pool_metrics import check_asked, pool_report
from worker.prefill_duty import PrefillDuty
from worker.read_pins import ReadPins
from worker.replicas import Replicas

GATEWAY_GRACE_S = 10.0
"""A gateway whose registration is gone for longer is lost; a lost lease alone is not enough."""
PARTS_EXPIRE_S = 5.0
"""How often parts of prompts that never came are looked for."""


class WorkerApp:
    """`context.roles` says which duties it has; with both it is coupled and hands over to itself."""

    @classmethod
    async def open(cls, context: ServiceContext, config: WorkerConfig) -> Self:
        """Raises ConfigError where a setting does not fit the model or is missing."""
        return cls(context, await Node.open(context, config))

    def __init__(self, context: ServiceContext, node: Node) -> None:
        self._context = context
        self._node = node
        self._parts = PartBuffer()
        self._decode = DecodeDuty(self._node, self._parts) if Role.DECODE in context.roles else None
        adopt = self._decode.adopt if self._decode else None
        self._prefill = PrefillDuty(self._node, self._parts, adopt) if Role.PREFILL in context.roles else None
        self._duties = [duty for duty in (self._prefill, self._decode) if duty is not None]
        self._read_pins = ReadPins(self._node)
        self._replicas = Replicas(self._node)

    async def start(self) -> InstanceRecord:
        await self._node.start()
        for duty in self._duties:
            self._node.keep_running(duty.run(), type(duty).__name__)
        self._node.keep_running(self._read_pins.run(), "read pins")
        self._node.keep_running(self._watch_gateways(), "watch gateways")
        self._node.keep_running(self._expire_parts(), "expire parts")
        return self._context.record(
            model=self._node.model,
            blocks=self._node.pool.stats().blocks,
            transfer=self._node.endpoint.descriptor(),
        )

    def handlers(self) -> Mapping[type, Handler]:
        handlers: dict[type, Handler] = {Cancel: self._on_cancel, PromptPart: self._on_part}
        for part in (*self._duties, self._read_pins, self._replicas):
            handlers.update(part.handlers())
        handlers[Resume] = self._on_resume
        return handlers

    def routes(self) -> tuple[web.RouteDef, ...]:
        return (web.get("/pool", self._pool),)

    def load(self) -> LoadSnapshot:
        queued = self._prefill.queued() if self._prefill else ()
        running = self._decode.running() if self._decode else ()
        stats = self._node.pool.stats()
        self._node.metrics.show_pool(stats)
        return LoadSnapshot(
            instance=self._context.instance,
            roles=self._context.roles,
            state=InstanceState.SERVING,
            queued=queued,
            running=running,
            requests=len(queued) + len(running),
            blocks=stats.blocks,
            blocks_free=stats.free,
            blocks_cached=stats.cached,
            blocks_in_use=stats.in_use,
            prefill_tokens_total=self._node.steps.prefill_tokens_total,
            cached_tokens_total=self._node.cached_tokens_total,
            decode_tokens_total=self._node.steps.decode_tokens_total,
            cost=self._node.current_cost(),
            ended=self._node.ended.latest(),
            ended_total=self._node.ended.total,
            step_s_total=self._node.cost_meter.step_s_total,
            step_predicted_s_total=self._node.cost_meter.step_predicted_s_total,
            lower_tiers=tuple(TierUse(tier.tier, tier.blocks, tier.copies) for tier in stats.tiers),
        )

    async def drain(self, deadline_s: float) -> None:
        """Both duties refuse what is new; a prefill that hands over to itself ends first. Others may read
        to the end what is lent to them."""
        ends_at_s = self._node.now_s() + deadline_s
        self._read_pins.refuse_new()
        self._replicas.refuse_new()
        if self._decode is not None:
            self._decode.refuse_new()
        if self._prefill is not None:
            await self._prefill.drain(deadline_s)
        if self._decode is not None:
            await self._decode.drain(max(0.0, ends_at_s - self._node.now_s()))

    async def close(self) -> None:
        """What was not drained is handed back: its gateways need not wait until they miss us."""
        for duty in self._duties:
            duty.hand_back("the instance stops")
        await self._node.close()

    async def _pool(self, request: web.Request) -> web.Response:
        """Tells what lies in which tier. `?check=1`: 500 with the contradiction where the bookkeeping holds
        one; that looks at every block, and nothing else happens meanwhile. 400 for any other question."""
        try:
            check = check_asked(request.query.items())
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        node = self._node
        told = pool_report(node.pool, node.mover.counters, node.layout.block_bytes, self._read_pins.pins())
        if not check:
            return web.json_response(told)
        try:
            self._node.pool.check_integrity()
        except AssertionError as error:
            return web.json_response({**told, "check": str(error)}, status=500)
        return web.json_response({**told, "check": "ok"})

    async def _on_cancel(self, received: Received) -> Accepted:
        cancel = received.body
        assert isinstance(cancel, Cancel)
        for duty in self._duties:
            duty.cancel(cancel.request_id, cancel.attempt)
        self._parts.discard(cancel.request_id, cancel.attempt)
        return Accepted(cancel.request_id, cancel.attempt)

    async def _on_resume(self, received: Received) -> Accepted | Refused:
        """Decode tells again what it has emitted; what prefill still works on will be told anyway."""
        resume = received.body
        assert isinstance(resume, Resume)
        if self._prefill is not None and self._prefill.works_on(resume.request_id, resume.attempt):
            return Accepted(resume.request_id, resume.attempt)
        if self._decode is not None:
            return self._decode.resume(resume)
        return Refused(resume.request_id, resume.attempt, RefusalReason.UNKNOWN)

    async def _on_part(self, received: Received) -> Accepted | Refused:
        part = received.body
        assert isinstance(part, PromptPart)
        try:
            self._parts.add(part, self._node.now_s())
        except PartsFullError as error:
            return Refused(part.request_id, part.attempt, RefusalReason.QUEUE_FULL, str(error), 1.0)
        except PartsError as error:
            return Refused(part.request_id, part.attempt, RefusalReason.BAD_REQUEST, str(error))
        return Accepted(part.request_id, part.attempt)

    async def _expire_parts(self) -> None:
        while True:
            await asyncio.sleep(PARTS_EXPIRE_S)
            self._parts.expire(self._node.now_s())

    async def _watch_gateways(self) -> None:
        """A lost gateway's requests are cancelled (DESIGN §3 step 11)."""
        missing_since_s: dict[InstanceId, float] = {}
        while True:
            await asyncio.sleep(GATEWAY_GRACE_S / 10)
            missing = self._gateways() - self._context.registry.instances.keys()
            now_s = self._node.now_s()
            missing_since_s = {gateway: missing_since_s.get(gateway, now_s) for gateway in missing}
            for gateway, since_s in missing_since_s.items():
                if now_s - since_s >= GATEWAY_GRACE_S:
                    for duty in self._duties:
                        duty.cancel_gateway(gateway)

    def _gateways(self) -> set[InstanceId]:
        """Gateways that wait for something from here."""
        return {gateway for duty in self._duties for gateway in duty.gateways()}
