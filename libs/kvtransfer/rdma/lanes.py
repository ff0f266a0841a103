"""The lanes of a link, at either side: made together, tried, given up where they fail, closed together."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvtransfer.errors import FrameError, PeerLostError, TransferError
from kvtransfer.rdma.devices import OpenDevice
from kvtransfer.rdma.frames import LaneEnd, parse_ready
from kvtransfer.rdma.lane import Lane
from kvtransfer.rdma.meeting import LaneInMaking, caller_lane, connect_caller_lane, no_lane, owner_lane
from kvtransfer.rdma.sendring import Columns, SendRing

_PROBE_S_MAX = 2.0
"""A lane whose first operation takes longer is given up, if another one works."""
_NOTHING = Columns([0], [0], [0], [0], [0])
_GIVEN_UP = "this lane does not work"

_log = logging.getLogger(__name__)


class _Lanes:
    def __init__(self) -> None:
        self._made: list[LaneInMaking] = []

    @property
    def working(self) -> Sequence[Lane]:
        """Lane 0 joins the nearest devices."""
        return [made.lane for made in self._made]

    def devices(self, lanes: int) -> list[int]:
        """The numbers of our devices of the first `lanes` lanes."""
        return [made.device for made in self._made[:lanes]]

    def close(self, error: TransferError) -> None:
        """No device touches memory for them when this returns. Again is harmless."""
        for made in self._made:
            made.lane.close(error)


class CallerLanes(_Lanes):
    """Made, connected to the owner's answer, probed, in this order."""

    def __init__(
        self, opened: Sequence[OpenDevice], ring: SendRing, on_failure: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._opened = opened
        self._ring = ring
        self._on_failure = on_failure
        self._probed = False

    def make(self, pairs: Sequence[tuple[int, int]]) -> list[LaneEnd]:
        """One for each pair (our device, the owner's). Raises OSError; `close` closes what was made."""
        for ours, theirs in pairs:
            # To a caller come completions of its own only, no immediates.
            made = caller_lane(self._opened[ours], ours, theirs, self._ring, lambda _: None, self._failed)
            self._made.append(made)
        return [made.end for made in self._made]

    def connect(self, theirs: Sequence[LaneEnd]) -> None:
        """Lanes that cannot be are closed here. Raises FrameError if the answer does not fit."""
        if len(theirs) != len(self._made):
            raise FrameError(f"{len(theirs)} lanes answer {len(self._made)}")
        for made, end in zip(self._made, theirs, strict=True):
            try:
                connect_caller_lane(self._opened[made.device], made, end)
            except OSError as error:
                made.lane.close(PeerLostError(f"{_GIVEN_UP}: {error}"))

    async def probe(self) -> list[bool]:
        """A WRITE of no bytes on each lane: it needs the path both ways, and touches nothing.

        Which lanes work; the others are closed. Raises PeerLostError if none does.
        """
        tries = [asyncio.create_task(_tried(made.lane)) for made in self._made]
        try:
            await asyncio.wait(tries, timeout=_PROBE_S_MAX)
        finally:
            usable = [one.done() and one.exception() is None for one in tries]
            for one in tries:
                one.cancel()
        for made, works in zip(self._made, usable, strict=True):
            if not works:
                made.lane.close(PeerLostError(_GIVEN_UP))
        self._made = [made for made, works in zip(self._made, usable, strict=True) if works]
        if not self._made:
            raise PeerLostError("none of the lanes works")
        self._probed = True
        return usable

    def _failed(self, reason: str) -> None:
        if self._probed:  # a probe sees for itself
            self._on_failure(reason)


async def _tried(lane: Lane) -> None:
    """Raises OSError, or the error with which the lane was closed."""
    await lane.room()
    await lane.completed(lane.write(_NOTHING, None))


class OwnerLanes(_Lanes):
    """Made as the caller asks for them, ready once it told which of them work."""

    def __init__(
        self,
        opened: Sequence[OpenDevice],
        ring: SendRing,
        on_immediate: Callable[[int, int], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """`on_immediate(lane, immediate)`, where `lane` counts those that work."""
        super().__init__()
        self._opened = opened
        self._ring = ring
        self._on_immediate = on_immediate
        self._on_failure = on_failure
        self._lanes_asked = 0
        self._asked: list[int] = []
        """The numbers of the lanes that could be made, as the caller counts them."""
        self._places: dict[int, int] = {}
        """By those numbers: which of the lanes that work."""
        self.ready = False

    def make(self, theirs: Sequence[LaneEnd]) -> list[LaneEnd]:
        """Connected to the caller's ends, as far as they can be. Raises FrameError."""
        if self._lanes_asked:
            raise FrameError("LANES again")
        if any(end.device >= len(self._opened) for end in theirs):
            raise FrameError(f"LANES to a device that is not one of {len(self._opened)}")
        self._lanes_asked = len(theirs)
        return [self._make_one(number, end) for number, end in enumerate(theirs)]

    def _make_one(self, number: int, theirs: LaneEnd) -> LaneEnd:
        opened, arrived = self._opened[theirs.device], partial(self._arrived, number)
        try:
            made = owner_lane(opened, theirs.device, theirs, self._ring, arrived, self._on_failure)
        except OSError as error:
            _log.warning("no queue pair on %s: %s", opened.facts.device, error)
            return no_lane(theirs)
        self._made.append(made)
        self._asked.append(number)
        return made.end

    def take_ready(self, body: bytes | bytearray) -> None:
        """The caller's READY. Raises FrameError where none is due, or it does not fit."""
        if self.ready or not self._lanes_asked:
            raise FrameError("READY where none is due")
        usable = parse_ready(body, self._lanes_asked)
        kept: list[LaneInMaking] = []
        for number, made in zip(self._asked, self._made, strict=True):
            if usable[number]:
                self._places[number] = len(kept)
                kept.append(made)
            else:
                made.lane.close(PeerLostError(_GIVEN_UP))
        if len(kept) != sum(usable):
            raise FrameError("READY with a lane that was not made")
        self._made = kept
        self.ready = True

    def _arrived(self, number: int, immediate: int) -> None:
        place = self._places.get(number)
        if place is None:
            self._on_failure("an immediate before READY")
        else:
            self._on_immediate(place, immediate)
