"""Rotary embedding, RMS norm with and without a residual, the gate of the MLP: one pass over memory each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels.common import FUSE_MULTIPLY_ADD, require_contiguous_rows

ROTATED_HEADS_AT_ONCE = 8
NORM_ELEMENTS_MIN = 1024
"""Narrow rows, as those of one head, share a program up to this many elements."""
GATE_ELEMENTS = 1024


def rotate_(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place: query [N, H, D], key [N, K, D]; cos, sin [N, D / 2] float32."""
    require_contiguous_rows(query=query, key=key, cos=cos, sin=sin)
    tokens, heads, head_dim = query.shape
    if tokens == 0:
        return
    kv_heads = key.shape[1]
    heads_at_once = min(ROTATED_HEADS_AT_ONCE, triton.next_power_of_2(heads))
    query_tiles = triton.cdiv(heads, heads_at_once)
    _rotate_heads[(tokens, query_tiles + triton.cdiv(kv_heads, heads_at_once))](
        query,
        key,
        cos,
        sin,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        cos.stride(0),
        sin.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        QUERY_TILES=query_tiles,
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        HEADS_AT_ONCE=heads_at_once,
        num_warps=4 if heads_at_once * head_dim >= 1024 else 1,
        enable_fp_fusion=FUSE_MULTIPLY_ADD,
    )


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """rows [..., width], at most two leading dimensions that do not fold into one → a contiguous tensor."""
    normed = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    _norm(rows, rows, weight, normed, epsilon, add=False)
    return normed


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """residual += delta in place; returns the sum normalised; both [N, width]."""
    normed = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    _norm(delta, residual, weight, normed, epsilon, add=True)
    return normed


