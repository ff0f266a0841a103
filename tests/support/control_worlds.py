"""Clients of one control plane, of the fake and of a real etcd: what contract suites run over."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from cluster.control import ControlPlane
from cluster.etcd_control import EtcdControl
from cluster.logs import Level, Logger
from cluster.metrics import ServiceMetrics
from cluster.testing import FakeControlPlane, FakeStore

CONNECT_S_MAX = 15.0
_PREFIXES = itertools.count()


@dataclass
class World:
    """Clients of one store. `prefix` is the test's own part of the keys."""

    connect: Callable[[], Awaitable[ControlPlane]]
    prefix: str


@contextlib.asynccontextmanager
async def fake_world() -> AsyncIterator[World]:
    store = FakeStore()
    controls: list[FakeControlPlane] = []

    async def connect() -> ControlPlane:
        controls.append(store.control())
        return controls[-1]

    yield World(connect, f"/test/{next(_PREFIXES)}/")
    for control in controls:
        await control.close()


@contextlib.asynccontextmanager
async def real_world(url: str) -> AsyncIterator[World]:
    controls: list[EtcdControl] = []

    async def connect() -> ControlPlane:
        controls.append(await connected(url))
        return controls[-1]

    yield World(connect, f"/test/{next(_PREFIXES)}/")
    for control in controls:
        await control.close()


async def connected(url: str, timeout_s: float = CONNECT_S_MAX) -> EtcdControl:
    return await EtcdControl.connect(
        url, metrics=ServiceMetrics(), log=Logger(Level.ERROR), timeout_s=timeout_s, call_timeout_s=1.0
    )
