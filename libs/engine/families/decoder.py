"""The decoder that all families share: embedding, layers of attention and gated MLP, final norm, head.

A model may hold a range of layers only: then `embed` needs the first layer in it and `logits` the
last, and hidden states pass between the parts. Layer numbers of the cache count from the range's start.

Knows neither device nor dtype: both come with the weights and the operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from engine.errors import EngineError
from engine.model_folder import ModelConfig
from engine.ops import Linear, Ops, StepTensors
from engine.rotary import rotary_angles, rotary_frequencies


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """An RMSNorm over each head, before it is rotated; both weights are [head_dim]."""

    query: Tensor
    key: Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """What a family decides about attention."""

    query_key_value: Linear
    """The three projections as one: heads + 2 · kv_heads heads come out."""
    output: Linear
    head_norm: HeadNorm | None = None
    window_tokens: int | None = None
    """How many positions a token sees, itself included; None: all of its context."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights."""

    attention_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LayerCache(Protocol):
    """Where a step's keys and values live."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a held layer, each [block, kv_head, token, head_dim]."""


class DecoderModel:
    """A model, or a range of its layers. Immutable."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        layers: range,
        weights: Sequence[DecoderLayer],
        *,
        embedding: Tensor | None,
        final_norm: Tensor | None,
        head: Linear | None,
    ) -> None:
        assert 0 < len(layers) == len(weights)
        self.config = config
        self.ops = ops
        self.layers = layers
        self._weights = tuple(weights)
        self._embedding = embedding
        self._final_norm = final_norm
        self._head = head
        self._frequencies = rotary_frequencies(config).to(ops.device)

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
        cache: LayerCache,
        on_layer: Callable[[int], None] | None = None,
        *,
        last_of: Tensor | None = None,
    ) -> Tensor:
        """Runs the held layers over [N, hidden], writing each layer's KV into the cache on the way.

        `on_layer(l)` is called as soon as the KV of layer `l` is there, before its attention. `hidden`
        is overwritten: it is the running sum that every layer adds to. With `last_of`, numbers of
        sequences, the result has one row for each, of its last new token: from its attention on, the
        last layer computes them alone.
        """
        ops = self.ops
        angles = rotary_angles(step.positions, self._frequencies)
        delta: Tensor | None = None
        for layer, weights in enumerate(self._weights):
            normed = self._add_norm(delta, hidden, weights.attention_norm)
            keys, values = cache.layer(layer)
            query = self._project(weights.attention, normed, angles, keys, values, step)
            if on_layer is not None:
                on_layer(layer)
            if last_of is not None and layer == len(self._weights) - 1:
                if not len(last_of):
                    return hidden[:0]  # a middle chunk: its KV is all that was wanted
                rows = step.last_rows(last_of)
                query, hidden, step = query[rows], hidden[rows], step.last_tokens(last_of)
            attended = self._attend(weights.attention, query, keys, values, step)
            delta = ops.linear(attended, weights.attention.output)
            normed = self._add_norm(delta, hidden, weights.mlp_norm)
            delta = ops.linear(ops.gated_linear(normed, weights.gate_up), weights.down)
        assert delta is not None, "a model has at least one layer"
        return hidden.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] after the last layer → [M, vocabulary] float32."""
        if self._final_norm is None or self._head is None:
            raise EngineError(f"layers {self.layers} have no head: it belongs to the last layer")
        normed = self.ops.rms_norm(hidden, self._final_norm, self.config.norm_epsilon)
        return self.ops.linear(normed, self._head).float()

    def _add_norm(self, delta: Tensor | None, hidden: Tensor, weight: Tensor) -> Tensor:
        """Adds what the layer before computed, if there is one, and returns the sum normalised."""
        if delta is None:
            return self.ops.rms_norm(hidden, weight, self.config.norm_epsilon)
        return self.ops.add_rms_norm(delta, hidden, weight, self.config.norm_epsilon)

    def _project(
        self,
        attention: Attention,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        step: StepTensors,
    ) -> Tensor:
        """Writes the new tokens' keys and values into the cache and returns their queries, [N, H, D]."""
        ops, config = self.ops, self.config
        product = ops.linear(normed, attention.query_key_value)
        heads = product.view(product.shape[0], -1, config.head_dim)
        query = heads[:, : config.heads]
        key = heads[:, config.heads : -config.kv_heads]
        value = heads[:, -config.kv_heads :]
        if attention.head_norm is not None:
            query = ops.rms_norm(query, attention.head_norm.query, config.norm_epsilon)
            key = ops.rms_norm(key, attention.head_norm.key, config.norm_epsilon)
        ops.rotate_(query, key, *angles)
        ops.write_kv(keys, values, key, value, step.slots)
        return query

    def _attend(
        self, attention: Attention, query: Tensor, keys: Tensor, values: Tensor, step: StepTensors
    ) -> Tensor:
        scale = self.config.head_dim**-0.5
        return self.ops.attend(query, keys, values, step, scale, attention.window_tokens).flatten(1)