def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) · up for rows of gate and up side by side: [N, 2 I] → [N, I]."""
    require_contiguous_rows(gate_up=gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gated = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gate_rows[(rows, triton.cdiv(width, GATE_ELEMENTS))](
            gate_up,
            gated,
            gate_up.stride(0),
            WIDTH=width,
            ELEMENTS=GATE_ELEMENTS,
            num_warps=4,
            enable_fp_fusion=FUSE_MULTIPLY_ADD,
        )
    return gated


def _norm(
    rows: Tensor, residual: Tensor, weight: Tensor, normed: Tensor, epsilon: float, *, add: bool
) -> None:
    require_contiguous_rows(rows=rows, residual=residual, weight=weight)
    width = rows.shape[-1]
    outer, inner, rows_strides = _two_leading(rows)
    _, _, residual_strides = _two_leading(residual)
    if outer * inner == 0:
        return
    padded = triton.next_power_of_2(width)
    rows_at_once = max(1, NORM_ELEMENTS_MIN // padded)
    _norm_rows[(triton.cdiv(outer * inner, rows_at_once),)](
        rows,
        residual,
        weight,
        normed,
        outer * inner,
        inner,
        epsilon,
        rows_strides[0],
        rows_strides[1],
        residual_strides[0],
        residual_strides[1],
        WIDTH=width,
        WIDTH_PADDED=padded,
        ROWS=rows_at_once,
        ADD=add,
        num_warps=4 if padded <= 2048 else 8,
        enable_fp_fusion=FUSE_MULTIPLY_ADD,
    )


def _two_leading(rows: Tensor) -> tuple[int, int, tuple[int, int]]:
    """The leading dimensions as (outer, inner) with their strides."""
    if rows.dim() == 1:
        return 1, 1, (0, 0)
    if rows.dim() == 2:
        return rows.shape[0], 1, (rows.stride(0), 0)
    if rows.dim() == 3:
        return rows.shape[0], rows.shape[1], (rows.stride(0), rows.stride(1))
    folded = rows.view(-1, rows.shape[-2], rows.shape[-1])
    return _two_leading(folded)


@triton.jit
def _rotate_tile(heads_start, sine, cosine, head_count, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
                 HEADS_AT_ONCE: tl.constexpr, place, stride_head):  # fmt: skip
    heads = heads_start + tl.arange(0, HEADS_AT_ONCE)
    pairs = tl.arange(0, HALF_PADDED)
    live = (heads < head_count)[:, None] & (pairs < HALF)[None, :]
    first_place = place + heads[:, None] * stride_head + pairs[None, :]
    first = tl.load(first_place, mask=live).to(tl.float32)
    second = tl.load(first_place + HALF, mask=live).to(tl.float32)
    turned_first = first * cosine - second * sine
    turned_second = second * cosine + first * sine
    tl.store(first_place, turned_first.to(place.dtype.element_ty), mask=live)
    tl.store(first_place + HALF, turned_second.to(place.dtype.element_ty), mask=live)


@triton.jit
def _rotate_heads(
    query,
    key,
    cos,
    sin,
    query_stride_row,
    query_stride_head,
    key_stride_row,
    key_stride_head,
    cos_stride_row,
    sin_stride_row,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):
    """A few heads of one token, of the query or of the key."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pairs = tl.arange(0, HALF_PADDED)
    cosine = tl.load(cos + row * cos_stride_row + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sine = tl.load(sin + row * sin_stride_row + pairs, mask=pairs < HALF, other=0.0)[None, :]
    if tile < QUERY_TILES:
        _rotate_tile(tile * HEADS_AT_ONCE, sine, cosine, HEADS, HALF, HALF_PADDED, HEADS_AT_ONCE,
                     query + row * query_stride_row, query_stride_head)  # fmt: skip
    else:
        _rotate_tile((tile - QUERY_TILES) * HEADS_AT_ONCE, sine, cosine, KV_HEADS, HALF, HALF_PADDED,
                     HEADS_AT_ONCE, key + row * key_stride_row, key_stride_head)  # fmt: skip


@triton.jit(do_not_specialize=("row_count",))
def _norm_rows(
    rows,
    residual,
    weight,
    normed,
    row_count,
    inner,
    epsilon,
    rows_stride_outer,
    rows_stride_inner,
    residual_stride_outer,
    residual_stride_inner,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """ROWS rows; row i is (i // inner, i % inner) of the leading dimensions."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH_PADDED)
    live = (row < row_count)[:, None] & (dims < WIDTH)[None, :]
    outer_index = (row // inner).to(tl.int64)
    inner_index = (row % inner).to(tl.int64)
    at = (outer_index * rows_stride_outer + inner_index * rows_stride_inner)[:, None] + dims[None, :]
    held = tl.load(rows + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        sum_at = outer_index * residual_stride_outer + inner_index * residual_stride_inner
        place = residual + sum_at[:, None] + dims[None, :]
        held = held + tl.load(place, mask=live, other=0.0).to(tl.float32)
        stored = held.to(residual.dtype.element_ty)
        tl.store(place, stored, mask=live)
        # What is normalised is what is kept: the next layer adds to the rounded sum.
        held = stored.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(held * held, 1) / WIDTH + epsilon)
    scale = tl.load(weight + dims, mask=dims < WIDTH, other=0.0).to(tl.float32)
    result = held * inverse[:, None] * scale[None, :]
    place = normed + row.to(tl.int64)[:, None] * WIDTH + dims[None, :]
    tl.store(place, result.to(normed.dtype.element_ty), mask=live)


@triton.jit
def _gate_rows(gate_up, gated, stride_row, WIDTH: tl.constexpr, ELEMENTS: tl.constexpr):
    """A part of one row."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    live = dims < WIDTH
    held = tl.load(gate_up + row * stride_row + dims, mask=live).to(tl.float32)
    up = tl.load(gate_up + row * stride_row + WIDTH + dims, mask=live).to(tl.float32)
    result = held / (1.0 + tl.exp(-held)) * up
    tl.store(gated + row * WIDTH + dims, result.to(gated.dtype.element_ty), mask=live)
