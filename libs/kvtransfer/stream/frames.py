"""The frames of a stream after the handshake, as bytes: pure packing and parsing.

Every frame is a 16-byte header (kind, body length, request number) and a body:

    WRITE  caller → owner   token, ranges, payload length, tag, digest, the length of what came before it in
                            the same call; over tcp the payload follows as DATA
    READ   caller → owner   token, ranges, payload length; over tcp the payload comes back as DATA
    DATA   both ways        the next bytes of the request's payload
    ABORT  caller → owner   the caller gave up
    DONE   owner → caller   all bytes landed (write) or were sent (read); the digest of what was sent
    ERROR  owner → caller   code, how many bytes landed from the payload's start on (with the code PIECES: how
                            many a request may have), text

Each WRITE and READ is answered by exactly one DONE or ERROR. Numbers are little-endian. A transport
may add kinds of its own from OWN_KINDS_FROM on; what a side accepts is a table of kinds and body limits.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from kvtransfer.errors import (
    ArrivalError,
    BusyError,
    ChecksumError,
    FrameError,
    GrantError,
    PieceTooLarge,
    TransferError,
    TransportUnfit,
)
from kvtransfer.limits import (
    CHUNK_BYTES_MAX,
    PIECE_BYTES_MIN,
    RANGES_MAX,
    REGION_BYTES_MAX,
    TAG_BYTES_MAX,
    TOKEN_BYTES_MAX,
)
from kvtransfer.memory import FEW_RANGES, Ranges

_HEADER = struct.Struct("<B3xIQ")
_REQUEST = struct.Struct("<QQIHHBB6x")
_DONE = struct.Struct("<Q")
_ERROR = struct.Struct("<QH")
HEADER_BYTES = _HEADER.size
_RANGE_BYTES = 16
_WIRE_INTEGER = np.dtype("<i8")
DIGEST_BYTES = 16
OWN_KINDS_FROM = 16
_VERIFY = 1
_TAG_FOLLOWS = 2
_AWAITS_GO = 4
_FLAGS_MAX = _VERIFY | _TAG_FOLLOWS | _AWAITS_GO
_ERROR_TEXT_BYTES_MAX = 400


class Kind(IntEnum):
    WRITE = 1
    READ = 2
    DATA = 3
    ABORT = 4
    DONE = 5
    ERROR = 6


class ErrorCode(IntEnum):
    GRANT = 1
    BUSY = 2
    ABORTED = 3
    CHECKSUM = 4
    UNFIT = 5
    ARRIVAL = 6
    PIECES = 7


_ERROR_CLASSES: Mapping[ErrorCode, type[TransferError]] = {
    ErrorCode.GRANT: GrantError,
    ErrorCode.BUSY: BusyError,
    ErrorCode.ABORTED: TransferError,
    ErrorCode.CHECKSUM: ChecksumError,
    ErrorCode.UNFIT: TransportUnfit,
    ErrorCode.ARRIVAL: ArrivalError,
    ErrorCode.PIECES: PieceTooLarge,
}

_ERROR_CODES = {error_class: code for code, error_class in _ERROR_CLASSES.items()}

_REQUEST_BYTES_MAX = (
    _REQUEST.size + TOKEN_BYTES_MAX + TAG_BYTES_MAX + DIGEST_BYTES + RANGES_MAX * _RANGE_BYTES
)
BODY_BYTES_MAX: Mapping[int, int] = {
    Kind.WRITE: _REQUEST_BYTES_MAX,
    Kind.READ: _REQUEST_BYTES_MAX,
    Kind.DATA: CHUNK_BYTES_MAX,
    Kind.ABORT: 0,
    Kind.DONE: _DONE.size + DIGEST_BYTES,
    Kind.ERROR: _ERROR.size + _ERROR_TEXT_BYTES_MAX,
}


class Header(NamedTuple):
    kind: int
    body_bytes: int
    request: int


class TransferRequest(NamedTuple):
    """The body of WRITE and READ. The ranges are as the peer sent them: not checked.

    `digest` is of a WRITE's payload; a READ with `verify` wants one back. `earlier_bytes` landed by
    requests before this one and belong to the same call: the tag is for all of them. `tag_follows`: this
    is such an earlier one. `awaits_go`: the payload follows once the owner wants it.
    """

    token: str
    ranges: Ranges
    payload_bytes: int
    tag: bytes = b""
    digest: bytes = b""
    verify: bool = False
    earlier_bytes: int = 0
    tag_follows: bool = False
    awaits_go: bool = False


def pack_header(kind: int, body_bytes: int, request: int) -> bytes:
    return _HEADER.pack(kind, body_bytes, request)


def accepts(*kinds: int, own: Mapping[int, int] | None = None) -> Mapping[int, int]:
    """What a side receives: kind → most bytes of its body. `own` are a transport's own kinds."""
    return {**{kind: BODY_BYTES_MAX[kind] for kind in kinds}, **(own or {})}


def parse_header(data: memoryview, accepted: Mapping[int, int]) -> Header:
    """From HEADER_BYTES bytes. Raises FrameError for a kind that is not accepted or a body over its limit."""
    kind, body_bytes, request = _HEADER.unpack(data)
    body_bytes_max = accepted.get(kind)
    if body_bytes_max is None:
        raise FrameError(f"frame of kind {kind}, which this side does not receive")
    if body_bytes > body_bytes_max:
        raise FrameError(f"frame of kind {kind} with {body_bytes} bytes, at most {body_bytes_max}")
    return Header(kind, body_bytes, request)


