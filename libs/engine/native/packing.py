"""Matrices packed into panels of outputs, as the compiled products read them (src/weight.h).

One file of the weight store holds one packed weight: float32 panels, or int8 quads and after them the
scales, one for each output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
import xxhash
from torch import Tensor

from engine.native.kernel_library import NativeLibrary
from engine.native.weight_store import FloatArray, WeightStore

LAYOUT_VERSION = 1
"""Of packed weights: another one for any change of what the kernels' packing writes."""
QUAD = 4
"""Depths of an int8 weight that share four bytes (src/product.h)."""


class WeightDtype(StrEnum):
    FLOAT32 = "float32"
    INT8 = "int8"
    """Rounded to 127 steps of each output's largest weight: a quarter of the bytes to read."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight and where its parts lie; an address is None where there is no such part."""

    in_features: int
    out_features: int
    paired: bool
    """Two matrices of one shape share each panel half and half, so that a gate meets its up."""
    panels_address: int | None
    quads_address: int | None
    scales_address: int | None
    bias_address: int | None
    memory: tuple[FloatArray, ...]
    """What the addresses point into, kept alive."""


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
    def lanes(self) -> int:
        """Outputs of all panels, those that only fill one up included."""
        panel_count = (
            -(-self.outs[0] // (self.panel_outputs // 2))
            if self.paired
            else -(-self.out_features // self.panel_outputs)
        )
        return panel_count * self.panel_outputs

    @property
    def quads(self) -> int:
        return self.lanes * -(-self.in_features // QUAD)

    @property
    def places(self) -> tuple[tuple[int, int, bool], ...]:
        """Of each part: its first output, its number, whether it is one of a pair (src/weight.h: place)."""
        if self.paired:
            return (0, 0, True), (0, 1, True)
        return tuple((sum(self.outs[:part]), part, False) for part in range(len(self.outs)))


class WeightPacker:
    """Packs weights into a store that shares them between processes."""

    def __init__(self, library: NativeLibrary, store: WeightStore, weight_dtype: WeightDtype) -> None:
        self._library = library
        self._store = store
        self._weight_dtype = weight_dtype

    def pack(self, parts: Sequence[Tensor], biases: Sequence[Tensor | None] | None) -> PackedLinear:
        """See `engine.ops.Ops.pack`."""
        held = [float32_rows(part) for part in parts]
        held_biases = [None] * len(held) if biases is None else list(biases)
        assert len(held_biases) == len(held)
        shape = WeightShape.of(held, self._library.panel)
        key = f"{_content_hash(held)}-{self._weight_dtype}-{LAYOUT_VERSION}-{shape.panel_outputs}"
        bias = self._pack_bias(held_biases, shape)
        if self._weight_dtype is WeightDtype.INT8:
            weight = self._store.obtain(
                key, shape.quads + shape.lanes, lambda address: self._pack_int8(held, shape, address)
            )
            panels_address, quads_address = None, weight.ctypes.data
            scales_address = quads_address + shape.quads * weight.itemsize
        else:
            weight = self._store.obtain(
                key,
                shape.lanes * shape.in_features,
                lambda address: self._pack_float32(held, shape, address),
            )
            panels_address, quads_address, scales_address = weight.ctypes.data, None, None
        return PackedLinear(
            in_features=shape.in_features,
            out_features=shape.out_features,
            paired=shape.paired,
            panels_address=panels_address,
            quads_address=quads_address,
            scales_address=scales_address,
            bias_address=None if bias is None else bias.ctypes.data,
            memory=(weight,) if bias is None else (weight, bias),
        )

    def _pack_float32(self, parts: Sequence[Tensor], shape: WeightShape, address: int) -> None:
        for matrix, place in zip(parts, shape.places, strict=True):
            stride, out = matrix.stride(0), matrix.shape[0]
            self._library.pack(matrix.data_ptr(), stride, out, shape.in_features, *place, address)

    def _pack_int8(self, parts: Sequence[Tensor], shape: WeightShape, address: int) -> None:
        scales_address = address + shape.quads * QUAD
        for matrix, place in zip(parts, shape.places, strict=True):
            stride, out = matrix.stride(0), matrix.shape[0]
            self._library.pack_int8(
                matrix.data_ptr(), stride, out, shape.in_features, *place, address, scales_address
            )

    def _pack_bias(self, biases: Sequence[Tensor | None], shape: WeightShape) -> FloatArray | None:
        if all(bias is None for bias in biases):
            return None
        packed = np.zeros(shape.lanes, dtype=np.float32)
        for bias, place in zip(biases, shape.places, strict=True):
            if bias is not None:
                row = bias.float().contiguous()
                self._library.pack_bias(row.data_ptr(), row.shape[0], *place, packed.ctypes.data)
        return packed


def float32_rows(matrix: Tensor) -> Tensor:
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
