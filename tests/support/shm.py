"""The shared memory transport without an endpoint around it: two sides in one process, or bare sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tests.support.transfer_peer import SECRET

from kvtransfer import Access, Grant, Limits
from kvtransfer.grants import GrantTable
from kvtransfer.memory import Region, RegisterableBuffer, checked_ranges, total_bytes
from kvtransfer.shared_buffer import SharedBuffer
from kvtransfer.shm.caller import CallerLink
from kvtransfer.shm.transport import ShmTransport
from kvtransfer.statistics import Statistics
from kvtransfer.transport import Address, Call, LocalMemory, TransportContext


@dataclass(slots=True)
class ShmSide:
    """A transport with one region."""

    context: TransportContext
    transport: ShmTransport
    address: Address
    region: Region

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.region.view, np.uint8)

    def grant(self, ranges: npt.ArrayLike, peer: str, access: Access = Access.WRITE, **more) -> Grant:
        return self.context.grants.issue(self.region, ranges, peer, 1, access, **more)

    async def revoke(self, grant: Grant) -> None:
        self.context.grants.revoke(grant)
        await self.transport.quiesce(grant)

    async def dial(self, other: "ShmSide") -> CallerLink:
        return await self.transport.dial(other.address, other.context.name)

    def call(self, local: npt.ArrayLike, grant: Grant | str, remote: npt.ArrayLike, **more) -> Call:
        token = grant if isinstance(grant, str) else grant.token
        local_ranges = checked_ranges(local, self.region.region_bytes, "local")
        memory = LocalMemory(self.region, local_ranges, total_bytes(local_ranges))
        return Call(memory, token, checked_ranges(remote, 1 << 40, "remote"), **more)


@asynccontextmanager
async def shm_side(
    name: str,
    buffer: RegisterableBuffer,
    *,
    limits: Limits | None = None,
    folder: Path | None = None,
    secret: bytes = SECRET,
) -> AsyncIterator[ShmSide]:
    limits = limits or Limits()
    context = TransportContext(name, secret, limits, GrantTable(limits.grants_max), Statistics())
    transport = ShmTransport(context, folder)
    region = Region(1, buffer)
    try:
        yield ShmSide(context, transport, await transport.start(), region)
    finally:
        for grant in context.grants.all():
            context.grants.revoke(grant)
            await transport.quiesce(grant)
        await transport.close()
        region.drop()
        if isinstance(buffer, SharedBuffer):
            buffer.close()
