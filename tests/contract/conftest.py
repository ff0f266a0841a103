"""Fixtures that contract suites share."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
from tests.support.control_worlds import World, fake_world, real_world
from tests.support.netns import HostPair
from tests.support.transfer import Pair, no_leaks, pattern, selected_transports, side
from tests.support.transfer_peer import PeerProcess
from tests.support.two_hosts import both_sides

from moonpool.servers import ServerProcess

PAIR_BYTES = 20 << 20


@pytest.fixture(params=["fake", "real"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A control plane's clients: the fake's, and a real etcd's."""
    if request.param == "fake":
        async with fake_world() as made:
            yield made
    else:
        server: ServerProcess = request.getfixturevalue("etcd")
        async with real_world(server.url) as made:
            yield made


@pytest.fixture(params=selected_transports())
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def pair(transport: str) -> AsyncIterator[Pair]:
    """`near` has a pattern, `far` has zeros, 20 MiB each."""
    near_memory, far_memory = pattern(PAIR_BYTES), np.zeros(PAIR_BYTES, np.uint8)
    async with (
        no_leaks(),
        side(transport, "near", near_memory) as near,
        side(transport, "far", far_memory) as far,
    ):
        yield near, far


@pytest.fixture
async def sides(hosts: HostPair) -> AsyncIterator[tuple[PeerProcess, PeerProcess]]:
    """Of modules that bring their own `hosts`."""
    async with both_sides(hosts) as started:
        yield started


@pytest.fixture
def caller(sides: tuple[PeerProcess, PeerProcess]) -> PeerProcess:
    """On the near host."""
    return sides[0]


@pytest.fixture
def owner(sides: tuple[PeerProcess, PeerProcess]) -> PeerProcess:
    """On the far host."""
    return sides[1]
