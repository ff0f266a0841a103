"""A conductor, a prefill and a decode that do as a test tells them, on a bus in memory."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import isawaitable

from aiohttp import ClientSession, TCPConnector, web
from tests.unit.gateway.model_files import byte_level_tokenizer

from cluster import subjects
from cluster.bus import Received
from cluster.http_options import HttpOptions
from cluster.http_server import BoundedRunner
from cluster.logs import Level, Logger
from cluster.messages import (
    Accepted,
    Cancel,
    FailedEntry,
    Finish,
    FinishEntry,
    PromptPart,
    Resume,
    StreamBatch,
    Submit,
    TokensEntry,
)
from cluster.metrics import ServiceMetrics
from cluster.testing.bus import FakeBroker, FakeBus
from gateway.answers.requests import GatewayLimits, Requests
from gateway.capacity import Capacity
from gateway.edge import Edge, error_form
from gateway.http_body import BodyLimits
from gateway.metrics import GatewayMetrics
from gateway.model_folder import load_model_folder
from gateway.routes import Api
from gateway.tenants.identity import Identity
from gateway.tenants.tenant_use import TenantUse
from gateway.text_model import TextModel, pack_token_ids
from kvindex.core import InstanceId
from policy.core import FinishReason, Placement, ScheduleRequest

GATEWAY = InstanceId("gateway-1")
PREFILL = InstanceId("prefill-1")
DECODE = InstanceId("decode-1")
SEED = b"s" * 16
END = byte_level_tokenizer().token_to_id("<|im_end|>")


def ids(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text, add_special_tokens=False).ids


class Worker:
    """A prefill or a decode: remembers what it is asked and tells the gateway what a test wants."""

    def __init__(self, bus: FakeBus) -> None:
        self.bus = bus
        self.submits: asyncio.Queue[Submit] = asyncio.Queue()
        self.parts: list[PromptPart] = []
        self.notices: asyncio.Queue[Cancel | Finish | Resume] = asyncio.Queue()
        self.traces: list[str] = []
        self.answer: Callable[[object], object] = accept

    async def start(self) -> "Worker":
        await self.bus.subscribe(subjects.instance(self.bus.instance), self._handle)
        return self

    async def _handle(self, received: Received) -> object:
        body = received.body
        if received.trace is not None:
            self.traces.append(received.trace.trace_id)
        match body:
            case Submit():
                self.submits.put_nowait(body)
            case PromptPart():
                self.parts.append(body)
            case Cancel() | Finish() | Resume():
                self.notices.put_nowait(body)
        answer = self.answer(body)
        return await answer if isawaitable(answer) else answer

    async def tokens(self, submit: Submit, token_ids: list[int], index: int, **fields: object) -> None:
        entry = TokensEntry(
            submit.work.request_id, submit.work.attempt, 0, index, pack_token_ids(token_ids), **fields
        )
        await self.bus.publish(subjects.stream(GATEWAY), StreamBatch(tokens=(entry,)))

    async def finish(self, submit: Submit, tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
        entry = FinishEntry(submit.work.request_id, submit.work.attempt, 0, tokens, reason)
        await self.bus.publish(subjects.stream(GATEWAY), StreamBatch(finished=(entry,)))

    async def fail(self, submit: Submit, *, retryable: bool, detail: str = "the engine broke") -> None:
        entry = FailedEntry(submit.work.request_id, submit.work.attempt, retryable, detail)
        await self.bus.publish(subjects.stream(GATEWAY), StreamBatch(failed=(entry,)))

    async def say(self, submit: Submit, token_ids: list[int], *, cached_tokens: int = 0) -> None:
        """A whole answer, ended by the end token, one message a token."""
        for index, token_id in enumerate([*token_ids, END]):
            await self.tokens(submit, [token_id], index, cached_tokens=cached_tokens)
        await self.finish(submit, len(token_ids) + 1)


def accept(body: object) -> object:
    assert isinstance(body, Submit | PromptPart | Cancel | Finish | Resume)
    if isinstance(body, Submit):
        return Accepted(body.work.request_id, body.work.attempt)
    return Accepted(body.request_id, body.attempt)


async def _place(request: ScheduleRequest) -> object:
    return Placement(request.request_id, request.attempt, PREFILL, DECODE, source=DECODE, prefix_blocks=1)


@dataclass
class Cluster:
    broker: FakeBroker
    gateway_bus: FakeBus
    prefill: Worker
    decode: Worker
    metrics: GatewayMetrics
    requests: Requests
    model: TextModel
    url: str
    session: ClientSession
    place: Callable[[ScheduleRequest], Awaitable[object]] = _place
    scheduled: list[ScheduleRequest] = field(default_factory=list)
    service_metrics: ServiceMetrics = field(default_factory=ServiceMetrics)

    async def conduct(self, received: Received) -> object:
        assert isinstance(received.body, ScheduleRequest)
        self.scheduled.append(received.body)
        return await self.place(received.body)

    def value(self, name: str, **labels: str) -> float:
        """A metric's value now."""
        return self.service_metrics.registry.get_sample_value(name, labels) or 0.0

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> "ReadReply":
        async with self.session.post(self.url + path, json=body, headers=headers) as reply:
            return ReadReply(
                reply.status,
                {name.lower(): value for name, value in reply.headers.items()},
                await reply.text(),
            )

    async def chat(self, **parameters: object) -> tuple[int, dict[str, object]]:
        reply = await self.post("/v1/chat/completions", chat_body(**parameters))
        return reply.status, json.loads(reply.text)


