"""API keys: how one is made, what is kept of it, and how it is found in a request's headers. Pure but for
`new_key`.

Only the SHA-256 of a key is kept. A slow password hash would add nothing: it is there for secrets that
people choose, and ours has 256 random bits, which nobody guesses whatever a guess costs; it would cost
every request a tenth of a second.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping

KEY_PREFIX = "mp-"
"""So that a key that leaked into a text is recognised for what it is."""
KEY_BYTES = 32
KEY_CHARS_MAX = 512
HASH_PREFIX = "sha256:"
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_BEARER = "bearer "
KEY_HEADERS = ("api-key", "x-api-key")
"""Where clients of other services put it; `Authorization` goes first."""


def new_key() -> str:
    """A key with 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> bytes:
    """The SHA-256 of a key. What is no text has one, too: it is nobody's."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def hash_line(key: str) -> str:
    """What is written into settings instead of the key."""
    return HASH_PREFIX + digest_of(key).hex()


def digest_in(text: str) -> bytes | None:
    """The digest that `sha256:<64 hexadecimal digits>` spells; None where it is nothing of the kind."""
    match = _HASH.fullmatch(text.strip().lower())
    return bytes.fromhex(match[1]) if match else None


def key_in(headers: Mapping[str, str]) -> str | None:
    """The key that a request shows, by header names in lower case or any; None where it shows none.

    `Authorization: Bearer KEY`, else `api-key`, else `x-api-key`.
    """
    authorization = headers.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip() or None
    if authorization:
        return None
    for name in KEY_HEADERS:
        if key := headers.get(name, "").strip():
            return key
    return None
