"""The engine: a model, a sampler and a paged cache in the caller's arena, one step at a time.

Synchronous; every call, the constructor included, belongs on one thread, the engine thread. It does
not know which request a sequence is, nor who owns a block.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.arena_copy import ArenaCopy
from engine.cost_profile import (
    PROFILE_FURTHER_ROUND_S_MAX,
    PROFILE_ROUNDS_MAX,
    ProfilePoint,
    fit,
    plan_profile,
    profile_step,
)
from engine.decode_graphs import CudaRecorder, DecodeGraphs
from engine.errors import EngineError
from engine.families.decoder import DecoderModel
from engine.layout import KVLayout
from engine.ops import StepTensors
from engine.paged_cache import PagedCache, to_tensors
from engine.sampler import NOTHING_SAMPLED, check, sample
from engine.step import FlatStep, SequenceStep, StepLimits, StepResult, flatten
from engine.swap_space import SwapSpace
from policy.core import CostCoefficients
from policy.preempt import HostCopyCost

__all__ = ["Engine", "KVLayout", "SequenceStep", "StepResult"]


class Engine:
    """Computes steps of a whole model over the KV of `blocks` blocks.

    On a CPU it computes on the arena itself, without a copy. On a GPU it has a cache in device memory, and
    the arena is what others see of it: blocks are copied there when they are full, layers of blocks before
    `on_layer` is told of them, and `load_blocks` brings in what was written from outside.
    """

    def __init__(
        self,
        model: DecoderModel,
        layout: KVLayout,
        arena_buffer: memoryview,
        blocks: int,
        *,
        threads: int = 1,
        swap_slots: int = 0,
        own_cache: bool = False,
    ) -> None:
        """`swap_slots`: blocks of host memory beside the cache, for `swap_out` and `swap_in`. `own_cache`:
        a cache beside the arena even on a CPU."""
        if not model.whole:
            raise EngineError(
                f"the engine needs a whole model, not layers {model.layers} of {model.config.layers}"
            )
        expected = KVLayout.of(model.config, block_tokens=layout.block_tokens, dtype_name=layout.dtype_name)
        if layout != expected:
            raise EngineError(f"layout {layout} does not fit the model, which needs {expected}")
        if threads < 1:
            raise EngineError(f"threads must be at least 1, not {threads}")
        self._model = model
        self._device = model.ops.device
        arena = PagedCache.over(layout, arena_buffer, blocks)
        self._cache = arena
        self._arena_copy: ArenaCopy | None = None
        if own_cache or self._device.type != "cpu":
            self._cache = PagedCache.on_device(layout, blocks, self._device)
            self._arena_copy = ArenaCopy(model.ops, self._cache, arena)
        self._swap = SwapSpace(self._cache.blocks, swap_slots)
        self._graphs = _decode_graphs(model, self._cache, layout)
        self._threads = threads
        self._limits = StepLimits(
            blocks, layout.block_tokens, model.config.context_tokens_max, model.config.vocab_size
        )

    def run(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> StepResult:
        """Computes one step: any mix of prefill chunks and decodes.

        `on_layer(l)` is called as soon as layer `l`'s KV of all sequences is in the arena; it must not
        block. Raises StepError or SamplingError before anything is written. A sequence whose logits
        are not finite fails alone, see StepResult.
        """
        started_s = time.perf_counter()
        for sequence in sequences:
            if sequence.sampling is not None:
                check(sequence.sampling, self._limits.vocab_size)
        logits = self.logits(sequences, on_layer)
        sampling = [index for index, sequence in enumerate(sequences) if sequence.sampling is not None]
        rows = [NOTHING_SAMPLED] * len(sequences)
        if sampling:
            with torch.inference_mode():
                sampled = sample(logits, [sequences[index] for index in sampling], self._model.ops.draw)
            for index, row in zip(sampling, sampled, strict=True):
                rows[index] = row
        return StepResult(
            token_ids=tuple(row.token_id for row in rows),
            elapsed_s=time.perf_counter() - started_s,
            logprobs=tuple(row.logprobs for row in rows),
            failures=tuple(row.failure for row in rows),
        )

    def logits(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """As `run`, up to the logits [sequences that sample, vocabulary] of their last new tokens."""
        step = flatten(sequences, self._limits)
        if torch.get_num_threads() != self._threads:  # OpenMP keeps this per calling thread
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            return self._forward(step, on_layer)

    def profile(
        self, block_ids: Sequence[int], *, transfer_fixed_s: float, transfer_bytes_per_s: float
    ) -> CostCoefficients:
        """Measures this engine on scratch blocks, which it overwrites; under 2 s for SmolLM2 on one core.

        The two transfer coefficients are passed through: the engine moves nothing.
        """
        limits = self._limits
        plan = plan_profile(len(block_ids), limits.block_tokens, limits.context_tokens_max)
        points = plan.prefill + plan.decode
        # The first step of a process pays for pages and kernels; it also makes every context finite.
        first = profile_step(points[0], block_ids, limits.block_tokens, limits.vocab_size)[0]
        self.run([replace(first, clear_block_ids=tuple(block_ids))])
        started_s = time.perf_counter()
        best_s = [self._measure(point, block_ids) for point in points]
        for _ in range(PROFILE_ROUNDS_MAX - 1):
            if time.perf_counter() - started_s > PROFILE_FURTHER_ROUND_S_MAX:
                break
            best_s = [
                min(best, self._measure(point, block_ids)) for best, point in zip(best_s, points, strict=True)
            ]
        return fit(
            plan,
            best_s[: len(plan.prefill)],
            best_s[len(plan.prefill) :],
            transfer_fixed_s=transfer_fixed_s,
            transfer_bytes_per_s=transfer_bytes_per_s,
        )

    @property
    def computes_on_arena(self) -> bool:
        """Whether what is written into the arena from outside needs no `load_blocks`."""
        return self._arena_copy is None

    def load_blocks(self, block_ids: Sequence[int]) -> None:
        """Blocks that were written into the arena from outside are computed on from the next step."""
        if self._arena_copy is not None:
            self._arena_copy.load(torch.tensor(block_ids, dtype=torch.int64))

    def swap_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copies blocks into slots of host memory; done when this returns."""
        self._swap.swap_out(block_ids, slots)

    def swap_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copies slots back into blocks, bit by bit what they were."""
        self._swap.swap_in(slots, block_ids)
        if self._arena_copy is not None:
            self._arena_copy.store(torch.tensor(block_ids, dtype=torch.int64))

    def measure_swap(self, block_ids: Sequence[int]) -> HostCopyCost:
        """What `swap_out` and `swap_in` take here; overwrites slots, needs at least one of each."""
        return self._swap.measure(block_ids)

    def _measure(self, point: ProfilePoint, block_ids: Sequence[int]) -> float:
        limits = self._limits
        step = profile_step(point, block_ids, limits.block_tokens, limits.vocab_size)
        return min(self.run(step).elapsed_s for _ in range(point.repeats))

    def _forward(self, step: FlatStep, on_layer: Callable[[int], None] | None) -> Tensor:
        if step.copy_blocks.size:
            copies = torch.from_numpy(step.copy_blocks).to(self._device)
            self._cache.copy(copies[:, 0], copies[:, 1])
        if step.clear_block_ids.size:
            self._cache.clear(torch.from_numpy(step.clear_block_ids).to(self._device))
        tensors = to_tensors(step, self._device)
        if self._arena_copy is None:
            return self._compute(step, tensors, on_layer)
        if on_layer is not None:
            stored = _stored_first(self._arena_copy, step, self._limits.block_tokens, on_layer)
            return self._compute(step, tensors, stored)
        logits = self._compute(step, tensors, None)
        full_blocks = step.full_blocks(self._limits.block_tokens)
        if full_blocks.size:
            self._arena_copy.store(torch.from_numpy(full_blocks))
        return logits

    def _compute(
        self, step: FlatStep, tensors: StepTensors, on_layer: Callable[[int], None] | None
    ) -> Tensor:
        sampling = torch.from_numpy(step.sampling).to(self._device)
        all_decode = tensors.decodes == len(step.kv_tokens)
        if all_decode and self._graphs is not None and on_layer is None:
            return self._graphs.run(tensors)[sampling]
        # Where all decode and all sample, the rows are wanted as they are.
        last_of = None if all_decode and len(sampling) == tensors.decodes else sampling
        hidden = self._model.embed(tensors.token_ids)
        hidden = self._model.forward(hidden, tensors, self._cache, on_layer, last_of=last_of)
        return self._model.logits(hidden) if len(hidden) else hidden.new_empty(0, self._limits.vocab_size)


def _stored_first(
    copy: ArenaCopy, step: FlatStep, block_tokens: int, on_layer: Callable[[int], None]
) -> Callable[[int], None]:
    """`on_layer`, told of a layer when its new KV is in the arena."""
    written = torch.from_numpy(step.written_blocks(block_tokens))

    def stored(layer: int) -> None:
        copy.store_layer(layer, written)
        on_layer(layer)

    return stored


def _decode_graphs(model: DecoderModel, cache: PagedCache, layout: KVLayout) -> DecodeGraphs | None:
    """Recorded decode steps, on a GPU."""
    device = model.ops.device
    if device.type != "cuda":
        return None
    return DecodeGraphs(
        lambda step: model.logits(model.forward(model.embed(step.token_ids), step, cache)),
        CudaRecorder(device),
        device,
        blocks_max=-(-model.config.context_tokens_max // layout.block_tokens),
        vocab_size=model.config.vocab_size,
    )
