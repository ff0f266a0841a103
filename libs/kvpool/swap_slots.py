"""Which places of the swap space are free. Pure bookkeeping; the bytes are the engine's.

One thread, the event loop's.
"""

from collections.abc import Iterable


class SwapSlots:
    """The slots 0 … `slots` - 1, one block each; 0 slots are no swap space."""

    def __init__(self, slots: int) -> None:
        """ValueError where `slots` is negative."""
        if slots < 0:
            raise ValueError(f"slots: {slots}, at least 0")
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free slots; there must be as many."""
        assert 0 <= count <= len(self._free), f"{count} slots asked for, {len(self._free)} are free"
        slots = [self._free.pop() for _ in range(count)]
        self._taken.update(slots)
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        """What they hold is not needed any more. Each must be taken."""
        for slot in slots:
            assert slot in self._taken, f"slot {slot} is not taken"
            self._taken.remove(slot)
            self._free.append(slot)

    def check_integrity(self) -> None:
        """AssertionError where a slot is lost or counted twice; for tests."""
        if sorted([*self._free, *self._taken]) != list(range(self.slots)):
            raise AssertionError(f"{len(self._free)} free and {len(self._taken)} taken of {self.slots}")
