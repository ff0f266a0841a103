"""`python -m moonpool.benchmarks.stub_workers`: instances that answer at once and compute nothing.

Each is a service like any other: it registers, tells its load and its blocks, and follows the messages of a
real one; only its tokens are made up, and no KV moves. All are in this one process, so that what they take
of a processor is little and can be told from what the services take. For `moonpool bench serve`, and for
tests that need many streams.
"""

import asyncio
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop
from aiohttp import web

from cluster.bus import Handler, Received
from cluster.config import load_config
from cluster.context import ServiceConfig, ServiceContext
from cluster.errors import ConfigError
from cluster.messages import (
    Accepted,
    Cancel,
    Finish,
    FinishEntry,
    InstanceRecord,
    ModelInfo,
    RefusalReason,
    Refused,
    Resume,
    Submit,
    TokensEntry,
    Work,
)
from cluster.service import Stop, serve
from engine.model_folder import ModelConfig
from kvhash import BLOCK_TOKENS, HASH_BYTES, BlockHash, block_hashes, model_fingerprint, namespace
from kvpool import BlockPool
from policy.core import (
    ENDED_LISTED_MAX,
    CostCoefficients,
    EndedRequest,
    FinishReason,
    InstanceState,
    LoadSnapshot,
    Role,
)
from worker.outbox import Outbox
from worker.pool_reporter import PoolReporter

DTYPE = "float32"
FIRST_TOKEN_ID = 1000
"""Of the made-up answers: tokens of ordinary text, one after the other."""
TOKEN_IDS = 1000
ANSWERS_KEPT_MAX = 4096
"""Answers that may be asked for again, the oldest forgotten first."""
COST = CostCoefficients(
    prefill_fixed_s=1e-4,
    prefill_per_token_s=1e-8,
    prefill_per_token_pair_s=0.0,
    step_fixed_s=1e-4,
    step_per_request_s=1e-6,
    step_per_kv_token_s=0.0,
    transfer_fixed_s=1e-4,
    transfer_bytes_per_s=1e11,
)
"""Of instances that take no time: so that a conductor turns nobody away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StubConfig(ServiceConfig):
    model_folder: str = field(metadata={"help": "folder of the model that they say they serve"})
    prefill: int = field(default=2, metadata={"help": "prefill instances", "min": 0, "max": 64})
    decode: int = field(default=2, metadata={"help": "decode instances", "min": 0, "max": 64})
    blocks: int = field(default=16_384, metadata={"help": "of each instance's pool", "min": 16})


class Peers:
    """The decode instances of this process, to which prefill hands over without a transfer."""

    def __init__(self) -> None:
        self._decodes: dict[str, StubInstance] = {}

    def add(self, stub: "StubInstance") -> None:
        self._decodes[stub.instance] = stub

    def decode(self, instance: str) -> "StubInstance | None":
        return self._decodes.get(instance)


class StubInstance:
    """A `ServiceApp` of one role."""

    def __init__(self, context: ServiceContext, config: StubConfig, model: ModelInfo, peers: Peers) -> None:
        self.instance = context.instance
        self._context = context
        self._model = model
        self._peers = peers
        self._space = namespace(context.cluster_seed, model.fingerprint)
        self._pool = BlockPool(config.blocks)
        self._reporter = PoolReporter(context.bus, self._pool, context.log)
        self._outbox = Outbox(context.bus, context.log)
        self._ended: deque[EndedRequest] = deque(maxlen=ENDED_LISTED_MAX)
        self._ended_total = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._kept: dict[str, tuple[Work, int]] = {}
        """By request: its work and how many of its prompt's tokens were cached."""

    async def start(self) -> InstanceRecord:
        await self._reporter.start()
        self._tasks = [asyncio.create_task(run()) for run in (self._reporter.run, self._outbox.run)]
        self._peers.add(self)
        return self._context.record(model=self._model, blocks=self._pool.stats().blocks)

    def load(self) -> LoadSnapshot:
        stats = self._pool.stats()
        return LoadSnapshot(
            instance=self._context.instance,
            roles=self._context.roles,
            state=InstanceState.SERVING,
            blocks=stats.blocks,
            blocks_free=stats.free,
            blocks_cached=stats.cached,
            blocks_in_use=stats.in_use,
            cost=COST,
            ended=tuple(self._ended),
            ended_total=self._ended_total,
        )

    def handlers(self) -> Mapping[type, Handler]:
        return {
            Submit: self._on_submit,
            Finish: self._on_end,
            Cancel: self._on_end,
            Resume: self._on_resume,
        }

    def routes(self) -> Iterable[web.RouteDef]:
        return ()

    async def drain(self, deadline_s: float) -> None:
        """Nothing runs: each request has ended when it is answered."""

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reporter.close()

    async def _on_submit(self, received: Received) -> Accepted | Refused:
        submit = received.body
        assert isinstance(submit, Submit)
        work = submit.work
        if work.prompt_parts:
            detail = "stub instances take no prompt in parts"
            return Refused(work.request_id, work.attempt, RefusalReason.BAD_REQUEST, detail)
        cached_tokens = self._take_prompt(work.prompt_token_ids)
        tokens = work.sampling.output_tokens_max
        self._tell(work, 0, 1, cached_tokens, last=tokens == 1)
        decode = self._peers.decode(submit.decode)
        if tokens > 1 and decode is not None:
            decode.go_on(work, cached_tokens)
        return Accepted(work.request_id, work.attempt)

    def go_on(self, work: Work, cached_tokens: int) -> None:
        """The rest of an answer, in one step, the first token once more."""
        self._take_prompt(work.prompt_token_ids)
        self._kept[work.request_id] = (work, cached_tokens)
        if len(self._kept) > ANSWERS_KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        self._tell(work, 0, work.sampling.output_tokens_max, cached_tokens, last=True)

    async def _on_end(self, received: Received) -> Accepted:
        end = received.body
        assert isinstance(end, Finish | Cancel)
        self._kept.pop(end.request_id, None)
        return Accepted(end.request_id, end.attempt)

    async def _on_resume(self, received: Received) -> Accepted | Refused:
        resume = received.body
        assert isinstance(resume, Resume)
        kept = self._kept.get(resume.request_id)
        if kept is None:
            return Refused(resume.request_id, resume.attempt, RefusalReason.UNKNOWN)
        work, cached_tokens = kept
        tokens = work.sampling.output_tokens_max
        self._tell(work, resume.from_index, tokens, cached_tokens, last=True)
        return Accepted(resume.request_id, resume.attempt)

    def _tell(self, work: Work, first: int, end: int, cached_tokens: int, *, last: bool) -> None:
        token_ids = b"".join(
            (FIRST_TOKEN_ID + index % TOKEN_IDS).to_bytes(4, "little") for index in range(first, end)
        )
        entry = TokensEntry(work.request_id, work.attempt, 0, first, token_ids, cached_tokens)
        self._outbox.put(work.gateway, entry)
        if last:
            finish = FinishEntry(work.request_id, work.attempt, 0, end, FinishReason.LENGTH)
            self._outbox.put(work.gateway, finish)
        if last:
            self._ended.append(EndedRequest(work.request_id, work.attempt, end, work.tenant))
            self._ended_total += 1
            self._context.load_changed()

    def _take_prompt(self, token_ids: bytes) -> int:
        """Have its full blocks in the pool, as if they were computed; the tokens that were there before."""
        packed = block_hashes(self._space, token_ids)
        hashes = [
            BlockHash(packed[begin : begin + HASH_BYTES]) for begin in range(0, len(packed), HASH_BYTES)
        ]
        held = self._pool.acquire(hashes)
        fresh = self._pool.allocate(len(hashes) - len(held))
        for place, block_id in enumerate(fresh, len(held)):
            self._pool.store(block_id, hashes[place], hashes[place - 1] if place else None)
        self._pool.release(held + fresh)
        if fresh:
            self._reporter.changed()
        return len(held) * BLOCK_TOKENS


