"""When a connection counts as stalled: by what the peer does, not by what we do."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import numpy as np
import pytest
from tests.support.transfer import no_leaks, side
from tests.support.transfer_peer import PeerProcess

from kvtransfer import Limits, PeerLostError, Transferred, TransferTimeout

pytestmark = pytest.mark.contract

SIZE = 4096
WHOLE = [(0, SIZE)]
STALL_S = 1.0
LIMITS = Limits(stall_s_max=STALL_S, tcp_streams=1)
"""One stream, so that all calls share what is thought of it."""
SHORT_S = 0.1
TIMEOUT_S = 20.0

Write = Callable[[float], Coroutine[None, None, Transferred]]
"""A small call with its `timeout_s`."""


@asynccontextmanager
async def connected(transport: str) -> AsyncIterator[tuple[Write, PeerProcess]]:
    """To a process that can be stopped; a call went through."""
    async with (
        no_leaks(),
        side(transport, "here", np.ones(SIZE, np.uint8), limits=LIMITS) as here,
        PeerProcess.run("there", SIZE, transport=transport) as there,
    ):
        peer = await here.endpoint.connect(there.descriptor, timeout_s=TIMEOUT_S)
        token = (await there.ask("grant", ranges=WHOLE, peer="here"))["token"]

        def write(timeout_s: float) -> Coroutine[None, None, Transferred]:
            return peer.write(here.region, WHOLE, token, WHOLE, timeout_s=timeout_s)

        await write(TIMEOUT_S)
        yield write, there


async def test_small_calls_do_not_keep_a_dead_connection(transport: str) -> None:
    """Our kernel takes their frames, and the ABORT of each that timed out, whoever reads them."""
    async with connected(transport) as (write, there):
        there.stop()
        patient = asyncio.create_task(write(TIMEOUT_S))
        calls = 0
        while not patient.done():
            with pytest.raises((TransferTimeout, PeerLostError)):
                await write(SHORT_S)
            calls += 1
        with pytest.raises(PeerLostError, match="stalls"):
            await patient
        assert calls > 1
        there.resume()
        await write(TIMEOUT_S)


async def test_a_connection_that_was_not_used_is_not_a_stalled_one(transport: str) -> None:
    async with connected(transport) as (write, there):
        await asyncio.sleep(STALL_S)  # nobody calls
        there.stop()
        patient = asyncio.create_task(write(TIMEOUT_S))
        with pytest.raises(TransferTimeout):
            await write(SHORT_S)
        there.resume()
        assert (await patient).payload_bytes == SIZE
