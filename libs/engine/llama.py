"""The Llama family: weights packed for a backend, and the forward pass over a paged cache.

A model may hold a range of layers only: then `embed` needs the first layer in it and `logits` the
last, and hidden states pass between the parts. Layer numbers of the cache count from the range's start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from engine.errors import EngineError
from engine.model_folder import ModelConfig
from engine.ops import Linear, Ops, StepTensors
from engine.paged_cache import PagedCache
from engine.rotary import rotary_angles, rotary_frequencies


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Tensor
    query_key_value: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """A Llama-family model, or a range of its layers. Immutable."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        layers: range,
        weights: Sequence[LayerWeights],
        *,
        embedding: Tensor | None,
        final_norm: Tensor | None,
        head: Linear | None,
    ) -> None:
        assert len(layers) == len(weights)
        self.config = config
        self.layers = layers
        self._ops = ops
        self._weights = tuple(weights)
        self._embedding = embedding
        self._final_norm = final_norm
        self._head = head
        self._frequencies = rotary_frequencies(config).to(ops.device)

    @property
    def ops(self) -> Ops:
        return self._ops

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
        step: StepTensors,
        cache: PagedCache,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Runs the held layers over [N, hidden], writing each layer's KV into the cache on the way.

        `on_layer(l)` is called as soon as the KV of layer `l` is there, before its attention. `hidden`
        is overwritten.
        """
        ops, config = self._ops, self.config
        cos, sin = rotary_angles(step.positions, self._frequencies)
        scale = config.head_dim**-0.5
        delta: Tensor | None = None
        for layer, weights in enumerate(self._weights):
            if delta is None:
                normed = ops.rms_norm(hidden, weights.attention_norm, config.norm_epsilon)
            else:
                normed = ops.add_rms_norm(delta, hidden, weights.attention_norm, config.norm_epsilon)
            product = ops.linear(normed, weights.query_key_value)
            heads = product.view(product.shape[0], -1, config.head_dim)
            query, key, value = (
                heads[:, : config.heads],
                heads[:, config.heads : -config.kv_heads],
                heads[:, -config.kv_heads :],
            )
            ops.rotate_(query, key, cos, sin)
            keys, values = cache.layer(layer)
            ops.write_kv(keys, values, key, value, step.slots)
            if on_layer is not None:
                on_layer(layer)
            attended = ops.attend(query, keys, values, step, scale, None)
            delta = ops.linear(attended.flatten(1), weights.output)
            normed = ops.add_rms_norm(delta, hidden, weights.mlp_norm, config.norm_epsilon)
            delta = ops.linear(ops.gated_linear(normed, weights.gate_up), weights.down)
        assert delta is not None, "a model has at least one layer"
        return hidden.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] after the last layer → [M, vocabulary] float32."""
        if self._final_norm is None or self._head is None:
            raise EngineError(f"layers {self.layers} have no head: it belongs to the last layer")
        normed = self._ops.rms_norm(hidden, self._final_norm, self.config.norm_epsilon)
        return self._ops.linear(normed, self._head).float()
