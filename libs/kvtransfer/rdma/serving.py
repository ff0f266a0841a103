"""A request as its owner keeps it, until it is answered."""

import asyncio
from dataclasses import dataclass, field

from kvtransfer.grants import Access, Grant
from kvtransfer.memory import Ranges
from kvtransfer.rdma.frames import LANES_MAX
from kvtransfer.rdma.lane_cut import LaneCut
from kvtransfer.stream.frames import TransferRequest


@dataclass(slots=True, eq=False)
class Serving:
    """`parts_landed` counts by lane. `ended` is set once it is answered or its link is lost."""

    request: int
    wanted: TransferRequest
    grant: Grant
    ranges: Ranges
    access: Access
    cut: LaneCut
    keys_given: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    parts_landed: list[int] = field(default_factory=lambda: [0] * LANES_MAX)

    @property
    def all_landed(self) -> bool:
        return sum(self.parts_landed) == self.cut.parts

    @property
    def moving(self) -> bool:
        """The caller may be touching the memory."""
        return self.keys_given and not (self.access is Access.WRITE and self.all_landed)
