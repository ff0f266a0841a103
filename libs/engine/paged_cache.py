"""The paged KV cache: a typed view of the arena's bytes, written and read by block table.

Owns no memory: the arena is the caller's, and a block's other owners (the pool, a transfer) see every
byte as soon as it is written. Reads take exactly the slots that were computed, so whatever an earlier
owner left in a block, NaN included, never reaches a result.

Addresses are row numbers, computed once a step for layer 0; another layer's rows are the same numbers
in a view that starts later. Letters in shapes: N tokens, K key/value heads, D head_dim, n blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.layout import KVLayout
from engine.step import FlatStep


@dataclass(frozen=True, slots=True)
class PagedSpan:
    """One sequence's rows in the step, and where its KV lies."""

    start: int
    tokens: int
    context_tokens: int
    read_rows: Tensor
    """[2·K·n] head rows (block_tokens · D numbers each) of its blocks: all keys by head, then all values."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A flat step as tensors, with the addresses of its KV."""

    token_ids: Tensor
    positions: Tensor
    write_rows: Tensor
    """[N·K] token rows (D numbers each) of the new tokens' keys."""
    spans: tuple[PagedSpan, ...]


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
        arena = torch.frombuffer(buffer, dtype=torch.float32, count=elements)
        self._layout = layout
        self._blocks = arena.view(blocks, -1)
        self._head_rows = arena.view(-1, layout.block_tokens * layout.head_dim)
        self._token_rows = arena.view(-1, layout.head_dim)

    def page(self, step: FlatStep) -> PagedStep:
        """Works out where the step's KV is written and read."""
        return PagedStep(
            token_ids=torch.from_numpy(step.token_ids),
            positions=torch.from_numpy(step.positions),
            write_rows=self._write_rows(torch.from_numpy(step.slots)),
            spans=tuple(
                PagedSpan(
                    start=span.start,
                    tokens=span.tokens,
                    context_tokens=span.context_tokens,
                    read_rows=self._read_rows(torch.from_numpy(span.block_ids)),
                )
                for span in step.spans
            ),
        )

    def clear(self, block_ids: Tensor) -> None:
        """Zeroes whole blocks."""
        self._blocks.index_fill_(0, block_ids, 0.0)

    def write(self, layer: int, step: PagedStep, keys: Tensor, values: Tensor) -> None:
        """Puts the new tokens' keys and values [N, K, D] into their slots."""
        layout = self._layout
        keys_start = layer * 2 * layout.kv_heads * layout.block_tokens
        values_start = keys_start + layout.kv_heads * layout.block_tokens
        rows = step.write_rows
        self._token_rows[keys_start:].index_copy_(0, rows, keys.reshape(-1, layout.head_dim))
        self._token_rows[values_start:].index_copy_(0, rows, values.reshape(-1, layout.head_dim))

    def read(self, layer: int, span: PagedSpan) -> tuple[Tensor, Tensor]:
        """Keys and values [K, context + new, D] of a sequence: one copy, of this layer only."""
        layout = self._layout
        rows = self._head_rows[layer * 2 * layout.kv_heads :].index_select(0, span.read_rows)
        by_head = rows.view(2, layout.kv_heads, -1, layout.head_dim)
        computed = by_head[:, :, : span.context_tokens + span.tokens]
        return computed[0], computed[1]

    def _write_rows(self, slots: Tensor) -> Tensor:
        layout = self._layout
        blocks = torch.div(slots, layout.block_tokens, rounding_mode="floor")
        offsets = slots - blocks * layout.block_tokens
        first = blocks * (layout.layers * 2 * layout.kv_heads * layout.block_tokens) + offsets
        heads = torch.arange(layout.kv_heads) * layout.block_tokens
        return (first.unsqueeze(1) + heads).flatten()

    def _read_rows(self, block_ids: Tensor) -> Tensor:
        layout = self._layout
        heads = torch.arange(2 * layout.kv_heads).unsqueeze(1)
        return (heads + block_ids * (layout.layers * 2 * layout.kv_heads)).flatten()
