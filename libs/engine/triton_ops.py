"""Every operation on an NVIDIA GPU: Triton kernels, and torch where a library's product is the best there is.

Nothing here waits for the GPU or depends on numbers that lie on it: so a step of decodes can be captured
as a CUDA graph (`engine.decode_graphs`). A negative slot is a row that is only padding: its key and value
are written nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.draw import DrawParameters
from engine.dtypes import TORCH_DTYPES
from engine.errors import EngineError
from engine.ops import Linear, StepTensors
from engine.triton_kernels import cache_moves, elementwise, sampling
from engine.triton_kernels.common import Chip
from engine.triton_kernels.decode_attention import decode_attention
from engine.triton_kernels.prefill_attention import prefill_attention

CAPABILITY_MIN = (8, 0)
"""Ampere: the first with bfloat16 products and copies straight into shared memory."""


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """The parts as one matrix on the GPU: one product reads the rows once and fills the chip better."""

    weight: Tensor
    """[out, in]"""
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


class TritonOps:
    """See `engine.ops.Ops` for what each operation means."""

    def __init__(self, device: torch.device | str = "cuda", *, chip: Chip | None = None) -> None:
        """`chip`: for tests without a GPU, else the device's. Raises EngineError if that is too old."""
        self.device = torch.device(device)
        if chip is None:
            capability = torch.cuda.get_device_capability(self.device)
            if capability < CAPABILITY_MIN:
                raise EngineError(
                    f"{torch.cuda.get_device_name(self.device)} has compute capability {capability}, "
                    f"the kernels need {CAPABILITY_MIN}"
                )
            chip = Chip.of(self.device)
        self._chip = chip

    def pack(self, parts: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> FusedLinear:
        known = TORCH_DTYPES.values()
        if parts[0].dtype not in known:
            raise EngineError(f"weights of dtype {parts[0].dtype} are none of {', '.join(map(str, known))}")
        weight = _joined([part.to(self.device) for part in parts])
        held_biases = [None] * len(parts) if biases is None else list(biases)
        if all(bias is None for bias in held_biases):
            return FusedLinear(weight, None)
        filled = [
            part.new_zeros(part.shape[0]) if bias is None else bias
            for part, bias in zip(parts, held_biases, strict=True)
        ]
        return FusedLinear(weight, _joined([bias.to(self.device) for bias in filled]))

    def linear(self, rows: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, FusedLinear), "a weight belongs to the backend that packed it"
        return F.linear(rows, weight.weight, weight.bias)

    def gated_linear(self, rows: Tensor, weight: Linear) -> Tensor:
        return elementwise.gate(self.linear(rows, weight))

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return elementwise.rms_norm(rows, weight, epsilon)

    def add_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return elementwise.add_rms_norm(delta, residual, weight, epsilon)

    def rotate_(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        elementwise.rotate_(query, key, cos, sin)

    def write_kv(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        cache_moves.write_kv(keys, values, key, value, slots)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: StepTensors,
        scale: float,
        window_tokens: int | None,
    ) -> Tensor:
        """A mixed step is two launches side by side: decodes, then runs of new tokens."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes, sequences = step.decodes, step.kv_tokens.shape[0]
        if decodes:
            decode_attention(
                query[:decodes],
                keys,
                values,
                step.kv_tokens[:decodes],
                step.block_table[:decodes],
                output[:decodes],
                scale=scale,
                window_tokens=window_tokens,
                chip=self._chip,
            )
        if decodes < sequences:
            prefill_attention(
                query,
                keys,
                values,
                step.query_starts[decodes:],
                step.kv_tokens[decodes:],
                step.block_table[decodes:],
                output,
                first_row=decodes,
                query_tokens_max=step.query_tokens_max,
                kv_tokens_max=step.kv_tokens_max,
                scale=scale,
                window_tokens=window_tokens,
                chip=self._chip,
            )
        return output

    def gather_layer(self, layer: Tensor, block_ids: Tensor) -> Tensor:
        blocks = torch.empty((block_ids.shape[0], *layer.shape[1:]), dtype=layer.dtype, device=layer.device)
        cache_moves.gather_layer(layer, block_ids, blocks)
        return blocks

    def scatter_layer(self, layer: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        cache_moves.scatter_layer(layer, block_ids, blocks)

    def draw(self, logits: Tensor, parameters: DrawParameters) -> Tensor:
        return sampling.draw(logits, parameters)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """One tensor; a single part stays the one it is, as an embedding that is also the head."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
