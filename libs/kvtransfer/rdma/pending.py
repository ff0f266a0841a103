"""One request of a caller, from its frame to the owner's answer, and what of it is on the lanes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.errors import TransferError
from kvtransfer.rdma.lane import Lane
from kvtransfer.rdma.lane_cut import LaneCut
from kvtransfer.rdma.work import RemoteKeys


@dataclass(slots=True, eq=False)
class Pending:
    """`keys`, `digest` and `error` come from the owner; who waits is woken by each of them."""

    request: int
    cut: LaneCut
    is_write: bool
    keys: RemoteKeys | None = None
    finished: bool = False
    digest: bytes = b""
    error: TransferError | None = None
    abandoned: bool = False
    posted: dict[Lane, int] = field(default_factory=dict)
    """The number of the last work request on each lane."""
    part_ends: list[tuple[Lane, int, int]] = field(default_factory=list)
    """Lane, number of the last work request, part: of each part that was posted whole."""
    _waiting: asyncio.Future[None] | None = None

    @property
    def posted_whole(self) -> bool:
        return len(self.part_ends) == self.cut.parts

    async def until(self, ready: Callable[[], bool]) -> None:
        """Returns when `ready`, raises `error` when there is one."""
        while True:
            if self.error is not None:
                raise self.error
            if ready():
                return
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def answered(self) -> None:
        """One of the owner's fields was set."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def landed(self) -> tuple[tuple[int, int], ...]:
        """The stretches of the call's bytes that are known to have landed, as far as they are known."""
        if self.finished:
            return ((0, self.cut.payload_bytes),) if self.cut.payload_bytes else ()
        parts = sorted(part for lane, number, part in self.part_ends if number <= lane.retired)
        return tuple(map(self.cut.stretch, parts))
