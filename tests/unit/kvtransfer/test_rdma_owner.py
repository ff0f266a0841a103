"""What an owner answers over rdma, as far as no device is needed for it."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from tests.support.transfer_peer import SECRET

from kvtransfer import Access, GrantError, Limits, Region
from kvtransfer.grants import GrantTable
from kvtransfer.memory import checked_ranges
from kvtransfer.statistics import Statistics
from kvtransfer.stream import frames, landed
from kvtransfer.stream.frames import HEADER_BYTES, Kind, TransferRequest
from kvtransfer.transport import TransportContext
from kvtransfer.verification import INLINE_BYTES_MAX, GrantedDigests

pytestmark = pytest.mark.unit

owner = pytest.importorskip("kvtransfer.rdma.owner", reason="needs pyverbs", exc_type=ImportError)

SIZE = 2 * INLINE_BYTES_MAX
Ends = tuple["owner.RdmaSession", socket.socket]
WHOLE = checked_ranges([(0, SIZE)], SIZE, "ranges")


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """A session without lanes, and the caller's socket."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(10)
    context = TransportContext("far", SECRET, Limits(), GrantTable(1), Statistics())
    session = owner.RdmaSession(
        *(ours, "near", bytes(16), context, (), owner.Registrations(()), None, GrantedDigests()),
        on_end=lambda _: None,
    )
    session.start()
    yield session, theirs
    session.close("the test ends")
    theirs.close()


@pytest.mark.parametrize("access", list(Access))
async def test_a_digest_cut_short_by_a_revoke_is_no_wrong_checksum(ends: Ends, access: Access) -> None:
    """Else the caller takes the transport for one that corrupts, and leaves it."""
    session, theirs = ends
    grant = GrantTable(1).issue(Region(1, bytearray(SIZE)), [(0, SIZE)], "near", 1, access)
    digest = bytes(16) if access is Access.WRITE else b""
    wanted = TransferRequest(grant.token, WHOLE, SIZE, digest=digest, verify=True)
    serving = owner.Serving(1, wanted, grant, WHOLE, access, owner.lane_cut(SIZE, 1))
    session._serving[1] = serving
    grant.revoked = True
    if access is Access.WRITE:
        landed.all_landed(session, session._digests, serving)
    else:
        session._all_read(serving)
    await serving.ended.wait()
    answer = await asyncio.to_thread(theirs.recv, 4096)
    header = frames.parse_header(memoryview(answer)[:HEADER_BYTES], frames.accepts(Kind.DONE, Kind.ERROR))
    assert header.kind == Kind.ERROR
    assert isinstance(frames.parse_error(bytearray(answer[HEADER_BYTES:])), GrantError)


async def test_nothing_is_registered_after_close() -> None:
    """Its devices are closed too: a verb called with one of them kills the process."""
    registrations = owner.Registrations(())
    region = Region(1, bytearray(SIZE))
    with pytest.raises(IndexError):
        await registrations.make(region, [0], [0])
    registrations.close()
    assert await registrations.make(region, [0], [0]) is None
