"""DramStore: its slots are the arena's last blocks, and hold what the arena holds."""

import pytest

from kvhash import BlockHash
from kvpool import Arena, CorruptBlock, DramStore

pytestmark = pytest.mark.unit

BLOCK_BYTES = 64
A = BlockHash(b"a" * 16)


def test_slots_are_arena_blocks_from_the_first_on():
    with Arena.create(5, BLOCK_BYTES) as arena:
        store = DramStore(arena, 3, 2)
        store.write(1, A, None, memoryview(b"\x07" * BLOCK_BYTES))
        assert arena.buffer.tobytes() == bytes(4 * BLOCK_BYTES) + b"\x07" * BLOCK_BYTES


def test_it_copies_from_and_to_blocks_of_its_own_arena():
    with Arena.create(3, BLOCK_BYTES) as arena:
        store = DramStore(arena, 2, 1)
        arena.block(0)[:] = b"\x05" * BLOCK_BYTES
        store.write(0, A, None, arena.block(0))
        arena.block(0)[:] = bytes(BLOCK_BYTES)
        store.read(0, A, arena.block(1))
        assert arena.block(1) == b"\x05" * BLOCK_BYTES


def test_a_view_is_the_slot_itself():
    with Arena.create(2, BLOCK_BYTES) as arena:
        store = DramStore(arena, 1, 1)
        store.view(0)[0] = 9
        assert arena.block(1)[0] == 9


def test_a_hash_that_is_not_there_is_named():
    with Arena.create(2, BLOCK_BYTES) as arena:
        store = DramStore(arena, 1, 1)
        into = memoryview(bytearray(BLOCK_BYTES))
        with pytest.raises(CorruptBlock, match=f"DRAM slot 0 holds nothing, not {A.hex()}"):
            store.read(0, A, into)
        store.write(0, BlockHash(b"b" * 16), None, memoryview(bytes(BLOCK_BYTES)))
        with pytest.raises(CorruptBlock, match=f"DRAM slot 0 holds {b'b'.hex() * 16}, not {A.hex()}"):
            store.read(0, A, into)


@pytest.mark.parametrize(
    ("first_block", "slots", "message"),
    [
        (0, 0, "slots: 0, at least 1"),
        (3, 2, "first_block: 3, from 0 to 2"),
        (-1, 2, "first_block: -1, from 0 to 2"),
        (0, 5, "first_block: 0, from 0 to -1"),
    ],
)
def test_blocks_the_arena_does_not_have_are_refused(first_block, slots, message):
    with Arena.create(4, BLOCK_BYTES) as arena, pytest.raises(ValueError, match=message):
        DramStore(arena, first_block, slots)
