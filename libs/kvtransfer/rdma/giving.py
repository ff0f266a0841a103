"""Gives the caller of a request the keys to the memory that it was granted, once that is registered.

Owns the registering that goes on meanwhile. Knows nothing of what becomes of the request.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from kvtransfer.memory import Region
from kvtransfer.rdma.frames import STRETCHES_MAX
from kvtransfer.rdma.registrations import PieceKeys, Registrations
from kvtransfer.rdma.serving import Serving
from kvtransfer.rdma.work import PIECE_BYTES, RemoteKeys, pieces_of


class KeyGiver:
    """Of one session. A request that ended meanwhile gets none."""

    def __init__(
        self,
        registrations: Registrations,
        on_keys: Callable[[Serving, RemoteKeys], None],
        on_unfit: Callable[[Serving, str], None],
    ) -> None:
        """Of each request that is still open one of them is called, `on_unfit` with the reason."""
        self._registrations = registrations
        self._on_keys = on_keys
        self._on_unfit = on_unfit
        self._tasks: set[asyncio.Task[None]] = set()

    def give(self, serving: Serving, devices: Sequence[int]) -> None:
        """At once if the memory is registered with these devices already, else when it is."""
        region, pieces = serving.grant.region, pieces_of(serving.ranges)
        if len(pieces) > STRETCHES_MAX:
            text = f"the ranges touch {len(pieces)} pieces of memory, at most {STRETCHES_MAX}"
            self._on_unfit(serving, text)
            return
        keys = self._registrations.known(region, pieces, devices)
        if keys is not None:
            self._on_keys(serving, _remote(keys, region))
            return
        task = asyncio.create_task(self._register(serving, pieces, devices))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _register(self, serving: Serving, pieces: Sequence[int], devices: Sequence[int]) -> None:
        region = serving.grant.region
        try:
            keys = await self._registrations.make(region, pieces, devices, lambda: not serving.ended.is_set())
        except OSError as error:
            if not serving.ended.is_set():
                self._on_unfit(serving, f"the memory cannot be registered for rdma: {error}")
            return
        if keys is not None and not serving.ended.is_set():
            self._on_keys(serving, _remote(keys, region))


def _remote(keys: PieceKeys, region: Region) -> RemoteKeys:
    starts = keys.pieces * PIECE_BYTES
    ends = np.minimum(starts + PIECE_BYTES, region.region_bytes)
    return RemoteKeys(keys.base_address, starts, ends, keys.remote)
