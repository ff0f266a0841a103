"""A link to one peer over several streams: which stream takes what.

A small call goes to the stream with the fewest bytes under way, so that it does not wait behind a large
one; a large call is cut into parts, each on a stream of its own. A stream that is lost takes the link with
it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

from kvtransfer.errors import PeerLostError, TransferError
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import RANGES_MAX, REGION_BYTES_MAX, Limits
from kvtransfer.memory import no_ranges
from kvtransfer.parts import Part, cut
from kvtransfer.tcp.caller import CallerStream
from kvtransfer.transport import Call, LocalMemory

_Move = Callable[[CallerStream, Call], Coroutine[None, None, None]]


class TcpLink:
    """Implements `transport.Link` over at least one stream; its streams are its own from now on."""

    kind = TransportKind.TCP

    def __init__(self, streams: Sequence[CallerStream], peer: str, limits: Limits) -> None:
        self._streams = tuple(streams)
        self._peer = peer
        self._limits = limits
        # A call cannot be this large: its regions are bounded.
        whole = REGION_BYTES_MAX * RANGES_MAX + 1
        self._cut_from_bytes = 2 * limits.tcp_part_bytes_min if len(self._streams) > 1 else whole
        for stream in self._streams:
            stream.start(self._lost)

    @property
    def closed(self) -> bool:
        return self._streams[0].closed

    async def write(self, call: Call) -> None:
        if len(self._streams) > 1 or call.piece_bytes_max is not None:
            for stream in self._streams:
                if stream.settling is not None:
                    await self._settled()
        if call.memory.payload_bytes < self._cut_from_bytes:
            await self._least_busy().write(call)
            return
        parts = self._parts(call)
        await self._together(parts, partial(CallerStream.write, tag_follows=bool(call.tag)))
        if call.tag:
            # All parts are DONE: their bytes are visible, whichever stream they took.
            nothing = LocalMemory(call.memory.region, no_ranges(), 0)
            last = replace(call, memory=nothing, remote=no_ranges(), verify=False)
            await self._least_busy().write(last, earlier_bytes=call.memory.payload_bytes)

    async def read(self, call: Call) -> None:
        if call.memory.payload_bytes < self._cut_from_bytes:
            await self._least_busy().read(call)
        else:
            await self._together(self._parts(call), CallerStream.read)

    def close_if_stalled(self) -> None:
        silent_s = max(stream.silent_s() for stream in self._streams)
        if silent_s >= self._limits.stall_s_max:
            self._lost(PeerLostError(f"{self._peer} stalls for {silent_s:.1f} s"))

    def close(self) -> None:
        self._lost(PeerLostError(f"the connection to {self._peer} was closed"))

    async def _settled(self) -> None:
        """What is still under way of writes that were given up must not land after a newer write that takes
        another stream, nor in memory of a device, whose copies keep no order: wait for the owner's answer."""
        while waiting := [stream.settling for stream in self._streams if stream.settling is not None]:
            await asyncio.wait(waiting)

    def _parts(self, call: Call) -> list[Part]:
        return cut(
            call, min(len(self._streams), call.memory.payload_bytes // self._limits.tcp_part_bytes_min)
        )

    def _least_busy(self) -> CallerStream:
        least = self._streams[0]
        for stream in self._streams:
            if stream.outstanding_bytes < least.outstanding_bytes:
                least = stream
        return least

    async def _together(self, parts: Sequence[Part], move: _Move) -> None:
        """Each part on its own stream. The first error is the call's, with what landed of all parts."""
        landed: list[tuple[int, int]] = []

        async def one(stream: CallerStream, part: Part) -> None:
            try:
                await move(stream, part.call)
            except TransferError as error:
                landed.extend((part.start + start, count) for start, count in error.landed)
                raise
            landed.append((part.start, part.call.memory.payload_bytes))

        streams = sorted(self._streams, key=lambda stream: stream.outstanding_bytes)
        try:
            async with asyncio.TaskGroup() as tasks:
                for stream, part in zip(streams, parts, strict=False):
                    tasks.create_task(one(stream, part))
        except ExceptionGroup as group:
            error = copy(group.exceptions[0])  # calls that fail with one stream share its error
            if isinstance(error, TransferError):
                error.landed = tuple(sorted(landed))
                error.settled = error.settled and len(parts) == 1
            raise error from None

    def _lost(self, error: TransferError) -> None:
        for stream in self._streams:
            stream.close(error)
