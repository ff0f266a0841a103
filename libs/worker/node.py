"""One instance's engine, pool and transfer endpoint, put together once for its duties.

Owns their start and end, and the tasks that run beside the duties. Knows no request.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from cluster.messages import Work
from cluster.service import ServiceContext
from engine.backend import Backend, choose_ops
from engine.engine import Engine
from engine.loader import load_model
from kvhash import BLOCK_TOKENS, Namespace, namespace
from kvindex.core import Tier
from kvpool import SwapSlots
from kvpool.mover import TierMover
from policy.core import CostCoefficients
from policy.evict import cost_doubles_at_blocks
from policy.plan_step import StepLimits
from structures.compiler import StructureCompiler
from worker.config import WorkerConfig
from worker.cost_meter import CostMeter
from worker.ended import EndedRequests
from worker.engine_thread import EngineThread
from worker.handover import Source
from worker.intake import WorkLimits
from worker.metrics import WorkerMetrics
from worker.node_parts import NodeParts, open_parts, weight_dtype
from worker.outbox import Outbox
from worker.pool_metrics import PoolCollector
from worker.pool_reporter import PoolReporter
from worker.pool_tiers import restore
from worker.preemption import Preempted, SwapCosts
from worker.prefix_fetch import PrefixFetch
from worker.slow_reads import SlowReads
from worker.step_loop import StepLoop
from worker.transfers import TransferCollector, start_endpoint, transfer_endpoint

PROFILE_BLOCKS_MAX = 256
"""Blocks lent to the engine's profile before anyone else uses the pool."""
KEPT_SHARE = 0.25
"""Of the blocks that are computed on: what stays available beside all that is done for other instances."""
SINK_AT_CLOSE_S_MAX = 4.0
"""What is cached and has no copy on the SSD gets this long to be written there when the instance stops."""
SETTLE_S_MAX = 1.0
"""What frees, releases and the like that are under way get at close."""


