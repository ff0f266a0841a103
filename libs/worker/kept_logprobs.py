"""Logprobs as they wait beside their tokens for the gateway's finish: packed, for they may be many."""

import struct

from policy.core import TokenLogprobs

_TOKEN = struct.Struct("<d")
_TOP = struct.Struct("<id")


def pack_logprobs(logprobs: TokenLogprobs) -> bytes:
    """8 bytes and 12 for each of the most probable tokens."""
    top = b"".join(_TOP.pack(token_id, logprob) for token_id, logprob in logprobs.top)
    return _TOKEN.pack(logprobs.token_logprob) + top


def unpack_logprobs(packed: bytes) -> TokenLogprobs:
    (token_logprob,) = _TOKEN.unpack_from(packed)
    return TokenLogprobs(token_logprob, tuple(_TOP.iter_unpack(packed[_TOKEN.size :])))
