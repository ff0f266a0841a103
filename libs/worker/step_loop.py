"""Continuous batching: the coroutine that re-forms the batch at every step (DESIGN §3 step 9).

Owns which sequences are in the batch and their blocks while they are there. What goes into a step is
decided by `policy.plan_step`; computing is the engine thread's.
"""

import asyncio
from bisect import insort
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from collections.abc import Sequence as Rows
from contextlib import asynccontextmanager

from cluster.logs import Logger
from engine.sampler import NOT_FINITE
from kvpool import BlockPool
from policy.core import STRUCTURE_FIELD, RequestId, TokenLogprobs
from policy.plan_step import DecodeWork, PrefillWork, StepLimits, StepPlan, plan_step
from structures.errors import StructureError
from worker.cost_meter import CostMeter
from worker.engine_thread import EngineThread
from worker.metrics import WorkerMetrics
from worker.preemption import Preempted
from worker.sequence import Sequence
from worker.step_rows import Row, StepUnderWay, engine_step, step_work


class StepLoop:
    """All methods are for the event loop's thread."""

    def __init__(
        self,
        engine: EngineThread,
        pool: BlockPool,
        preempted: Preempted,
        limits: StepLimits,
        layers: int,
        metrics: WorkerMetrics,
        step_done: Callable[[], None],
        log: Logger,
        meter: CostMeter,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._preempted = preempted
        self._limits = limits
        self._layers = layers
        self._metrics = metrics
        self._step_done = step_done
        self._meter = meter
        self._log = log
        self._sequences: list[Sequence] = []
        self._in_step: frozenset[Sequence] = frozenset()
        self._under_way: StepUnderWay | None = None
        self._step_over = asyncio.Condition()
        self._wake = asyncio.Event()
        self._arrivals = 0
        self._steps = 0
        self._turns = 0
        self.prefill_tokens_total = 0
        self.decode_tokens_total = 0

    def add(self, sequence: Sequence) -> None:
        """Take a sequence that holds its blocks into the batch, behind those that came before."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.last_step = self._steps
        self._sequences.append(sequence)
        self._wake.set()

    @property
    def preempted(self) -> bool:
        """Some sequence waits for blocks to come back."""
        return bool(self._preempted)

    def blocks_to_allocate(self) -> int:
        """Blocks that those who decode will take for their next tokens."""
        decoding = [sequence for sequence in self._sequences if sequence.decodes]
        return sum(sequence.blocks_to_allocate(self._pool, sequence.new_tokens) for sequence in decoding)

    def tokens_under_way(self, sequence: Sequence) -> int:
        """Of the tokens that the step under way computes for `sequence`, how many it is thought to have done
        by now, by what such a step takes."""
        step = self._under_way
        if step is None:
            return 0
        return step.tokens_done(sequence, self._meter.work_s(step.work), asyncio.get_running_loop().time())

    def wake(self) -> None:
        """Blocks came back: whoever waits for some is looked at again."""
        self._wake.set()

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out: from now on its owner hears nothing. The step under way may still touch its
        blocks, see `remove`."""
        sequence.owner = None
        self._sequences = [other for other in self._sequences if other is not sequence]
        self._preempted.leave(sequence)

    async def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; after this returns no step touches its blocks."""
        self.leave(sequence)
        async with self._step_over:
            await self._step_over.wait_for(lambda: sequence not in self._in_step)

    async def run(self) -> None:
        """Step until cancelled. A step that fails fails its sequences, never the loop."""
        while True:
            self._wake.clear()
            await self._readmit()
            self._jump()
            plan, places = self._plan()
            some_were_preempted = bool(plan.preempted)
            while plan.preempted:
                # One at a time: what it gives back may be more than the block that the plan counts on.
                await self._preempt(places[plan.preempted[0]])
                plan, places = self._plan()
            rows = self._rows(plan, places)
            if rows:
                await self._step(rows)
            elif not some_were_preempted:
                # Where all were preempted their own blocks may do for the first of them: nobody else
                # would wake us then.
                await self._wake.wait()

    def _jump(self) -> None:
        """Where an answer's structure leaves no choice its tokens are taken at once: the next step computes
        them together, and one step does what would have taken many."""
        for sequence in [present for present in self._sequences if present.decodes]:
            if sequence.new_tokens > 1 or sequence.owner is None:
                continue
            try:
                token_ids = sequence.append_forced()
            except StructureError as error:
                self._fail_structure(sequence, str(error))
                continue
            if token_ids:
                self._metrics.forced_tokens.inc(len(token_ids))
                if sequence.ending is not None:
                    self._sequences.remove(sequence)
                sequence.owner.tokens_forced(token_ids, sequence.ending)

    def _plan(self) -> tuple[StepPlan, Mapping[RequestId, Sequence]]:
        """The plan names sequences by their place: the samples and attempts of a request are one each."""
        places = {RequestId(str(place)): sequence for place, sequence in enumerate(self._sequences)}
        waiting = [
            PrefillWork(place, sequence.new_tokens, self._steps - sequence.last_step)
            for place, sequence in places.items()
            if not sequence.decodes
        ]
        running = [
            DecodeWork(
                place,
                sequence.blocks_to_allocate(self._pool, sequence.new_tokens),
                sequence.new_tokens,
                sequence.turn,
            )
            for place, sequence in places.items()
            if sequence.decodes
        ]
        return plan_step(waiting, running, self._pool.available(), self._limits), places

    async def _preempt(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        async with self._touching([sequence]):
            await self._preempted.take(sequence)

    async def _readmit(self) -> None:
        """Preempted sequences come back oldest first, to their old place."""
        while (sequence := self._preempted.first()) is not None:
            async with self._touching([sequence]):
                came_back = await self._preempted.bring_back(sequence)
            if came_back:
                sequence.last_step = self._steps
                insort(self._sequences, sequence, key=lambda present: present.arrival)
            elif self._preempted.first() is sequence:
                return

    @asynccontextmanager
    async def _touching(self, sequences: Iterable[Sequence]) -> AsyncIterator[None]:
        """Until this ends, the engine may read and write the blocks of these; `remove` waits for it."""
        self._in_step = frozenset(sequences)
        try:
            yield
        finally:
            self._in_step = frozenset()
            async with self._step_over:
                self._step_over.notify_all()

    def _rows(self, plan: StepPlan, places: Mapping[RequestId, Sequence]) -> list[Row]:
        rows = []
        for part in plan.decodes:
            places[part.request_id].prepare_write(self._pool, part.tokens)
        for part in plan.decodes + plan.prefills:
            sequence = places[part.request_id]
            rows.append(Row(sequence, part.tokens, samples=part.tokens == sequence.new_tokens))
        return rows

    async def _step(self, rows: list[Row]) -> None:
        loop = asyncio.get_running_loop()
        step = self._under_way = StepUnderWay(rows, step_work(rows), loop.time())
        self._steps += 1
        for row in rows:
            self._turns += 1
            row.sequence.turn = self._turns
            row.sequence.last_step = self._steps
        async with self._touching(row.sequence for row in rows):
            try:
                result = await self._engine.run([engine_step(row) for row in rows], self._layer_hook(rows))
            except Exception as error:
                self._log.exception("step failed")
                for row in rows:
                    self._fail(row.sequence, f"engine step failed: {error}")
            else:
                results = zip(rows, result.token_ids, result.logprobs, result.failures, strict=True)
                for row, token_id, logprobs, failure in results:
                    if failure is None:
                        self._apply(row, token_id, logprobs)
                    else:
                        self._not_sampled(row.sequence, failure)
                self._metrics.step_s.observe(result.elapsed_s)
                # While the next step computes.
                loop.call_soon(self._meter.step_done, step.work, loop.time() - step.started_s)
                self._step_done()
            finally:
                self._under_way = None

    def _layer_hook(self, rows: list[Row]) -> Callable[[int], None] | None:
        """Carries "layer l is done" from the engine's thread to the owners that stream layers."""
        streaming = [row for row in rows if row.sequence.streams_layers]
        if not streaming:
            return None
        loop = asyncio.get_running_loop()

        def on_layer(layer: int) -> None:
            loop.call_soon_threadsafe(self._tell_layer, streaming, layer)

        return on_layer

    def _tell_layer(self, rows: Rows[Row], layer: int) -> None:
        for row in rows:
            if row.sequence.owner is not None:
                computed_tokens = row.sequence.context_tokens + row.tokens
                row.sequence.owner.layer_done(layer, computed_tokens, layer == self._layers - 1)

    def _apply(self, row: Row, token_id: int | None, logprobs: TokenLogprobs | None) -> None:
        sequence = row.sequence
        if sequence.decodes:
            self.decode_tokens_total += row.tokens
            self._metrics.decode_tokens.inc(row.tokens)
        else:
            self.prefill_tokens_total += row.tokens
            self._metrics.prefill_tokens.inc(row.tokens)
        if sequence.owner is None:
            return
        sequence.written(self._pool, row.tokens)
        sequence.store_full_blocks(self._pool)
        if token_id is None:
            sequence.owner.chunk_done(sequence.context_tokens)
            return
        try:
            ending = sequence.append(token_id, logprobs)
        except StructureError as error:
            self._fail_structure(sequence, str(error))
            return
        sequence.decodes = sequence.goes_on
        if ending is not None or not sequence.goes_on:
            self._sequences.remove(sequence)
        sequence.owner.token_sampled(token_id, ending)

    def _not_sampled(self, sequence: Sequence, failure: str) -> None:
        """Its logits are of no use, or its structure met a limit and allows nothing."""
        limit = None if sequence.matcher is None else sequence.matcher.failure
        sequence.broken = failure == NOT_FINITE
        if limit is None:
            self._fail(sequence, failure)
        else:
            self._fail_structure(sequence, limit)

    def _fail_structure(self, sequence: Sequence, detail: str) -> None:
        """What an answer fails on by itself it would fail on elsewhere; with others, a new try may help."""
        detail = f"{STRUCTURE_FIELD}: {detail}"
        if sequence.matcher is None or not sequence.matcher.failed_alone:
            self._fail(sequence, detail)
        elif sequence.owner is not None:
            self._sequences.remove(sequence)
            sequence.owner.refused(detail)

    def _fail(self, sequence: Sequence, detail: str) -> None:
        if sequence.owner is not None:
            self._log.warning("sequence failed", request_id=sequence.request_id, detail=detail)
            self._sequences.remove(sequence)
            sequence.owner.failed(detail)
