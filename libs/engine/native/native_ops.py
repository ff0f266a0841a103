"""The operations of a model on the CPU in float32, by compiled kernels that read the cache in place.

Weights are packed when a model is loaded, into the order in which products read them. What has no kernel
of its own here is the torch twin's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from engine.draw import DrawParameters
from engine.native.build import build_library
from engine.native.library import NativeLibrary
from engine.native.weight_store import FloatArray, WeightStore
from engine.ops import Linear, StepTensors
from engine.torch_ops import TorchOps

LAYOUT_VERSION = 1
"""Of packed weights: another one for any change of what `moonpool_pack` writes."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Matrices as panels of outputs, depth-major (src/linear.cpp)."""

    in_features: int
    out_features: int
    paired: bool
    """Two matrices of one shape share each panel half and half, so that a gate meets its up."""
    panels: FloatArray
    bias: FloatArray | None
    panels_address: int
    bias_address: int | None


@dataclass(frozen=True, slots=True)
class WeightShape:
    """How matrices [out_i, in] become panels: stacked, or as a pair if they are two of one shape."""

    in_features: int
    outs: tuple[int, ...]
    panel_outputs: int

    @classmethod
    def of(cls, parts: Sequence[Tensor], panel_outputs: int) -> "WeightShape":
        in_features = parts[0].shape[1]
        assert all(part.shape[1] == in_features for part in parts), "stacked matrices have the same inputs"
        return cls(in_features, tuple(part.shape[0] for part in parts), panel_outputs)

    @property
    def out_features(self) -> int:
        return sum(self.outs)

    @property
    def paired(self) -> bool:
        return len(self.outs) == 2 and self.outs[0] == self.outs[1]

    @property
    def panel_count(self) -> int:
        if self.paired:
            return -(-self.outs[0] // (self.panel_outputs // 2))
        return -(-self.out_features // self.panel_outputs)

    @property
    def floats(self) -> int:
        return self.panel_count * self.panel_outputs * self.in_features

    @property
    def places(self) -> tuple[tuple[int, int, bool], ...]:
        """Of each part: its first output, its number, whether it is one of a pair (src/linear.cpp: place)."""
        if self.paired:
            return (0, 0, True), (0, 1, True)
        return tuple((sum(self.outs[:part]), part, False) for part in range(len(self.outs)))


class NativeOps:
    """See `engine.ops.Ops` for what each operation means. Tensors are float32 on the CPU."""

    def __init__(self, library: NativeLibrary, store: WeightStore) -> None:
        self.device = torch.device("cpu")
        self._library = library
        self._store = store
        self._torch = TorchOps(self.device)

    @classmethod
    def build(cls, cache_folder: Path) -> "NativeOps":
        """`cache_folder` keeps the compiled kernels and the packed weights of this machine.

        Raises NativeUnavailableError saying why there are no kernels.
        """
        library = NativeLibrary(build_library(cache_folder))
        return cls(library, WeightStore(cache_folder / "weights"))

    def pack(self, parts: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> PackedLinear:
        held = [_rows(part) for part in parts]
        held_biases = [None] * len(held) if biases is None else list(biases)
        assert len(held_biases) == len(held)
        shape = WeightShape.of(held, self._library.panel)

        def pack_parts(address: int) -> None:
            for matrix, place in zip(held, shape.places, strict=True):
                stride, out = matrix.stride(0), matrix.shape[0]
                self._library.pack(matrix.data_ptr(), stride, out, shape.in_features, *place, address)

        key = f"{_content_hash(held)}-{LAYOUT_VERSION}-{shape.panel_outputs}"
        panels = self._store.obtain(key, shape.floats, pack_parts)
        bias = self._pack_bias(held_biases, shape)
        return PackedLinear(
            in_features=shape.in_features,
            out_features=shape.out_features,
            paired=shape.paired,
            panels=panels,
            bias=bias,
            panels_address=panels.ctypes.data,
            bias_address=None if bias is None else bias.ctypes.data,
        )

    def _pack_bias(self, biases: Sequence[Tensor | None], shape: "WeightShape") -> FloatArray | None:
        if all(bias is None for bias in biases):
            return None
        packed = np.zeros(shape.panel_count * shape.panel_outputs, dtype=np.float32)
        for bias, place in zip(biases, shape.places, strict=True):
            if bias is not None:
                row = bias.float().contiguous()
                self._library.pack_bias(row.data_ptr(), row.shape[0], *place, packed.ctypes.data)
        return packed

    def linear(self, rows: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, PackedLinear), "a weight belongs to the backend that packed it"
        return self._multiply(rows, weight, gated=False)

    def gated_linear(self, rows: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, PackedLinear), "a weight belongs to the backend that packed it"
        assert weight.paired, "gate and up are packed together"
        return self._multiply(rows, weight, gated=True)

    def _multiply(self, rows: Tensor, weight: PackedLinear, gated: bool) -> Tensor:
        rows = _rows(rows)
        count, in_features = rows.shape
        assert in_features == weight.in_features
        width = weight.out_features // 2 if gated else weight.out_features
        output = torch.empty((count, width))
        if count:
            self._library.linear(
                rows.data_ptr(),
                rows.stride(0),
                count,
                weight.panels_address,
                weight.bias_address,
                in_features,
                weight.out_features,
                weight.paired,
                gated,
                output.data_ptr(),
                width,
            )
        return output

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        if rows.dim() not in (2, 3) or rows.stride(-1) != 1:
            rows = rows.contiguous().view(-1, rows.shape[-1]) if rows.dim() < 2 else rows.contiguous()
        output = torch.empty(rows.shape)
        outer, outer_stride = rows.shape[0], rows.stride(0)
        inner, inner_stride = (1, 0) if rows.dim() == 2 else (rows.shape[1], rows.stride(1))
        self._library.rms_norm(
            rows.data_ptr(),
            outer,
            outer_stride,
            inner,
            inner_stride,
            rows.shape[-1],
            weight.data_ptr(),
            epsilon,
            output.data_ptr(),
        )
        return output

    def add_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        delta = _rows(delta)
        count, width = residual.shape
        assert delta.shape == residual.shape
        assert residual.stride(1) == 1
        output = torch.empty((count, width))
        self._library.add_rms_norm(
            delta.data_ptr(),
            delta.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            count,
            width,
            weight.data_ptr(),
            epsilon,
            output.data_ptr(),
        )
        return output

    def rotate_(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        count, query_heads, head_dim = query.shape
        if not (_heads_adjacent(query) and _heads_adjacent(key)):
            self._torch.rotate_(query, key, cos, sin)
            return
        cos, sin = cos.contiguous(), sin.contiguous()
        self._library.rotate(
            query.data_ptr(),
            query.stride(0),
            query_heads,
            key.data_ptr(),
            key.stride(0),
            key.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            count,
            head_dim // 2,
        )

    def write_kv(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        if not (_heads_adjacent(key) and _heads_adjacent(value) and _readable_in_place(keys, values)):
            self._torch.write_kv(keys, values, key, value, slots)
            return
        block_stride, head_stride, token_stride, _ = keys.stride()
        count, heads, head_dim = key.shape
        self._library.write_kv(
            keys.data_ptr(),
            values.data_ptr(),
            block_stride,
            head_stride,
            token_stride,
            keys.shape[2],
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            slots.data_ptr(),
            count,
            heads,
            head_dim,
        )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: StepTensors,
        scale: float,
        window_tokens: int | None,
    ) -> Tensor:
        count, heads, head_dim = query.shape
        if head_dim % self._library.width or not _readable_in_place(keys, values):
            return self._torch.attend(query, keys, values, step, scale, window_tokens)
        if not _heads_adjacent(query):
            query = query.contiguous()
        output = torch.empty((count, heads, head_dim))
        block_stride, head_stride, token_stride, _ = keys.stride()
        self._library.attend(
            query.data_ptr(),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            block_stride,
            head_stride,
            token_stride,
            keys.shape[2],
            step.query_starts.data_ptr(),
            step.kv_tokens.data_ptr(),
            step.block_table.data_ptr(),
            step.block_table.stride(0),
            step.kv_tokens.shape[0],
            step.decodes,
            heads,
            keys.shape[1],
            head_dim,
            scale,
            window_tokens or 0,
            output.data_ptr(),
        )
        return output

    def gather_layer(self, layer: Tensor, block_ids: Tensor) -> Tensor:
        return self._torch.gather_layer(layer, block_ids)

    def scatter_layer(self, layer: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        self._torch.scatter_layer(layer, block_ids, blocks)

    def draw(self, logits: Tensor, parameters: DrawParameters) -> Tensor:
        return self._torch.draw(logits, parameters)


def _rows(matrix: Tensor) -> Tensor:
    """As float32 with adjacent elements in each row, which is what the kernels read."""
    if matrix.dtype != torch.float32:
        matrix = matrix.float()
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _content_hash(parts: Sequence[Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(f"{tuple(part.shape)};".encode())
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


def _heads_adjacent(heads: Tensor) -> bool:
    """[N, H, D] whose heads follow each other within a row."""
    _, head_stride, stride = heads.stride()
    return stride == 1 and head_stride == heads.shape[2]


def _readable_in_place(keys: Tensor, values: Tensor) -> bool:
    """Blocks as the kernels can address them: adjacent dimensions, keys and values alike."""
    strides = keys.stride()
    return strides[3] == 1 and strides == values.stride()
