"""Writes a safetensors file one tensor at a time, so that memory never holds more than one.

The library's own writer wants all tensors at once, twice over. The format is small: eight bytes of
header length, a JSON header, the tensors' bytes.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

ALIGNMENT_BYTES = 64
"""Where the data begins: a mapped tensor then starts on a cache line."""

Float32Array = npt.NDArray[np.float32]


def write_float32(
    path: Path,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    tensors: Iterable[Float32Array],
) -> None:
    """Writes `tensors`, which come in the order of `shapes`, as little-endian float32."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes:
        end = offset + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(len(encoded) + 8) % ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for (name, shape), tensor in zip(shapes, tensors, strict=True):
            if tensor.shape != shape:
                raise ValueError(f"tensor {name} has shape {tensor.shape}, announced as {shape}")
            file.write(np.ascontiguousarray(tensor, dtype="<f4").data)
