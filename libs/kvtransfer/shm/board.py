"""Boards: one word per permission to read memory of this process, in memory that peers map read-only.

A permission is a slot and an epoch; it stands while the slot's word is its epoch. Epochs are never used
twice, so a slot given to another permission does not revive an old one.

The order of things makes it work. Who takes a permission back clears the word before the memory is given
away; who reads memory looks at the word after the last byte was copied. A reader that saw its epoch
then has copied nothing that came later. Both sides pass a lock of the interpreter in between, which is
a full barrier, so this holds on processors that reorder loads as well.
"""

from dataclasses import dataclass

from kvtransfer.errors import BusyError, FrameError
from kvtransfer.shared_buffer import SharedBuffer
from kvtransfer.shm.system import Mapping

_WORD_BYTES = 8
_SHUT = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """A permission of ours."""

    index: int
    epoch: int


class Board:
    """The permissions that this process gave. Raises SharedBufferError if there is no memory for it."""

    def __init__(self, slots_max: int) -> None:
        self.memory = SharedBuffer.create(slots_max * _WORD_BYTES, from_start=True)
        self._words = memoryview(self.memory).cast("Q")
        self._slots_max = slots_max
        self._free: list[int] = []
        self._used = 0
        self._epoch = _SHUT

    def open(self) -> Slot:
        """A new permission, which stands. Raises BusyError if all slots are taken."""
        if self._free:
            index = self._free.pop()
        elif self._used < self._slots_max:
            index = self._used
            self._used += 1
        else:
            raise BusyError(f"all {self._slots_max} slots of the board are taken")
        self._epoch += 1
        self._words[index] = self._epoch
        return Slot(index, self._epoch)

    def shut(self, slot: Slot) -> None:
        """Take it back; again is harmless."""
        if self._words[slot.index] == slot.epoch:
            self._words[slot.index] = _SHUT
            self._free.append(slot.index)

    def close(self) -> None:
        """Take all back; again is harmless."""
        for index in range(self._used):
            self._words[index] = _SHUT
        self._used = 0
        self._words.release()
        self.memory.close()


class BoardView:
    """The board of a peer."""

    __slots__ = ("_mapping", "_words")

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._words = mapping.words()

    def permission(self, index: int, epoch: int) -> "Permission":
        """Raises FrameError for a slot that the board does not have, or no epoch."""
        if not 0 <= index < len(self._words) or epoch == _SHUT:
            raise FrameError(f"slot {index} with epoch {epoch} on a board of {len(self._words)} slots")
        return Permission(self, index, epoch)

    def word(self, index: int) -> int:
        return self._words[index]


class Permission:
    """A permission of the peer's, for us to look at."""

    __slots__ = ("_board", "_epoch", "_index")

    def __init__(self, board: BoardView, index: int, epoch: int) -> None:
        self._board = board
        self._index = index
        self._epoch = epoch

    def stands(self) -> bool:
        return self._board.word(self._index) == self._epoch