async def run_stubs(config: StubConfig, stop: Stop) -> int:
    """All instances until `stop`; the worst exit status."""
    model = model_info(Path(config.model_folder))
    peers = Peers()
    builds: list[tuple[StubConfig, Role]] = [
        (replace(config, instance=f"{role}-{number}", http_port=0), role)
        for role, count in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode))
        for number in range(count)
    ]
    served = (serve(own, (role,), _build(own, model, peers), stop) for own, role in builds)
    return max(await asyncio.gather(*served), default=0)


def model_info(folder: Path) -> ModelInfo:
    """What a worker of this model registers, but for the size of its blocks: none is ever moved."""
    model = ModelConfig.load(folder)
    return ModelInfo(
        name=model.name,
        fingerprint=model_fingerprint(folder, DTYPE, DTYPE, BLOCK_TOKENS),
        context_tokens_max=model.context_tokens_max,
        block_tokens=BLOCK_TOKENS,
        block_bytes=1,
        layers=model.layers,
        dtype=DTYPE,
    )


def _build(config: StubConfig, model: ModelInfo, peers: Peers) -> Callable[[ServiceContext], StubInstance]:
    return lambda context: StubInstance(context, config, model, peers)


def main(argv: Sequence[str]) -> int:
    try:
        config = load_config(StubConfig, argv, {}, role="stub_workers")
    except ConfigError as error:
        print(f"stub_workers: {error}", file=sys.stderr)
        return 2

    async def run() -> int:
        stop = Stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.ask)
        return await run_stubs(config, stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
