"""The hash chain: tokens of one namespace to the content addresses of their blocks.

    h[-1] = xxh3_128(namespace)
    h[i]  = xxh3_128(h[i-1] || tokens[16 i : 16 (i+1)] as little-endian int32)

Only full blocks have a hash. A hash therefore stands for everything before it too: equal hashes mean
equal prefixes, and what a hash follows is part of what it is. Every process computes the same bytes.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import NewType, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import xxhash

BLOCK_TOKENS = 16
HASH_BYTES = 16
TOKEN_BYTES = 4
BLOCK_TOKENS_BYTES = BLOCK_TOKENS * TOKEN_BYTES
NAMESPACE_FIELD_BYTES_MAX = 65_535

BlockHash = NewType("BlockHash", bytes)
"""Content address of one full block and all before it: 16 bytes."""

Namespace = NewType("Namespace", bytes)
"""What must be equal before two requests may share a block; made by `namespace`."""

TokenIds: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.integer] | Sequence[int]
"""Token ids of a prompt: packed little-endian int32 bytes, a one-dimensional integer array, or ints."""

_NAMESPACE_TAG = b"moonpool.namespace.v1"
_TOKEN_DTYPE = np.dtype("<i4")
_BLOCK_DTYPE = np.dtype(f"V{BLOCK_TOKENS_BYTES}")
_HASH_DTYPE = np.dtype(f"V{HASH_BYTES}")
_TOKEN_RANGE = np.iinfo(np.int32)

# One call with 32,768 arguments packs at half the speed: its argument tuple falls out of the L1 cache.
_PACK_TOKENS = 1024
_pack_tokens = struct.Struct(f"<{_PACK_TOKENS}i").pack


class HashInputError(ValueError):
    """Token ids or hashes that have no chain; the message names the field and its limit."""


def namespace(cluster_seed: bytes, fingerprint: str, tenant_salt: str = "", adapter: str = "") -> Namespace:
    """The namespace of one cluster, model, tenant salt and adapter.

    Every field is preceded by its length, so no two different quadruples have the same encoding.
    """
    fields = {
        "cluster_seed": cluster_seed,
        "fingerprint": fingerprint.encode(),
        "tenant_salt": tenant_salt.encode(),
        "adapter": adapter.encode(),
    }
    parts = [_NAMESPACE_TAG]
    for name, value in fields.items():
        if len(value) > NAMESPACE_FIELD_BYTES_MAX:
            raise HashInputError(f"{name}: {len(value)} bytes, at most {NAMESPACE_FIELD_BYTES_MAX}")
        parts += (len(value).to_bytes(2, "little"), value)
    return Namespace(b"".join(parts))


def block_hashes(space: Namespace, token_ids: TokenIds) -> bytes:
    """Hashes of the full blocks of a prompt that starts with `token_ids`: 16 bytes each, in order.

    A list is packed, an int32 array or bytes are read in place. Raises HashInputError.
    """
    return extend(None, space, token_ids)


def extend(parent: BlockHash | None, space: Namespace, token_ids: TokenIds) -> bytes:
    """Hashes of the full blocks of `token_ids`, which follow the block `parent` in the same namespace.

    `parent` None starts at the first block of a prompt. Raises HashInputError.
    """
    if parent is None:
        parent = BlockHash(xxhash.xxh3_128_digest(space))
    elif len(parent) != HASH_BYTES:
        raise HashInputError(f"parent: {len(parent)} bytes, a block hash has {HASH_BYTES}")
    digest = xxhash.xxh3_128_digest
    block_hash: bytes = parent
    return b"".join([block_hash := digest(block_hash + block) for block in _full_blocks(token_ids)])


def unpack(packed: bytes) -> list[BlockHash]:
    """The single hashes of a packed list. Raises HashInputError."""
    if len(packed) % HASH_BYTES:
        raise HashInputError(f"block hashes: {len(packed)} bytes, not a multiple of {HASH_BYTES}")
    return cast(list[BlockHash], np.frombuffer(packed, _HASH_DTYPE).tolist())


def pack(hashes: Iterable[BlockHash]) -> bytes:
    """The inverse of `unpack`. Raises HashInputError."""
    items = list(hashes)
    for item in items:
        if len(item) != HASH_BYTES:
            raise HashInputError(f"block hash: {len(item)} bytes, not {HASH_BYTES}")
    return b"".join(items)


def _full_blocks(token_ids: TokenIds) -> list[bytes]:
    """The tokens of each full block as 64 little-endian bytes."""
    if isinstance(token_ids, np.ndarray):
        data = _array_bytes(token_ids)
    elif isinstance(token_ids, bytes | bytearray | memoryview):
        data = memoryview(token_ids).cast("B")
        if len(data) % TOKEN_BYTES:
            raise HashInputError(f"token_ids: {len(data)} bytes, not a multiple of {TOKEN_BYTES}")
    else:
        data = memoryview(_sequence_bytes(token_ids))
    blocks = len(data) // BLOCK_TOKENS_BYTES
    return cast(list[bytes], np.frombuffer(data, _BLOCK_DTYPE, count=blocks).tolist())


def _array_bytes(token_ids: npt.NDArray[np.integer]) -> memoryview:
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise HashInputError(
            f"token_ids: {token_ids.ndim}-dimensional {token_ids.dtype}, not a one-dimensional integer array"
        )
    if token_ids.dtype != _TOKEN_DTYPE and token_ids.size:
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < _TOKEN_RANGE.min or highest > _TOKEN_RANGE.max:
            raise HashInputError(f"token_ids: from {lowest} to {highest}, beyond int32")
    return np.ascontiguousarray(token_ids, _TOKEN_DTYPE).view(np.uint8).data


def _sequence_bytes(token_ids: Sequence[int]) -> bytes:
    whole = len(token_ids) - len(token_ids) % _PACK_TOKENS
    rest = token_ids[whole:]
    try:
        parts = [
            _pack_tokens(*token_ids[start : start + _PACK_TOKENS]) for start in range(0, whole, _PACK_TOKENS)
        ]
        parts.append(struct.pack(f"<{len(rest)}i", *rest))
    except struct.error as error:
        raise HashInputError(f"token_ids: {error}; a token id is an int32") from error
    return b"".join(parts)
