"""When a connection counts as stalled: by what the peer does, not by what we do."""

import asyncio

import numpy as np
import pytest
from tests.support.transfer import no_leaks, side
from tests.support.transfer_peer import PeerProcess

from kvtransfer import Limits, PeerLostError, TransferTimeout

pytestmark = pytest.mark.contract

SIZE = 4096
WHOLE = [(0, SIZE)]
STALL_S = 1.0
LIMITS = Limits(stall_s_max=STALL_S, tcp_streams=1)
"""One stream, so that all calls share what is thought of it."""
SHORT_S = 0.1
TIMEOUT_S = 20.0


async def test_small_calls_do_not_keep_a_dead_connection(transport: str) -> None:
    """Our kernel takes their frames, and the ABORT of each that timed out, whoever reads them."""
    async with (
        no_leaks(),
        side(transport, "here", np.ones(SIZE, np.uint8), limits=LIMITS) as here,
        PeerProcess.run("there", SIZE, transport=transport) as there,
    ):
        peer = await here.endpoint.connect(there.descriptor, timeout_s=TIMEOUT_S)
        token = (await there.ask("grant", ranges=WHOLE, peer="here"))["token"]
        await peer.write(here.region, WHOLE, token, WHOLE, timeout_s=TIMEOUT_S)
        there.stop()
        patient = asyncio.create_task(peer.write(here.region, WHOLE, token, WHOLE, timeout_s=TIMEOUT_S))
        calls = 0
        while not patient.done():
            with pytest.raises((TransferTimeout, PeerLostError)):
                await peer.write(here.region, WHOLE, token, WHOLE, timeout_s=SHORT_S)
            calls += 1
        with pytest.raises(PeerLostError, match="stalls"):
            await patient
        assert calls > 1
        there.resume()
        await peer.write(here.region, WHOLE, token, WHOLE, timeout_s=TIMEOUT_S)


async def test_a_connection_that_was_not_used_is_not_a_stalled_one(transport: str) -> None:
    async with (
        no_leaks(),
        side(transport, "here", np.ones(SIZE, np.uint8), limits=LIMITS) as here,
        PeerProcess.run("there", SIZE, transport=transport) as there,
    ):
        peer = await here.endpoint.connect(there.descriptor, timeout_s=TIMEOUT_S)
        token = (await there.ask("grant", ranges=WHOLE, peer="here"))["token"]
        await peer.write(here.region, WHOLE, token, WHOLE, timeout_s=TIMEOUT_S)
        await asyncio.sleep(STALL_S)  # nobody calls
        there.stop()
        patient = asyncio.create_task(peer.write(here.region, WHOLE, token, WHOLE, timeout_s=TIMEOUT_S))
        with pytest.raises(TransferTimeout):
            await peer.write(here.region, WHOLE, token, WHOLE, timeout_s=SHORT_S)
        there.resume()
        assert (await patient).payload_bytes == SIZE
