"""A caller on one host and an owner of memory on another one, and what the tests ask of the two."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from tests.support.netns import Host, HostPair
from tests.support.transfer_peer import SECRET, PeerProcess

MIB = 1 << 20
TOTAL = 16 * MIB + 1
"""Memory of each side, zero at first; far more than the kernel holds of a slow connection."""
WHOLE = [(0, TOTAL)]
STALL_S = 0.3
"""`stall_s_max` of the caller."""
SLOW_MEGABITS_PER_S = 100
"""TOTAL takes 1.3 s: time to do something in the middle."""


def peer_on(
    host: Host, name: str, *, secret: bytes = SECRET, transport: str = "tcp", **limits: float
) -> AbstractAsyncContextManager[PeerProcess]:
    """A process on the host with TOTAL bytes; the tests' names are "caller" and "owner"."""
    return PeerProcess.run(
        name, TOTAL, launcher=host.launcher, host=host.address, secret=secret, transport=transport, **limits
    )


@asynccontextmanager
async def both_sides(hosts: HostPair) -> AsyncIterator[tuple[PeerProcess, PeerProcess]]:
    """A caller on the near host and an owner on the far one, started at the same time."""
    async with AsyncExitStack() as running:
        async with asyncio.TaskGroup() as starting:
            sides = [
                starting.create_task(running.enter_async_context(process))
                for process in (
                    peer_on(hosts.near, "caller", stall_s_max=STALL_S),
                    peer_on(hosts.far, "owner"),
                )
            ]
        caller, owner = (side.result() for side in sides)
        yield caller, owner


async def token_of(owner: PeerProcess, ranges: Any = WHOLE, access: str = "write") -> str:
    answer = await owner.ask("grant", ranges=ranges, peer="caller", access=access)
    return str(answer["token"])


async def call(
    do: str,
    caller: PeerProcess,
    owner: PeerProcess,
    token: str,
    local: Any = WHOLE,
    remote: Any = WHOLE,
    **more: Any,
) -> dict[str, Any]:
    """One write or read, and its answer without the number."""
    answer = await caller.ask(
        do, descriptor=owner.descriptor, local=local, token=token, remote=remote, **more
    )
    del answer["id"]
    return answer


async def checksum(process: PeerProcess, ranges: Any = WHOLE) -> str:
    return str((await process.ask("checksum", ranges=ranges))["checksum"])


async def count(process: PeerProcess, value: int) -> int:
    return int((await process.ask("count", value=value))["count"])


async def begun(
    do: str, caller: PeerProcess, owner: PeerProcess, **more: Any
) -> tuple[str, asyncio.Task[dict[str, Any]]]:
    """A write or read of everything over a slow link, some of which has landed; the grant's token."""
    source, target = (caller, owner) if do == "write" else (owner, caller)
    await source.ask("fill_random", seed=7)
    token = await token_of(owner, access=do)
    task = asyncio.create_task(call(do, caller, owner, token, **more))
    where = {"token": token} if do == "write" else {}
    await target.ask("landing", more_than_bytes=MIB, **where)
    return token, task
