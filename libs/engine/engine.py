"""The engine: a model, a sampler and a paged cache in the caller's arena, one step at a time.

Synchronous; every call, the constructor included, belongs on one thread, the engine thread. It does
not know which request a sequence is, nor who owns a block.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.cost_profile import (
    PROFILE_FURTHER_ROUND_S_MAX,
    PROFILE_ROUNDS_MAX,
    ProfilePoint,
    fit,
    plan_profile,
    profile_step,
)
from engine.errors import EngineError
from engine.families.decoder import DecoderModel
from engine.layout import KVLayout
from engine.paged_cache import PagedCache, to_tensors
from engine.sampler import NOTHING_SAMPLED, check, sample
from engine.step import FlatStep, SequenceStep, StepLimits, StepResult, flatten
from engine.swap_space import SwapSpace
from policy.core import CostCoefficients
from policy.preempt import HostCopyCost

__all__ = ["Engine", "KVLayout", "SequenceStep", "StepResult"]


class Engine:
    """Computes steps of a whole model over an arena of `blocks` blocks, in place and without a copy."""

    def __init__(
        self,
        model: DecoderModel,
        layout: KVLayout,
        arena_buffer: memoryview,
        blocks: int,
        *,
        threads: int = 1,
        swap_slots: int = 0,
    ) -> None:
        """`swap_slots`: blocks of host memory beside the cache, for `swap_out` and `swap_in`."""
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
        self._cache = PagedCache.over(layout, arena_buffer, blocks)
        self._swap = SwapSpace(self._cache.blocks, swap_slots)
        self._device = model.ops.device
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

    def swap_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copies blocks into slots of host memory; done when this returns."""
        self._swap.swap_out(block_ids, slots)

    def swap_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copies slots back into blocks, bit by bit what they were."""
        self._swap.swap_in(slots, block_ids)

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
        rows = torch.from_numpy(step.sampled_rows).to(self._device)
        hidden = self._model.embed(tensors.token_ids)
        hidden = self._model.forward(hidden, tensors, self._cache, on_layer, rows=rows)
        return self._model.logits(hidden) if len(rows) else hidden.new_empty(0, self._limits.vocab_size)
