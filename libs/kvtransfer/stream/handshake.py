"""The handshake of a stream, pure: messages, proofs, and what they bind.

    caller → owner  HELLO      caller's nonce, the link's id, caller's name, the name it expects to meet
    owner  → caller CHALLENGE  owner's nonce
    caller → owner  PROOF      HMAC-SHA256(secret, "caller", names, link id, nonces)
    owner  → caller WELCOME    HMAC-SHA256(secret, "owner", names, link id, nonces)
    owner  → caller REFUSED    instead of any of its messages: a reason

Each side proves that it knows the secret over a fresh nonce of the other; role and names are under
the MAC, so a proof cannot be reflected or used for another pair. Streams of one link carry the same
random id; a peer that connects with another id starts anew. The caller proves first: the owner
signs nothing for strangers. Nothing of the secret is on the wire. What follows the handshake is not
encrypted: the network between instances is trusted not to take over connections.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from kvtransfer.errors import AuthError, BusyError, FrameError, PeerLostError, TransferError
from kvtransfer.limits import NAME_BYTES_MAX

PROTOCOL_VERSION = 2
NONCE_BYTES = 32
LINK_ID_BYTES = 16
_MAC_BYTES = 32
_DOMAIN = b"moonpool.kvtransfer.1"
_PREFIX = struct.Struct("<4sBBH")
_MAGIC = b"MPKV"
PREFIX_BYTES = _PREFIX.size
_BODY_BYTES_MAX = NONCE_BYTES + LINK_ID_BYTES + 2 * (1 + NAME_BYTES_MAX)


class Step(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5


class Refusal(IntEnum):
    VERSION = 1
    NAME = 2
    SECRET = 3
    BUSY = 4


class Role(IntEnum):
    CALLER = 1
    OWNER = 2


@dataclass(frozen=True, slots=True)
class Hello:
    nonce: bytes
    link_id: bytes
    caller: str
    owner: str


def pack(step: Step, body: bytes) -> bytes:
    assert len(body) <= _BODY_BYTES_MAX
    return _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, step, len(body)) + body


def parse_prefix(data: bytes) -> tuple[Step, int]:
    """Step and body length. Raises FrameError for anything but our protocol in our version."""
    magic, version, number, body_bytes = _PREFIX.unpack(data)
    if magic != _MAGIC:
        raise FrameError("the peer does not speak this protocol")
    if version != PROTOCOL_VERSION:
        raise FrameError(f"the peer speaks version {version}, we speak {PROTOCOL_VERSION}")
    if body_bytes > _BODY_BYTES_MAX:
        raise FrameError(f"handshake message of {body_bytes} bytes, at most {_BODY_BYTES_MAX}")
    try:
        return Step(number), body_bytes
    except ValueError:
        raise FrameError(f"unknown handshake step {number}") from None


def pack_hello(hello: Hello) -> bytes:
    return pack(Step.HELLO, hello.nonce + hello.link_id + _prefixed(hello.caller) + _prefixed(hello.owner))


def parse_hello(body: bytes) -> Hello:
    names_at = NONCE_BYTES + LINK_ID_BYTES
    if len(body) < names_at:
        raise FrameError("HELLO is too short")
    caller, rest = _take_name(body[names_at:])
    owner, rest = _take_name(rest)
    if rest:
        raise FrameError("HELLO is too long")
    return Hello(body[:NONCE_BYTES], body[NONCE_BYTES:names_at], caller, owner)


def proof(secret: bytes, role: Role, hello: Hello, owner_nonce: bytes) -> bytes:
    """What the side in `role` sends. Every field is of fixed length or carries its length."""
    message = b"".join((_DOMAIN, bytes((role,)), _prefixed(hello.caller), _prefixed(hello.owner)))
    message += hello.link_id + hello.nonce + owner_nonce
    return hmac.new(secret, message, hashlib.sha256).digest()


def check_proof(secret: bytes, role: Role, hello: Hello, owner_nonce: bytes, sent: bytes) -> None:
    """Raises AuthError unless `sent` is the proof of the side in `role`; takes the same time either way."""
    if not hmac.compare_digest(proof(secret, role, hello, owner_nonce), sent):
        raise AuthError("the peer does not know the cluster secret")


def check_body(step: Step, expected: Step, body: bytes) -> None:
    """Raises FrameError unless it is the expected step with a body of its size, or the refusal's error."""
    if step is Step.REFUSED:
        raise refusal_error(body)
    if step is not expected:
        raise FrameError(f"handshake step {step.name} where {expected.name} is due")
    fixed = {Step.CHALLENGE: NONCE_BYTES, Step.PROOF: _MAC_BYTES, Step.WELCOME: _MAC_BYTES}.get(step)
    if fixed is not None and len(body) != fixed:
        raise FrameError(f"{step.name} of {len(body)} bytes, not {fixed}")


def pack_refused(reason: Refusal) -> bytes:
    return pack(Step.REFUSED, bytes((reason,)))


def refusal_error(body: bytes) -> TransferError:
    """What a caller raises on REFUSED. A wrong name means that another process has the address now."""
    match body[0] if len(body) == 1 else None:
        case Refusal.VERSION:
            return FrameError("the peer speaks another version")
        case Refusal.NAME:
            return PeerLostError("another peer listens at this address")
        case Refusal.SECRET:
            return AuthError("the peer does not accept our cluster secret")
        case Refusal.BUSY:
            return BusyError("the peer has too many connections")
        case _:
            return FrameError("the peer refused for an unknown reason")


def _prefixed(name: str) -> bytes:
    data = name.encode()
    assert len(data) <= NAME_BYTES_MAX
    return bytes((len(data),)) + data


def _take_name(data: bytes) -> tuple[str, bytes]:
    if not data or not data[0] or len(data) < 1 + data[0]:
        raise FrameError("HELLO has a malformed name")
    end = 1 + data[0]
    try:
        return data[1:end].decode(), data[end:]
    except UnicodeDecodeError:
        raise FrameError("HELLO has a name that is not UTF-8") from None
