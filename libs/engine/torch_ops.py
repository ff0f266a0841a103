"""Every operation in plain torch: the CPU's fallback, and the twin that faster backends are tested against.

Says what is computed, as directly as torch allows; attention gathers each sequence's KV into a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.draw import DrawParameters, draw
from engine.ops import Linear, StepTensors


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """The matrices as they were given: weights that are mapped from a file stay where they lie."""

    parts: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    @property
    def in_features(self) -> int:
        return self.parts[0].shape[1]

    @property
    def out_features(self) -> int:
        return sum(part.shape[0] for part in self.parts)


class TorchOps:
    """See `engine.ops.Ops` for what each operation means."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def pack(self, parts: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> StackedLinear:
        held = tuple(part.to(self.device) for part in parts)
        held_biases = [None] * len(held) if biases is None else list(biases)
        assert len(held_biases) == len(held)
        return StackedLinear(held, tuple(None if b is None else b.to(self.device) for b in held_biases))

    def linear(self, rows: Tensor, weight: Linear) -> Tensor:
        products = _products(rows, weight)
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def gated_linear(self, rows: Tensor, weight: Linear) -> Tensor:
        gate, up = _products(rows, weight)
        return F.silu(gate.float()).mul_(up).to(gate.dtype)

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(rows, (rows.shape[-1],), weight, epsilon)

    def add_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        residual.add_(delta)
        return F.rms_norm(residual, (residual.shape[-1],), weight, epsilon)

    def rotate_(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        for heads in (query, key):
            first, second = heads.chunk(2, dim=-1)
            c, s = cos.unsqueeze(1), sin.unsqueeze(1)
            turned_first = first * c - second * s
            second.copy_(second * c + first * s)
            first.copy_(turned_first)

    def write_kv(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        block_tokens = keys.shape[2]
        blocks = torch.div(slots, block_tokens, rounding_mode="floor")
        offsets = slots - blocks * block_tokens
        keys[blocks, :, offsets] = key
        values[blocks, :, offsets] = value

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: StepTensors,
        scale: float,
        window_tokens: int | None,
    ) -> Tensor:
        attended = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts, kv_tokens = step.query_starts.tolist(), step.kv_tokens.tolist()
        for sequence, tokens in enumerate(kv_tokens):
            rows = slice(starts[sequence], starts[sequence + 1])
            blocks = step.block_table[sequence, : -(-tokens // keys.shape[2])]
            attended[rows] = _attend_one(
                query[rows],
                _computed(keys, blocks, tokens),
                _computed(values, blocks, tokens),
                scale,
                window_tokens,
            )
        return attended

    def gather_layer(self, layer: Tensor, block_ids: Tensor) -> Tensor:
        return layer.index_select(0, block_ids)

    def scatter_layer(self, layer: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        layer.index_copy_(0, block_ids, blocks)

    def draw(self, logits: Tensor, parameters: DrawParameters) -> Tensor:
        return draw(logits, parameters)


def _products(rows: Tensor, weight: Linear) -> list[Tensor]:
    assert isinstance(weight, StackedLinear), "a weight belongs to the backend that packed it"
    return [F.linear(rows, part, bias) for part, bias in zip(weight.parts, weight.biases, strict=True)]


def _computed(blocks: Tensor, block_ids: Tensor, tokens: int) -> Tensor:
    """[B, K, T, D] → [K, tokens, D]: exactly the slots that were computed, in order."""
    chosen = blocks.index_select(0, block_ids).transpose(0, 1)
    return chosen.reshape(chosen.shape[0], -1, chosen.shape[-1])[:, :tokens]


def _attend_one(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window_tokens: int | None
) -> Tensor:
    """One sequence: query [n, H, D] over keys, values [K, tokens, D] → [n, H, D].

    Query heads that share a key head form a group: they are the kernel's head dimension and the key
    heads its batch dimension, so keys and values are broadcast and never copied.
    """
    new_tokens, heads, head_dim = query.shape
    kv_heads, tokens, _ = keys.shape
    group = heads // kv_heads
    if new_tokens == 1:  # nothing to mask: the group itself can be the query dimension
        first = 0 if window_tokens is None else max(0, tokens - window_tokens)
        attended = F.scaled_dot_product_attention(
            query.reshape(1, kv_heads, group, head_dim),
            keys[:, first:].unsqueeze(0),
            values[:, first:].unsqueeze(0),
            scale=scale,
        )
        return attended.view(1, heads, head_dim)
    plainly_causal = new_tokens == tokens and (window_tokens is None or tokens <= window_tokens)
    attended = F.scaled_dot_product_attention(
        query.reshape(new_tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3),
        keys.unsqueeze(1).expand(-1, group, -1, -1),
        values.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=None if plainly_causal else _visible(new_tokens, tokens, window_tokens, query.device),
        is_causal=plainly_causal,
        scale=scale,
    )
    return attended.permute(2, 0, 1, 3).reshape(new_tokens, heads, head_dim)


def _visible(new_tokens: int, tokens: int, window_tokens: int | None, device: torch.device) -> Tensor:
    """[new, tokens] bool: row i stands at position tokens - new + i and sees the window up to itself."""
    diagonal = tokens - new_tokens
    visible = torch.ones(new_tokens, tokens, dtype=torch.bool, device=device).tril_(diagonal)
    if window_tokens is not None:
        visible.triu_(diagonal - window_tokens + 1)
    return visible
