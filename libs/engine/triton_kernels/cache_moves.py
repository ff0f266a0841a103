"""Into the paged cache, out of it and back: new tokens' keys and values, and whole blocks of one layer."""

import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels.common import require_contiguous_rows


def write_kv(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """key, value [N, K, D] into keys, values [B, K, T, D]; a negative slot is written nowhere."""
    require_contiguous_rows(keys=keys, values=values, key=key, value=value)
    tokens, kv_heads, head_dim = key.shape
    if tokens == 0:
        return
    _write_tokens[(tokens,)](
        keys,
        values,
        key,
        value,
        slots,
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        KV_HEADS=kv_heads,
        KV_HEADS_PADDED=triton.next_power_of_2(kv_heads),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
        BLOCK_TOKENS=keys.shape[2],
        num_warps=4,
    )


def gather_layer(layer: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """layer [B, 2, K, T, D] at `block_ids` [n] → blocks, contiguous [n, 2, K, T, D]."""
    _move(layer, block_ids, blocks, to_cache=False)


def scatter_layer(layer: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """blocks, contiguous [n, 2, K, T, D] → layer [B, 2, K, T, D] at `block_ids` [n]."""
    _move(layer, block_ids, blocks, to_cache=True)


def _move(layer: Tensor, block_ids: Tensor, blocks: Tensor, *, to_cache: bool) -> None:
    require_contiguous_rows(layer=layer)
    count, two, kv_heads, block_tokens, head_dim = blocks.shape
    if not blocks.is_contiguous():
        raise ValueError("blocks: must be contiguous")
    if count == 0:
        return
    _move_heads[(count, two * kv_heads)](
        layer,
        block_ids,
        blocks,
        layer.stride(0),
        layer.stride(1),
        layer.stride(2),
        layer.stride(3),
        KV_HEADS=kv_heads,
        BLOCK_TOKENS=block_tokens,
        BLOCK_TOKENS_PADDED=triton.next_power_of_2(block_tokens),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
        TO_CACHE=to_cache,
        num_warps=4,
    )


@triton.jit
def _write_tokens(
    keys,
    values,
    key,
    value,
    slots,
    keys_stride_block,
    keys_stride_head,
    keys_stride_token,
    values_stride_block,
    values_stride_head,
    values_stride_token,
    key_stride_row,
    key_stride_head,
    value_stride_row,
    value_stride_head,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """One token: its key and its value, all heads."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    block_id = slot // BLOCK_TOKENS
    within = slot % BLOCK_TOKENS
    heads = tl.arange(0, KV_HEADS_PADDED).to(tl.int64)[:, None]
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    live = (heads < KV_HEADS) & (dims < HEAD_DIM)
    new_key = tl.load(key + row * key_stride_row + heads * key_stride_head + dims, mask=live)
    new_value = tl.load(value + row * value_stride_row + heads * value_stride_head + dims, mask=live)
    key_place = keys + block_id * keys_stride_block + within * keys_stride_token
    value_place = values + block_id * values_stride_block + within * values_stride_token
    tl.store(key_place + heads * keys_stride_head + dims, new_key, mask=live)
    tl.store(value_place + heads * values_stride_head + dims, new_value, mask=live)


@triton.jit
def _move_heads(
    layer,
    block_ids,
    blocks,
    stride_block,
    stride_part,
    stride_head,
    stride_token,
    KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_TOKENS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TO_CACHE: tl.constexpr,
):
    """The keys or the values of one head of one block."""
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    block_id = tl.load(block_ids + index).to(tl.int64)
    tokens = tl.arange(0, BLOCK_TOKENS_PADDED).to(tl.int64)[:, None]
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    live = (tokens < BLOCK_TOKENS) & (dims < HEAD_DIM)
    in_cache = (
        layer + block_id * stride_block + part.to(tl.int64) * stride_part + head.to(tl.int64) * stride_head
    )
    in_cache = in_cache + tokens * stride_token + dims
    head_row = index * (2 * KV_HEADS) + tl.program_id(1)
    packed = blocks + (head_row * BLOCK_TOKENS + tokens) * HEAD_DIM + dims
    if TO_CACHE:
        tl.store(in_cache, tl.load(packed, mask=live), mask=live)
    else:
        tl.store(packed, tl.load(in_cache, mask=live), mask=live)
