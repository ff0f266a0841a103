"""The step loop over an engine that computes nothing: no sequence is lost, mixed up or forgotten."""

import asyncio
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Rows
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from tests.support.workers import packed

from cluster.logs import Level, Logger
from cluster.messages import Work
from engine.step import SequenceStep, StepResult
from kvhash import namespace
from kvindex.core import InstanceId
from kvpool import BlockPool, SwapSlots
from policy.core import FinishReason, RequestId, SamplingParams
from policy.plan_step import StepLimits
from worker.metrics import WorkerMetrics
from worker.preemption import Preempted
from worker.sequence import Sequence
from worker.step_loop import StepLoop

pytestmark = pytest.mark.unit

SPACE = namespace(b"seed", "model")
WAIT_S_MAX = 5.0


class CountingEngine:
    """Its "model" says: the next token is how many tokens there are."""

    async def run(self, sequences: Rows[SequenceStep], on_layer: Callable[[int], None] | None) -> StepResult:
        await asyncio.sleep(0)
        token_ids = (s.context_tokens + len(s.token_ids) if s.sampling else None for s in sequences)
        nothing = (None,) * len(sequences)
        return StepResult(tuple(token_ids), 0.0, nothing, nothing)


class Listener:
    """Keeps what its sequence says, and gives the blocks back at the end."""

    def __init__(self, sequence: Sequence, pool: BlockPool, steps: StepLoop) -> None:
        self.sequence, self.pool, self.steps = sequence, pool, steps
        self.token_ids: list[int] = []
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        sequence.owner = self

    def layer_done(self, layer: int, computed_tokens: int, last_layer: bool) -> None:
        raise AssertionError("nothing streams here")

    def chunk_done(self, computed_tokens: int) -> None:
        pass

    def token_sampled(self, token_id: int, ending: FinishReason | None) -> None:
        self.token_ids.append(token_id)
        self.begun.set()
        if ending is not None:
            self.sequence.give_back(self.pool)
            self.steps.wake()
            self.ended.set()

    def failed(self, detail: str) -> None:
        raise AssertionError(detail)


class Bench:
    def __init__(self, blocks: int, limits: StepLimits) -> None:
        self.pool = BlockPool(blocks)
        metrics = WorkerMetrics(CollectorRegistry())
        log = Logger(Level.ERROR)
        engine = CountingEngine()
        preempted = Preempted(engine, self.pool, SwapSlots(0), metrics, log)
        self.steps = StepLoop(engine, self.pool, preempted, limits, 1, metrics, lambda: None, log)

    def add(self, request_id: str, prompt: list[int], output_tokens: int, attempt: int = 0) -> Listener:
        work = Work(
            RequestId(request_id),
            attempt,
            InstanceId("g"),
            "f",
            SamplingParams(output_tokens),
            len(prompt),
            packed(prompt),
            0,
            b"",
            60.0,
        )
        sequence = Sequence.of(work, packed(prompt), SPACE, 1000)
        sequence.take_blocks(self.pool)
        sequence.goes_on = True
        listener = Listener(sequence, self.pool, self.steps)
        self.steps.add(sequence)
        return listener


@asynccontextmanager
async def running(blocks: int, limits: StepLimits | None = None) -> AsyncIterator[Bench]:
    """Sequences that are added before the first await are in the first step together."""
    bench = Bench(blocks, limits or StepLimits(512, 64))
    task = asyncio.create_task(bench.steps.run())
    try:
        yield bench
    finally:
        assert not task.done(), "the step loop ended"
        task.cancel()
        bench.pool.check_integrity()


async def expect(listener: Listener, prompt_tokens: int, output_tokens: int) -> None:
    async with asyncio.timeout(WAIT_S_MAX):
        await listener.ended.wait()
    assert listener.token_ids == list(range(prompt_tokens, prompt_tokens + output_tokens))


async def test_sequences_that_run_out_of_blocks_together_both_go_on() -> None:
    """All are preempted in one plan: nobody is left whose end could wake the loop."""
    async with running(blocks=8) as bench:
        both = [bench.add(f"r{n}", [n] * 60, 24) for n in range(2)]
        for listener in both:
            await expect(listener, 60, 24)


async def test_a_preempted_sequence_as_large_as_the_pool_comes_back() -> None:
    async with running(blocks=6) as bench:
        small = bench.add("small", [1] * 3, 13)
        large = bench.add("large", [2] * 75, 9)
        await expect(small, 3, 13)
        await expect(large, 75, 9)


async def test_two_attempts_of_one_request_are_two_sequences() -> None:
    """A cancel of the first may come later than the second does."""
    async with running(blocks=32, limits=StepLimits(16, 64)) as bench:
        first = bench.add("r", [1] * 20, 12, attempt=0)
        await first.begun.wait()
        second = bench.add("r", [2] * 50, 12, attempt=1)
        await expect(first, 20, 12)
        await expect(second, 50, 12)


async def test_who_left_hears_nothing_of_the_step_under_way() -> None:
    async with running(blocks=8) as bench:
        listener = bench.add("r", [1] * 20, 100)
        await listener.begun.wait()
        bench.steps.leave(listener.sequence)
        heard = len(listener.token_ids)
        await bench.steps.remove(listener.sequence)
        listener.sequence.give_back(bench.pool)
        other = bench.add("s", [2] * 20, 5)
        await expect(other, 20, 5)
        assert len(listener.token_ids) == heard
