"""A request that an owner serves over tcp, from its admission to its answer."""

import asyncio
from dataclasses import dataclass

from kvtransfer.grants import Access, Grant
from kvtransfer.memory import Ranges
from kvtransfer.stream.frames import ErrorCode, TransferRequest
from kvtransfer.stream.outbox import Outgoing


@dataclass(slots=True, eq=False)
class Staged:
    """What else there is of a request on memory of a device. `moved` is done once its payload is in its slot,
    or has left it; with a `refusal` it is given up, which its task may take a while to notice."""

    moved: "asyncio.Future[None]"
    task: "asyncio.Task[None] | None" = None
    refusal: tuple[ErrorCode, str] | None = None

    def has_moved(self) -> None:
        if not self.moved.done():
            self.moved.set_result(None)


@dataclass(slots=True, eq=False)
class Serving:
    """`ranges` are checked: the grant lets it through."""

    request: int
    wanted: TransferRequest
    grant: Grant
    ranges: Ranges
    access: Access
    outgoing: Outgoing | None = None
    staged: Staged | None = None