def pack_request(kind: int, request: int, wanted: TransferRequest) -> bytes:
    """A whole WRITE or READ frame."""
    token = wanted.token.encode()
    flags = (_VERIFY if wanted.verify else 0) | (_TAG_FOLLOWS if wanted.tag_follows else 0)
    if wanted.awaits_go:
        flags |= _AWAITS_GO
    fixed = _REQUEST.pack(
        wanted.payload_bytes,
        wanted.earlier_bytes,
        len(wanted.ranges),
        len(token),
        len(wanted.tag),
        len(wanted.digest),
        flags,
    )
    body = b"".join(
        (fixed, token, wanted.tag, wanted.digest, wanted.ranges.astype(_WIRE_INTEGER, copy=False).tobytes())
    )
    return pack_header(kind, len(body), request) + body


def parse_request(body: bytearray) -> TransferRequest:
    """Raises FrameError unless the lengths add up and the ranges sum to the payload."""
    if len(body) < _REQUEST.size:
        raise FrameError(f"request body of {len(body)} bytes is too short")
    payload_bytes, earlier_bytes, range_count, token_bytes, tag_bytes, digest_bytes, flags = (
        _REQUEST.unpack_from(body)
    )
    tag_at = _REQUEST.size + token_bytes
    digest_at = tag_at + tag_bytes
    ranges_at = digest_at + digest_bytes
    if token_bytes > TOKEN_BYTES_MAX or range_count > RANGES_MAX or tag_bytes > TAG_BYTES_MAX:
        raise FrameError(f"request with {range_count} ranges, a token of {token_bytes}, a tag of {tag_bytes}")
    if digest_bytes not in (0, DIGEST_BYTES) or flags > _FLAGS_MAX:
        raise FrameError(f"request with a digest of {digest_bytes} bytes and flags {flags}")
    if len(body) != ranges_at + range_count * _RANGE_BYTES:
        raise FrameError(f"request body of {len(body)} bytes does not hold {range_count} ranges")
    try:
        token = body[_REQUEST.size : tag_at].decode("ascii")
    except UnicodeDecodeError:
        raise FrameError("the token is not ASCII") from None
    ranges = np.frombuffer(body, _WIRE_INTEGER, offset=ranges_at).reshape(range_count, 2)
    if _summed(ranges) != payload_bytes:
        raise FrameError("the lengths of the ranges do not sum to the payload")
    return TransferRequest(
        token,
        ranges,
        payload_bytes,
        bytes(body[tag_at:digest_at]) if tag_bytes else b"",
        bytes(body[digest_at:ranges_at]) if digest_bytes else b"",
        flags & _VERIFY != 0,
        earlier_bytes,
        flags & _TAG_FOLLOWS != 0,
        flags & _AWAITS_GO != 0,
    )


def _summed(ranges: Ranges) -> int:
    """The lengths are the peer's word so far: where their sum may overflow, they are summed as integers."""
    lengths = ranges[:, 1]
    if len(ranges) <= FEW_RANGES or lengths.min() < 0 or lengths.max() > REGION_BYTES_MAX:
        return sum(lengths.tolist())
    return int(lengths.sum())


def pack_abort(request: int) -> bytes:
    return pack_header(Kind.ABORT, 0, request)


def pack_done(request: int, payload_bytes: int, digest: bytes = b"") -> bytes:
    body = _DONE.pack(payload_bytes) + digest
    return pack_header(Kind.DONE, len(body), request) + body


def parse_done(body: bytearray) -> tuple[int, bytes]:
    """Payload bytes and the digest, empty where none was asked for."""
    if len(body) not in (_DONE.size, _DONE.size + DIGEST_BYTES):
        raise FrameError(f"DONE body of {len(body)} bytes")
    payload_bytes: int = _DONE.unpack_from(body)[0]
    return payload_bytes, bytes(body[_DONE.size :]) if len(body) > _DONE.size else b""


def pack_error(request: int, code: ErrorCode, text: str, landed_bytes: int = 0) -> bytes:
    cut = text.encode()[:_ERROR_TEXT_BYTES_MAX]
    return pack_header(Kind.ERROR, _ERROR.size + len(cut), request) + _ERROR.pack(landed_bytes, code) + cut


def error_code(error: TransferError) -> ErrorCode:
    """By which a peer is told of an error of ours."""
    return _ERROR_CODES[type(error)]


def parse_error(body: bytearray) -> TransferError:
    """The error that the peer reports, ready to be raised here."""
    if len(body) < _ERROR.size:
        raise FrameError(f"ERROR body of {len(body)} bytes is too short")
    landed_bytes, code = _ERROR.unpack_from(body)
    error_class = _ERROR_CLASSES.get(code)
    if error_class is None:
        raise FrameError(f"unknown error code {code}")
    error = error_class(body[_ERROR.size :].decode(errors="replace"))
    if isinstance(error, PieceTooLarge):
        if landed_bytes < PIECE_BYTES_MIN:
            raise FrameError(f"ERROR that wants pieces of {landed_bytes} bytes, at least {PIECE_BYTES_MIN}")
        error.piece_bytes_max = landed_bytes
    elif landed_bytes:
        error.landed = ((0, landed_bytes),)
    return error