@dataclass(frozen=True)
class ReadReply:
    status: int
    headers: dict[str, str]
    text: str


def chat_body(**parameters: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Capital of France?"}]} | parameters


def prompt_hash_count(request: ScheduleRequest) -> int:
    return len(request.block_hashes) // 16


async def _empty(_request: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def running_cluster(
    folder,
    *,
    limits: GatewayLimits | None = None,
    body_limits: BodyLimits | None = None,
    write_timeout_s: float = 5.0,
    keep_alive_s: float = 15.0,
    conductor: str | None = subjects.SCHEDULE,
    model_name: str = "tiny",
    capacity: Capacity | None = None,
    log: Logger | None = None,
    identity: Identity | None = None,
):
    """A gateway on a real socket in front of fakes; `conductor` is the subject that one answers on."""
    broker = FakeBroker()
    service_metrics = ServiceMetrics()
    metrics = GatewayMetrics(service_metrics.registry)
    log = log or Logger(Level.ERROR)
    gateway_bus = broker.bus(GATEWAY)
    model = TextModel(load_model_folder(folder, model_name, "float32"), SEED)
    requests = Requests(gateway_bus, metrics, log, limits or GatewayLimits())
    await requests.start()
    api = Api(
        model,
        requests,
        metrics,
        log,
        capacity=lambda: capacity,
        identity=identity or Identity(None),
        tenants=TenantUse(metrics, asyncio.get_running_loop().time),
        body_limits=body_limits or BodyLimits(),
        write_timeout_s=write_timeout_s,
        keep_alive_s=keep_alive_s,
    )
    app = web.Application()
    app.add_routes([web.get("/metrics", _empty), *api.routes()])
    http = HttpOptions(error_form=error_form, answer_headers=Edge(()).answer_headers)
    runner = BoundedRunner(app, http, log, shutdown_s=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    prefill = await Worker(broker.bus(PREFILL)).start()
    decode = await Worker(broker.bus(DECODE)).start()
    async with ClientSession(connector=TCPConnector(force_close=True)) as session:
        cluster = Cluster(
            broker,
            gateway_bus,
            prefill,
            decode,
            metrics,
            requests,
            model,
            url,
            session,
            service_metrics=service_metrics,
        )
        if conductor is not None:
            await broker.bus("conductor-1").subscribe(conductor, cluster.conduct)
        yield cluster
    await runner.cleanup()
    await requests.close()
    model.close()
    for bus in (gateway_bus, prefill.bus, decode.bus):
        await bus.close()
