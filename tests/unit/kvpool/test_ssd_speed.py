"""Measuring the SSD: plausible numbers, and nothing is left behind or lost."""

import time

import pytest

from kvhash import BlockHash
from kvpool import CorruptBlock, SsdStore, StoreError
from kvpool.ssd_speed import SAMPLE_BLOCKS_MAX, measure_read

pytestmark = pytest.mark.unit

BLOCK_BYTES = 5000
CAPACITY_BYTES = 2 << 20


def open_store(folder, capacity_bytes=CAPACITY_BYTES):
    return SsdStore.open(folder, capacity_bytes, BLOCK_BYTES, b"one", segment_bytes=1 << 20)


def hash_of(number):
    return BlockHash(number.to_bytes(16, "little"))


def write(store, slots):
    for slot in slots:
        store.write(slot, hash_of(slot), None, memoryview(bytes([slot % 256]) * BLOCK_BYTES))


@pytest.mark.parametrize("held", [0, 3, 100, 253])
def test_it_measures_and_keeps_what_there_is(tmp_path, held):
    store = open_store(tmp_path)
    assert store.slots == 253
    write(store, range(held))
    found = store.recover()
    speed = measure_read(store, found)
    assert speed.fixed_s >= 0
    assert 1e5 < speed.bytes_per_s < 1e12
    assert store.recover() == found
    into = memoryview(bytearray(BLOCK_BYTES))
    for slot in range(held):
        store.read(slot, hash_of(slot), into)
        assert into == bytes([slot % 256]) * BLOCK_BYTES
    store.close()


def test_it_is_the_reads_that_are_timed(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    slow_s = 0.004
    read = SsdStore.read

    def read_slowly(self, slot, block_hash, into):
        time.sleep(slow_s)  # what is measured
        read(self, slot, block_hash, into)

    monkeypatch.setattr(SsdStore, "read", read_slowly)
    speed = measure_read(store, [], threads=4)
    rounds = SAMPLE_BLOCKS_MAX / 4
    assert speed.bytes_per_s <= SAMPLE_BLOCKS_MAX * BLOCK_BYTES / (rounds * slow_s)
    assert speed.fixed_s > 0
    store.close()


@pytest.mark.parametrize("held", [0, 1])
def test_a_store_of_one_slot_can_be_measured(tmp_path, held):
    store = open_store(tmp_path, 20480)
    assert store.slots == 1
    write(store, range(held))
    assert measure_read(store, store.recover()).bytes_per_s > 0
    assert len(store.recover()) == held
    store.close()


def test_copies_that_are_corrupt_take_their_time_too(tmp_path):
    store = open_store(tmp_path)
    write(store, range(60))
    found = store.recover()
    path = tmp_path / "segment-0000.data"
    path.write_bytes(bytes(path.stat().st_size))
    assert measure_read(store, found).bytes_per_s > 0
    with pytest.raises(CorruptBlock):
        store.read(7, hash_of(7), memoryview(bytearray(BLOCK_BYTES)))
    store.close()


def test_a_failing_disk_is_an_error(tmp_path):
    store = open_store(tmp_path)
    write(store, range(60))
    found = store.recover()
    store.close()
    with pytest.raises(StoreError):
        measure_read(store, found)
