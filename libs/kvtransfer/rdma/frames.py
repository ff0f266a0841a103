"""The frames that rdma adds to those of a stream, as bytes: pure packing and parsing.

    LANES    caller → owner   the caller's queue pairs, each with the owner's device that it wants to meet
    LANES    owner → caller   the queue pairs that the owner made for them, in the same order
    READY    caller → owner   a byte per lane: 1 where a first operation went through, 0 for lanes given up
    GO       owner → caller   the request is granted: address of the region, keys by stretch and lane
    FIN      caller → owner   all bytes of a READ are there
    REVOKED  owner → caller   the grant of a request that has keys was revoked: stop, and answer with ABORT
    RESET    owner → caller   the owner took its queue pairs away, since the caller of these did not stop

WRITE and READ open a request as on every stream; a WRITE has no DATA frames, its parts are announced to the
owner by immediates that carry the request's number. A refused request gets ERROR, a finished WRITE gets
DONE, a READ with `verify` gets DONE with the digest after its FIN. Numbers are little-endian.
"""

import ipaddress
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvtransfer.errors import FrameError
from kvtransfer.limits import REGION_BYTES_MAX
from kvtransfer.rdma.ports import MTU_BYTES
from kvtransfer.rdma.work import RemoteKeys
from kvtransfer.stream.frames import OWN_KINDS_FROM, pack_header

LANES_MAX = 16
"""Queue pairs of one link."""
STRETCHES_MAX = 65_536
"""Stretches in one GO."""
RESET_REQUESTS_MAX = 4096
REQUEST_NUMBER_MAX = (1 << 32) - 1
"""An immediate has 32 bits. A link whose numbers are used up is closed and made anew."""

NO_PAIR = 0
"""No number of a reliable-connected queue pair."""

_LANE = struct.Struct("<16sIIHHBBxx")
_GO = struct.Struct("<QIH2x")
_NUMBER_BITS_MAX = 24


class RdmaKind(IntEnum):
    LANES = OWN_KINDS_FROM
    READY = OWN_KINDS_FROM + 1
    GO = OWN_KINDS_FROM + 2
    FIN = OWN_KINDS_FROM + 3
    REVOKED = OWN_KINDS_FROM + 4
    RESET = OWN_KINDS_FROM + 5


OWN_BODY_BYTES_MAX = {
    RdmaKind.LANES: LANES_MAX * _LANE.size,
    RdmaKind.READY: LANES_MAX,
    RdmaKind.GO: _GO.size + STRETCHES_MAX * (16 + 4 * LANES_MAX),
    RdmaKind.FIN: 0,
    RdmaKind.REVOKED: 0,
    RdmaKind.RESET: 8 * RESET_REQUESTS_MAX,
}


@dataclass(frozen=True, slots=True)
class LaneEnd:
    """One queue pair as the other side must know it. `device` is an index into the owner's devices;
    `reads_max` is how many READs this end serves or makes at once. An owner that could not make one answers
    with `number` NO_PAIR."""

    device: int
    gid: str
    number: int
    first_packet: int
    lid: int
    mtu_bytes: int
    reads_max: int


def pack_lanes(lanes: list[LaneEnd]) -> bytes:
    body = b"".join(
        _LANE.pack(
            ipaddress.IPv6Address(lane.gid).packed,
            *(lane.number, lane.first_packet, lane.lid, lane.mtu_bytes, lane.device, lane.reads_max),
        )
        for lane in lanes
    )
    return pack_header(RdmaKind.LANES, len(body), 0) + body


def parse_lanes(body: bytes | bytearray) -> list[LaneEnd]:
    """Raises FrameError for no lane, and for numbers that no queue pair has."""
    if not body or len(body) % _LANE.size:
        raise FrameError(f"LANES body of {len(body)} bytes")
    lanes = []
    for gid, number, first_packet, lid, mtu_bytes, device, reads_max in _LANE.iter_unpack(body):
        if number >> _NUMBER_BITS_MAX or first_packet >> _NUMBER_BITS_MAX:
            raise FrameError(f"LANES with queue pair {number} and packet number {first_packet}")
        if mtu_bytes not in MTU_BYTES or not reads_max:
            raise FrameError(f"LANES with an MTU of {mtu_bytes} bytes and {reads_max} reads")
        text = ipaddress.IPv6Address(gid).exploded
        lanes.append(LaneEnd(device, text, number, first_packet, lid, mtu_bytes, reads_max))
    return lanes


def pack_ready(usable: list[bool]) -> bytes:
    return pack_header(RdmaKind.READY, len(usable), 0) + bytes(usable)


def parse_ready(body: bytes | bytearray, lanes: int) -> list[bool]:
    """Raises FrameError unless it speaks of each lane and one is usable."""
    if len(body) != lanes or not any(body) or any(value > 1 for value in body):
        raise FrameError("READY does not fit the lanes")
    return [bool(value) for value in body]


def pack_go(request: int, keys: RemoteKeys) -> bytes:
    body = b"".join(
        (
            _GO.pack(keys.base_address, *keys.keys.shape),
            keys.starts.astype("<i8").tobytes(),
            keys.ends.astype("<i8").tobytes(),
            keys.keys.astype("<u4").tobytes(),
        )
    )
    return pack_header(RdmaKind.GO, len(body), request) + body


def parse_go(body: bytes | bytearray, lanes: int) -> RemoteKeys:
    """Raises FrameError unless the lengths add up, with a key for each of `lanes`, and stretches in order."""
    if len(body) < _GO.size:
        raise FrameError(f"GO body of {len(body)} bytes")
    base_address, stretches, key_lanes = _GO.unpack_from(body)
    keys_at = _GO.size + 16 * stretches
    if key_lanes != lanes or not 0 < stretches <= STRETCHES_MAX:
        raise FrameError(f"GO with {stretches} stretches and {key_lanes} lanes, not {lanes}")
    if len(body) != keys_at + 4 * stretches * lanes:
        raise FrameError(f"GO body of {len(body)} bytes does not hold {stretches} stretches")
    bounds = np.frombuffer(body, "<i8", 2 * stretches, _GO.size).astype(np.int64)
    starts, ends = bounds[:stretches], bounds[stretches:]
    inside = (starts >= 0).all() and (ends <= REGION_BYTES_MAX).all() and (starts < ends).all()
    if not inside or bool((ends[:-1] > starts[1:]).any()) or base_address > 1 << 63:
        raise FrameError("GO with stretches out of order or out of bounds")
    keys = np.frombuffer(body, "<u4", stretches * lanes, keys_at).astype(np.uint32)
    return RemoteKeys(base_address, starts, ends, keys.reshape(stretches, lanes))


def pack_fin(request: int) -> bytes:
    return pack_header(RdmaKind.FIN, 0, request)


def pack_revoked(request: int) -> bytes:
    return pack_header(RdmaKind.REVOKED, 0, request)


def pack_reset(requests: list[int]) -> bytes:
    body = struct.pack(f"<{len(requests)}Q", *requests)
    return pack_header(RdmaKind.RESET, len(body), 0) + body


def parse_reset(body: bytes | bytearray) -> frozenset[int]:
    if len(body) % 8:
        raise FrameError(f"RESET body of {len(body)} bytes")
    return frozenset(struct.unpack(f"<{len(body) // 8}Q", body))
