"""Causal attention of runs of new tokens over paged keys and values, cached prefix included.

Flash attention: scores never leave the chip. The query heads that share a key head lie in one tile, row
r being token r // group and head r % group, so that each tile of keys is read once for all of them. The
runs of a batch are cut into tiles of tokens; a program finds its run from the lengths on the device, and
long rows start first, so that no long program starts last.

A short run on a long cached prefix is few tiles: then the context is cut into parts as well, so that the
whole chip reads it, and a second kernel joins what the parts found.
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

FEW_ROWS = 16
"""Runs as short as this (tokens · group) get the smallest tile of a tensor core."""
PART_TOKENS_MIN = 512
"""Shorter parts would write and read partial results for too little context."""
PARTS_MAX = 32
VARYING = ("sequences", "window", "table_stride", "parts", "query_rows")
"""Arguments that differ from step to step: Triton must not compile anew where one is 1 or divides by 16."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """`rows` of queries (tokens · group) against `tokens` of context at a time."""

    rows: int
    tokens: int
    warps: int
    stages: int


def prefill_tile(dtype: torch.dtype, head_dim: int, rows_max: int, chip: Chip) -> PrefillTile:
    """The largest tiles that neither spill registers nor exceed the shared memory of the chip's kind.

    A cross-compilation test holds them to that for head_dim 64 and 128.
    """
    few = rows_max <= FEW_ROWS
    if dtype == torch.float32:
        # Each float32 product is three of half the precision: their operands fill the registers.
        return PrefillTile(rows=FEW_ROWS if few else 32, tokens=32, warps=8, stages=2)
    if few:
        return PrefillTile(rows=FEW_ROWS, tokens=64 if head_dim <= 128 else 32, warps=4, stages=3)
    if head_dim > 128:
        return PrefillTile(rows=64, tokens=32, warps=8, stages=2)
    return PrefillTile(rows=128, tokens=64 if chip.large or head_dim <= 64 else 32, warps=8, stages=3)


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    kv_tokens: Tensor,
    block_table: Tensor,
    output: Tensor,
    *,
    first_row: int,
    query_tokens_max: int,
    kv_tokens_max: int,
    scale: float,
    window_tokens: int | None,
    chip: Chip,
    part_tokens_min: int = PART_TOKENS_MIN,
) -> None:
    """Fills the rows of `output` [N, H, D] from `first_row`, which is query_starts[0], to the last.

    keys, values [B, K, T, D]; kv_tokens [S] and block_table [S, ≥ blocks] int32. Run s is query rows
    query_starts[s] up to query_starts[s + 1], the newest of its kv_tokens[s] tokens.
    """
    require_contiguous_rows(query=query, keys=keys, values=values, output=output, block_table=block_table)
    require_equal_strides(keys, values)
    rows, heads, head_dim = query.shape
    sequences = kv_tokens.shape[0]
    kv_heads, block_tokens = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    tile = prefill_tile(query.dtype, head_dim, query_tokens_max * group, chip)
    tile_queries = max(1, tile.rows // group)
    # Each run may end in one tile that is not full.
    tiles_max = (rows - first_row) // tile_queries + sequences
    seen_tokens = kv_tokens_max if window_tokens is None else window_tokens + query_tokens_max
    parts = context_parts(tiles_max * kv_heads, min(seen_tokens, kv_tokens_max), chip, part_tokens_min)
    head_dim_padded = triton.next_power_of_2(head_dim)
    partial, partial_weight = output, output  # neither read nor written where there is one part
    if parts > 1:
        partial = torch.empty((parts, rows, heads, head_dim), dtype=torch.float32, device=query.device)
        partial_weight = torch.empty((parts, rows, heads), dtype=torch.float32, device=query.device)
    _attend_runs[(tiles_max, kv_heads, parts)](
        query,
        keys,
        values,
        output,
        partial,
        partial_weight,
        query_starts,
        kv_tokens,
        block_table,
        sequences,
        parts,
        rows,
        window_tokens or 0,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        output.stride(0),
        output.stride(1),
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        BLOCK_TOKENS=block_tokens,
        WINDOWED=window_tokens is not None,
        SPLIT=parts > 1,
        SEQUENCES=sequences_padded(sequences),
        ROWS=max(tile.rows, triton.next_power_of_2(group)),
        TILE_QUERIES=tile_queries,
        TILE_TOKENS=tile.tokens,
        num_warps=tile.warps,
        enable_fp_fusion=FUSE_MULTIPLY_ADD,
        num_stages=tile.stages,
    )
    if parts > 1:
        _merge_parts[(rows - first_row, heads)](
            output,
            partial,
            partial_weight,
            first_row,
            parts,
            rows,
            output.stride(0),
            output.stride(1),
            HEADS=heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=head_dim_padded,
            num_warps=4,
            enable_fp_fusion=FUSE_MULTIPLY_ADD,
        )


def context_parts(programs: int, seen_tokens: int, chip: Chip, part_tokens_min: int) -> int:
    """How many parts to cut the context into so that `programs` of one part each fill the chip."""
    return max(1, min(chip.multiprocessors // programs, seen_tokens // part_tokens_min, PARTS_MAX))


@triton.jit
def _attend_context(
    attended,
    weight,
    best,
    tile_query,
    head_keys,
    head_values,
    table_row,
    start,
    end,
    tokens_end,
    row_positions,
    window,
    scale,
    stride_block,
    stride_token,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ALL_VISIBLE: tl.constexpr,
):
    """Adds context [start, end), a whole number of tiles, to the running result of a tile of queries.

    ALL_VISIBLE: every row sees all of it, and nothing needs to be masked.
    """
    dims = tl.arange(0, HEAD_DIM_PADDED)
    dim_live = dims < HEAD_DIM
    offsets = tl.arange(0, TILE_TOKENS)
    at = start + offsets
    block_ids = blocks_of(table_row, at, at < tokens_end, BLOCK_TOKENS)
    for _position in tl.range(start, end, TILE_TOKENS):
        live = at < tokens_end
        within = at % BLOCK_TOKENS
        slot_at = (block_ids * stride_block + within * stride_token)[:, None] + dims[None, :]
        if ALL_VISIBLE and HEAD_DIM == HEAD_DIM_PADDED:
            tile_keys = tl.load(head_keys + slot_at)
            tile_values = tl.load(head_values + slot_at)
        else:
            loaded = live[:, None] & dim_live[None, :]
            tile_keys = tl.load(head_keys + slot_at, mask=loaded, other=0.0)
            tile_values = tl.load(head_values + slot_at, mask=loaded, other=0.0)

        scores = multiply(tile_query, tl.trans(tile_keys))
        if ALL_VISIBLE:
            best_now = tl.maximum(best, tl.max(scores, 1) * scale)
        else:
            visible = at[None, :] <= row_positions[:, None]
            if WINDOWED:
                visible = visible & (at[None, :] > row_positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
            best_now = tl.maximum(best, tl.max(scores, 1) * scale)
        shares = tl.exp2(scores * scale - best_now[:, None])
        shrink = tl.exp2(best - best_now)
        weight = weight * shrink + tl.sum(shares, 1)
        attended = multiply_add(shares.to(tile_values.dtype), tile_values, attended * shrink[:, None])
        best = best_now
        at += TILE_TOKENS
        block_ids = blocks_of(table_row, at, at < tokens_end, BLOCK_TOKENS)
    return attended, weight, best


@triton.jit(do_not_specialize=VARYING)
def _attend_runs(
    query,
    keys,
    values,
    output,
    partial,
    partial_weight,
    query_starts,
    kv_tokens,
    block_table,
    sequences,
    parts,
    query_rows,
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """One tile of queries of one run, for one key head, over all of its context or a part of it."""
    head = tl.program_id(1)
    index = tl.arange(0, SEQUENCES)
    begins = tl.load(query_starts + index, mask=index < sequences, other=0)
    runs = tl.load(query_starts + 1 + index, mask=index < sequences, other=0) - begins
    counts = (runs + TILE_QUERIES - 1) // TILE_QUERIES
    item = tl.sum(counts, 0) - 1 - tl.program_id(0)
    if item < 0:
        return
    sequence, tile = find_work(item, tl.cumsum(counts, 0), counts, SEQUENCES)
    first_row = tl.load(query_starts + sequence)
    run = tl.load(query_starts + sequence + 1) - first_row
    tokens = tl.load(kv_tokens + sequence)
    context = tokens - run
    first_position = context + tile * TILE_QUERIES
    last_position = tl.minimum(first_position + TILE_QUERIES, tokens) - 1

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    row_positions = first_position + rows // GROUP
    heads = head * GROUP + rows % GROUP
    # Rows past the last token compute what nobody reads.
    row_live = (row_positions <= last_position) & (rows < TILE_QUERIES * GROUP)
    row_at = (first_row + tile * TILE_QUERIES + rows // GROUP).to(tl.int64)
    loaded = row_live[:, None] & (dims < HEAD_DIM)[None, :]
    tile_query = tl.load(
        query + (row_at * query_stride_row + heads * query_stride_head)[:, None] + dims[None, :],
        mask=loaded,
        other=0.0,
    )
    table_row = block_table + sequence.to(tl.int64) * table_stride
    head_keys = keys + head.to(tl.int64) * stride_head
    head_values = values + head.to(tl.int64) * stride_head

    attended = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    best = tl.full([ROWS], MASKED_SCORE, tl.float32)
    start = tokens * 0
    end = last_position + 1
    if WINDOWED:
        # Blocks that no row sees are skipped.
        start = tl.maximum(first_position - window + 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    part_start = start
    part_end = end
    if SPLIT:
        part_tiles = (end - start + parts * TILE_TOKENS - 1) // (parts * TILE_TOKENS)
        part_start = start + tl.program_id(2) * (part_tiles * TILE_TOKENS)
        part_end = tl.minimum(part_start + part_tiles * TILE_TOKENS, end)
    # Tiles that the window cuts for some rows, then those that all rows see in full, last the diagonal.
    whole_from = start
    if WINDOWED:
        whole_from = tl.maximum(last_position - window + 1, start)
        whole_from = start + (whole_from - start + TILE_TOKENS - 1) // TILE_TOKENS * TILE_TOKENS
        whole_from = tl.minimum(whole_from, end)
        attended, weight, best = _attend_context(
            attended, weight, best, tile_query, head_keys, head_values, table_row,
            part_start, tl.minimum(whole_from, part_end), tokens, row_positions, window, scale,
            stride_block, stride_token,
            HEAD_DIM, HEAD_DIM_PADDED, BLOCK_TOKENS, WINDOWED, TILE_TOKENS, False,
        )  # fmt: skip
    whole_to = whole_from + tl.maximum(first_position + 1 - whole_from, 0) // TILE_TOKENS * TILE_TOKENS
    attended, weight, best = _attend_context(
        attended, weight, best, tile_query, head_keys, head_values, table_row,
        tl.maximum(whole_from, part_start), tl.minimum(whole_to, part_end), tokens, row_positions, window,
        scale, stride_block, stride_token,
        HEAD_DIM, HEAD_DIM_PADDED, BLOCK_TOKENS, WINDOWED, TILE_TOKENS, True,
    )  # fmt: skip
    attended, weight, best = _attend_context(
        attended, weight, best, tile_query, head_keys, head_values, table_row,
        tl.maximum(whole_to, part_start), part_end, tokens, row_positions, window, scale,
        stride_block, stride_token,
        HEAD_DIM, HEAD_DIM_PADDED, BLOCK_TOKENS, WINDOWED, TILE_TOKENS, False,
    )  # fmt: skip
    if SPLIT:
        # A row may see nothing of a part; then its share of the whole is nothing.
        attended = attended / tl.where(weight > 0.0, weight, 1.0)[:, None]
        partial_row = (tl.program_id(2).to(tl.int64) * query_rows + row_at) * (
            tl.num_programs(1) * GROUP
        ) + heads
        tl.store(partial + partial_row[:, None] * HEAD_DIM + dims[None, :], attended, mask=loaded)
        tl.store(partial_weight + partial_row, best + tl.log2(weight), mask=row_live)
    else:
        attended = attended / weight[:, None]
        place = output + (row_at * output_stride_row + heads * output_stride_head)[:, None] + dims[None, :]
        tl.store(place, attended.to(output.dtype.element_ty), mask=loaded)


@triton.jit(do_not_specialize=("first_row", "parts", "query_rows"))
def _merge_parts(
    output,
    partial,
    partial_weight,
    first_row,
    parts,
    query_rows,
    output_stride_row,
    output_stride_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Joins what the parts found for one row and query head."""
    row = (first_row + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    stride = query_rows.to(tl.int64) * HEADS
    attended = merge(partial, partial_weight, row * HEADS + head, stride, parts, HEAD_DIM, HEAD_DIM_PADDED)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    place = output + row * output_stride_row + head * output_stride_head + dims
    tl.store(place, attended.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
