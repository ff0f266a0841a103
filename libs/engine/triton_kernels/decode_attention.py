"""Attention of one new token a sequence over paged keys and values, split along the context.

A decode step reads every key and value once and computes little: it is bound by memory. So the work is
cut into items of about equal length, whatever the lengths of the sequences: enough to fill the chip with
one long sequence, and never one program with a long sequence all to itself. Query heads that share a
key head are rows of one tile, so each key is read once for all of them.

How the work is cut is worked out inside each program from the lengths on the device. So the grid depends
on the number of sequences only, and a captured CUDA graph stays valid while contexts grow.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels.common import (
    FUSE_MULTIPLY_ADD,
    LOG2_E,
    MASKED_SCORE,
    Chip,
    blocks_of,
    find_work,
    merge,
    multiply,
    multiply_add,
    require_contiguous_rows,
    require_equal_strides,
    sequences_padded,
)

PROGRAMS_PER_MULTIPROCESSOR = 8
"""Two are resident at a time: four waves, so that the last one costs little."""
ITEM_TOKENS_MIN = 128
"""Shorter items would write and read partial results for too little context."""
QUERY_ROWS_MIN = 16
"""The smallest tile of a tensor core; a smaller group of query heads is padded to it."""
VARYING = ("sequences", "programs", "item_tokens_min", "window", "table_stride")
"""Arguments that differ from step to step: Triton must not compile anew where one is 1 or divides by 16."""


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How a program walks its context."""

    tokens: int
    warps: int
    stages: int


def decode_tile(dtype: torch.dtype, head_dim: int) -> DecodeTile:
    """About 32 KiB of keys and values in flight a stage; two programs fit a multiprocessor."""
    if dtype == torch.float32:
        return DecodeTile(tokens=32, warps=4 if head_dim <= 64 else 8, stages=2)
    return DecodeTile(tokens=64 if head_dim <= 128 else 32, warps=4, stages=3)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_tokens: Tensor,
    block_table: Tensor,
    output: Tensor,
    *,
    scale: float,
    window_tokens: int | None,
    chip: Chip,
    item_tokens_min: int = ITEM_TOKENS_MIN,
) -> None:
    """query, output [S, H, D]; keys, values [B, K, T, D]; kv_tokens [S] and block_table [S, ≥ blocks] int32.

    A sequence without a token (a padded row of a graph) gets zeros.
    """
    require_contiguous_rows(query=query, keys=keys, values=values, output=output, block_table=block_table)
    require_equal_strides(keys, values)
    sequences, heads, head_dim = query.shape
    kv_heads, block_tokens = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    programs = chip.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    # An item has at least 1/programs of all tokens and heads; each sequence may add one shorter item.
    items_max = triton.cdiv(programs, kv_heads) + sequences
    partial = torch.empty((items_max, heads, head_dim), dtype=torch.float32, device=query.device)
    partial_weight = torch.empty((items_max, heads), dtype=torch.float32, device=query.device)
    tile = decode_tile(query.dtype, head_dim)
    padded = sequences_padded(sequences)
    window = window_tokens or 0
    item_tokens_min = triton.cdiv(item_tokens_min, tile.tokens) * tile.tokens
    head_dim_padded = triton.next_power_of_2(head_dim)
    _attend_items[(kv_heads, items_max)](
        query,
        keys,
        values,
        output,
        partial,
        partial_weight,
        kv_tokens,
        block_table,
        sequences,
        programs,
        item_tokens_min,
        window,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        output.stride(0),
        output.stride(1),
        block_table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        BLOCK_TOKENS=block_tokens,
        WINDOWED=window_tokens is not None,
        SEQUENCES=padded,
        ROWS=max(QUERY_ROWS_MIN, triton.next_power_of_2(group)),
        TILE_TOKENS=tile.tokens,
        num_warps=tile.warps,
        enable_fp_fusion=FUSE_MULTIPLY_ADD,
        num_stages=tile.stages,
    )
    _merge_items[(sequences, heads)](
        output,
        partial,
        partial_weight,
        kv_tokens,
        sequences,
        programs,
        item_tokens_min,
        window,
        output.stride(0),
        output.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        BLOCK_TOKENS=block_tokens,
        WINDOWED=window_tokens is not None,
        SEQUENCES=padded,
        TILE_TOKENS=tile.tokens,
        num_warps=4,
        enable_fp_fusion=FUSE_MULTIPLY_ADD,
    )


