"""Rotary position embedding: by which angle each pair of dimensions turns at each position."""

import math

import torch
from torch import Tensor

from engine.model_folder import Llama3Rope, ModelConfig


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """[D/2] float32: the angle each pair of dimensions turns by per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / torch.pow(config.rope_theta, exponents)
    return frequencies if config.rope_scaling is None else _stretched(frequencies, config.rope_scaling)


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each float32 [N, D / 2]: computed once a step, used in every layer."""
    angles = torch.outer(positions.to(torch.float32), frequencies)
    return angles.cos(), angles.sin()


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
