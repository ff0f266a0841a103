"""The lanes of a link, at either side: made together, tried, given up where they fail, closed together."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from kvtransfer.errors import FrameError, PeerLostError, TransferError
from kvtransfer.rdma.devices import OpenDevice
from kvtransfer.rdma.frames import LaneEnd, parse_ready
from kvtransfer.rdma.lane import Lane
from kvtransfer.rdma.meeting import LaneInMaking, caller_lane, connect_caller_lane, owner_lane
from kvtransfer.rdma.sendring import Columns, SendRing

_PROBE_S_MAX = 2.0
"""A lane whose first operation takes longer is given up, if another one works."""
_NOTHING = Columns([0], [0], [0], [0], [0])
_GIVEN_UP = "this lane does not work"


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

    def _keep(self, usable: Sequence[bool]) -> None:
        for made, works in zip(self._made, usable, strict=True):
            if not works:
                made.lane.close(PeerLostError(_GIVEN_UP))
        self._made = [made for made, works in zip(self._made, usable, strict=True) if works]


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
        """Raises OSError, FrameError if the answer does not fit."""
        if len(theirs) != len(self._made):
            raise FrameError(f"{len(theirs)} lanes answer {len(self._made)}")
        for made, end in zip(self._made, theirs, strict=True):
            connect_caller_lane(self._opened[made.device], made, end)

    async def probe(self) -> list[bool]:
        """A WRITE of no bytes on each lane: it needs the path both ways, and touches nothing.

        Which lanes work; the others are closed. Raises PeerLostError if none does, OSError.
        """
        waits = []
        for made in self._made:
            made.lane.write(_NOTHING, None)
            waits.append(asyncio.create_task(made.lane.completed(1)))
        try:
            await asyncio.wait(waits, timeout=_PROBE_S_MAX)
        finally:
            usable = [wait.done() and wait.exception() is None for wait in waits]
            for wait in waits:
                wait.cancel()
        self._keep(usable)
        if not self._made:
            raise PeerLostError("none of the lanes works")
        self._probed = True
        return usable

    def _failed(self, reason: str) -> None:
        if self._probed:  # a probe sees for itself
            self._on_failure(reason)


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
        self._numbers: dict[int, int] = {}
        """Of the lanes as they were asked for to those that work."""
        self.ready = False

    def make(self, theirs: Sequence[LaneEnd]) -> list[LaneEnd]:
        """Connected to the caller's ends. Raises FrameError, OSError; `close` closes what was made."""
        if self._made:
            raise FrameError("LANES again")
        if any(end.device >= len(self._opened) for end in theirs):
            raise FrameError(f"LANES to a device that is not one of {len(self._opened)}")
        for number, end in enumerate(theirs):
            arrived = partial(self._arrived, number)
            opened = self._opened[end.device]
            self._made.append(owner_lane(opened, end.device, end, self._ring, arrived, self._on_failure))
        return [made.end for made in self._made]

    def take_ready(self, body: bytes | bytearray) -> None:
        """The caller's READY. Raises FrameError where none is due, or it does not fit."""
        if self.ready or not self._made:
            raise FrameError("READY where none is due")
        usable = parse_ready(body, len(self._made))
        working = [number for number, works in enumerate(usable) if works]
        self._numbers = {number: place for place, number in enumerate(working)}
        self._keep(usable)
        self.ready = True

    def _arrived(self, number: int, immediate: int) -> None:
        place = self._numbers.get(number)
        if place is None:
            self._on_failure("an immediate before READY")
        else:
            self._on_immediate(place, immediate)
