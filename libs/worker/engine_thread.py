"""The one thread that owns every tensor: the event loop hands it whole steps and awaits them."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.engine import Engine, SequenceStep, StepResult
from policy.core import CostCoefficients
from policy.preempt import HostCopyCost

ResultT = TypeVar("ResultT")


class EngineThread:
    """Calls run one after the other, never on the event loop's thread."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._engine: Engine | None = None

    async def start(self) -> None:
        """Load the model on the engine's own thread."""
        self._engine = await self._call(self._build)

    async def run(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None
    ) -> StepResult:
        """One step; `on_layer` is called on the engine's thread and must not block."""
        engine = self._ready()
        return await self._call(lambda: engine.run(sequences, on_layer))

    async def profile(
        self, block_ids: Sequence[int], transfer_fixed_s: float, transfer_bytes_per_s: float
    ) -> CostCoefficients:
        """Measure the engine on scratch blocks; the transfer's two coefficients are taken as given."""
        engine = self._ready()
        return await self._call(
            lambda: engine.profile(
                block_ids, transfer_fixed_s=transfer_fixed_s, transfer_bytes_per_s=transfer_bytes_per_s
            )
        )

    @property
    def computes_on_arena(self) -> bool:
        """Whether the engine has no cache of its own."""
        return self._ready().computes_on_arena

    async def load_blocks(self, block_ids: Sequence[int]) -> None:
        """What a transfer wrote into these blocks is computed on from now."""
        engine = self._ready()
        if not engine.computes_on_arena:
            await self._call(lambda: engine.load_blocks(block_ids))

    async def swap_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Blocks to host memory; they may be given away when this returns."""
        engine = self._ready()
        await self._call(lambda: engine.swap_out(block_ids, slots))

    async def swap_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """The way back; the blocks may be read when this returns."""
        engine = self._ready()
        await self._call(lambda: engine.swap_in(slots, block_ids))

    async def measure_swap(self, block_ids: Sequence[int]) -> HostCopyCost:
        """How fast the two are, on scratch blocks and while no slot is taken."""
        engine = self._ready()
        return await self._call(lambda: engine.measure_swap(block_ids))

    async def close(self) -> None:
        """Wait for the step under way, then end the thread and let go of the arena."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)
        self._engine = None

    def _ready(self) -> Engine:
        assert self._engine is not None, "start() was not awaited"
        return self._engine

    async def _call(self, function: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)
