"""The frames of the TCP transport after the handshake, as bytes: pure packing and parsing.

Every frame is a 16-byte header (kind, body length, request number) and a body:

    WRITE  caller → owner   token, ranges, payload length; the payload follows as DATA
    READ   caller → owner   token, ranges, payload length; the payload comes back as DATA
    DATA   both ways        the next bytes of the request's payload
    ABORT  caller → owner   the caller gave up
    DONE   owner → caller   all bytes landed (write) or were sent (read)
    ERROR  owner → caller   code and text

Each WRITE and READ is answered by exactly one DONE or ERROR. Numbers are little-endian.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvtransfer.errors import BusyError, FrameError, GrantError, TransferError
from kvtransfer.limits import CHUNK_BYTES_MAX, RANGES_MAX, TOKEN_BYTES_MAX
from kvtransfer.memory import Ranges

_HEADER = struct.Struct("<B3xIQ")
_REQUEST = struct.Struct("<QIH2x")
_DONE = struct.Struct("<Q")
_ERROR = struct.Struct("<H")
HEADER_BYTES = _HEADER.size
_RANGE_BYTES = 16
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


BODY_BYTES_MAX: dict[Kind, int] = {
    Kind.WRITE: _REQUEST.size + TOKEN_BYTES_MAX + RANGES_MAX * _RANGE_BYTES,
    Kind.READ: _REQUEST.size + TOKEN_BYTES_MAX + RANGES_MAX * _RANGE_BYTES,
    Kind.DATA: CHUNK_BYTES_MAX,
    Kind.ABORT: 0,
    Kind.DONE: _DONE.size,
    Kind.ERROR: _ERROR.size + _ERROR_TEXT_BYTES_MAX,
}


@dataclass(frozen=True, slots=True)
class Header:
    kind: Kind
    body_bytes: int
    request: int


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """The body of WRITE and READ. The ranges are as the peer sent them: not checked."""

    token: str
    ranges: Ranges
    payload_bytes: int


def pack_header(kind: Kind, body_bytes: int, request: int) -> bytes:
    return _HEADER.pack(kind, body_bytes, request)


def parse_header(data: memoryview) -> Header:
    """From HEADER_BYTES bytes. Raises FrameError for an unknown kind or a body over its limit."""
    number, body_bytes, request = _HEADER.unpack(data)
    try:
        kind = Kind(number)
    except ValueError:
        raise FrameError(f"unknown frame kind {number}") from None
    if body_bytes > BODY_BYTES_MAX[kind]:
        raise FrameError(f"{kind.name} frame of {body_bytes} bytes, at most {BODY_BYTES_MAX[kind]}")
    return Header(kind, body_bytes, request)


def pack_request(kind: Kind, request: int, token: str, ranges: Ranges, payload_bytes: int) -> bytes:
    """A whole WRITE or READ frame."""
    name = token.encode()
    body = _REQUEST.pack(payload_bytes, len(ranges), len(name)) + name + ranges.astype("<i8").tobytes()
    return pack_header(kind, len(body), request) + body


def parse_request(body: bytearray) -> TransferRequest:
    """Raises FrameError unless the lengths add up and the ranges sum to the payload."""
    if len(body) < _REQUEST.size:
        raise FrameError(f"request body of {len(body)} bytes is too short")
    payload_bytes, range_count, token_bytes = _REQUEST.unpack_from(body)
    ranges_at = _REQUEST.size + token_bytes
    if token_bytes > TOKEN_BYTES_MAX or range_count > RANGES_MAX:
        raise FrameError(f"request with {range_count} ranges and a token of {token_bytes} bytes")
    if len(body) != ranges_at + range_count * _RANGE_BYTES:
        raise FrameError(f"request body of {len(body)} bytes does not hold {range_count} ranges")
    try:
        token = body[_REQUEST.size : ranges_at].decode("ascii")
    except UnicodeDecodeError:
        raise FrameError("the token is not ASCII") from None
    ranges = np.frombuffer(body, dtype="<i8", count=range_count * 2, offset=ranges_at)
    ranges = ranges.reshape(range_count, 2).astype(np.int64)
    # Python integers: the lengths are the peer's word so far and may overflow an int64.
    if sum(ranges[:, 1].tolist()) != payload_bytes:
        raise FrameError("the lengths of the ranges do not sum to the payload")
    return TransferRequest(token, ranges, payload_bytes)


def pack_abort(request: int) -> bytes:
    return pack_header(Kind.ABORT, 0, request)


def pack_done(request: int, payload_bytes: int) -> bytes:
    return pack_header(Kind.DONE, _DONE.size, request) + _DONE.pack(payload_bytes)


def parse_done(body: bytearray) -> int:
    if len(body) != _DONE.size:
        raise FrameError(f"DONE body of {len(body)} bytes")
    payload_bytes: int = _DONE.unpack(body)[0]
    return payload_bytes


def pack_error(request: int, code: ErrorCode, text: str) -> bytes:
    cut = text.encode()[:_ERROR_TEXT_BYTES_MAX]
    return pack_header(Kind.ERROR, _ERROR.size + len(cut), request) + _ERROR.pack(code) + cut


def parse_error(body: bytearray) -> TransferError:
    """The error that the peer reports, ready to be raised here."""
    if len(body) < _ERROR.size:
        raise FrameError(f"ERROR body of {len(body)} bytes is too short")
    (code,) = _ERROR.unpack_from(body)
    text = body[_ERROR.size :].decode(errors="replace")
    match code:
        case ErrorCode.GRANT:
            return GrantError(text)
        case ErrorCode.BUSY:
            return BusyError(text)
        case ErrorCode.ABORTED:
            return TransferError(text)
        case _:
            raise FrameError(f"unknown error code {code}")
