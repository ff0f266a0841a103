"""A service that does next to nothing, for tests of the lifecycle."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from aiohttp import web

from cluster.bus import Handler, Received, Reply
from cluster.messages import Accepted, Cancel, InstanceRecord
from cluster.service import ServiceContext
from policy.core import InstanceState, LoadSnapshot


class EchoApp:
    """Answers Cancel with Accepted; notes what the lifecycle does with it."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self.steps: list[str] = []
        self.requests = 0
        self.drained = asyncio.Event()
        self.drain_started = asyncio.Event()
        self.on_start: Callable[[], None] = lambda: None

    async def start(self) -> InstanceRecord:
        self.steps.append("start")
        self.on_start()
        return self.context.record(blocks=7)

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            self.context.instance, self.context.roles, InstanceState.SERVING, requests=self.requests
        )

    def handlers(self) -> Mapping[type, Handler]:
        return {Cancel: self._cancel}

    def routes(self) -> Iterable[web.RouteDef]:
        return [web.post("/echo", self._echo)]

    async def drain(self, deadline_s: float) -> None:
        self.steps.append("drain")
        self.drain_started.set()
        await self.drained.wait()

    async def close(self) -> None:
        self.steps.append("close")

    async def _cancel(self, received: Received) -> Reply:
        assert isinstance(received.body, Cancel)
        return Accepted(received.body.request_id, received.body.attempt)

    async def _echo(self, request: web.Request) -> web.Response:
        return web.Response(body=await request.read())
