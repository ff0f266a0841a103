"""Who holds one block, as one integer: two bits for each place, an instance having one place.

The two bits say the tier, 0 that the instance has not the block; a slower tier is a smaller number. Along
a chain of hashes an instance first holds blocks, in tiers that only get slower, and then none; so the
integer only gets smaller, place by place. Knows integers and tiers, no hashes and no instances.
"""

from collections.abc import Iterator
from typing import Final

from kvindex.core import Tier

PLACE_BITS: Final = 2
PLACE_MASK: Final = 0b11

CODE_OF: Final = {Tier.SSD: 1, Tier.DRAM: 2, Tier.DEVICE: 3}
TIER_OF: Final = {code: tier for tier, code in CODE_OF.items()}


def places(holders: int) -> Iterator[tuple[int, int]]:
    """(place, code) of every place that has the block, from the last place to the first."""
    while holders:
        place = (holders.bit_length() - 1) // PLACE_BITS
        code = holders >> PLACE_BITS * place
        yield place, code
        holders ^= code << PLACE_BITS * place


def code_at(holders: int, place: int) -> int:
    """0 where the place has not the block."""
    return holders >> PLACE_BITS * place & PLACE_MASK


def count(holders: int) -> int:
    """How many places have the block."""
    low_bits = int.from_bytes(b"\x55" * (holders.bit_length() // 8 + 1), "little")
    return ((holders | holders >> 1) & low_bits).bit_count()


class Interned:
    """Equal integers as one object: a directory has many blocks and few different sets of holders.

    Whoever asks it for every integer that it keeps may compare them by identity.
    """

    UNUSED_MAX = 65_536
    """Integers more than were in use at the last `keep_only` before it is due again."""

    def __init__(self) -> None:
        self._integers: dict[int, int] = {0: 0}
        self._integers_max = self.UNUSED_MAX

    def __len__(self) -> int:
        return len(self._integers)

    def __call__(self, integer: int) -> int:
        return self._integers.setdefault(integer, integer)

    @property
    def overfull(self) -> bool:
        return len(self._integers) > self._integers_max

    def keep_only(self, used: set[int]) -> None:
        """`used` are all that are kept anywhere, as they were given out; all others are forgotten."""
        self._integers = {integer: integer for integer in used}
        self._integers.setdefault(0, 0)
        self._integers_max = 2 * len(self._integers) + self.UNUSED_MAX
