"""Calls that are made piece by piece, some pieces at once: for memory whose bytes pass through slots.

Owns the order of the pieces and what is known of them when one fails. Knows not what moves a piece.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace

from kvtransfer.errors import PieceTooLarge, TransferError, TransportUnfit
from kvtransfer.parts import sliced
from kvtransfer.transport import Call, LocalMemory

PIECES_AT_ONCE = 4
"""Of one call: one that is copied, one on the wire, and two between so that neither waits for the other."""

REFUSED_ALIKE = (TransportUnfit, PieceTooLarge)
"""What all pieces of a call meet at this transport. It goes on another way, so those that are under way are
waited for: nothing of them comes later."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a call's bytes. One that brings the tag comes after all others, and says how many bytes
    they were."""

    start: int
    count: int
    tag: bytes = b""

    def call(self, whole: Call, memory: LocalMemory | None = None) -> Call:
        """The call that moves it: between the peer and its place in the whole call's memory, or `memory`."""
        if memory is None:
            local = sliced(whole.memory.ranges, self.start, self.count)
            memory = LocalMemory(whole.memory.region, local, self.count)
        remote = sliced(whole.remote, self.start, self.count)
        earlier_bytes = self.start if self.tag else 0
        return replace(whole, memory=memory, remote=remote, tag=self.tag, earlier_bytes=earlier_bytes)


Move = Callable[[Piece], Awaitable[None]]


async def in_pieces(call: Call, piece_bytes_max: int, move: Move) -> None:
    """Each piece once; a call without bytes has one without. The first error is the call's, with what landed
    of all pieces."""
    total = call.memory.payload_bytes
    starts = range(0, max(total, 1), piece_bytes_max)
    before = starts[:-1] if call.tag else starts
    landed: list[tuple[int, int]] = []
    try:
        pieces = (Piece(start, min(piece_bytes_max, total - start)) for start in before)
        await _some_at_once(pieces, min(PIECES_AT_ONCE, len(before)), move, landed)
        if call.tag:
            last = Piece(starts[-1], total - starts[-1], call.tag)
            await _some_at_once([last], 1, move, landed)
    except TransferError as error:
        error.landed = tuple(sorted(landed))
        error.settled = error.settled and (len(starts) == 1 or isinstance(error, REFUSED_ALIKE))
        raise


async def _some_at_once(
    pieces: Iterable[Piece], at_once: int, move: Move, landed: list[tuple[int, int]]
) -> None:
    waiting = iter(pieces)
    refused: list[TransferError] = []

    async def some() -> None:
        for piece in waiting:
            try:
                await move(piece)
            except REFUSED_ALIKE as error:
                refused.append(error)
            except TransferError as error:
                landed.extend((piece.start + start, count) for start, count in error.landed)
                raise
            else:
                landed.append((piece.start, piece.count))
            if refused:
                return

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(some())
    except ExceptionGroup as group:
        raise copy(group.exceptions[0]) from None  # calls that fail with one link share its error
    if refused:
        raise copy(refused[0])