class Node:
    """All that the duties of one instance share. Every method is for the event loop's thread."""

    @classmethod
    async def open(cls, context: ServiceContext, config: WorkerConfig) -> Self:
        """Raises ConfigError where a setting does not fit the model or is missing. To allocate an SSD's files
        may take long: that is done in a thread, meanwhile the servers are answered."""
        return cls(context, config, await asyncio.to_thread(open_parts, context, config))

    def __init__(self, context: ServiceContext, config: WorkerConfig, parts: NodeParts) -> None:
        """Use `open`."""
        folder, model, sizes = Path(config.model_folder), parts.model, parts.sizes
        self.context = context
        self.config = config
        self.layout = parts.layout
        self._compute_tier = sizes.compute_tier
        self.arena = parts.arena
        self.model = parts.info
        self.pool, self._stores = parts.pool, parts.stores
        self.metrics = WorkerMetrics(context.metrics.registry)
        self.engine = EngineThread(lambda: self._build_engine(folder, sizes.compute_blocks))
        self.mover = TierMover(
            self.pool,
            self.arena,
            self._stores,
            loaded=self.engine.load_blocks,
            changed=self.pool_changed,
            trouble=self._mover_trouble,
        )
        context.metrics.registry.register(PoolCollector(self.pool, self.mover.counters))
        self.endpoint = transfer_endpoint(context.instance, config)
        context.metrics.registry.register(TransferCollector(self.endpoint.totals))
        self.region = self.endpoint.register(self.arena.buffer)
        self.cost: CostCoefficients | None = None
        """As measured at the start."""
        self.cost_meter = CostMeter(lambda: self.cost, self.now_s, context.metrics.registry)
        self.source = Source(
            self.endpoint,
            self.region,
            self.layout,
            config.checksums,
            measured=self.cost_meter.transfer,
        )
        limits = StepLimits(config.step_tokens_max, config.batch_requests_max)
        self.swap_slots = SwapSlots(config.swap_bytes // self.layout.block_bytes)
        self.preempted = Preempted(self.engine, self.pool, self.swap_slots, self.metrics, context.log)
        self.steps = StepLoop(
            self.engine,
            self.pool,
            self.preempted,
            limits,
            model.layers,
            self.metrics,
            self._room_changed,
            context.log,
            self.cost_meter,
        )
        self.structures = StructureCompiler(folder, model.vocab_size, model.eos_token_ids)
        self.outbox = Outbox(context.bus, context.log)
        self.reporter = PoolReporter(context.bus, self.pool, context.log)
        self.work_limits = WorkLimits(
            self.model.fingerprint, model.vocab_size, model.context_tokens_max, sizes.compute_blocks
        )
        self.slow_reads = SlowReads()
        self.fetch = PrefixFetch(self)
        self.cached_tokens_total = 0
        self.ended = EndedRequests()
        self._loops: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._room_callbacks: list[Callable[[], None]] = []
        self._promises: list[Callable[[], int]] = []

    async def start(self) -> None:
        """Ready to serve when this returns."""
        if self.config.pool_huge_pages and not await asyncio.to_thread(self.arena.take_memory):
            self.context.log.warning("the kernel gives the pool no huge pages")
        await self.engine.start()
        assert self.engine.computes_on_arena == (self._compute_tier is Tier.DRAM), "the tiers do not fit"
        self.cost = await self._profile()
        self.pool.set_cost_doubles_at_blocks(cost_doubles_at_blocks(self.cost, BLOCK_TOKENS))
        self.structures.prepare()
        speed = await restore(self.pool, self._stores, self.context.log)
        if speed is not None:
            ssd = {"ssd_fixed_s": speed.fixed_s, "ssd_bytes_per_s": speed.bytes_per_s}
            self.cost = replace(self.cost, **ssd)
        await start_endpoint(self.endpoint, self.context.log)
        await self.reporter.start()
        self.keep_running(self.steps.run(), "steps")
        self.keep_running(self.outbox.run(), "outbox")
        self.keep_running(self.reporter.run(), "pool reporter")
        self.keep_running(self.mover.run(), "tier mover")

    async def close(self) -> None:
        try:
            await self.outbox.flush()
        except Exception:
            self.context.log.exception("stream entries lost at close")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SETTLE_S_MAX)
        left = [*self._tasks, *self._loops]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.reporter.close()
        await self.endpoint.close()
        self.structures.close()
        await self.engine.close()
        await self.mover.close(SINK_AT_CLOSE_S_MAX)
        self.arena.close()

    def space(self, work: Work) -> Namespace:
        return namespace(self.context.cluster_seed, self.model.fingerprint, work.tenant_salt, work.adapter)

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def current_cost(self) -> CostCoefficients | None:
        """As measured at the start, corrected by what was seen since."""
        cost = self.cost_meter.announce()
        return None if cost is None else self.slow_reads.corrected(cost, self.now_s())

    def keep_running(self, loop: Coroutine[Any, Any, None], what: str) -> None:
        """Run a loop that the instance cannot do without: if it raises, the service ends."""
        self._begin(self._loops, loop, what, self.context.fail)

    def spawn(
        self, work: Coroutine[Any, Any, None], what: str, failed: Callable[[str], None] | None = None
    ) -> None:
        """Run `work` beside everything else; if it raises, that is logged and `failed(detail)` called."""
        self._begin(self._tasks, work, what, failed)

    def spare_blocks(self) -> int:
        """Of the available blocks, how many may be held for other instances: a share is kept for the requests
        here, and what is being decoded comes first; where some wait for blocks to come back, none."""
        if self.steps.preempted:
            return 0
        promised = sum(promised() for promised in self._promises)
        kept = max(int(KEPT_SHARE * self.pool.stats().blocks), promised)
        return max(0, self.pool.available() - kept - self.steps.blocks_to_allocate())

    def on_promise(self, promised: Callable[[], int]) -> None:
        """`promised()`: how many of the available blocks are meant for what has begun already."""
        self._promises.append(promised)

    def prefix_reused(self, tokens: int) -> None:
        self.cached_tokens_total += tokens
        self.metrics.cached_tokens.inc(tokens)

    def pool_changed(self) -> None:
        """Blocks were stored or came back: tell the directory and whoever waits for room."""
        self.steps.wake()
        self._room_changed()

    def on_room_change(self, callback: Callable[[], None]) -> None:
        """Have `callback()` called whenever there may be more room: blocks came back, or a step was done,
        before which the last who was preempted may have come back."""
        self._room_callbacks.append(callback)

    def _room_changed(self) -> None:
        self.mover.wake()
        self.reporter.changed()
        self.context.load_changed()
        for callback in self._room_callbacks:
            callback()

    def _mover_trouble(self, what: str, error: Exception) -> None:
        self.context.log.warning("tier trouble", what=what, error=error)

    def _begin(
        self,
        tasks: set[asyncio.Task[None]],
        work: Coroutine[Any, Any, None],
        what: str,
        failed: Callable[[str], None] | None,
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work, what, failed))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _guarded(
        self, work: Coroutine[Any, Any, None], what: str, failed: Callable[[str], None] | None
    ) -> None:
        try:
            await work
        except Exception as error:
            self.context.log.exception("task failed", task=what)
            if failed is not None:
                failed(f"{what} failed: {error!r}")

    def _build_engine(self, folder: Path, blocks: int) -> Engine:
        """On the engine's thread."""
        config = self.config
        kernels_folder = Path(config.kernels_folder).expanduser()
        chosen = choose_ops(Backend(config.backend), config.dtype, kernels_folder, weight_dtype(config))
        self.context.log.info("backend", backend=chosen.backend, detail=chosen.detail)
        model = load_model(folder, chosen.ops, dtype=config.dtype)
        return Engine(
            model,
            self.layout,
            self.arena.buffer[: blocks * self.layout.block_bytes],
            blocks,
            threads=config.threads,
            swap_slots=self.swap_slots.slots,
            own_cache=config.own_cache,
        )

    async def _profile(self) -> CostCoefficients:
        config = self.config
        block_ids = self.pool.allocate(min(PROFILE_BLOCKS_MAX, self.pool.available()))
        try:
            cost = await self.engine.profile(block_ids, config.transfer_fixed_s, config.transfer_bytes_per_s)
            if self.swap_slots.slots:
                copy = await self.engine.measure_swap(block_ids)
                self.preempted.costs = SwapCosts(cost, copy, self.layout.block_bytes)
            return cost
        finally:
            self.pool.release(block_ids)
