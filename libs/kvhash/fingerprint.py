"""The fingerprint of a served model: equal fingerprints mean that KV blocks may be exchanged.

Covers everything that changes what a block's bytes mean: configuration, tokenizer, weights, the dtypes
and the block size. Weights are not read in full (a 70B model has 140 GB): names, shapes and sizes of all
tensors count, their contents by sampled windows. A copy of the same files has the same fingerprint on
every machine; the same model stored in other files may have another, which costs sharing, not safety.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TEXT_FILE_BYTES_MAX = 256 << 20
"""Bound of config.json and of tokenizer.json, which are read in full."""

WEIGHT_FILES_MAX = 4096
HEADER_BYTES_MAX = 100_000_000
"""Bound of one safetensors header; the format has the same."""

WINDOW_BYTES = 4096
WINDOWS_MAX = 2048
"""Bound of what is read of all tensors together: 8 MiB. Weights up to that size are read in full."""

_TAG = b"moonpool.fingerprint.v1"


class FingerprintError(Exception):
    """The folder holds no model that can be told from others; the message names file and limit."""


@dataclass(frozen=True, slots=True)
class _WeightFile:
    path: Path
    size_bytes: int
    header: bytes
    extents: tuple[tuple[int, int], ...]
    """(offset in the file, length) of each tensor, by offset."""


def model_fingerprint(folder: Path, dtype: str, kv_dtype: str, block_tokens: int) -> str:
    """32 hexadecimal digits for the model in `folder` served with these dtypes and this block size.

    `folder` is in Hugging Face's form: config.json, *.safetensors and, where the model has one,
    tokenizer.json. Raises FingerprintError.
    """
    hasher = xxhash.xxh3_128()
    try:
        for field in _fields(folder, dtype, kv_dtype, block_tokens):
            # With its length in front, a field cannot pass for the end of the one before it.
            hasher.update(len(field).to_bytes(8, "little"))
            hasher.update(field)
    except OSError as error:
        raise FingerprintError(f"{error.filename or folder}: {error.strerror}") from error
    return hasher.hexdigest()


def _fields(folder: Path, dtype: str, kv_dtype: str, block_tokens: int) -> Iterator[bytes]:
    yield _TAG
    for setting in (dtype, kv_dtype, str(block_tokens)):
        yield setting.encode()
    yield _text_file(folder / CONFIG_FILE)
    tokenizer = folder / TOKENIZER_FILE
    yield _text_file(tokenizer) if tokenizer.exists() else b""

    weights = _weight_files(folder)
    for weight_file in weights:
        yield weight_file.path.name.encode()
        yield weight_file.size_bytes.to_bytes(8, "little")
        yield weight_file.header
    yield from _sampled_windows(weights)


def _text_file(path: Path) -> bytes:
    size_bytes = path.stat().st_size
    if size_bytes > TEXT_FILE_BYTES_MAX:
        raise FingerprintError(f"{path}: {size_bytes} bytes, at most {TEXT_FILE_BYTES_MAX}")
    return path.read_bytes()


def _weight_files(folder: Path) -> list[_WeightFile]:
    paths = sorted(folder.glob("*.safetensors"), key=lambda path: path.name)
    if not paths:
        raise FingerprintError(f"{folder}: no *.safetensors file")
    if len(paths) > WEIGHT_FILES_MAX:
        raise FingerprintError(f"{folder}: {len(paths)} *.safetensors files, at most {WEIGHT_FILES_MAX}")
    return [_weight_file(path) for path in paths]


def _weight_file(path: Path) -> _WeightFile:
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        header_bytes_max = min(HEADER_BYTES_MAX, size_bytes - 8)
        if header_bytes > header_bytes_max:
            raise FingerprintError(f"{path}: a header of {header_bytes} bytes, at most {header_bytes_max}")
        header = file.read(header_bytes)
    extents = _tensor_extents(path, header, 8 + header_bytes, size_bytes)
    return _WeightFile(path, size_bytes, header, tuple(sorted(extents)))


def _tensor_extents(path: Path, header: bytes, data_start: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    try:
        offsets = [
            entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"
        ]
        extents = [(data_start + int(begin), int(end) - int(begin)) for begin, end in offsets]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FingerprintError(f"{path}: not a safetensors header: {error!r}") from error
    for offset, length in extents:
        if offset < data_start or length < 0 or offset + length > size_bytes:
            raise FingerprintError(f"{path}: a tensor lies outside of the file's {size_bytes} bytes")
        yield offset, length


def _sampled_windows(weights: list[_WeightFile]) -> Iterator[bytes]:
    """At most WINDOWS_MAX windows of WINDOW_BYTES, spread evenly over the tensors and within each."""
    lengths = [length for weight_file in weights for _, length in weight_file.extents]
    if sum(map(_windows, lengths)) <= WINDOWS_MAX:
        chosen, per_tensor = set(range(len(lengths))), WINDOWS_MAX
    else:
        tensors = min(len(lengths), WINDOWS_MAX)
        chosen = {position * len(lengths) // tensors for position in range(tensors)}
        per_tensor = WINDOWS_MAX // tensors
    tensor = 0
    for weight_file in weights:
        with weight_file.path.open("rb") as file:
            for offset, length in weight_file.extents:
                if tensor in chosen:
                    yield from _tensor_windows(file, offset, length, per_tensor)
                tensor += 1


def _tensor_windows(file: BinaryIO, offset: int, length: int, windows_max: int) -> Iterator[bytes]:
    windows = _windows(length)
    taken = min(windows, windows_max)
    for position in range(taken):
        start = position * windows // taken * WINDOW_BYTES
        file.seek(offset + start)
        yield file.read(min(WINDOW_BYTES, length - start))


def _windows(length: int) -> int:
    return -(-length // WINDOW_BYTES)