@triton.jit
def _first_token(tokens, window, BLOCK_TOKENS: tl.constexpr, WINDOWED: tl.constexpr):
    """The first token of the first block that the newest token sees."""
    if WINDOWED:
        return tl.maximum(tokens - window, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    return tokens * 0


@triton.jit
def _cut(
    kv_tokens,
    sequences,
    programs,
    item_tokens_min,
    window,
    KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Tokens of an item, and how many items each sequence has."""
    index = tl.arange(0, SEQUENCES)
    tokens = tl.load(kv_tokens + index, mask=index < sequences, other=0)
    spans = tokens - _first_token(tokens, window, BLOCK_TOKENS, WINDOWED)
    total = tl.sum(spans.to(tl.int64), 0)
    fair = ((total * KV_HEADS + programs - 1) // programs).to(tl.int32)
    item_tokens = tl.maximum(item_tokens_min, (fair + TILE_TOKENS - 1) // TILE_TOKENS * TILE_TOKENS)
    return item_tokens, (spans + item_tokens - 1) // item_tokens


@triton.jit(do_not_specialize=VARYING)
def _attend_items(
    query,
    keys,
    values,
    output,
    partial,
    partial_weight,
    kv_tokens,
    block_table,
    sequences,
    programs,
    item_tokens_min,
    window,
    scale,
    query_stride_row,
    query_stride_head,
    stride_block,
    stride_head,
    stride_token,
    output_stride_row,
    output_stride_head,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """One item for one key head. A sequence of one item is finished here, others leave a partial result."""
    head = tl.program_id(0)
    item = tl.program_id(1)
    item_tokens, counts = _cut(
        kv_tokens, sequences, programs, item_tokens_min, window,
        KV_HEADS, BLOCK_TOKENS, WINDOWED, SEQUENCES, TILE_TOKENS,
    )  # fmt: skip
    sequence, part = find_work(item, tl.cumsum(counts, 0), counts, SEQUENCES)
    if sequence >= sequences:
        return
    tokens = tl.load(kv_tokens + sequence)
    first = _first_token(tokens, window, BLOCK_TOKENS, WINDOWED)
    start = first + part * item_tokens
    end = tl.minimum(start + item_tokens, tokens)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    offsets = tl.arange(0, TILE_TOKENS)
    heads = head * GROUP + rows
    row_live = rows < GROUP
    dim_live = dims < HEAD_DIM
    tile_query = tl.load(
        query + sequence.to(tl.int64) * query_stride_row + heads[:, None] * query_stride_head + dims[None, :],
        mask=row_live[:, None] & dim_live[None, :],
        other=0.0,
    )
    table_row = block_table + sequence.to(tl.int64) * table_stride
    head_keys = keys + head.to(tl.int64) * stride_head
    head_values = values + head.to(tl.int64) * stride_head

    best = tl.full([ROWS], MASKED_SCORE, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    at = start + offsets
    block_ids = blocks_of(table_row, at, at < end, BLOCK_TOKENS)
    for _position in tl.range(start, end, TILE_TOKENS):
        live = at < end
        if WINDOWED:
            live = live & (at >= tokens - window)
        loaded = live[:, None] & dim_live[None, :]
        within = at % BLOCK_TOKENS
        slot_at = (block_ids * stride_block + within * stride_token)[:, None] + dims[None, :]
        tile_keys = tl.load(head_keys + slot_at, mask=loaded, other=0.0)
        tile_values = tl.load(head_values + slot_at, mask=loaded, other=0.0)

        scores = multiply(tile_query, tl.trans(tile_keys)) * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        best_now = tl.maximum(best, tl.max(scores, 1))
        shares = tl.exp2(scores - best_now[:, None])
        shrink = tl.exp2(best - best_now)
        weight = weight * shrink + tl.sum(shares, 1)
        attended = multiply_add(shares.to(tile_values.dtype), tile_values, attended * shrink[:, None])
        best = best_now
        at += TILE_TOKENS
        block_ids = blocks_of(table_row, at, at < end, BLOCK_TOKENS)

    attended = attended / weight[:, None]
    stored = row_live[:, None] & dim_live[None, :]
    if tokens - first <= item_tokens:
        place = output + sequence.to(tl.int64) * output_stride_row
        place = place + heads[:, None] * output_stride_head + dims[None, :]
        tl.store(place, attended.to(output.dtype.element_ty), mask=stored)
    else:
        partial_row = item.to(tl.int64) * (KV_HEADS * GROUP) + heads
        tl.store(partial + partial_row[:, None] * HEAD_DIM + dims[None, :], attended, mask=stored)
        tl.store(partial_weight + partial_row, best + tl.log2(weight), mask=row_live)


@triton.jit(do_not_specialize=VARYING)
def _merge_items(
    output,
    partial,
    partial_weight,
    kv_tokens,
    sequences,
    programs,
    item_tokens_min,
    window,
    output_stride_row,
    output_stride_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Joins the partial results of one sequence and query head, weighted by their share of the whole."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    _item_tokens, counts = _cut(
        kv_tokens, sequences, programs, item_tokens_min, window,
        KV_HEADS, BLOCK_TOKENS, WINDOWED, SEQUENCES, TILE_TOKENS,
    )  # fmt: skip
    index = tl.arange(0, SEQUENCES)
    count = tl.sum(tl.where(index == sequence, counts, 0), 0)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    dim_live = dims < HEAD_DIM
    place = output + sequence.to(tl.int64) * output_stride_row + head * output_stride_head + dims
    if count == 1:
        return
    if count == 0:
        tl.store(place, tl.zeros([HEAD_DIM_PADDED], output.dtype.element_ty), mask=dim_live)
        return
    first = tl.sum(tl.where(index < sequence, counts, 0), 0).to(tl.int64) * (KV_HEADS * GROUP) + head
    attended = merge(partial, partial_weight, first, KV_HEADS * GROUP, count, HEAD_DIM, HEAD_DIM_PADDED)
    tl.store(place, attended.to(output.dtype.element_ty), mask=dim_live)
