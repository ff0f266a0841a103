"""The arithmetic of a Llama layer, one function a formula. Tensors in, tensors out, no state.

Shapes: N tokens, H query heads, K key/value heads, D head_dim.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_folder import Llama3Rope, ModelConfig


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Scales each row of `hidden` to unit mean square, then by `weight`."""
    return F.rms_norm(hidden, (hidden.shape[-1],), weight, epsilon)


def gated_mlp(hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate(x)) · up(x))."""
    return F.linear(F.silu(F.linear(hidden, gate), inplace=True).mul_(F.linear(hidden, up)), down)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """[D/2] float32: the angle each pair of dimensions turns by per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / torch.pow(config.rope_theta, exponents)
    return frequencies if config.rope_scaling is None else _stretched(frequencies, config.rope_scaling)


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each [N, 1, D/2]: computed once a step, used in every layer."""
    angles = torch.outer(positions.to(torch.float32), frequencies).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [N, H, D]; dimension i is paired with i + D/2."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(query: Tensor, keys: Tensor, values: Tensor, context_tokens: int) -> Tensor:
    """Causal attention of one sequence: query [n, H, D] over keys, values [K, context + n, D] → [n, H, D].

    Query heads that share a key head form a group: they are the kernel's head dimension and the key
    heads its batch dimension, so keys and values are broadcast and never copied.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    if tokens == 1:  # nothing to mask: the group itself can be the query dimension
        grouped = query.view(1, kv_heads, group, head_dim)
        attended = F.scaled_dot_product_attention(grouped, keys.unsqueeze(0), values.unsqueeze(0))
        return attended.view(1, heads, head_dim)
    attended = F.scaled_dot_product_attention(
        query.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3),
        keys.unsqueeze(1).expand(-1, group, -1, -1),
        values.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=_causal_mask(tokens, context_tokens) if context_tokens else None,
        is_causal=context_tokens == 0,
    )
    return attended.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)


def _causal_mask(tokens: int, context_tokens: int) -> Tensor:
    """[tokens, context + tokens] bool: row i sees the context and the new tokens up to itself."""
    mask = torch.ones(tokens, context_tokens + tokens, dtype=torch.bool)
    return mask.tril_(diagonal=context_tokens)


def _stretched(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_context_tokens / scaling.low_frequency_factor
    high = scaling.original_context_tokens / scaling.high_frequency_factor
    ramp = (scaling.original_context_tokens / wavelengths - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    between = (1 - ramp) * frequencies / scaling.factor + ramp * frequencies
    stretched = torch.where(wavelengths > low, frequencies / scaling.factor, between)
    return torch.where(wavelengths < high, frequencies, stretched)
