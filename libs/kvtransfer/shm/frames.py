"""The frames of the shared memory transport, beside those of `stream.frames`: pure packing and parsing.

    BOARD   both ways       a descriptor: the sender's board; the first frame of each side
    REGION  both ways       a region of the sender, with a descriptor if it can be mapped
    DROP    both ways       the region is gone
    PUT     caller → owner  a WRITE whose source the owner copies: where the source is, and the request
    GO      owner → caller  the answer to a READ: where the source is, and which grant it falls under
    MOVED   caller → owner  what the caller read since it last said so
    ALIVE   owner → caller  a long copy goes on

PUT is answered by DONE or ERROR, READ by GO or ERROR. Numbers are little-endian.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvtransfer.errors import FrameError
from kvtransfer.limits import RANGES_MAX, REGION_BYTES_MAX
from kvtransfer.memory import Ranges
from kvtransfer.stream import frames
from kvtransfer.stream.frames import (
    BODY_BYTES_MAX,
    DIGEST_BYTES,
    OWN_KINDS_FROM,
    TransferRequest,
    pack_header,
)

_REGION = struct.Struct("<QQQIB3x")
_DROP = struct.Struct("<I")
_PUT = struct.Struct("<QIII4x")
_GO = struct.Struct("<QIIIB3x")
_MOVED = struct.Struct("<QII")
_RANGE_BYTES = 16
STRETCHES_TOLD_MAX = 1024
"""A grant of more separate stretches is asked for at every read: the caller does not keep it."""


class OwnKind(IntEnum):
    BOARD = OWN_KINDS_FROM
    REGION = OWN_KINDS_FROM + 1
    DROP = OWN_KINDS_FROM + 2
    PUT = OWN_KINDS_FROM + 3
    GO = OWN_KINDS_FROM + 4
    MOVED = OWN_KINDS_FROM + 5
    ALIVE = OWN_KINDS_FROM + 6


OWN_BODY_BYTES_MAX = {
    OwnKind.BOARD: 0,
    OwnKind.REGION: _REGION.size,
    OwnKind.DROP: _DROP.size,
    OwnKind.PUT: _PUT.size + RANGES_MAX * _RANGE_BYTES + BODY_BYTES_MAX[frames.Kind.WRITE],
    OwnKind.GO: _GO.size + DIGEST_BYTES + STRETCHES_TOLD_MAX * _RANGE_BYTES,
    OwnKind.MOVED: _MOVED.size,
    OwnKind.ALIVE: 0,
}


@dataclass(frozen=True, slots=True)
class RegionFrame:
    """`mapped`: a descriptor comes along, and the region begins `offset` bytes into it. Otherwise `address`
    is where it is in the sender's process."""

    region_id: int
    region_bytes: int
    mapped: bool
    offset: int
    address: int


@dataclass(frozen=True, slots=True)
class PutFrame:
    """`source` as the peer sent it: not checked. Slot and epoch are of its board."""

    region_id: int
    slot: int
    epoch: int
    source: Ranges
    request: TransferRequest


@dataclass(frozen=True, slots=True)
class GoFrame:
    """`stretches` of the whole grant; nothing if there are too many to keep."""

    region_id: int
    slot: int
    epoch: int
    digest: bytes
    stretches: Ranges | None


@dataclass(frozen=True, slots=True)
class MovedFrame:
    payload_bytes: int
    reads: int
    failures: int


def pack_board() -> bytes:
    return pack_header(OwnKind.BOARD, 0, 0)


def pack_region(region: RegionFrame) -> bytes:
    body = _REGION.pack(
        region.region_bytes, region.offset, region.address, region.region_id, 1 if region.mapped else 0
    )
    return pack_header(OwnKind.REGION, len(body), 0) + body


def parse_region(body: bytes) -> RegionFrame:
    _fits("REGION", body, _REGION.size)
    region_bytes, offset, address, region_id, mapped = _REGION.unpack(body)
    if not 0 < region_bytes <= REGION_BYTES_MAX or offset > REGION_BYTES_MAX or mapped > 1:
        raise FrameError(f"REGION of {region_bytes} bytes at {offset}")
    return RegionFrame(region_id, region_bytes, bool(mapped), offset, address)


def pack_drop(region_id: int) -> bytes:
    return pack_header(OwnKind.DROP, _DROP.size, 0) + _DROP.pack(region_id)


def parse_drop(body: bytes) -> int:
    _fits("DROP", body, _DROP.size)
    region_id: int = _DROP.unpack(body)[0]
    return region_id


def pack_put(request: int, put: PutFrame) -> bytes:
    wanted = frames.pack_request(frames.Kind.WRITE, request, put.request)[frames.HEADER_BYTES :]
    fixed = _PUT.pack(put.epoch, put.region_id, put.slot, len(put.source))
    body = b"".join((fixed, put.source.astype("<i8", copy=False).tobytes(), wanted))
    return pack_header(OwnKind.PUT, len(body), request) + body


def parse_put(body: bytes) -> PutFrame:
    if len(body) < _PUT.size:
        raise FrameError(f"PUT body of {len(body)} bytes is too short")
    epoch, region_id, slot, count = _PUT.unpack_from(body)
    request_at = _PUT.size + count * _RANGE_BYTES
    if count > RANGES_MAX or len(body) < request_at:
        raise FrameError(f"PUT body of {len(body)} bytes does not hold {count} ranges")
    source = _ranges(body, count, _PUT.size)
    return PutFrame(region_id, slot, epoch, source, frames.parse_request(bytearray(body[request_at:])))


def pack_go(request: int, go: GoFrame) -> bytes:
    kept = go.stretches is not None
    stretches = go.stretches if go.stretches is not None else np.empty((0, 2), np.int64)
    fixed = _GO.pack(go.epoch, go.region_id, go.slot, len(stretches), kept | bool(go.digest) << 1)
    body = b"".join((fixed, go.digest, stretches.astype("<i8", copy=False).tobytes()))
    return pack_header(OwnKind.GO, len(body), request) + body


def parse_go(body: bytes) -> GoFrame:
    if len(body) < _GO.size:
        raise FrameError(f"GO body of {len(body)} bytes is too short")
    epoch, region_id, slot, count, flags = _GO.unpack_from(body)
    stretches_at = _GO.size + (DIGEST_BYTES if flags & 2 else 0)
    if flags > 3 or len(body) != stretches_at + count * _RANGE_BYTES:
        raise FrameError(f"GO body of {len(body)} bytes does not hold {count} stretches")
    stretches = _ranges(body, count, stretches_at) if flags & 1 else None
    return GoFrame(region_id, slot, epoch, bytes(body[_GO.size : stretches_at]), stretches)


def pack_alive() -> bytes:
    return pack_header(OwnKind.ALIVE, 0, 0)


def pack_moved(moved: MovedFrame) -> bytes:
    body = _MOVED.pack(moved.payload_bytes, moved.reads, moved.failures)
    return pack_header(OwnKind.MOVED, len(body), 0) + body


def parse_moved(body: bytes) -> MovedFrame:
    _fits("MOVED", body, _MOVED.size)
    return MovedFrame(*_MOVED.unpack(body))


def _fits(name: str, body: bytes, body_bytes: int) -> None:
    if len(body) != body_bytes:
        raise FrameError(f"{name} body of {len(body)} bytes, not {body_bytes}")


def _ranges(body: bytes, count: int, at: int) -> Ranges:
    return (
        np.frombuffer(body, "<i8", count=2 * count, offset=at).reshape(count, 2).astype(np.int64, copy=False)
    )
