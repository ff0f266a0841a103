"""The paged KV cache: a typed view of the arena's bytes, and a step's addresses in it.

Owns no memory: the arena is the caller's, and a block's other owners (the pool, a transfer) see every
byte as soon as it is written. What is read are exactly the slots that were computed, so whatever an
earlier owner left in a block, NaN included, never reaches a result.
"""

import torch
from torch import Tensor

from engine.dtypes import TORCH_DTYPES
from engine.errors import EngineError
from engine.layout import KVLayout
from engine.ops import StepTensors
from engine.step import FlatStep


class PagedCache:
    """Memory as a tensor [block, layer, 2, kv_head, token, head_dim]; no copy is made."""

    def __init__(self, layout: KVLayout, memory: Tensor) -> None:
        """`memory`: flat, of the layout's dtype, on the device that computes."""
        self._blocks = memory.view(
            -1, layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim
        )
        self._layers = tuple(
            (self._blocks[:, layer, 0], self._blocks[:, layer, 1]) for layer in range(layout.layers)
        )

    @classmethod
    def over(cls, layout: KVLayout, buffer: memoryview, blocks: int) -> "PagedCache":
        """On bytes of host memory. Raises EngineError where they do not fit `blocks` blocks."""
        if blocks < 1 or buffer.nbytes < blocks * layout.block_bytes:
            raise EngineError(
                f"an arena of {buffer.nbytes} bytes does not hold {blocks} blocks of {layout.block_bytes}"
            )
        if buffer.readonly:
            raise EngineError("the arena's buffer must be writable")
        dtype = TORCH_DTYPES[layout.dtype_name]
        return cls(
            layout,
            torch.frombuffer(buffer, dtype=dtype, count=blocks * layout.block_bytes // dtype.itemsize),
        )

    @classmethod
    def on_device(cls, layout: KVLayout, blocks: int, device: torch.device) -> "PagedCache":
        """Memory of its own, zeroed."""
        dtype = TORCH_DTYPES[layout.dtype_name]
        return cls(
            layout, torch.zeros(blocks * layout.block_bytes // dtype.itemsize, dtype=dtype, device=device)
        )

    @property
    def blocks(self) -> Tensor:
        """[block, layer, 2, kv_head, token, head_dim]"""
        return self._blocks

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, views [block, kv_head, token, head_dim]."""
        return self._layers[layer]

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies whole blocks; every source is read before any destination is written."""
        self._blocks.index_copy_(0, destinations, self._blocks.index_select(0, sources))

    def clear(self, block_ids: Tensor) -> None:
        """Zeroes whole blocks."""
        self._blocks.index_fill_(0, block_ids, 0.0)


def to_tensors(step: FlatStep, device: torch.device) -> StepTensors:
    """The arrays of a step where the backend wants them; on the CPU they are not copied."""
    return StepTensors(
        token_ids=torch.from_numpy(step.token_ids).to(device),
        positions=torch.from_numpy(step.positions).to(device),
        slots=torch.from_numpy(step.slots).to(device),
        query_starts=torch.from_numpy(step.query_starts).to(device),
        kv_tokens=torch.from_numpy(step.kv_tokens).to(device),
        block_table=torch.from_numpy(step.block_table).to(device),
        decodes=step.decodes,
        query_tokens_max=int((step.query_starts[1:] - step.query_starts[:-1]).max()),
        kv_tokens_max=int(step.kv_tokens.max()),
    )
