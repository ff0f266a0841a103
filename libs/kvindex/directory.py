"""Who holds which block, over all instances: what kvmeta serves.

For every block one integer that says which instances hold it and in which tier (`kvindex.holders`); equal
integers are one object. What is held is prefix-closed by the holder's doing, in every tier by itself:
`match` relies on it. Events and inventories are taken over whole, mostly without a step per block.

An instance has a place in the integers. A dropped or replaced one leaves its place at once, so no match
tells it any more; its bits are cleared by `sweep`, step by step, and then the place is given again. A new
inventory is built up in a place of its own, and shown by `commit`.

Knows neither event numbers nor messages. One thread; bounded by what the instances announce.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from kvhash import HASH_BYTES, HashInputError, unpack
from kvindex.changes import ChangeFinder
from kvindex.core import BlockAction, BlockEvent, HeldRun, InstanceId, InstanceMatch, Tier
from kvindex.holders import CODE_OF, Interned, count
from kvindex.inventory import InventoryError
from kvindex.matches import MatchBuilder
from kvindex.places import Place, Places, Replacement
from kvindex.runs import NO_PARENT


@dataclass(slots=True)
class _Sweep:
    places: list[Place]
    hashes: list[bytes]
    at: int = 0


class Directory:
    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._interned = Interned()
        self._places = Places()
        self._place_of: dict[InstanceId, Place] = {}
        self._sweep: _Sweep | None = None
        self._finder = ChangeFinder()
        self._matches = MatchBuilder()

    def apply(self, instance: InstanceId, event: BlockEvent) -> None:
        """Take over one change of an instance's inventory, which may be the first.

        InventoryError where it contradicts what is known of the instance: something was missed, ask for
        its inventory. HashInputError where its hashes are none. Then nothing of the event was applied.
        """
        block_hashes = unpack(event.block_hashes)
        place = self._place(instance)
        match event.action:
            case BlockAction.STORED:
                self._check_parent(place, event.parent)
                self._store(place, block_hashes, event.tier)
            case BlockAction.MOVED:
                self._move(place, block_hashes, event.tier)
            case BlockAction.REMOVED:
                self._remove(place, block_hashes)

    def match(self, packed_hashes: bytes) -> tuple[InstanceMatch, ...]:
        """How long a prefix of the prompt each instance holds, longest first; those with none are left out.

        `packed_hashes` is the prompt's hash chain, 16 bytes a block; what is no chain is answered too, but
        the answer means nothing. Looks at O(i · log n) blocks, i being the number of different lengths.
        Raises HashInputError on bytes that are no hashes.
        """
        if len(packed_hashes) % HASH_BYTES:
            raise HashInputError(f"block hashes: {len(packed_hashes)} bytes, not a multiple of {HASH_BYTES}")
        get = self._holders.get
        changes = self._finder.find(get, packed_hashes, count)
        return self._matches.matches(changes, get, packed_hashes)

    def replacement(self, instance: InstanceId) -> Replacement:
        """Begin a new inventory of the instance; it ends with `commit` or `abandon`."""
        return Replacement(instance, self._places.take())

    def extend(self, replacement: Replacement, run: HeldRun) -> None:
        """InventoryError where a block comes twice, HashInputError for what are no hashes; then nothing of
        the run was taken. Parents may come later than their children."""
        place = replacement.open_place()
        if len(run.parents) != len(run.block_hashes):
            raise InventoryError(
                f"parents: {len(run.parents)} bytes beside {len(run.block_hashes)} of block hashes"
            )
        self._store(place, unpack(run.block_hashes), run.tier)
        for parent in _parents_elsewhere(run):
            if parent != NO_PARENT and not self._holders.get(parent, 0) & place.mask:
                replacement.parents_missing.add(parent)

    def commit(self, replacement: Replacement) -> None:
        """Forget what was known of the instance and show the new inventory instead. O(1), mostly.

        InventoryError where a block's parent is not in the inventory; then what was known is known still.
        """
        place = replacement.open_place()
        for parent in replacement.parents_missing:
            self._check_parent(place, parent)
        replacement.place = None
        self.drop(replacement.instance)
        self._show(replacement.instance, place)

    def abandon(self, replacement: Replacement) -> None:
        """Forget a new inventory that is not to be shown; nothing happens after `commit`. O(1)."""
        place, replacement.place = replacement.place, None
        if place is not None:
            self._places.leave(place)

    def replace(self, instance: InstanceId, runs: Iterable[HeldRun]) -> None:
        """Forget what was known of the instance and take `runs` for it, in one go.

        Raises as `extend` and `commit` do; then what was known is known still.
        """
        replacement = self.replacement(instance)
        try:
            for run in runs:
                self.extend(replacement, run)
            self.commit(replacement)
        finally:
            self.abandon(replacement)

    def drop(self, instance: InstanceId) -> None:
        """Forget the instance; nothing happens where it is unknown. O(1)."""
        place = self._place_of.pop(instance, None)
        if place is not None:
            self._matches.hide(place.number)
            self._places.leave(place)

    def sweep(self, blocks_max: int) -> bool:
        """Clear what dropped and replaced instances left behind, looking at `blocks_max` blocks at most.

        False once nothing is left. Each pass begins with a list of all hashes: some 10 ms for a million.
        """
        if self._sweep is None:
            if not self._places.to_sweep:
                return False
            self._sweep = _Sweep(self._places.take_left(), list(self._holders))
        sweep = self._sweep
        part = sweep.hashes[sweep.at : sweep.at + blocks_max]
        sweep.at += len(part)
        self._clear(part, sum(place.mask for place in sweep.places))
        if sweep.at == len(sweep.hashes):
            self._places.give_back(sweep.places)
            self._sweep = None
        return self._sweep is not None or self._places.to_sweep

    def instances(self) -> tuple[InstanceId, ...]:
        """Every instance from which something is known, even that it holds nothing."""
        return tuple(self._place_of)

    def blocks(self) -> int:
        """Blocks held, summed over all instances."""
        return sum(place.blocks for place in self._place_of.values())

    def blocks_of(self, instance: InstanceId) -> int:
        """Blocks held by one instance; 0 where it is unknown."""
        place = self._place_of.get(instance)
        return 0 if place is None else place.blocks

    def _store(self, place: Place, block_hashes: Sequence[bytes], tier: Tier) -> None:
        before = self._holders_of(block_hashes)
        mask, code = place.mask, CODE_OF[tier] << place.shift
        after = {holders: holders | code for holders in set(before)}
        if any(holders & mask for holders in after):
            raise _contradiction("is held already", block_hashes, before, lambda holders: holders & mask)
        if len(set(block_hashes)) != len(block_hashes):
            raise InventoryError("a block comes twice")
        self._set(block_hashes, before, after)
        place.blocks += len(block_hashes)

    def _move(self, place: Place, block_hashes: Sequence[bytes], tier: Tier) -> None:
        before = self._held(place, block_hashes)
        mask, code = place.mask, CODE_OF[tier] << place.shift
        self._set(block_hashes, before, {holders: holders & ~mask | code for holders in set(before)})

    def _remove(self, place: Place, block_hashes: Sequence[bytes]) -> None:
        before = self._held(place, block_hashes)
        if len(set(block_hashes)) != len(block_hashes):
            raise InventoryError("a block is removed twice")
        self._set(block_hashes, before, {holders: holders & ~place.mask for holders in set(before)})
        place.blocks -= len(block_hashes)

    def _clear(self, block_hashes: Sequence[bytes], mask: int) -> None:
        before = self._holders_of(block_hashes)
        after = {holders: holders & ~mask for holders in set(before) if holders & mask}
        if not after:
            return
        marked = [
            (block_hash, holders)
            for block_hash, holders in zip(block_hashes, before, strict=True)
            if holders in after
        ]
        self._set([block_hash for block_hash, _ in marked], [holders for _, holders in marked], after)

    def _set(self, block_hashes: Sequence[bytes], before: list[int], after: dict[int, int]) -> None:
        """Give each block, whose holders were `before`, those that `after` says; without any it goes."""
        after = {old: self._interned(new) for old, new in after.items()}
        if len(after) == 1:
            (new,) = after.values()
            if new:
                self._holders.update(dict.fromkeys(block_hashes, new))
        else:
            self._holders.update(zip(block_hashes, map(after.__getitem__, before), strict=True))
        if not all(after.values()):
            holders = self._holders
            for block_hash, old in zip(block_hashes, before, strict=True):
                if not after[old]:
                    del holders[block_hash]
        if self._interned.overfull:
            self._interned.keep_only(set(self._holders.values()))

    def _held(self, place: Place, block_hashes: Sequence[bytes]) -> list[int]:
        """The holders of blocks that the place has; InventoryError where it has one not."""
        before, mask = self._holders_of(block_hashes), place.mask
        if not all(holders & mask for holders in set(before)):
            raise _contradiction("is not held", block_hashes, before, lambda holders: not holders & mask)
        return before

    def _holders_of(self, block_hashes: Sequence[bytes]) -> list[int]:
        return list(map(self._holders.get, block_hashes, repeat(0)))

    def _check_parent(self, place: Place, parent: bytes) -> None:
        if len(parent) not in (0, HASH_BYTES):
            raise InventoryError(f"parent: {len(parent)} bytes, a block hash has {HASH_BYTES}")
        if parent and not self._holders.get(parent, 0) & place.mask:
            raise InventoryError(f"parent {parent.hex()} is not held")

    def _place(self, instance: InstanceId) -> Place:
        place = self._place_of.get(instance)
        if place is None:
            place = self._places.take()
            self._show(instance, place)
        return place

    def _show(self, instance: InstanceId, place: Place) -> None:
        self._place_of[instance] = place
        self._matches.show(place.number, instance)


def _parents_elsewhere(run: HeldRun) -> set[bytes]:
    """The parents of those blocks of a run that do not follow the block before them in it."""
    if not run.parents:
        return set()
    hashes = np.frombuffer(run.block_hashes, np.uint64).reshape(-1, 2)
    parents = np.frombuffer(run.parents, np.uint64).reshape(-1, 2)
    starts = np.flatnonzero((parents[1:] != hashes[:-1]).any(axis=1)) + 1
    return {run.parents[HASH_BYTES * start : HASH_BYTES * (start + 1)] for start in [0, *starts.tolist()]}


def _contradiction(
    what: str, block_hashes: Sequence[bytes], before: Sequence[int], is_wrong: Callable[[int], object]
) -> InventoryError:
    """Names the first block whose holders are wrong."""
    block_hash = next(h for h, holders in zip(block_hashes, before, strict=True) if is_wrong(holders))
    return InventoryError(f"block {block_hash.hex()} {what}")
