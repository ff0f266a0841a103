"""One prefill with its handover, put together of the worker's own parts: the engine on its thread, blocks in
an arena, `worker.handover`, and an endpoint in another process in decode's place.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

import numpy as np

from cluster.messages import Reserved
from engine.backend import Backend, choose_ops
from engine.engine import Engine, SequenceStep
from engine.layout import KVLayout
from engine.loader import load_model
from engine.model_folder import ModelConfig
from engine.native.packing import WeightDtype
from kvpool import Arena
from kvtransfer import Access, checksum
from moonpool.benchmarks.engine_under_test import GREEDY
from moonpool.benchmarks.transfer_pair import Pair
from moonpool.run_folder import moonpool_home
from policy.core import RequestId
from worker.engine_thread import EngineThread
from worker.handover import Handover, Source, block_ranges

BLOCKS_SEED = 11
GRANT_TTL_S = 600.0


class Mode(StrEnum):
    """How the KV goes to decode."""

    NONE = "none"
    STREAMED = "streamed"
    """Layer by layer while the next one is computed, as workers do."""
    AT_END = "at_end"
    """All blocks at once when the prompt is computed."""


@dataclass(frozen=True, slots=True)
class Run:
    """From the prompt's start: until its first token was there, and until decode had all bytes."""

    computed_s: float
    done_s: float
    handed_over_bytes: int


class WrongBytes(Exception):
    """Decode does not hold what prefill computed."""


class HandoverUnderTest:
    """Made by `running`."""

    def __init__(
        self,
        config: ModelConfig,
        layout: KVLayout,
        backend: Backend,
        source: Source,
        engine: EngineThread,
        pair: Pair,
        blocks: int,
        step_tokens: int,
    ) -> None:
        self.config = config
        self.layout = layout
        self.backend = backend
        self._source = source
        self._engine = engine
        self._pair = pair
        self._step_tokens = step_tokens
        numbers = random.Random(BLOCKS_SEED)
        self._local_ids = numbers.sample(range(blocks), blocks)
        self._remote_ids = numbers.sample(range(blocks), blocks)
        """Of a pool that was used for a while: no block lies beside the one before it."""

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        folder: Path,
        *,
        threads: int,
        backend: str | None,
        tokens_max: int,
        step_tokens: int,
        transport: str | None,
    ) -> AsyncIterator[Self]:
        """Loads the model and connects. `transport` None: the one that the pair takes by itself."""
        config = ModelConfig.load(folder)
        layout = KVLayout.of(config)
        blocks = -(-tokens_max // layout.block_tokens)
        chosen = choose_ops(
            Backend(backend or Backend.AUTO),
            layout.dtype_name,
            moonpool_home() / "kernels",
            WeightDtype.FLOAT32,
        )
        with Arena.create(blocks, layout.block_bytes) as arena:
            np.frombuffer(arena.buffer, np.uint8)[:] = 0  # no timed step is the first to meet a page
            engine = EngineThread(
                lambda: Engine(load_model(folder, chosen.ops), layout, arena.buffer, blocks, threads=threads)
            )
            async with Pair.running(transport, blocks * layout.block_bytes) as pair:
                try:
                    await engine.start()
                    region = pair.endpoint.register(arena.buffer)
                    source = Source(pair.endpoint, region, layout, checksums=False)
                    yield cls(config, layout, chosen.backend, source, engine, pair, blocks, step_tokens)
                finally:
                    await engine.close()

    def carriers(self) -> list[str]:
        """The transports that carried the handovers so far."""
        return self._pair.carriers()

    async def run(self, prompt: Sequence[int], mode: Mode) -> Run:
        """One prompt, up to the last byte that decode acknowledged. Raises WrongBytes, TransferError."""
        blocks = -(-len(prompt) // self.layout.block_tokens)
        local_ids, remote_ids = self._local_ids[:blocks], self._remote_ids[:blocks]
        reserved = await self._reserve(remote_ids)
        handover = Handover(self._source, self._pair.peer, reserved, local_ids, len(prompt))
        try:
            run = await self._timed(prompt, local_ids, mode, handover)
        except BaseException:
            await handover.abort()
            raise
        await self._pair.ask(do="revoke", token=reserved.grant)
        if mode is not Mode.NONE:
            await self._compare(local_ids, remote_ids, run.handed_over_bytes)
        return run

    async def _timed(
        self, prompt: Sequence[int], block_ids: list[int], mode: Mode, handover: Handover
    ) -> Run:
        started_s = time.perf_counter()
        await self._prefill(prompt, block_ids, handover if mode is Mode.STREAMED else None)
        computed_s = time.perf_counter() - started_s
        if mode is Mode.AT_END:
            handover.send_cached(len(block_ids))
        done = await handover.finish()
        return Run(computed_s, time.perf_counter() - started_s, done.bytes_written)

    async def _reserve(self, remote_ids: list[int]) -> Reserved:
        ranges = block_ranges(remote_ids, self.layout.block_bytes).tolist()
        token = await self._pair.grant(Access.WRITE, ranges)
        packed = np.asarray(remote_ids, "<i4").tobytes()
        return Reserved(RequestId("bench"), 0, 1, 0, packed, token, GRANT_TTL_S)

    async def _prefill(self, prompt: Sequence[int], block_ids: list[int], handover: Handover | None) -> None:
        """Chunk by chunk, as the step loop computes a prompt that is alone."""
        for start in range(0, len(prompt), self._step_tokens):
            end = min(start + self._step_tokens, len(prompt))
            sampling = GREEDY if end == len(prompt) else None
            step = SequenceStep(tuple(prompt[start:end]), start, tuple(block_ids), sampling, 0)
            await self._engine.run([step], self._layer_hook(handover, end))

    def _layer_hook(self, handover: Handover | None, computed_tokens: int) -> Callable[[int], None] | None:
        """From the engine's thread to the handover on this one."""
        if handover is None:
            return None
        loop, last = asyncio.get_running_loop(), self.layout.layers - 1

        def on_layer(layer: int) -> None:
            loop.call_soon_threadsafe(handover.layer_done, layer, computed_tokens, layer == last)

        return on_layer

    async def _compare(self, local_ids: list[int], remote_ids: list[int], written: int) -> None:
        block_bytes = self.layout.block_bytes
        here = await asyncio.to_thread(checksum, self._source.region, block_ranges(local_ids, block_bytes))
        remote = block_ranges(remote_ids, block_bytes).tolist()
        there = (await self._pair.ask(do="checksum", ranges=remote))["checksum"]
        if (here, written) != (there, len(local_ids) * block_bytes):
            raise WrongBytes(f"decode holds {there} after {written} bytes, prefill computed {here}")
