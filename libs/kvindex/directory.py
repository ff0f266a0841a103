"""Who holds which block, over all instances: what kvmeta serves.

For every block one integer, whose bits are the instances that hold it. Each instance's inventory is
prefix-closed, so along a prompt bits only disappear: `match` looks for the places where they do, by
doubling and halving, instead of walking the prompt. Knows neither event numbers nor messages.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import cast

from kvhash import HASH_BYTES, BlockHash, HashInputError, unpack
from kvindex.core import BlockAction, BlockEvent, InstanceId, InstanceMatch, TierRun
from kvindex.inventory import HeldBlock, Inventory, InventoryError


class Directory:
    """Blocks of many instances. One thread; bounded by what the instances announce."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        self._inventories: dict[InstanceId, Inventory] = {}
        self._bits: dict[InstanceId, int] = {}
        self._instances: dict[int, InstanceId] = {}

    def apply(self, instance: InstanceId, event: BlockEvent) -> None:
        """Take over one change of an instance's inventory, which may be the first.

        InventoryError where it contradicts what is known of the instance: something was missed, ask for
        its inventory. The blocks of the event before the contradiction stay applied.
        """
        block_hashes = unpack(event.block_hashes)
        match event.action:
            case BlockAction.STORED:
                if len(event.parent) not in (0, HASH_BYTES):
                    raise InventoryError(f"parent: {len(event.parent)} bytes, a block hash has {HASH_BYTES}")
                self._store(instance, block_hashes, event)
            case BlockAction.MOVED:
                inventory = self._inventory(instance)
                for block_hash in block_hashes:
                    inventory.move(block_hash, event.tier)
            case BlockAction.REMOVED:
                inventory = self._inventory(instance)
                bit = self._bits[instance]
                for block_hash in block_hashes:
                    inventory.remove(block_hash)
                    self._clear(block_hash, bit)

    def replace(self, instance: InstanceId, blocks: Iterable[HeldBlock]) -> None:
        """Forget what was known of the instance and take `blocks`, parents first, for it.

        InventoryError where they are not prefix-closed or come twice; then nothing was changed.
        """
        inventory = Inventory(blocks)
        old = self._inventory(instance)
        bit = self._bits[instance]
        self._inventories[instance] = inventory
        for block_hash in old:
            if block_hash not in inventory:
                self._clear(block_hash, bit)
        holders = self._holders
        for block_hash in inventory:
            holders[block_hash] = holders.get(block_hash, 0) | bit

    def drop(self, instance: InstanceId) -> None:
        """Forget the instance; nothing happens where it is unknown."""
        inventory = self._inventories.pop(instance, None)
        if inventory is None:
            return
        bit = self._bits.pop(instance)
        del self._instances[bit]
        for block_hash in inventory:
            self._clear(block_hash, bit)

    def match(self, packed_hashes: bytes) -> tuple[InstanceMatch, ...]:
        """How long a prefix of the prompt each instance holds, longest first; those with none are left out.

        `packed_hashes` is the prompt's hash chain, 16 bytes a block; what is no chain is answered too, but
        the answer means nothing. Looks at O(i · log n) blocks, i being the number of different lengths.
        Raises HashInputError on bytes that are no hashes.
        """
        hashes = _PackedHashes(packed_hashes)
        matches: list[InstanceMatch] = []
        start, bits = 0, self._bits_at(hashes, 0)
        while bits:
            # All of `bits` hold the blocks up to and with `start`; `end` is the first that one of them lacks.
            end = self._first_lacking(hashes, start, bits)
            left = bits & self._bits_at(hashes, end)
            matches.extend(self._match_of(bit, hashes, end) for bit in _single_bits(bits & ~left))
            start, bits = end, left
        matches.sort(key=lambda match: (-match.prefix_blocks, match.instance))
        return tuple(matches)

    def instances(self) -> tuple[InstanceId, ...]:
        """Every instance from which something is known, even that it holds nothing."""
        return tuple(self._inventories)

    def blocks(self) -> int:
        """Blocks held, summed over all instances."""
        return sum(len(inventory) for inventory in self._inventories.values())

    def blocks_of(self, instance: InstanceId) -> int:
        """Blocks held by one instance; 0 where it is unknown."""
        inventory = self._inventories.get(instance)
        return 0 if inventory is None else len(inventory)

    def _store(self, instance: InstanceId, block_hashes: list[BlockHash], event: BlockEvent) -> None:
        inventory = self._inventory(instance)
        bit = self._bits[instance]
        holders = self._holders
        parent = BlockHash(event.parent) if event.parent else None
        for block_hash in block_hashes:
            inventory.add(block_hash, parent, event.tier)
            holders[block_hash] = holders.get(block_hash, 0) | bit
            parent = block_hash

    def _inventory(self, instance: InstanceId) -> Inventory:
        inventory = self._inventories.get(instance)
        if inventory is None:
            bit = _lowest_free_bit(self._instances)
            inventory = self._inventories[instance] = Inventory()
            self._bits[instance] = bit
            self._instances[bit] = instance
        return inventory

    def _clear(self, block_hash: BlockHash, bit: int) -> None:
        left = self._holders[block_hash] & ~bit
        if left:
            self._holders[block_hash] = left
        else:
            del self._holders[block_hash]

    def _bits_at(self, hashes: "_PackedHashes", index: int) -> int:
        if index >= hashes.blocks:
            return 0
        return self._holders.get(hashes[index], 0)

    def _first_lacking(self, hashes: "_PackedHashes", start: int, bits: int) -> int:
        """The first index after `start` whose block not all of `bits` hold; all hold the one at `start`."""
        held, step = start, 1
        while self._bits_at(hashes, held + step) & bits == bits:
            held += step
            step *= 2
        lacking = min(held + step, hashes.blocks)
        while lacking - held > 1:
            middle = (held + lacking) // 2
            if self._bits_at(hashes, middle) & bits == bits:
                held = middle
            else:
                lacking = middle
        return lacking

    def _match_of(self, bit: int, hashes: "_PackedHashes", prefix_blocks: int) -> InstanceMatch:
        instance = self._instances[bit]
        inventory = self._inventories[instance]
        tier = inventory.only_tier()
        if tier is not None:
            return InstanceMatch(instance, prefix_blocks, (TierRun(tier, prefix_blocks),))
        runs = inventory.tier_runs(hashes.first(prefix_blocks))
        return InstanceMatch(instance, sum(run.blocks for run in runs), runs)


class _PackedHashes:
    """A packed list of hashes, of which only those that are asked for are cut out."""

    __slots__ = ("_packed", "_unpacked", "blocks")

    def __init__(self, packed: bytes) -> None:
        if len(packed) % HASH_BYTES:
            raise HashInputError(f"block hashes: {len(packed)} bytes, not a multiple of {HASH_BYTES}")
        self._packed = packed
        self._unpacked: list[BlockHash] | None = None
        self.blocks = len(packed) // HASH_BYTES

    def __getitem__(self, index: int) -> BlockHash:
        return cast(BlockHash, self._packed[index * HASH_BYTES : (index + 1) * HASH_BYTES])

    def first(self, blocks: int) -> Iterator[BlockHash]:
        if self._unpacked is None:
            self._unpacked = unpack(self._packed)
        return islice(self._unpacked, blocks)


def _single_bits(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest
        bits ^= lowest


def _lowest_free_bit(used: Iterable[int]) -> int:
    """Bits of dropped instances are given again, so that integers stay short."""
    free = ~sum(used)
    return free & -free
