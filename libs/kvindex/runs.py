"""An inventory as packed runs, the form in which it travels: no object for each block."""

from collections.abc import Iterator, Sequence

from kvhash import HASH_BYTES
from kvindex.core import HeldRun, Tier
from kvindex.inventory import HeldBlock

NO_PARENT = bytes(HASH_BYTES)
"""Stands for the parent of a prompt's first block."""


def pack_runs(blocks: Sequence[HeldBlock], blocks_max: int) -> Iterator[HeldRun]:
    """`blocks`, parents first, in runs of at most `blocks_max`; nothing where there are none.

    The fastest tier comes first, so parents stay first: no block lies in a faster tier than its parent.
    """
    for tier in Tier:
        held = [block for block in blocks if block[2] is tier]
        for start in range(0, len(held), blocks_max):
            part = held[start : start + blocks_max]
            yield HeldRun(
                tier,
                b"".join([block_hash for block_hash, _, _ in part]),
                b"".join([parent or NO_PARENT for _, parent, _ in part]),
            )
