"""Whoever waits for a host that is gone learns it from the kernel, without a deadline of its own."""

import asyncio
import time

import pytest
from tests.support.eventually import eventually
from tests.support.netns import Cut, host_pair, tcp_counter
from tests.support.two_hosts import SLOW_MEGABITS_PER_S, TOTAL, begun, peer_on

pytestmark = pytest.mark.integration

NOTICED_S_MAX = 30.0
"""The kernel is told to wait for 20 s and looks again a keepalive interval (5 s) later at most; the rest is
for a busy machine."""


async def test_both_sides_give_up_a_host_that_is_silent() -> None:
    with host_pair() as hosts:
        hosts.shape(SLOW_MEGABITS_PER_S)
        async with (
            peer_on(hosts.near, "caller") as writer,
            peer_on(hosts.near, "caller") as reader,
            peer_on(hosts.far, "owner") as written,
            peer_on(hosts.far, "owner") as read,
        ):
            # The writer's host waits for acknowledgements, the reader's for bytes: two clocks of the kernel.
            token, writing = await begun("write", writer, written, timeout_s=2 * NOTICED_S_MAX)
            _, reading = await begun("read", reader, read, timeout_s=2 * NOTICED_S_MAX)
            hosts.cut(Cut.SILENT)
            silent_since_s = time.monotonic()
            for answer in await asyncio.gather(writing, reading):
                assert (answer["error"], answer["retryable"]) == ("PeerLostError", True)
            # The owners keep no session for a host that is gone.
            await eventually(lambda: tcp_counter(written.pid, "CurrEstab") == 0, NOTICED_S_MAX)
            assert time.monotonic() - silent_since_s < NOTICED_S_MAX
            assert (await written.ask("written", token=token))["bytes"] < TOTAL
