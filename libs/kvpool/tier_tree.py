"""The copies of blocks in one tier, as the tree of their chains, and which of them goes next.

A tier is prefix-closed by itself: a copy is added under its parent's and removed before it. A copy is in
use while somebody holds it or one of its children is in use; one that is not in use is cached. Only leaves
among the cached go, in the order of `policy.evict`.

Ahead of need, copies are *staged*: found to be next in that order and settled, so that nothing is lost by
their going (or nothing can be done about it). Staged copies go first, in the order in which they were
staged, children before parents. A copy that is being copied down (`sinking`) goes last: what was spent on
it would be lost. Without staging and sinking the order is the policy's alone.

Knows no pins, generations, slots or events. AssertionError means that the caller broke the contract.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvhash import BlockHash
from kvpool.tier_copy import BlockFacts, TierCopy, check, children_of, link, unlink
from policy.evict import EvictionKey, EvictionOrder, EvictionScale, key_function
from policy.evictable import EvictableBlocks


class TierTree:
    """The copies at the indices 0 … `size` - 1 of a tier. O(log n) per call where nothing else is said."""

    def __init__(self, size: int, order: EvictionOrder) -> None:
        self._order = order
        self._copies: dict[BlockHash, TierCopy] = {}
        self._at: list[TierCopy | None] = [None] * size
        self.cached = 0
        """Copies that are not in use. All of them can go, one after the other."""
        self._staged: OrderedDict[int, TierCopy] = OrderedDict()
        # The owner's clock ticks once for each block that comes in, and little else.
        self.weigh_by(EvictionScale(turnover=size))

    def weigh_by(self, scale: EvictionScale) -> None:
        """What the order's credits are measured by from now on; only while there are no copies."""
        assert not self._copies, "copies are in line by another scale"
        self._key_of = key_function(self._order, scale)
        self._open = EvictableBlocks(self._order, scale)
        """Cached, not staged, no child that is not staged, not sinking."""
        self._late = EvictableBlocks(self._order, scale)
        """Cached leaves that are sinking."""

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._copies

    def __iter__(self) -> Iterator[TierCopy]:
        return iter(self._copies.values())

    @property
    def staged(self) -> int:
        """Copies that were found to go next, and are settled."""
        return len(self._staged)

    def get(self, block_hash: BlockHash) -> TierCopy | None:
        return self._copies.get(block_hash)

    def at(self, index: int) -> TierCopy | None:
        return self._at[index]

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks of a chain have a copy here; it is searched for, the tier is closed."""
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in self._copies)

    def match_in_use(self, hashes: Sequence[BlockHash]) -> int:
        """How many of them are in use."""
        return bisect_left(hashes, True, key=lambda block_hash: not self._is_in_use(block_hash))

    def add(self, facts: BlockFacts, index: int, holds: int = 0) -> TierCopy:
        """A copy at a free index, held as often as that; its parent, where it has one, has a copy here."""
        assert facts.block_hash not in self._copies, f"{facts} has a copy here"
        assert self._at[index] is None, f"index {index} is taken"
        parent = None if facts.parent is None else self._copies[facts.parent]
        copy = TierCopy(facts, index, parent, holds)
        self._copies[facts.block_hash] = self._at[index] = copy
        if parent is not None:
            link(parent, copy)
        if holds:
            if parent is not None:
                self.hold(parent)
            return copy
        self.cached += 1
        self._enter(copy)
        if parent is not None:
            # Not by holding it for a moment: that is O(depth), and a restart adds chains block by block.
            self._place_anew(parent)
        return copy

    def remove(self, copy: TierCopy) -> None:
        """The copy of a cached leaf is gone."""
        assert not copy.holds, f"copy {copy.index} is in use"
        assert not copy.children, f"copy {copy.index} has children"
        self._withdraw(copy)
        del self._copies[copy.facts.block_hash]
        self._at[copy.index] = None
        self.cached -= 1
        parent = copy.parent
        if parent is not None:
            unlink(parent, copy)
            self._enter(parent)

    def hold(self, copy: TierCopy) -> None:
        """Count one holder or one child in use more; a copy that comes into use holds its parent.

        O(1) along a chain that is held from its start; O(depth) where a copy alone is held.
        """
        current: TierCopy | None = copy
        while current is not None:
            current.holds += 1
            if current.holds > 1:
                return
            self.cached -= 1
            if current.line is not None or current.staged:
                self._withdraw(current)
            current = current.parent

    def unhold(self, copy: TierCopy) -> None:
        """The inverse of `hold`; the last copy of the chain to fall out of use may go."""
        current: TierCopy | None = copy
        while current is not None:
            current.holds -= 1
            if current.holds:
                return
            self.cached += 1
            if current.staged_children == current.children:
                self._enter(current)
            current = current.parent

    def touch(self, copy: TierCopy) -> None:
        """The block was used, its facts have changed: its place in the order is found anew.

        O(log n) where a chain is touched from its start.
        """
        copy.unsinkable = False
        self._place_anew(copy)

    def victim(self) -> TierCopy | None:
        """The copy that goes first, a leaf; None where all are in use."""
        if self._staged:
            return self.first_staged()
        index = self._open.first()
        if index is None:
            index = self._late.first()
        return None if index is None else self._at[index]

    def first_staged(self) -> TierCopy | None:
        """The leaf that goes first, where it is settled already."""
        return next(iter(self._staged.values()), None)

    def next_to_stage(self) -> TierCopy | None:
        """The copy that goes next when all that are staged are gone."""
        index = self._open.first()
        return None if index is None else self._at[index]

    def stage(self, copy: TierCopy) -> None:
        """The copy that `next_to_stage` gave is settled."""
        assert copy.line is self._open, f"copy {copy.index} is not next in any order"
        self._withdraw(copy)
        copy.staged = True
        self._staged[copy.index] = copy
        if copy.parent is not None:
            copy.parent.staged_children += 1
            self._enter(copy.parent)

    def mark_sinking(self, copy: TierCopy, sinking: bool) -> None:
        """While its bytes are copied down, a copy is the last to go."""
        assert not copy.staged, f"copy {copy.index} is settled"
        self._withdraw(copy)
        copy.sinking = sinking
        self._enter(copy)

    def goes_before(self, copy: TierCopy, facts: BlockFacts) -> bool:
        """Whether a copy here is worth less than that block, were it in its place."""
        return self._key(copy.facts, copy.index) < self._key(facts, copy.index)

    def subtree(self, copy: TierCopy) -> list[TierCopy]:
        """The copy and all below it, children first. O(their number)."""
        found = [copy]
        for current in found:
            child = current.first_child
            while child is not None:
                found.append(child)
                child = child.next_sibling
        found.reverse()
        return found

    def _is_in_use(self, block_hash: BlockHash) -> bool:
        copy = self._copies.get(block_hash)
        return copy is not None and copy.holds > 0

    def _key(self, facts: BlockFacts, index: int) -> EvictionKey:
        return self._key_of(facts.candidate(index))

    def _place_anew(self, copy: TierCopy) -> None:
        """Find again the place in line of a copy that has one, and of those above it that were staged."""
        current: TierCopy | None = copy
        while current is not None and current.staged:
            self._withdraw(current)
            self._enter(current)
            current = current.parent
        if current is not None and current.line is not None:
            self._withdraw(current)
            self._enter(current)

    def _enter(self, copy: TierCopy) -> None:
        """Put a copy in line where it may be next; nothing happens where it may not or is in line already."""
        if copy.holds or copy.staged or copy.staged_children < copy.children:
            return
        if copy.line is not None or (copy.sinking and copy.children):
            return
        copy.line = self._late if copy.sinking else self._open
        copy.line.add(copy.facts.candidate(copy.index))

    def _withdraw(self, copy: TierCopy) -> None:
        """Take a copy out of any line. A parent that was staged above it must follow."""
        if copy.line is not None:
            copy.line.discard(copy.index)
            copy.line = None
        if not copy.staged:
            return
        copy.staged = False
        del self._staged[copy.index]
        if copy.parent is not None:
            copy.parent.staged_children -= 1

    def check_integrity(self, held: Sequence[int]) -> None:
        """AssertionError where the tree contradicts itself or the holders at each index. O(size)."""
        present = [copy for copy in self._at if copy is not None]
        check({copy.facts.block_hash: copy for copy in present} == self._copies, "hashes and indices differ")
        check(sum(not copy.holds for copy in present) == self.cached, f"{self.cached} are counted as cached")
        for copy in present:
            self._check_copy(copy, held[copy.index])
        linked = sum(copy.children for copy in present)
        check(linked == sum(copy.parent is not None for copy in present), "a copy is not linked")
        staged_before: set[int] = set()
        for copy in self._staged.values():
            check({child.index for child in children_of(copy)} <= staged_before, "goes before a child", copy)
            staged_before.add(copy.index)
        check(len(self._staged) == sum(copy.staged for copy in present), "a staged copy is not in line")
        in_line = sum(copy.line is not None for copy in present)
        check(in_line == len(self._open) + len(self._late), "a line has what is not there")
        self._open.check_integrity()
        self._late.check_integrity()

    def _check_copy(self, copy: TierCopy, held: int) -> None:
        children = children_of(copy)
        parent = None if copy.facts.parent is None else self._copies.get(copy.facts.parent)
        check(copy.parent is parent and (parent is not None or copy.facts.parent is None), "parent", copy)
        check(all(child.parent is copy for child in children), "siblings", copy)
        check(parent is None or copy.facts.depth_blocks == parent.facts.depth_blocks + 1, "depth", copy)
        check(copy.holds == held + sum(child.holds > 0 for child in children), "holds", copy)
        check(copy.children == len(children), "children", copy)
        check(copy.staged_children == sum(child.staged for child in children), "staged", copy)
        check(not (copy.staged and (copy.holds or copy.sinking)), "staged", copy)
        is_next = not copy.holds and not copy.staged and copy.staged_children == copy.children
        is_late = is_next and copy.sinking and not copy.children
        is_open = is_next and not copy.sinking
        check(copy.line is (self._open if is_open else self._late if is_late else None), "line", copy)
        check(copy.line is None or copy.index in copy.line, "line", copy)
