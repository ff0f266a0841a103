"""A step loop over a pool and a memory engine, and who listens to its sequences."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry
from tests.support.memory_engine import MemoryEngine, answer
from tests.support.workers import packed

from cluster.logs import Level, Logger
from cluster.messages import Work
from kvhash import BLOCK_TOKENS, namespace
from kvindex.core import InstanceId
from kvpool import BlockPool, SwapSlots
from policy.core import CostCoefficients, FinishReason, RequestId, SamplingParams
from policy.plan_step import StepLimits
from policy.preempt import HostCopyCost
from worker.cost_meter import CostMeter
from worker.metrics import WorkerMetrics
from worker.preemption import Preempted, SwapCosts
from worker.sequence import Sequence
from worker.step_loop import StepLoop

SPACE = namespace(b"seed", "model")
WAIT_S_MAX = 5.0
SLOW_COMPUTE = CostCoefficients(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
FAST_COPY = HostCopyCost(0.0, 1e9)


class Listener:
    """Keeps what its sequence says, begins its request's other samples, gives the blocks back at the end."""

    def __init__(self, bench: "Bench", sequence: Sequence) -> None:
        self.bench = bench
        self.sequence = sequence
        self.token_ids: list[int] = []
        self.others: list[Listener] = []
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        sequence.owner = self

    def layer_done(self, layer: int, computed_tokens: int, last_layer: bool) -> None:
        raise AssertionError("nothing streams here")

    def chunk_done(self, computed_tokens: int) -> None:
        pass

    def token_sampled(self, token_id: int, ending: FinishReason | None) -> None:
        self.token_ids.append(token_id)
        work = self.sequence.work
        if len(self.token_ids) == 1 and self.sequence.sample == 0:
            for sample in range(1, work.sampling.samples):
                other = self.sequence.fork(self.bench.pool, sample, work.prompt_tokens)
                self.others.append(Listener(self.bench, other))
                self.bench.steps.add(other)
        self.begun.set()
        if ending is not None:
            self.sequence.give_back(self.bench.pool)
            self.bench.steps.wake()
            self.ended.set()

    def failed(self, detail: str) -> None:
        raise AssertionError(detail)

    async def leave(self) -> None:
        """As a cancel does it: at once it hears nothing more, its blocks go when no step uses them."""
        self.bench.steps.leave(self.sequence)
        await self.bench.steps.remove(self.sequence)
        self.sequence.give_back(self.bench.pool)
        self.bench.steps.wake()

    async def expect_answer(self) -> None:
        """All samples end with exactly what the model says."""
        async with asyncio.timeout(WAIT_S_MAX):
            await self.ended.wait()
        work = self.sequence.work
        prompt = self.sequence.token_ids[: work.prompt_tokens]
        tokens = work.sampling.output_tokens_max
        assert self.token_ids == answer(prompt, tokens, self.sequence.sample)
        for other in self.others:
            await other.expect_answer()


class Bench:
    """Where there are enough slots they are the cheaper way."""

    def __init__(self, blocks: int, limits: StepLimits, slots: int = 0) -> None:
        self.pool = BlockPool(blocks)
        self.slots = SwapSlots(slots)
        self.engine = MemoryEngine(blocks, slots)
        self.metrics = WorkerMetrics(CollectorRegistry())
        log = Logger(Level.ERROR)
        self.preempted = Preempted(self.engine, self.pool, self.slots, self.metrics, log)
        self.preempted.costs = SwapCosts(SLOW_COMPUTE, FAST_COPY, 1)
        meter = CostMeter(lambda: None, lambda: 0.0, CollectorRegistry())
        self.steps = StepLoop(
            self.engine, self.pool, self.preempted, limits, 1, self.metrics, lambda: None, log, meter
        )

    def has_room_for(self, prompt: list[int]) -> bool:
        """What a duty asks before it lets a request in: who was preempted goes first."""
        return not self.steps.preempted and self.pool.available() >= -(-len(prompt) // BLOCK_TOKENS)

    def add(
        self, request_id: str, prompt: list[int], output_tokens: int, attempt: int = 0, samples: int = 1
    ) -> Listener:
        work = Work(
            RequestId(request_id),
            attempt,
            InstanceId("g"),
            "f",
            SamplingParams(output_tokens, samples=samples),
            len(prompt),
            packed(prompt),
            0,
            b"",
            60.0,
        )
        sequence = Sequence.of(work, packed(prompt), SPACE, 1000)
        sequence.take_blocks(self.pool)
        sequence.goes_on = True
        listener = Listener(self, sequence)
        self.steps.add(sequence)
        return listener


@asynccontextmanager
async def running(blocks: int, limits: StepLimits | None = None, slots: int = 0) -> AsyncIterator[Bench]:
    """Sequences that are added before the first await are in the first step together."""
    bench = Bench(blocks, limits or StepLimits(512, 64), slots)
    task = asyncio.create_task(bench.steps.run())
    try:
        yield bench
    finally:
        assert not task.done(), "the step loop ended"
        task.cancel()
        bench.pool.check_integrity()
        bench.slots.check_integrity()
