"""The Llama family: weights as plain tensors and the forward pass over a paged cache.

A model may hold a range of layers only: then `embed` needs the first layer in it and `logits` the
last, and hidden states pass between the parts. Layer numbers of the cache count from the range's start.

The projections are not fused: one product of [960, 576] takes as long as its three parts on the CPU, and
fused weights would be a copy where the stored ones are shared between processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import EngineError
from engine.layers import attend, gated_mlp, rms_norm, rotary_angles, rotary_frequencies, rotate
from engine.model_folder import ModelConfig
from engine.paged_cache import PagedCache, PagedSpan, PagedStep


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; each matrix is [out, in]."""

    attention_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class LlamaModel:
    """A Llama-family model, or a range of its layers, in float32 on the CPU. Immutable."""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        weights: Sequence[LayerWeights],
        *,
        embedding: Tensor | None,
        final_norm: Tensor | None,
        head: Tensor | None,
    ) -> None:
        assert len(layers) == len(weights)
        self.config = config
        self.layers = layers
        self._weights = tuple(weights)
        self._embedding = embedding
        self._final_norm = final_norm
        self._head = head
        self._frequencies = rotary_frequencies(config)

    @property
    def whole(self) -> bool:
        """Whether every layer is here, so that token ids go in and logits come out."""
        return len(self.layers) == self.config.layers

    def embed(self, token_ids: Tensor) -> Tensor:
        """[N] token ids → [N, hidden]."""
        if self._embedding is None:
            raise EngineError(f"layers {self.layers} have no embedding: it belongs to layer 0")
        return F.embedding(token_ids, self._embedding)

    def forward(
        self,
        hidden: Tensor,
        step: PagedStep,
        cache: PagedCache,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Runs the held layers over [N, hidden], writing each layer's KV into the cache on the way.

        `on_layer(l)` is called as soon as the KV of layer `l` is there, before its attention.
        """
        cos, sin = rotary_angles(step.positions, self._frequencies)
        for layer, weights in enumerate(self._weights):
            normed = rms_norm(hidden, weights.attention_norm, self.config.norm_epsilon)
            query = self._heads(normed, weights.query)
            key = self._heads(normed, weights.key)
            value = self._heads(normed, weights.value)
            cache.write(layer, step, rotate(key, cos, sin), value)
            if on_layer is not None:
                on_layer(layer)
            attended = _attention(layer, rotate(query, cos, sin), step.spans, cache)
            hidden = hidden + F.linear(attended.flatten(1), weights.output)
            normed = rms_norm(hidden, weights.mlp_norm, self.config.norm_epsilon)
            hidden = hidden + gated_mlp(normed, weights.gate, weights.up, weights.down)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] after the last layer → [M, vocabulary]."""
        if self._final_norm is None or self._head is None:
            raise EngineError(f"layers {self.layers} have no head: it belongs to the last layer")
        return F.linear(rms_norm(hidden, self._final_norm, self.config.norm_epsilon), self._head)

    def _heads(self, normed: Tensor, weight: Tensor) -> Tensor:
        return F.linear(normed, weight).view(normed.shape[0], -1, self.config.head_dim)


def _attention(layer: int, query: Tensor, spans: Sequence[PagedSpan], cache: PagedCache) -> Tensor:
    """[N, H, D] → [N, H, D], each span over its own context and new tokens."""
    parts = []
    for span in spans:
        keys, values = cache.read(layer, span)
        part = query[span.start : span.start + span.tokens]
        parts.append(attend(part, keys, values, span.context_tokens))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
