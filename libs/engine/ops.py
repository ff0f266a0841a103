"""The operations a model is made of: one protocol, a backend for each kind of machine behind it.

Models are written on `Ops` alone and know neither device nor kernel. `engine.torch_ops` has every
operation in plain torch, on any device: it is the twin that the other backends are tested against.

Letters in shapes: N new tokens of a step over all its sequences, S sequences, H query heads, K key/value
heads, D head_dim, T block_tokens, B blocks of the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.draw import DrawParameters


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step on the backend's device; sequences with a single new token come first."""

    token_ids: Tensor
    """[N] int64"""
    positions: Tensor
    """[N] int64: place of each token in its sequence."""
    slots: Tensor
    """[N] int64: block id · T + offset, where the token's KV goes."""
    query_starts: Tensor
    """[S + 1] int32: the rows of sequence s are query_starts[s] up to query_starts[s + 1]."""
    kv_tokens: Tensor
    """[S] int32: context and new tokens of each sequence."""
    block_table: Tensor
    """[S, most blocks of one sequence] int32; short rows are padded with 0."""
    decodes: int
    """How many sequences have exactly one new token: the first ones."""
    query_tokens_max: int
    """The most new tokens of one sequence."""
    kv_tokens_max: int
    """The most context and new tokens of one sequence."""

    def last_rows(self, sequences: Tensor) -> Tensor:
        """[n]: the rows of the last new token of each of `sequences`, int64 [n]."""
        return self.query_starts[sequences + 1].long() - 1

    def last_tokens(self, sequences: Tensor) -> "StepTensors":
        """A step of decodes: the last new token of each of `sequences`, all before it being context."""
        rows = self.last_rows(sequences)
        return StepTensors(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            query_starts=torch.arange(len(sequences) + 1, dtype=torch.int32, device=rows.device),
            kv_tokens=self.kv_tokens[sequences],
            block_table=self.block_table[sequences],
            decodes=len(sequences),
            query_tokens_max=1,
            kv_tokens_max=self.kv_tokens_max,
        )


class Linear(Protocol):
    """A matrix (or several, stacked along the outputs) as a backend keeps it; made by `Ops.pack`."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class Ops(Protocol):
    """What a backend can do. Rows and outputs have the dtype of the weights; sums are float32 or better."""

    @property
    def device(self) -> torch.device: ...

    def pack(self, parts: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> Linear:
        """Matrices [out, in] of equal `in`, stacked along their outputs: one product for all of them."""

    def linear(self, rows: Tensor, weight: Linear) -> Tensor:
        """[N, in] → [N, out], a new contiguous tensor."""

    def gated_linear(self, rows: Tensor, weight: Linear) -> Tensor:
        """silu(gate(x)) · up(x): [N, in] → [N, out / 2], for a weight packed of gate and up."""

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Each row of [..., width], whatever its strides, to unit mean square, then times `weight`."""

    def add_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Adds `delta` to `residual` in place and returns the sum normalised; both [N, width]."""

    def rotate_(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotary embedding in place of [N, H, D] and [N, K, D], whatever the strides of their rows.

        cos and sin are float32 [N, D / 2]; dimension i is paired with i + D / 2.
        """

    def write_kv(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Puts the new tokens' key and value [N, K, D] into keys and values [B, K, T, D] of a layer."""

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: StepTensors,
        scale: float,
        window_tokens: int | None,
    ) -> Tensor:
        """Causal attention of the new tokens, [N, H, D], over a layer's blocks, [B, K, T, D] → [N, H, D].

        The KV of the new tokens is in the blocks. With a window, position i sees the last
        `window_tokens` positions up to itself. Slots that were never written do not reach the result.
        """

    def gather_layer(self, layer: Tensor, block_ids: Tensor) -> Tensor:
        """Blocks of one layer, a view [B, 2, K, T, D] of the cache → contiguous [n, 2, K, T, D]."""

    def scatter_layer(self, layer: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        """The inverse of `gather_layer`."""

    def draw(self, logits: Tensor, parameters: DrawParameters) -> Tensor:
        """The sampler's last stage, see `engine.draw`: float32 [S, vocabulary] → [S] int64."""
