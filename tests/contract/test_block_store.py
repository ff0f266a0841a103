"""What every BlockStore promises: DRAM, SSD and the fake that the mover's tests use."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.memory_store import Disk, MemoryStore

from kvhash import BlockHash
from kvpool import Arena, BlockStore, Copy, CorruptBlock, DramStore, SsdStore

pytestmark = pytest.mark.contract

BLOCK_BYTES = 5000
SLOTS = 6


@dataclass
class Case:
    store: BlockStore
    reopened: Callable[[], BlockStore]
    """Closes the store and opens its successor."""
    lasts: bool


@pytest.fixture(params=["memory", "dram", "ssd"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    opened: list[BlockStore] = []
    with Arena.create(SLOTS + 3, BLOCK_BYTES) as arena:
        disk = Disk()

        def open_store() -> BlockStore:
            for store in opened:
                store.close()
            match request.param:
                case "memory":
                    opened.append(MemoryStore(SLOTS, BLOCK_BYTES, disk))
                case "dram":
                    opened.append(DramStore(arena, 3, SLOTS))
                case "ssd":
                    opened.append(
                        SsdStore.open(tmp_path, 8192 + SLOTS * 8192 + 2 * 4096, BLOCK_BYTES, b"id", 30_000)
                    )
            return opened[-1]

        yield Case(open_store(), open_store, request.param != "dram")
        for store in opened:
            store.close()
            store.close()


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def data_of(number: int) -> memoryview:
    return memoryview(bytes([number % 251, number // 251 % 251]) * (BLOCK_BYTES // 2))


def read(store: BlockStore, slot: int, number: int) -> bytes:
    into = bytearray(BLOCK_BYTES)
    store.read(slot, hash_of(number), memoryview(into))
    return bytes(into)


def test_it_has_the_slots_it_says(case):
    assert (case.store.slots, case.store.block_bytes) == (SLOTS, BLOCK_BYTES)


def test_every_slot_keeps_a_block_of_its_own(case):
    for slot in range(SLOTS):
        case.store.write(slot, hash_of(slot + 1), None, data_of(slot + 1))
    for slot in range(SLOTS):
        assert read(case.store, slot, slot + 1) == data_of(slot + 1)


def test_the_last_write_counts(case):
    case.store.write(2, hash_of(1), None, data_of(1))
    case.store.write(2, hash_of(2), hash_of(1), data_of(2))
    assert read(case.store, 2, 2) == data_of(2)
    with pytest.raises(CorruptBlock):
        read(case.store, 2, 1)


def test_a_slot_that_was_never_written_holds_no_block(case):
    with pytest.raises(CorruptBlock):
        read(case.store, 0, 1)


def test_a_view_is_of_what_the_slot_holds(case):
    case.store.write(4, hash_of(9), None, data_of(9))
    view = case.store.view(4)
    assert view is None or view == data_of(9)


def test_what_is_erased_is_not_found_again(case):
    for slot in range(3):
        case.store.write(slot, hash_of(slot + 1), None, data_of(slot + 1))
    case.store.erase(1)
    case.store.erase(5)
    with pytest.raises(CorruptBlock):
        read(case.store, 1, 2)
    assert read(case.store, 2, 3) == data_of(3)
    found = {copy.block_hash for copy in case.reopened().recover()}
    assert found == ({hash_of(1), hash_of(3)} if case.lasts else set())


def test_an_erased_slot_is_written_to_again(case):
    case.store.write(1, hash_of(1), None, data_of(1))
    case.store.erase(1)
    case.store.write(1, hash_of(2), None, data_of(2))
    assert read(case.store, 1, 2) == data_of(2)


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_that_is_none_is_refused(case, slot):
    with pytest.raises(IndexError, match=f"slot: {slot}, the store has {SLOTS} slots"):
        case.store.erase(slot)
    with pytest.raises(IndexError, match=f"slot: {slot}, the store has {SLOTS} slots"):
        case.store.write(slot, hash_of(1), None, data_of(1))
    with pytest.raises(IndexError, match=f"slot: {slot}, the store has {SLOTS} slots"):
        read(case.store, slot, 1)


@pytest.mark.parametrize("size_bytes", [0, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_data_that_is_no_block_is_refused(case, size_bytes):
    with pytest.raises(ValueError, match=f"{size_bytes} bytes of data, a block has {BLOCK_BYTES}"):
        case.store.write(0, hash_of(1), None, memoryview(bytes(size_bytes)))
    case.store.write(0, hash_of(1), None, data_of(1))
    with pytest.raises(ValueError, match=f"{size_bytes} bytes of data, a block has {BLOCK_BYTES}"):
        case.store.read(0, hash_of(1), memoryview(bytearray(size_bytes)))


def test_threads_use_slots_side_by_side(case):
    rounds = 20
    wrong: list[object] = []

    def use(slot: int) -> None:
        try:
            for number in range(rounds):
                case.store.write(slot, hash_of(slot * rounds + number), None, data_of(slot * rounds + number))
                if read(case.store, slot, slot * rounds + number) != data_of(slot * rounds + number):
                    wrong.append((slot, number))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(slot,)) for slot in range(SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_new_store_recovers_nothing(case):
    assert case.store.recover() == []


def test_a_successor_finds_what_was_written(case):
    case.store.write(3, hash_of(1), None, data_of(1))
    case.store.write(0, hash_of(2), hash_of(1), data_of(2))
    case.store.write(5, hash_of(3), hash_of(1), data_of(3))
    case.store.write(5, hash_of(4), hash_of(2), data_of(4))
    successor = case.reopened()
    found = successor.recover()
    if not case.lasts:
        assert found == []
        return
    assert list(found) == [
        Copy(3, hash_of(1), None),
        Copy(0, hash_of(2), hash_of(1)),
        Copy(5, hash_of(4), hash_of(2)),
    ]
    assert [read(successor, copy.slot, number) for copy, number in zip(found, (1, 2, 4), strict=True)] == [
        data_of(1),
        data_of(2),
        data_of(4),
    ]


def test_of_two_slots_with_one_hash_the_newer_is_found(case):
    case.store.write(5, hash_of(1), None, data_of(1))
    case.store.write(0, hash_of(2), hash_of(1), data_of(2))
    case.store.write(1, hash_of(1), None, data_of(7))
    successor = case.reopened()
    if case.lasts:
        assert list(successor.recover()) == [Copy(0, hash_of(2), hash_of(1)), Copy(1, hash_of(1), None)]
        successor.write(5, hash_of(1), None, data_of(8))
        assert list(case.reopened().recover())[-1] == Copy(5, hash_of(1), None)
