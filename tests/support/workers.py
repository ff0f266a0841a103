"""Real workers (tiny model, real transfer) over the in-memory bus, and a gateway's ear beside them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.support.contexts import register, service_context
from tests.support.reference import Reference

from cluster import subjects
from cluster.bus import Bus, Received
from cluster.life import dispatch
from cluster.messages import FailedEntry, FinishEntry, StreamBatch, Submit, Work
from cluster.testing import FakeBroker, FakeStore
from kvhash import BLOCK_TOKENS
from kvindex.core import InstanceId
from policy.core import RequestId, Role, SamplingParams, TokenLogprobs
from worker.app import WorkerApp
from worker.config import WorkerConfig

GATEWAY = InstanceId("gateway")
PAIR = {"p": (Role.PREFILL,), "d": (Role.DECODE,)}
TOKENS = 24
"""Length of the answers that are compared with the reference."""
WAIT_S_MAX = 20.0
TIMEOUT_S = 5.0


def packed(token_ids: list[int]) -> bytes:
    return np.asarray(token_ids, "<i4").tobytes()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids for the tiny model, without a pattern that repeats within a block."""
    return [(7 * i + seed * 31 + i * i) % 500 + 5 for i in range(tokens)]


def greedy(reference: Reference, prompt_ids: list[int]) -> list[int]:
    return list(reference.answers([prompt_ids], TOKENS)[0].token_ids)


