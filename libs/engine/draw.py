"""The sampler's last stage: one token a row from shaped logits and one uniform number a row.

Temperature, top-k, top-p, min-p, then the inverse CDF in vocabulary order, which rounding differences
between batches cannot reorder. What is here is the torch twin; other backends draw with the same
signature in a kernel of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn; temperature 0 is greedy and needs none of the others."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """`Draw` of S rows as tensors on the backend's device, each [S]."""

    temperature: Tensor
    """float32; 0: the largest logit, of equals the first."""
    top_k: Tensor
    """int32; 0: no limit."""
    top_p: Tensor
    """float32, above 0; 1: no limit."""
    min_p: Tensor
    """float32; 0: no limit."""
    uniform: Tensor
    """float64 in [0, 1); in float32 it may round to 1."""

    @classmethod
    def of(cls, rows: Sequence[Draw], device: torch.device) -> "DrawParameters":
        return cls(
            torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.top_k for row in rows], dtype=torch.int32, device=device),
            torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=device),
        )
