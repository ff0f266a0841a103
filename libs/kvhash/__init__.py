"""Block identity: the hash chain that gives every KV block its content address.

Owns how tokens become block hashes, how a namespace keeps apart what must not be shared, and the
model fingerprint. Knows tokens and namespaces, nothing else: not who holds a block, nor where.
"""

from kvhash.chain import (
    BLOCK_TOKENS,
    HASH_BYTES,
    BlockHash,
    HashInputError,
    Namespace,
    TokenIds,
    block_hashes,
    extend,
    namespace,
    pack,
    unpack,
)
from kvhash.fingerprint import FingerprintError, model_fingerprint

__all__ = [
    "BLOCK_TOKENS",
    "HASH_BYTES",
    "BlockHash",
    "FingerprintError",
    "HashInputError",
    "Namespace",
    "TokenIds",
    "block_hashes",
    "extend",
    "model_fingerprint",
    "namespace",
    "pack",
    "unpack",
]
