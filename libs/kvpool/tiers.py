"""Words of a pool with several tiers: what is copied between two of them, and what is told of each.

A block may have a copy in every tier. The compute tier's copy is a block of the arena, named by its block
id; a lower tier's copy lies in one of its numbered slots.
"""

from dataclasses import dataclass, field

from kvhash import BlockHash
from kvindex.core import Tier


@dataclass(frozen=True, slots=True)
class Sink:
    """A copy to be made one tier further down; `slot` is reserved for it until it is reported."""

    block_hash: BlockHash
    parent: BlockHash | None
    source: Tier
    source_index: int
    """Block id where `source` is the compute tier, else a slot, which stays as it is until the report."""
    generation: int
    """Of the source block when the copy was asked for; 0 where the source is a slot."""
    tier: Tier
    slot: int


@dataclass(frozen=True, slots=True)
class Rise:
    """A copy to be read into a fresh block of the compute tier; both are pinned until it is reported."""

    block_hash: BlockHash
    parent: BlockHash | None
    tier: Tier
    slot: int
    block_id: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A block that a store holds in one of its slots."""

    slot: int
    block_hash: BlockHash
    parent: BlockHash | None


@dataclass(frozen=True, slots=True)
class TierStats:
    """One lower tier; free + copies + moving == blocks. Totals count blocks since the start."""

    tier: Tier
    blocks: int
    """Slots of the tier."""
    free: int
    copies: int
    """Slots that hold the copy of a block."""
    moving: int
    """Slots that are being written, to be erased, or still read although their copy was given up."""
    lying: int
    """Blocks that lie here: their fastest copy is this one."""
    sunk_total: int = 0
    """Copies that came from the tier above."""
    discarded_total: int = 0
    """Copies that were made and thrown away, because the block was gone when they were done."""
    risen_total: int = 0
    """Copies that were brought up from here."""
    evicted_total: int = 0
    """Copies that made room for others."""
    lost_total: int = 0
    """Copies that could not be read, with those that hung on them."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """free + cached + in_use == blocks, of the compute tier. Totals, since the start, are not compared."""

    blocks: int
    free: int
    """Blocks that hold nothing."""
    cached: int
    """Reusable blocks nobody is using: given up on demand."""
    in_use: int
    """Pinned blocks and the ancestors of pinned blocks."""
    tiers: tuple[TierStats, ...] = ()
    """The lower tiers, fastest first."""
    dropped_total: int = field(default=0, compare=False)
    """Blocks that were lost to the pool because they had to go before they had a copy below."""
    gone_total: int = field(default=0, compare=False)
    """Blocks that went from the lowest tier, and lay nowhere else."""
