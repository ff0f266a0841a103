"""What several kernels share: the product of two tiles, the search for a program's sequence, launch sizes."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, where a bfloat16 product must be done in float32."""

MASKED_SCORE = tl.constexpr(-1.0e30)
"""Below every real score, yet finite: a row that has seen nothing so far must not become NaN."""

LOG2_E = 1.4426950408889634
"""exp2 is one instruction; scores are scaled by this once, beforehand."""

FUSE_MULTIPLY_ADD = True
"""Said at each launch: from Triton 3.10 on it is not the default."""

MERGED_AT_ONCE = tl.constexpr(16)
"""Partial results that are joined in one go."""

SEQUENCES_PADDED_MIN = 256
"""Kernels that search a sequence load all lengths at once: nearly every batch has this one size."""


DATA_CENTRE_SHARED_BYTES = 227 * 1024
"""Shared memory a program may have on Hopper and on Blackwell's large chips; consumer chips have 99 KiB."""


@dataclass(frozen=True, slots=True)
class Chip:
    """What the launch sizes depend on."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory that one program may ask for."""

    @classmethod
    def of(cls, device: torch.device) -> "Chip":
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = triton.runtime.driver.active.utils.get_device_properties(index)
        return cls(properties["multiprocessor_count"], properties["max_shared_mem"])

    @property
    def large(self) -> bool:
        """Whether it has warpgroup products and the shared memory to feed them."""
        return self.shared_bytes >= DATA_CENTRE_SHARED_BYTES


def sequences_padded(sequences: int) -> int:
    """The constant size of the vector that holds a length for each of `sequences`."""
    return max(SEQUENCES_PADDED_MIN, int(triton.next_power_of_2(sequences)))


def require_contiguous_rows(**tensors: Tensor) -> None:
    """Raises ValueError naming a tensor whose last dimension is not contiguous."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: the last dimension must be contiguous, its stride is {tensor.stride(-1)}"
            )


def require_equal_strides(keys: Tensor, values: Tensor) -> None:
    """Raises ValueError where a key and its value do not lie alike: kernels work out one offset for both."""
    if keys.stride() != values.stride():
        raise ValueError(f"keys and values: their strides differ, {keys.stride()} and {values.stride()}")


@triton.jit
def multiply(left, right):
    """The product of two tiles, summed in float32; float32 tiles keep their precision on tensor cores."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    if left.dtype == tl.float32:
        return tl.dot(left, right, input_precision="tf32x3")
    return tl.dot(left, right)


@triton.jit
def multiply_add(left, right, total):
    """`total` + the product of two tiles."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    if left.dtype == tl.float32:
        return tl.dot(left, right, total, input_precision="tf32x3")
    return tl.dot(left, right, total)


@triton.jit
def blocks_of(table_row, tokens, live, BLOCK_TOKENS: tl.constexpr):
    """The block each of a sequence's `tokens` lies in: 64 bits, for offsets beyond 2**31 are common."""
    return tl.load(table_row + tokens // BLOCK_TOKENS, mask=live, other=0).to(tl.int64)


@triton.jit
def find_work(item, ends, counts, SEQUENCES: tl.constexpr):
    """Which sequence work item `item` belongs to, and which of its items it is.

    Sequence s has `counts[s]` items; `ends` is the running sum of `counts`.
    """
    sequence = tl.sum((ends <= item).to(tl.int32), 0)
    chosen = tl.arange(0, SEQUENCES) == sequence
    first = tl.sum(tl.where(chosen, ends - counts, 0), 0)
    return sequence, item - first


@triton.jit
def merge(
    partial, partial_weight, first, stride, count, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr
):
    """Joins `count` partial results [HEAD_DIM], in rows first, first + stride, …, by their shares.

    `partial_weight` has the logarithm to base 2 of what each row's shares were divided by.
    """
    dims = tl.arange(0, HEAD_DIM_PADDED)
    parts = tl.arange(0, MERGED_AT_ONCE)
    best = tl.full([], MASKED_SCORE, tl.float32)
    weight = tl.zeros([], tl.float32)
    attended = tl.zeros([HEAD_DIM_PADDED], tl.float32)
    for start in tl.range(0, count, MERGED_AT_ONCE):
        live = start + parts < count
        rows = first + (start + parts) * stride
        weights = tl.load(partial_weight + rows, mask=live, other=float("-inf"))
        pieces = tl.load(
            partial + rows[:, None] * HEAD_DIM + dims[None, :],
            mask=live[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        best_now = tl.maximum(best, tl.max(weights, 0))
        shares = tl.exp2(weights - best_now)
        shrink = tl.exp2(best - best_now)
        weight = weight * shrink + tl.sum(shares, 0)
        attended = attended * shrink + tl.sum(pieces * shares[:, None], 0)
        best = best_now
    return attended / weight
