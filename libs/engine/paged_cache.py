"""The paged KV cache: a typed view of the arena's bytes, written and read by block table.

Owns no memory: the arena is the caller's, and a block's other owners (the pool, a transfer) see every
byte as soon as it is written. Reads take exactly the slots that were computed, so whatever an earlier
owner left in a block, NaN included, never reaches a result.
"""

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.layout import KVLayout


class PagedCache:
    """The arena as a tensor [block, layer, 2, kv_head, token, head_dim]; no copy is made."""

    def __init__(self, layout: KVLayout, buffer: memoryview, blocks: int) -> None:
        if layout.dtype_name != "float32":
            raise EngineError(f"KVLayout.dtype_name {layout.dtype_name!r} is not supported, only 'float32'")
        if blocks < 1 or buffer.nbytes < blocks * layout.block_bytes:
            raise EngineError(
                f"an arena of {buffer.nbytes} bytes does not hold {blocks} blocks of {layout.block_bytes}"
            )
        if buffer.readonly:
            raise EngineError("the arena's buffer must be writable")
        elements = blocks * layout.block_bytes // torch.float32.itemsize
        self._arena = torch.frombuffer(buffer, dtype=torch.float32, count=elements).view(
            blocks, layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim
        )
        self._block_tokens = layout.block_tokens

    def clear(self, block_ids: Tensor) -> None:
        """Zeroes whole blocks."""
        self._arena.index_fill_(0, block_ids, 0.0)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts keys and values [N, K, D] into slots [N] (block id · block_tokens + offset)."""
        blocks = torch.div(slots, self._block_tokens, rounding_mode="floor")
        offsets = slots - blocks * self._block_tokens
        of_layer = self._arena[:, layer]
        of_layer[blocks, 0, :, offsets] = keys
        of_layer[blocks, 1, :, offsets] = values

    def read(self, layer: int, block_ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, tokens, D] of the first `tokens` slots of a block table."""
        gathered = self._arena[:, layer].index_select(0, block_ids)  # [n, 2, K, block_tokens, D]
        by_head = gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]
        return by_head[0], by_head[1]
