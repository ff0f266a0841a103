"""One run of copies on its way up: read in threads, verified, loaded, stored root first.

An ascent settles each of its rises with the pool exactly once, and no block before the thread that writes to
it has ended. It is a task of its own that nobody cancels: who asked for it may leave at any time, and what
was on its way is then given back, or kept as a cached block if it is whole. What a thread hangs on stays
until it comes back: one block for each thread, and those that it has read before in the same piece.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvhash import BlockHash
from kvindex.core import Tier
from kvpool.arena import Arena
from kvpool.block_store import BlockStore, CorruptBlock, StoreError
from kvpool.copy_threads import CopyThreads
from kvpool.mover_limits import MoverCounters
from kvpool.pool import BlockPool
from kvpool.tiers import Rise


@dataclass(frozen=True, slots=True)
class Shared:
    """What all ascents of a mover have in common."""

    pool: BlockPool
    arena: Arena
    stores: Mapping[Tier, BlockStore]
    threads: CopyThreads
    loaded: Callable[[Sequence[int]], Awaitable[None]]
    trouble: Callable[[str, Exception], None]
    counters: MoverCounters
    rising: dict[BlockHash, "Ascent"] = field(default_factory=dict)
    """Blocks on their way up, each with who brings it."""


@dataclass(frozen=True, slots=True)
class _PieceRead:
    """How many leading copies of a piece are good, and what was wrong with the next; None: not wanted."""

    good: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    number: int
    rises: Sequence[Rise]
    read: "asyncio.Future[_PieceRead]"


class Ascent:
    """All methods are for the event loop's thread."""

    def __init__(self, shared: Shared, rises: Sequence[Rise], piece_blocks: int, taken: list[int]) -> None:
        """`rises` come from `begin_rise`; the blocks are appended to `taken`, pinned, as they are stored."""
        self._shared = shared
        self._left = deque(rises)
        """Not settled with the pool yet, in order."""
        loop = asyncio.get_running_loop()
        self._pieces = [
            _Piece(number, rises[first : first + piece_blocks], loop.create_future())
            for number, first in enumerate(range(0, len(rises), piece_blocks))
        ]
        self._pieces_wanted = len(self._pieces)
        self._claimed = [0] * len(self._pieces)
        """How many leading blocks of each piece a thread has written to, or does."""
        self._claiming = threading.Lock()
        """Of these two: whoever claims a block sees that nobody wants it any more, or is seen."""
        self._given_back: set[int] = set()
        """Blocks that are not this ascent's any more."""
        self._taken: list[int] | None = taken
        self._progress = asyncio.Event()
        self._interested = 1
        for rise in rises:
            shared.rising.setdefault(rise.block_hash, self)

    async def run(self) -> None:
        """Returns when every rise is settled; raises nothing that a store or `loaded` raises."""
        queue = iter(self._pieces)
        readers = [
            asyncio.ensure_future(self._read_pieces(queue))
            for _ in range(min(self._shared.threads.threads, len(self._pieces)))
        ]
        try:
            await self._store_in_order()
        finally:
            self.give_up()
            await asyncio.wait(readers)
            while self._left:
                self._shared.pool.rise_failed(self._settled(), lost=False)
            self._tell_progress()

    def give_up(self) -> None:
        """Read nothing more; what is whole by then is still stored, and what nobody writes to given back: the
        thread that is waited for may hang."""
        with self._claiming:
            self._pieces_wanted = 0
        staying = self._staying()
        left, self._left = self._left, deque()
        for rise in left:
            if rise.block_id in staying:
                self._left.append(rise)
            else:
                self._given_back.add(rise.block_id)
                self._not_rising(rise)
                self._shared.pool.rise_failed(rise, lost=False)
        self._tell_progress()

    def leave(self) -> None:
        """The owner has what it got; what is stored from now on is nobody's."""
        self._taken = None
        self._lose_interest()

    async def brought(self, block_hash: BlockHash) -> None:
        """Returns when that block is stored, or known not to come. For others who want it."""
        self._interested += 1
        try:
            while self._shared.rising.get(block_hash) is self:
                await self._progress.wait()
        finally:
            self._lose_interest()

    def _lose_interest(self) -> None:
        self._interested -= 1
        if not self._interested:
            self.give_up()

    async def _read_pieces(self, queue: Iterator[_Piece]) -> None:
        """One of several that take the next piece until there is none."""
        for piece in queue:
            read = await self._read_piece(piece)
            if read.good < len(piece.rises):
                # What comes after it cannot be stored; what came before it may still be on its way.
                with self._claiming:
                    self._pieces_wanted = min(self._pieces_wanted, piece.number)
            piece.read.set_result(read)

    async def _read_piece(self, piece: _Piece) -> _PieceRead:
        if not self._is_wanted(piece):
            return _PieceRead(0)
        shared = self._shared
        work = partial(_read, shared.stores, shared.arena, piece.rises, partial(self._claim, piece))
        try:
            return await shared.threads.run(work)
        except Exception as error:
            # Not the copy's fault: the system gives no thread, or the arena is closed.
            return _PieceRead(0, error)

    def _is_wanted(self, piece: _Piece) -> bool:
        return piece.number < self._pieces_wanted

    def _claim(self, piece: _Piece, place: int) -> bool:
        """In a thread: the block at that place of the piece is written to from now on. False: not wanted."""
        with self._claiming:
            if not self._is_wanted(piece):
                return False
            self._claimed[piece.number] = place + 1
            return True

    def _staying(self) -> set[int]:
        """Blocks of what was read in one go from the start, and those that threads write to."""
        block_ids: set[int] = set()
        unbroken = True
        for piece in self._pieces:
            if not piece.read.done():
                unbroken = False
                block_ids.update(rise.block_id for rise in piece.rises[: self._claimed[piece.number]])
            elif unbroken:
                unbroken = piece.read.result().good == len(piece.rises)
                block_ids.update(rise.block_id for rise in piece.rises)
        return block_ids

    async def _store_in_order(self) -> None:
        """Store what is read, as far as it is good; all that is read by now goes to `loaded` together."""
        place = 0
        while place < len(self._pieces):
            await asyncio.wait([self._pieces[place].read])
            whole: list[Rise] = []
            broken = False
            error: Exception | None = None
            while place < len(self._pieces) and self._pieces[place].read.done() and not broken:
                piece = self._pieces[place]
                read = self._still_ours(piece)
                whole += piece.rises[: read.good]
                broken, error = read.good < len(piece.rises), read.error
                place += 1
            if whole and not await self._store(whole):
                return
            if error is not None:
                self._failed(error)
            if broken:
                return

    def _still_ours(self, piece: _Piece) -> _PieceRead:
        """What was read of a piece, up to the first block that was given back."""
        read = piece.read.result()
        for place, rise in enumerate(piece.rises[: read.good + 1]):
            if rise.block_id in self._given_back:
                return _PieceRead(place)
        return read

    async def _store(self, rises: Sequence[Rise]) -> bool:
        """Whether all could be."""
        shared = self._shared
        try:
            await shared.loaded([rise.block_id for rise in rises])
        except Exception as error:
            shared.trouble("loading what rose", error)
            return False
        for _ in rises:
            rise = self._settled()
            block_id = shared.pool.risen(rise)
            if block_id is None:
                return False
            counters = shared.counters.tiers[rise.tier]
            counters.risen_blocks += 1
            counters.risen_bytes += shared.arena.block_bytes
            if self._taken is None:
                shared.pool.release((block_id,))
            else:
                self._taken.append(block_id)
        self._tell_progress()
        return True

    def _failed(self, error: Exception) -> None:
        """The first of those that are left could not be read."""
        shared, tier = self._shared, self._left[0].tier
        shared.trouble(f"reading from {tier}", error)
        if not isinstance(error, StoreError):
            return
        counters = shared.counters.tiers[tier]
        if isinstance(error, CorruptBlock):
            counters.corrupt_blocks += 1
        else:
            counters.unreadable_blocks += 1
        shared.pool.rise_failed(self._settled(), lost=True)

    def _settled(self) -> Rise:
        """The first of those that are left, which the pool is to be told of now."""
        rise = self._left.popleft()
        self._not_rising(rise)
        return rise

    def _not_rising(self, rise: Rise) -> None:
        if self._shared.rising.get(rise.block_hash) is self:
            del self._shared.rising[rise.block_hash]

    def _tell_progress(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()


def _read(
    stores: Mapping[Tier, BlockStore], arena: Arena, rises: Sequence[Rise], claim: Callable[[int], bool]
) -> _PieceRead:
    """In a thread. `claim(place)`: whether the block at that place may be written to."""
    for good, rise in enumerate(rises):
        if not claim(good):
            return _PieceRead(good)
        try:
            stores[rise.tier].read(rise.slot, rise.block_hash, arena.block(rise.block_id))
        except StoreError as error:
            return _PieceRead(good, error)
    return _PieceRead(len(rises))
