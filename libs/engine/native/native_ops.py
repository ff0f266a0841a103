"""The operations of a model on the CPU in float32, by compiled kernels that read the cache in place.

What has no kernel of its own here is the torch twin's.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.draw import DrawParameters
from engine.native.allocator import keep_freed_memory
from engine.native.kernel_library import NativeLibrary, load_library
from engine.native.packing import PackedLinear, WeightDtype, WeightPacker, float32_rows
from engine.native.weight_store import WeightStore
from engine.ops import Linear, StepTensors
from engine.torch_ops import TorchOps


class NativeOps:
    """See `engine.ops.Ops` for what each operation means. Tensors are float32 on the CPU.

    With int8 weights only the matrices are rounded; everything is still computed in float32.
    """

    def __init__(self, library: NativeLibrary, packer: WeightPacker) -> None:
        self.device = torch.device("cpu")
        self._library = library
        self._packer = packer
        self._torch = TorchOps(self.device)

    @classmethod
    def build(cls, cache_folder: Path, weight_dtype: WeightDtype = WeightDtype.FLOAT32) -> "NativeOps":
        """`cache_folder` keeps the compiled kernels and the packed weights of this machine.

        Raises NativeUnavailableError saying why there are no kernels.
        """
        library = load_library(cache_folder)
        keep_freed_memory()
        return cls(library, WeightPacker(library, WeightStore(cache_folder / "weights"), weight_dtype))

    def pack(self, parts: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> PackedLinear:
        return self._packer.pack(parts, biases)

    def linear(self, rows: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, PackedLinear), "a weight belongs to the backend that packed it"
        return self._multiply(rows, weight, gated=False)

    def gated_linear(self, rows: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, PackedLinear), "a weight belongs to the backend that packed it"
        assert weight.paired, "gate and up are packed together"
        return self._multiply(rows, weight, gated=True)

    def _multiply(self, rows: Tensor, weight: PackedLinear, gated: bool) -> Tensor:
        rows = float32_rows(rows)
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
                weight.quads_address,
                weight.scales_address,
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
        output = torch.empty(rows.shape)
        if rows.dim() not in (2, 3) or rows.stride(-1) != 1:
            rows = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]).contiguous()
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
        delta = float32_rows(delta)
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


def _heads_adjacent(heads: Tensor) -> bool:
    """[N, H, D] whose heads follow each other within a row."""
    _, head_stride, stride = heads.stride()
    return stride == 1 and head_stride == heads.shape[2]


def _readable_in_place(keys: Tensor, values: Tensor) -> bool:
    """Blocks as the kernels can address them: adjacent dimensions, keys and values alike."""
    strides = keys.stride()
    return strides[3] == 1 and strides == values.stride()