class Ear:
    """What a gateway hears: tokens by (request, attempt, sample) as last told, finishes and failures."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.tokens: dict[tuple[RequestId, int, int], dict[int, int]] = {}
        self.logprobs: dict[tuple[RequestId, int, int], dict[int, TokenLogprobs | None]] = {}
        self.cached_tokens: dict[RequestId, int] = {}
        self.finished: dict[tuple[RequestId, int, int], FinishEntry] = {}
        self.failed: list[FailedEntry] = []
        self.heard = asyncio.Condition()

    async def start(self) -> None:
        await self.bus.subscribe(subjects.stream(GATEWAY), self._hear, concurrency_max=1)

    def answer(self, request_id: str, attempt: int = 0, sample: int = 0) -> list[int]:
        tokens = self.tokens.get((RequestId(request_id), attempt, sample), {})
        return [tokens[index] for index in sorted(tokens)]

    async def wait_finish(self, request_id: str, attempt: int = 0, sample: int = 0) -> FinishEntry:
        key = (RequestId(request_id), attempt, sample)
        await self.wait(lambda: key in self.finished)
        return self.finished[key]

    async def wait_answers(self, request_id: str, samples: int) -> list[list[int]]:
        """The answers of all samples, once they are complete."""
        for sample in range(samples):
            await self.wait_finish(request_id, sample=sample)
        return [self.answer(request_id, sample=sample) for sample in range(samples)]

    async def wait(self, condition) -> None:
        async with asyncio.timeout(WAIT_S_MAX), self.heard:
            await self.heard.wait_for(condition)

    async def ask(self, instance: str, body: object) -> object:
        return await self.bus.request(subjects.instance(InstanceId(instance)), body, timeout_s=TIMEOUT_S)

    async def _hear(self, received: Received) -> None:
        batch = received.body
        assert isinstance(batch, StreamBatch)
        for entry in batch.tokens:
            known = self.tokens.setdefault((entry.request_id, entry.attempt, entry.sample), {})
            for offset, token_id in enumerate(np.frombuffer(entry.token_ids, "<i4").tolist()):
                assert known.setdefault(entry.output_index + offset, token_id) == token_id
            told = self.logprobs.setdefault((entry.request_id, entry.attempt, entry.sample), {})
            for offset, logprobs in enumerate(entry.logprobs):
                assert told.setdefault(entry.output_index + offset, logprobs) == logprobs
            self.cached_tokens[entry.request_id] = max(
                entry.cached_tokens, self.cached_tokens.get(entry.request_id, 0)
            )
        for entry in batch.finished:
            self.finished[(entry.request_id, entry.attempt, entry.sample)] = entry
        self.failed += batch.failed
        async with self.heard:
            self.heard.notify_all()


def after_each_step(app: WorkerApp, action: Callable[[], None]) -> None:
    """Have `action` run when the step loop has made of a step what there is to make of it."""
    steps = app._node.steps
    step_done = steps._step_done

    def done_then_act() -> None:
        step_done()
        action()

    steps._step_done = done_then_act


class Workers:
    """Named workers of one cluster."""

    def __init__(self, apps: dict[str, WorkerApp], ear: Ear, broker: FakeBroker, store: FakeStore) -> None:
        self.apps = apps
        self.ear = ear
        self.broker = broker
        self.store = store
        self.wasted: list[str] = []
        for name, app in apps.items():
            after_each_step(app, lambda name=name, app=app: self._look_for_waste(name, app))

    def _look_for_waste(self, name: str, app: WorkerApp) -> None:
        """At most one partly filled block of waste for each sequence that was in this step."""
        steps = app._node.steps
        for sequence in steps._in_step & {*steps._sequences}:
            blocks = -(-len(sequence.token_ids) // BLOCK_TOKENS)
            if len(sequence.block_ids) > blocks:
                holds = f"{len(sequence.block_ids)} blocks for {len(sequence.token_ids)} tokens"
                self.wasted.append(f"{name}: {sequence.request_id} sample {sequence.sample}: {holds}")

    @property
    def fingerprint(self) -> str:
        return next(iter(self.apps.values()))._node.model.fingerprint

    def work(self, request_id: str, prompt: list[int], output_tokens_max: int, **fields: object) -> Work:
        sampling = fields.pop("sampling", None) or SamplingParams(output_tokens_max)
        values: dict[str, object] = {
            "request_id": RequestId(request_id),
            "attempt": 0,
            "gateway": GATEWAY,
            "fingerprint": self.fingerprint,
            "sampling": sampling,
            "prompt_tokens": len(prompt),
            "prompt_token_ids": packed(prompt),
            "prompt_parts": 0,
            "output_token_ids": b"",
            "deadline_s": 60.0,
        }
        return Work(**{**values, **fields})

    async def submit(
        self,
        request_id: str,
        prompt: list[int],
        tokens: int,
        *,
        at: tuple[str, str] = ("p", "d"),
        source: tuple[str, int] | None = None,
        **fields,
    ) -> object:
        """`source`: whose prefix is brought in, and how many blocks of it."""
        work = self.work(request_id, prompt, tokens, **fields)
        where, blocks = source or (None, 0)
        return await self.ear.ask(at[0], Submit(work, InstanceId(at[1]), where, blocks))

    async def quiet(self) -> None:
        """Wait until nothing is queued, held or pinned anywhere."""
        async with asyncio.timeout(WAIT_S_MAX):
            while not all(self._is_quiet(app) for app in self.apps.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def check_blocks(self) -> None:
        """AssertionError where a pool contradicts itself or a sequence held more than it may."""
        for app in self.apps.values():
            app._node.pool.check_integrity()
            app._node.swap_slots.check_integrity()
        assert self.wasted == []

    def _is_quiet(self, app: WorkerApp) -> bool:
        load = app.load()
        slots = app._node.swap_slots
        idle = not load.queued and not load.running and load.blocks_in_use == 0
        return idle and slots.free == slots.slots


@asynccontextmanager
async def workers(
    model: Path, roles: dict[str, tuple[Role, ...]], **settings: object
) -> AsyncIterator[Workers]:
    """Workers by name and roles, registered and listening."""
    broker, store = FakeBroker(), FakeStore()
    config = WorkerConfig(
        model_folder=str(model),
        model_name="tiny",
        **{"cluster_secret": "sixteen bytes or more", "pool_bytes": 8 << 20, **settings},
    )
    async with AsyncExitStack() as stack:
        apps: dict[str, WorkerApp] = {}
        for name, worker_roles in roles.items():
            named = replace(config, instance=name)
            context = await stack.enter_async_context(
                service_context(broker, store, name, worker_roles, named)
            )
            app = apps[name] = await WorkerApp.open(context, named)
            stack.push_async_callback(app.close)
            record = await app.start()
            await context.bus.subscribe(subjects.instance(context.instance), dispatch(app.handlers()))
            register(store, record)
        ear = Ear(broker.bus(GATEWAY))
        await ear.start()
        for app in apps.values():
            await app._context.registry.wait_for(
                lambda instances: set(roles) <= set(instances), timeout_s=TIMEOUT_S
            )
        cluster = Workers(apps, ear, broker, store)
        yield cluster
        cluster.check_blocks()
