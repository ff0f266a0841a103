"""What is known of a block, its copy in one tier, and how copies of one chain hang together.

The words of `tier_tree`, which keeps them in order.
"""

from dataclasses import dataclass, field

from kvhash import BlockHash
from policy.evict import UNKNOWN_USE, BlockUse, EvictionCandidate
from policy.evictable import EvictableBlocks


@dataclass(slots=True, eq=False)
class BlockFacts:
    """What is known of a block wherever its copies lie; all of them share it."""

    block_hash: BlockHash
    parent: BlockHash | None
    depth_blocks: int
    """Blocks before it in its chain."""
    used_at: int
    uses: int = 0
    use: BlockUse = UNKNOWN_USE

    def candidate(self, index: int) -> EvictionCandidate:
        return EvictionCandidate(index, self.used_at, self.uses, self.depth_blocks, self.use)


@dataclass(slots=True, eq=False)
class TierCopy:
    """One block's copy in one tier. A block that is evicted and stored again gets another."""

    facts: BlockFacts
    index: int
    """Block id or slot."""
    parent: "TierCopy | None" = field(repr=False)
    holds: int
    """What the tier's owner holds it by, plus its children in use."""
    children: int = 0
    staged_children: int = 0
    staged: bool = False
    sinking: bool = False
    unsinkable: bool = False
    """The tier below had no room for it, or could not be written: not tried again before its next use."""
    line: EvictableBlocks | None = field(default=None, repr=False)
    """Where it stands among those that may be next."""
    # Siblings are linked, which costs less memory than a set for each parent, most of which have one child.
    first_child: "TierCopy | None" = field(default=None, repr=False)
    previous_sibling: "TierCopy | None" = field(default=None, repr=False)
    next_sibling: "TierCopy | None" = field(default=None, repr=False)


def link(parent: TierCopy, copy: TierCopy) -> None:
    parent.children += 1
    copy.next_sibling = parent.first_child
    if parent.first_child is not None:
        parent.first_child.previous_sibling = copy
    parent.first_child = copy


def unlink(parent: TierCopy, copy: TierCopy) -> None:
    parent.children -= 1
    if copy.previous_sibling is None:
        parent.first_child = copy.next_sibling
    else:
        copy.previous_sibling.next_sibling = copy.next_sibling
    if copy.next_sibling is not None:
        copy.next_sibling.previous_sibling = copy.previous_sibling


def children_of(copy: TierCopy) -> list[TierCopy]:
    found = []
    child = copy.first_child
    while child is not None:
        found.append(child)
        child = child.next_sibling
    return found


def check(holds: bool, detail: str, about: object = "") -> None:
    """`about` is printed only where it fails: a check looks at many things."""
    if not holds:
        raise AssertionError(f"{detail} {about}")
