"""What keeps the bytes of one lower tier: numbered slots of one block each.

Says what a store promises; `ssd_store` and `dram_store` keep the promise. A store knows which hash it was
given for a slot and nothing of trees, pins or eviction: which slot is free is `BlockPool`'s to say.
"""

from collections.abc import Sequence
from typing import Protocol

from kvhash import BlockHash
from kvpool.tiers import Copy


class StoreError(Exception):
    """A slot cannot be written or read; the message names the place and the cause."""


class CorruptBlock(StoreError):
    """What was read is not what was written under that hash; the bytes that were read are worthless."""


class BlockStore(Protocol):
    """Slots 0 … `slots` - 1 of `block_bytes` bytes.

    Calls block, and may be made from several threads at once. It is the caller who sees to it that a slot
    is not written or erased while another call writes or reads it, and that no call is under way at `close`.
    A slot number or a length of data that fits no slot is IndexError or ValueError.
    """

    slots: int
    block_bytes: int

    def write(self, slot: int, block_hash: BlockHash, parent: BlockHash | None, data: memoryview) -> None:
        """Put a block into a slot in place of what was there. Raises StoreError; then the slot may hold
        anything, and never gives it out under this hash."""

    def read(self, slot: int, block_hash: BlockHash, into: memoryview) -> None:
        """Fill `into` with the block that was written there last, verified.

        Raises CorruptBlock where that is not `block_hash` or not what was written, and StoreError where it
        cannot be read; `into` may hold anything then.
        """

    def view(self, slot: int) -> memoryview | None:
        """The bytes of a slot where they lie, to be copied on from there; None where that is not memory."""

    def erase(self, slot: int) -> None:
        """Have the slot hold nothing, now and for a successor. Raises StoreError."""

    def recover(self) -> Sequence[Copy]:
        """What a predecessor left, in the order in which it was written; of two slots with one hash the
        newer. Looks at records only: whether the bytes are good is seen when they are read.
        Raises StoreError."""

    def close(self) -> None:
        """Give back what it has; what was written stays for a successor where the store can. Twice is
        nothing."""
