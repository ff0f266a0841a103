"""Places in the holders' integers: who is given which two bits, and when they may be given again."""

from dataclasses import dataclass, field

from kvindex.core import InstanceId
from kvindex.holders import PLACE_BITS, PLACE_MASK


@dataclass(slots=True)
class Place:
    """Two bits of every holders' integer, and how many blocks have them set."""

    number: int
    blocks: int = 0
    shift: int = field(init=False)
    mask: int = field(init=False)

    def __post_init__(self) -> None:
        self.shift = PLACE_BITS * self.number
        self.mask = PLACE_MASK << self.shift


@dataclass(slots=True)
class Replacement:
    """A new inventory of one instance while it is built up; nobody sees it before `Directory.commit`."""

    instance: InstanceId
    place: Place | None
    """None once it is committed or abandoned."""
    parents_missing: set[bytes] = field(default_factory=set)
    """Parents that had not come when their children did."""

    @property
    def blocks(self) -> int:
        return 0 if self.place is None else self.place.blocks

    def open_place(self) -> Place:
        """AssertionError once it is committed or abandoned."""
        if self.place is None:
            raise AssertionError("the inventory is committed or abandoned already")
        return self.place


class Places:
    """Gives the lowest number that is free, so that the integers stay short."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._left: list[Place] = []

    def __len__(self) -> int:
        """Those that were given and not yet given back, left ones included."""
        return len(self._taken)

    def take(self) -> Place:
        number = next(number for number in range(len(self._taken) + 1) if number not in self._taken)
        self._taken.add(number)
        return Place(number)

    def leave(self, place: Place) -> None:
        """Nobody has it any more; where blocks have its bits, it is to be swept before it is given again."""
        if place.blocks:
            self._left.append(place)
        else:
            self._taken.discard(place.number)

    @property
    def to_sweep(self) -> bool:
        return bool(self._left)

    def take_left(self) -> list[Place]:
        """All that are to be swept; the caller gives them back."""
        left, self._left = self._left, []
        return left

    def give_back(self, places: list[Place]) -> None:
        """No block has their bits any more."""
        self._taken.difference_update(place.number for place in places)
