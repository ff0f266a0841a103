"""The copy of a device's KV cache in the arena, block for block under the same ids.

A GPU computes on memory that neither the pool's other owners nor a transfer can reach; they see the
arena in host memory. This copies between the two: a layer or whole blocks out as soon as they are computed,
blocks in that were written from outside. Belongs on the engine thread.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.ops import Ops
from engine.paged_cache import PagedCache

COPIED_BYTES_MAX = 64 * 1024 * 1024
"""Gathered at once, on the device and in host memory."""


class ArenaCopy:
    """`cache` and `arena` have the same layout and the same blocks. Block ids are int64, on the CPU."""

    def __init__(self, ops: Ops, cache: PagedCache, arena: PagedCache) -> None:
        assert cache.blocks.shape == arena.blocks.shape
        self._ops = ops
        self._cache = cache.blocks
        self._arena = arena.blocks

    def store_layer(self, layer: int, block_ids: Tensor) -> None:
        """One layer of blocks into the arena; done when this returns."""
        source, destination = self._cache[:, layer], self._arena[:, layer]
        for part in self._parts(block_ids, source):
            gathered = self._ops.gather_layer(source, part.to(source.device))
            destination.index_copy_(0, part, gathered.cpu())

    def store(self, block_ids: Tensor) -> None:
        """Whole blocks into the arena; done when this returns."""
        for layer in range(self._cache.shape[1]):
            self.store_layer(layer, block_ids)

    def load(self, block_ids: Tensor) -> None:
        """Whole blocks from the arena; steps that begin after this see them."""
        for layer in range(self._cache.shape[1]):
            source, destination = self._arena[:, layer], self._cache[:, layer]
            for part in self._parts(block_ids, source):
                blocks = source.index_select(0, part).to(destination.device)
                self._ops.scatter_layer(destination, part.to(destination.device), blocks)

    def _parts(self, block_ids: Tensor, layer: Tensor) -> Iterator[Tensor]:
        blocks_max = max(1, COPIED_BYTES_MAX // layer[0].nbytes)
        return iter(torch.split(block_ids, blocks_max))
