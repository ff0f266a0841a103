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

SEQUENCES_PADDED_MIN = 256
"""Kernels that search a sequence load all lengths at once: one size, one compilation for nearly every batch."""


@dataclass(frozen=True, slots=True)
class Chip:
    """What the launch sizes depend on."""

    multiprocessors: int
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> "Chip":
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, (properties.major, properties.minor))


def sequences_padded(sequences: int) -> int:
    """The constant size of the vector that holds a length for each of `sequences`."""
    return max(SEQUENCES_PADDED_MIN, triton.next_power_of_2(sequences))


def require_contiguous_rows(**tensors: Tensor) -> None:
    """Raises ValueError naming a tensor whose last dimension is not contiguous."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: the last dimension must be contiguous, its stride is {tensor.stride(-1)}"
            )


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
