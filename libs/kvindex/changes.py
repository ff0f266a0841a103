"""Where along a prompt its holders change: the search behind `Directory.match`.

Holders only get fewer and slower along a chain (`kvindex.holders`), so two equal places have nothing
different between them. What is looked at: the first and the last block; where the holders ended the last
time (a prompt often shares its start with one that was asked before); else a grid with about one cell for
each holder that ends, and each cell in which something changes, by halving.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from kvhash import HASH_BYTES

FINGERS_MAX = 16_384

Change: TypeAlias = tuple[int, int, int]
"""(block, holders up to it, holders from it on)"""

HoldersAt: TypeAlias = Callable[[bytes, int], int]
"""`dict.get` of the holders by hash. Equal holders are one object."""


class ChangeFinder:
    """Finds changes, and remembers where: bounded by FINGERS_MAX, and a wrong memory costs one look."""

    def __init__(self) -> None:
        self._fingers: dict[int, int] = {}

    def find(self, get: HoldersAt, packed: bytes, count: Callable[[int], int]) -> list[Change]:
        """The changes of the holders along `packed`, of a chain of hashes of 16 bytes each; behind the end
        there are no holders. Of what is no chain, some.

        `count` says how many places differ between two holders, by their exclusive or.
        """
        end = len(packed)
        holders = get(packed[:HASH_BYTES], 0)
        if not holders:
            return []
        last = get(packed[end - HASH_BYTES :], 0)
        fingers = self._fingers
        changes: list[Change] = []
        grid: _Grid | None = None
        at = 0
        while holders and holders is not last:
            start, at = at, fingers.get(holders, 0)
            after = holders
            if start < at < end and get(packed[at - HASH_BYTES : at], 0) is holders:
                after = get(packed[at : at + HASH_BYTES], 0)
            if after is holders:
                if grid is None:
                    grid = _Grid(get, packed, start, last, count(holders ^ last))
                at, after = grid.change(start, holders)
                self._remember(holders, at)
            changes.append((at // HASH_BYTES, holders, after))
            holders = after
        if holders:
            changes.append((end // HASH_BYTES, holders, 0))
        return changes

    def _remember(self, holders: int, at: int) -> None:
        if len(self._fingers) >= FINGERS_MAX:
            self._fingers.clear()
        self._fingers[holders] = at


class _Grid:
    """Holders at every `step` bytes from `start` on, and at the last block."""

    def __init__(self, get: HoldersAt, packed: bytes, start: int, last: int, cells: int) -> None:
        blocks = len(packed) // HASH_BYTES - start // HASH_BYTES
        halvings = ((blocks - 1) // cells).bit_length()
        self._get = get
        self._packed = packed
        self._start = start
        self._step = HASH_BYTES << halvings
        self._steps = [HASH_BYTES << halving for halving in reversed(range(halvings))]
        lines = range(start + self._step, len(packed) - HASH_BYTES, self._step)
        self._ends = [get(packed[line : line + HASH_BYTES], 0) for line in lines]
        self._ends.append(last)

    def change(self, at: int, holders: int) -> tuple[int, int]:
        """(where the next change after `at` is, the holders there); `holders` are those at `at`, and not
        those of the last block."""
        get, packed, ends = self._get, self._packed, self._ends
        cell = (at - self._start) // self._step
        if ends[cell] is holders:
            while ends[cell] is holders:
                cell += 1
            at = self._start + cell * self._step
        after: int | None = None
        for step in self._steps:
            beyond = at + step
            found = get(packed[beyond : beyond + HASH_BYTES], 0)
            if found is holders:
                at = beyond
            else:
                after = found
        at += HASH_BYTES
        if after is None:
            after = get(packed[at : at + HASH_BYTES], 0)
        return at, after


def all_changes(get: HoldersAt, hashes: Iterable[bytes]) -> list[Change]:
    """As `ChangeFinder.find`, looking at every block."""
    changes: list[Change] = []
    before, block = 0, -1
    for block, block_hash in enumerate(hashes):
        holders = get(block_hash, 0)
        if block and holders is not before:
            changes.append((block, before, holders))
        before = holders
    if before:
        changes.append((block + 1, before, 0))
    return changes
