"""How the queue pairs of a link come to know each other: each side's half of the LANES exchange."""

import errno
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtransfer.errors import FrameError, PeerLostError
from kvtransfer.rdma.devices import OpenDevice
from kvtransfer.rdma.frames import NO_PAIR, LaneEnd
from kvtransfer.rdma.lane import RECEIVES_MAX, SENDS_MAX, Lane
from kvtransfer.rdma.sendring import SendRing
from kvtransfer.rdma.verbs import Path, QueuePair

_READS_MAX = 16
"""READs that one queue pair makes, or serves, at once; a device may allow fewer."""
_PACKET_NUMBER_BITS = 24


@dataclass(slots=True)
class LaneInMaking:
    """Our end of a lane, and what the other side must know of it."""

    lane: Lane
    device: int
    end: LaneEnd


def caller_lane(
    opened: OpenDevice,
    device: int,
    their_device: int,
    ring: SendRing,
    on_immediate: Callable[[int], None],
    on_failure: Callable[[str], None],
) -> LaneInMaking:
    """The caller's end on our device number `device`, to meet the owner's `their_device`. Raises OSError."""
    pair = QueuePair(opened.device, SENDS_MAX, 1)
    reads_max = min(_READS_MAX, opened.device.limits.reads_made_max)
    end = _end(opened, pair, their_device, opened.facts.mtu_bytes, reads_max)
    return LaneInMaking(Lane(pair, ring, on_immediate, on_failure), device, end)


def owner_lane(
    opened: OpenDevice,
    device: int,
    theirs: LaneEnd,
    ring: SendRing,
    on_immediate: Callable[[int], None],
    on_failure: Callable[[str], None],
) -> LaneInMaking:
    """The owner's end, connected to the caller's. Raises OSError."""
    pair = QueuePair(opened.device, 1, RECEIVES_MAX)
    mtu_bytes = min(opened.facts.mtu_bytes, theirs.mtu_bytes)
    reads_max = min(_READS_MAX, opened.device.limits.reads_served_max, theirs.reads_max)
    end = _end(opened, pair, theirs.device, mtu_bytes, reads_max)
    lane = Lane(pair, ring, on_immediate, on_failure)
    try:
        pair.connect(_path(opened, end, theirs, mtu_bytes, reads_max, serves=True))
        lane.start(RECEIVES_MAX)
    except BaseException:
        lane.close(PeerLostError("this lane could not be made"))
        raise
    return LaneInMaking(lane, device, end)


def no_lane(theirs: LaneEnd) -> LaneEnd:
    """What an owner answers where it could make none."""
    return replace(theirs, number=NO_PAIR)


def connect_caller_lane(opened: OpenDevice, ours: LaneInMaking, theirs: LaneEnd) -> None:
    """The caller's end, connected to what the owner answered. Raises FrameError, OSError also where the
    owner could make none."""
    if theirs.device != ours.end.device:
        raise FrameError(f"a lane to device {ours.end.device} was answered by device {theirs.device}")
    if theirs.number == NO_PAIR:
        raise OSError(errno.EHOSTUNREACH, "the owner could make no queue pair")
    mtu_bytes = min(opened.facts.mtu_bytes, theirs.mtu_bytes)
    reads_max = min(ours.end.reads_max, theirs.reads_max)
    ours.lane.pair.connect(_path(opened, ours.end, theirs, mtu_bytes, reads_max, serves=False))
    ours.lane.start(0)


def _end(opened: OpenDevice, pair: QueuePair, device: int, mtu_bytes: int, reads_max: int) -> LaneEnd:
    return LaneEnd(
        device=device,
        gid=opened.facts.gid.text,
        number=pair.number,
        first_packet=secrets.randbits(_PACKET_NUMBER_BITS),
        lid=opened.facts.lid,
        mtu_bytes=mtu_bytes,
        reads_max=reads_max,
    )


def _path(
    opened: OpenDevice, ours: LaneEnd, theirs: LaneEnd, mtu_bytes: int, reads_max: int, *, serves: bool
) -> Path:
    """A queue pair may not be set to serve no READ at all, nor to make none."""
    return Path(
        gid_index=opened.facts.gid.index,
        gid=theirs.gid,
        lid=theirs.lid,
        number=theirs.number,
        mtu_bytes=mtu_bytes,
        first_packet_sent=ours.first_packet,
        first_packet_received=theirs.first_packet,
        reads_made_max=1 if serves else reads_max,
        reads_served_max=reads_max if serves else 1,
        serves=serves,
    )
