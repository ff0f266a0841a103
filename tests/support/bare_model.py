"""A model over caches of its own, without engine or sampler: the logits of all tokens, not only the last."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.families.decoder import DecoderModel
from engine.layout import KVLayout
from engine.paged_cache import PagedCache, to_tensors
from engine.step import SequenceStep, StepLimits, flatten

BLOCK_TOKENS = 16


class BareModel:
    """One whole model, or parts that hold consecutive layers, each with the cache of its layers."""

    def __init__(
        self, parts: Sequence[DecoderModel], blocks: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self._parts = tuple(parts)
        config = parts[0].config
        self._limits = StepLimits(blocks, BLOCK_TOKENS, config.context_tokens_max, config.vocab_size)
        self._memories: list[Tensor] = []
        self._caches: list[PagedCache] = []
        for part in parts:
            layout = KVLayout.of(
                config,
                block_tokens=BLOCK_TOKENS,
                layers=part.layers,
                dtype_name=str(dtype).removeprefix("torch."),
            )
            elements = blocks * layout.block_bytes // dtype.itemsize
            memory = torch.empty(elements, dtype=dtype, device=part.ops.device)
            self._memories.append(memory)
            self._caches.append(PagedCache(layout, memory))
        self.forget()

    def forget(self) -> None:
        """Fills every block with NaN: what is stale must never matter."""
        for memory in self._memories:
            memory.fill_(float("nan"))

    def logits(
        self, steps: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> list[Tensor]:
        """For each sequence [new tokens, vocabulary]; those with a single new token must come first."""
        flat = flatten(steps, self._limits)
        with torch.inference_mode():
            tensors = to_tensors(flat, self._parts[0].ops.device)
            hidden = self._parts[0].embed(tensors.token_ids)
            for part, cache in zip(self._parts, self._caches, strict=True):
                hidden = part.forward(hidden, tensors, cache, on_layer)
            rows = self._parts[-1].logits(hidden)
        return list(rows.split([len(step.token_ids) for step in steps]))


def chunk(token_ids: Sequence[int], start: int, end: int, block_ids: tuple[int, ...]) -> SequenceStep:
    """Tokens start..end of a sequence, on a context of everything before."""
    return SequenceStep(tuple(token_ids[start:end]), start, block_ids, None, 0)
