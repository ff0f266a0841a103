"""SsdStore on real files: what a restart finds, and what damage, a full and a failing disk do to it."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.full_disk import failing, room_for, short_transfers

from kvhash import BlockHash
from kvpool import Copy, CorruptBlock, Opened, SsdLayoutError, SsdStore, StoreError
from kvpool.ssd_files import BlockFile
from kvpool.ssd_format import RECORD_BYTES, SUPERBLOCK_BYTES, SUPERBLOCK_COPY_BYTES
from kvpool.ssd_layout import file_bytes

pytestmark = pytest.mark.unit

BLOCK_BYTES = 5000
SLOT_BYTES = 8192
SEGMENT_SLOTS = 4
SEGMENT_BYTES = file_bytes(SEGMENT_SLOTS, BLOCK_BYTES)
SLOTS = 10
CAPACITY_BYTES = SUPERBLOCK_BYTES + 2 * SEGMENT_BYTES + file_bytes(2, BLOCK_BYTES)


def open_store(folder: Path, **changes: object) -> SsdStore:
    settings = {
        "capacity_bytes": CAPACITY_BYTES,
        "block_bytes": BLOCK_BYTES,
        "identity": b"one",
        "segment_bytes": SEGMENT_BYTES,
    }
    return SsdStore.open(folder, **(settings | changes))


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def data_of(number: int, size_bytes: int = BLOCK_BYTES) -> memoryview:
    return memoryview((number.to_bytes(4, "little") * (size_bytes // 4 + 1))[:size_bytes])


def write(store: SsdStore, slot: int, number: int, parent: BlockHash | None = None) -> None:
    store.write(slot, hash_of(number), parent, data_of(number, store.block_bytes))


def read(store: SsdStore, slot: int, number: int) -> bytes:
    into = bytearray(store.block_bytes)
    store.read(slot, hash_of(number), memoryview(into))
    return bytes(into)


def filled(folder: Path, slots: int = SLOTS) -> None:
    """A closed store whose slot s holds block s + 1, child of block s."""
    store = open_store(folder)
    for slot in range(slots):
        write(store, slot, slot + 1, hash_of(slot) if slot else None)
    store.close()


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x40
    path.write_bytes(raw)


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_its_files_have_their_size_from_the_start_and_keep_it(tmp_path):
    store = open_store(tmp_path)
    before = sizes(tmp_path)
    assert before == {
        "superblock": SUPERBLOCK_BYTES,
        "segment-0000.data": 4 * SLOT_BYTES,
        "segment-0000.records": 4096,
        "segment-0001.data": 4 * SLOT_BYTES,
        "segment-0001.records": 4096,
        "segment-0002.data": 2 * SLOT_BYTES,
        "segment-0002.records": 4096,
    }
    assert sum(before.values()) == CAPACITY_BYTES
    assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in tmp_path.iterdir())
    for number in range(3 * SLOTS):
        write(store, number % SLOTS, number + 1)
    store.close()
    assert sizes(tmp_path) == before


def test_nobody_else_may_read_its_files(tmp_path):
    open_store(tmp_path / "pool" / "ssd").close()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "pool" / "ssd").iterdir()} == {0o600}
    assert (tmp_path / "pool" / "ssd").stat().st_mode & 0o777 == 0o700


def test_a_restart_finds_everything(tmp_path):
    filled(tmp_path)
    store = open_store(tmp_path)
    assert (store.opening.folder, store.opening.damaged) == (Opened.FOUND, ())
    assert store.recover() == [
        Copy(slot, hash_of(slot + 1), hash_of(slot) if slot else None) for slot in range(SLOTS)
    ]
    assert [read(store, slot, slot + 1) for slot in range(SLOTS)] == [
        data_of(slot + 1) for slot in range(SLOTS)
    ]
    store.close()


def test_a_killed_process_leaves_what_it_wrote(tmp_path):
    """No fsync, no close: what was written is the kernel's."""
    code = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from kvpool import SsdStore
store = SsdStore.open(Path({str(tmp_path)!r}), {CAPACITY_BYTES}, {BLOCK_BYTES}, b"one", {SEGMENT_BYTES})
store.write(7, (5).to_bytes(16, "little"), None, memoryview(bytes(range(250)) * 20))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    store = open_store(tmp_path)
    assert store.recover() == [Copy(7, hash_of(5), None)]
    assert read(store, 7, 5) == bytes(range(250)) * 20
    store.close()


def test_the_newest_of_a_hash_counts_over_restarts(tmp_path):
    for slot in (5, 1, 8):
        store = open_store(tmp_path)
        write(store, slot, 1)
        assert store.recover() == [Copy(slot, hash_of(1), None)]
        store.close()


@pytest.mark.parametrize(
    "changes",
    [{"identity": b"other"}, {"block_bytes": 5001}, {"segment_bytes": SEGMENT_BYTES + SLOT_BYTES + 64}],
)
def test_a_store_of_other_blocks_is_emptied_and_says_so(tmp_path, changes):
    filled(tmp_path)
    store = open_store(tmp_path, **changes)
    assert store.opening.folder is Opened.REPLACED
    assert store.recover() == []
    with pytest.raises(CorruptBlock):
        read(store, 0, 1)
    assert sum(sizes(tmp_path).values()) <= CAPACITY_BYTES
    write(store, 0, 1)
    store.close()
    store = open_store(tmp_path, **changes)
    assert (store.opening.folder, len(store.recover())) == (Opened.FOUND, 1)
    store.close()


def test_a_folder_whose_superblock_is_gone_is_begun_anew(tmp_path):
    filled(tmp_path)
    (tmp_path / "superblock").unlink()
    store = open_store(tmp_path)
    assert (store.opening.folder, store.recover()) == (Opened.NEW, [])
    assert store.opening.damaged == ("superblock",)
    store.close()


def test_where_nothing_was_nothing_is_damaged(tmp_path):
    store = open_store(tmp_path)
    assert (store.opening.folder, store.opening.damaged) == (Opened.NEW, ())
    store.close()


def test_one_torn_superblock_costs_nothing_and_two_the_store(tmp_path):
    filled(tmp_path)  # the first epoch, in the second copy
    open_store(tmp_path).close()  # the second, in the first copy
    flip(tmp_path / "superblock", 5)
    store = open_store(tmp_path)
    assert (store.opening.folder, len(store.recover())) == (Opened.FOUND, SLOTS)
    store.close()
    flip(tmp_path / "superblock", 5)
    flip(tmp_path / "superblock", SUPERBLOCK_COPY_BYTES + 5)
    store = open_store(tmp_path)
    assert (store.opening.folder, store.recover()) == (Opened.NEW, [])
    assert store.opening.damaged == ("superblock",)
    store.close()


def test_foreign_files_stay(tmp_path):
    (tmp_path / "segment-notes.data").write_text("mine")
    filled(tmp_path)
    open_store(tmp_path, identity=b"other").close()
    assert (tmp_path / "segment-notes.data").read_text() == "mine"


def test_another_capacity_keeps_what_still_fits(tmp_path):
    filled(tmp_path)
    capacity_bytes = SUPERBLOCK_BYTES + SEGMENT_BYTES + file_bytes(3, BLOCK_BYTES)
    smaller = open_store(tmp_path, capacity_bytes=capacity_bytes)
    assert (smaller.slots, smaller.opening.folder, smaller.opening.damaged) == (7, Opened.FOUND, ())
    assert [copy.slot for copy in smaller.recover()] == list(range(7))
    assert sum(sizes(tmp_path).values()) == capacity_bytes
    smaller.close()
    larger = open_store(tmp_path, capacity_bytes=SUPERBLOCK_BYTES + 3 * SEGMENT_BYTES)
    assert (larger.slots, larger.opening.folder, larger.opening.damaged) == (12, Opened.FOUND, ())
    assert [copy.slot for copy in larger.recover()] == list(range(7))
    assert read(larger, 6, 7) == data_of(7)
    write(larger, 11, 99)
    assert read(larger, 11, 99) == data_of(99)
    larger.close()


def test_a_folder_has_one_owner(tmp_path):
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match=f"{re.escape(str(tmp_path))}: in use by another process"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_data_that_changed_is_never_given_out(tmp_path):
    filled(tmp_path)
    flip(tmp_path / "segment-0001.data", SLOT_BYTES + 4999)
    store = open_store(tmp_path)
    with pytest.raises(CorruptBlock, match=r"segment-0001\.data: slot 5 does not hold what was written"):
        read(store, 5, 6)
    assert read(store, 4, 5) == data_of(5)
    store.close()


def test_a_changed_record_is_a_lost_block(tmp_path):
    filled(tmp_path)
    flip(tmp_path / "segment-0001.records", RECORD_BYTES + 3)
    store = open_store(tmp_path)
    assert [copy.slot for copy in store.recover()] == [slot for slot in range(SLOTS) if slot != 5]
    with pytest.raises(CorruptBlock, match=r"segment-0001\.records: no good record of slot 5"):
        read(store, 5, 6)
    store.close()


def test_a_record_in_the_wrong_place_gives_no_wrong_bytes(tmp_path):
    """As a write that went astray: each record is good, the data is another block's."""
    filled(tmp_path)
    path = tmp_path / "segment-0000.records"
    raw = path.read_bytes()
    path.write_bytes(raw[RECORD_BYTES : 2 * RECORD_BYTES] + raw[RECORD_BYTES:])
    store = open_store(tmp_path)
    with pytest.raises(CorruptBlock, match=f"slot 0 holds {hash_of(2).hex()}, not {hash_of(1).hex()}"):
        read(store, 0, 1)
    with pytest.raises(CorruptBlock, match="slot 0 does not hold what was written"):
        read(store, 0, 2)
    store.close()


def test_a_crash_between_data_and_record_costs_the_old_block_only(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    write(store, 0, 1)
    with monkeypatch.context() as patched:
        patched.setattr(type(store._segments[0].records), "write", _crash_at_the_second_call())
        with pytest.raises(KeyboardInterrupt):
            write(store, 0, 2)
    store.close()
    store = open_store(tmp_path)
    assert store.recover() == [Copy(0, hash_of(1), None)]
    for number in (1, 2):
        with pytest.raises(CorruptBlock):
            read(store, 0, number)
    store.close()


def _crash_at_the_second_call():
    write_file, calls = BlockFile.write, []

    def write(self, offset, data):
        calls.append(offset)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write_file(self, offset, data)

    return write


@pytest.mark.parametrize("name", ["segment-0001.data", "segment-0001.records"])
@pytest.mark.parametrize("left_bytes", [None, 0, 100])
def test_a_file_that_is_missing_or_cut_costs_its_blocks(tmp_path, name, left_bytes):
    filled(tmp_path)
    if left_bytes is None:
        (tmp_path / name).unlink()
    else:
        os.truncate(tmp_path / name, left_bytes)
    store = open_store(tmp_path)
    assert (store.opening.folder, store.opening.damaged) == (Opened.FOUND, (name,))
    # 100 bytes are one whole record, but no whole block.
    kept = {4} if name.endswith("records") and left_bytes == 100 else set()
    assert {copy.slot for copy in store.recover()} == {0, 1, 2, 3, 8, 9} | kept
    write(store, 6, 77)
    assert read(store, 6, 77) == data_of(77)
    store.close()
    store = open_store(tmp_path)
    assert store.opening.damaged == ()
    assert {copy.slot for copy in store.recover()} == {0, 1, 2, 3, 6, 8, 9} | kept
    store.close()


def test_a_file_cut_under_an_open_store_is_an_error_that_names_it(tmp_path):
    store = open_store(tmp_path)
    write(store, 5, 6)
    os.truncate(tmp_path / "segment-0001.data", SLOT_BYTES + 10)
    with pytest.raises(StoreError, match=r"segment-0001\.data: ends at 8202, not 13192"):
        read(store, 5, 6)
    os.truncate(tmp_path / "segment-0001.records", 0)
    with pytest.raises(StoreError, match=r"segment-0001\.records: ends at 64, not 128|ends at 0"):
        read(store, 5, 6)
    write(store, 5, 6)
    assert read(store, 5, 6) == data_of(6)
    store.close()


@pytest.mark.parametrize(
    ("error_number", "cause"), [(errno.ENOSPC, "No space left on device"), (errno.EIO, "Input/output error")]
)
def test_a_failing_write_names_file_and_cause_and_loses_the_slot_only(
    tmp_path, monkeypatch, error_number, cause
):
    store = open_store(tmp_path)
    write(store, 0, 1)
    write(store, 1, 2)
    with (
        failing(monkeypatch, "pwritev", error_number),
        pytest.raises(StoreError, match=rf"0000\.data: write 5000 bytes at 0: {cause}"),
    ):
        write(store, 0, 3)
    assert read(store, 1, 2) == data_of(2)
    with pytest.raises(CorruptBlock):
        read(store, 0, 3)
    store.close()


def test_a_failing_read_names_file_and_cause(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    write(store, 0, 1)
    with failing(monkeypatch, "preadv", errno.EIO):
        with pytest.raises(
            StoreError, match=r"0000\.records: read 64 bytes at 0: Input/output error"
        ) as raised:
            read(store, 0, 1)
        assert not isinstance(raised.value, CorruptBlock)
        with pytest.raises(StoreError, match="Input/output error"):
            store.recover()
    assert read(store, 0, 1) == data_of(1)
    store.close()


def test_the_kernel_may_move_fewer_bytes_than_asked(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    with short_transfers(monkeypatch, 37):
        write(store, 3, 4)
        assert read(store, 3, 4) == data_of(4)
        assert store.recover() == [Copy(3, hash_of(4), None)]
    store.close()


def test_a_write_that_moves_nothing_ends(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    with short_transfers(monkeypatch, 0), pytest.raises(StoreError, match="nothing could be written at 0"):
        write(store, 0, 1)
    store.close()


def test_a_file_size_limit_is_an_error(tmp_path):
    """The kernel's own refusal, not a patched call."""
    store = open_store(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
        with pytest.raises(StoreError, match="File too large"):
            write(store, 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    write(store, 0, 1)
    assert read(store, 0, 1) == data_of(1)
    store.close()


@pytest.mark.parametrize(
    ("free_bytes", "slots"),
    [
        (SUPERBLOCK_BYTES + 2 * SEGMENT_BYTES + file_bytes(1, BLOCK_BYTES), 9),
        (SUPERBLOCK_BYTES + 2 * SEGMENT_BYTES, 8),
        (SUPERBLOCK_BYTES + SEGMENT_BYTES + file_bytes(3, BLOCK_BYTES), 6),
        (SUPERBLOCK_BYTES + file_bytes(1, BLOCK_BYTES), 1),
    ],
)
def test_a_disk_too_full_makes_a_smaller_store(tmp_path, monkeypatch, free_bytes, slots):
    with room_for(monkeypatch, free_bytes):
        store = open_store(tmp_path)
        assert (store.slots, store.opening.slots, store.opening.slots_asked) == (slots, slots, SLOTS)
        assert sum(sizes(tmp_path).values()) <= free_bytes
        for slot in range(slots):
            write(store, slot, slot + 1)
        store.close()
    with room_for(monkeypatch, 0):
        again = open_store(tmp_path)
        assert (again.slots, len(again.recover()), again.opening.damaged) == (slots, slots, ())
        again.close()
    whole = open_store(tmp_path)
    assert (whole.slots, len(whole.recover())) == (SLOTS, slots)
    whole.close()


def test_a_limit_of_the_file_size_makes_a_smaller_store(tmp_path):
    """The kernel's own refusal to allocate."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * SLOT_BYTES, before[1]))
        store = open_store(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (store.slots, store.opening.slots_asked) == (2, SLOTS)
    write(store, 1, 2)
    assert read(store, 1, 2) == data_of(2)
    store.close()


@pytest.mark.parametrize("free_bytes", [0, SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + SLOT_BYTES])
def test_a_disk_without_room_for_a_block_is_refused(tmp_path, monkeypatch, free_bytes):
    with room_for(monkeypatch, free_bytes), pytest.raises(StoreError, match=r"no space left on the disk"):
        open_store(tmp_path)
    store = open_store(tmp_path)
    assert store.slots == SLOTS
    store.close()


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/ssd: make folder: Not a directory"):
        open_store(tmp_path / "file" / "ssd")


def test_an_error_at_opening_leaves_nothing_open(tmp_path, monkeypatch):
    filled(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with (
        failing(monkeypatch, "posix_fallocate", errno.EIO),
        pytest.raises(StoreError, match="Input/output error"),
    ):
        open_store(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    store = open_store(tmp_path)
    assert len(store.recover()) == SLOTS
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"identity": b""}, "identity: 0 bytes, from 1 to 1024"),
        ({"identity": bytes(1025)}, "identity: 1025 bytes, from 1 to 1024"),
        ({"capacity_bytes": 100}, "capacity_bytes: 100, at least 20480"),
    ],
)
def test_settings_that_make_no_store_are_refused_before_a_file_is_touched(tmp_path, changes, message):
    with pytest.raises(SsdLayoutError, match=message):
        open_store(tmp_path / "ssd", **changes)
    assert not (tmp_path / "ssd").exists()


def test_an_erased_slot_holds_nothing(tmp_path):
    filled(tmp_path, slots=3)
    store = open_store(tmp_path)
    store.erase(1)
    with pytest.raises(CorruptBlock):
        read(store, 1, 2)
    store.close()
    store = open_store(tmp_path)
    assert [copy.slot for copy in store.recover()] == [0, 2]
    store.close()


def test_what_left_the_page_cache_is_read_from_the_disk(tmp_path):
    store = open_store(tmp_path)
    write(store, 0, 1)
    store.drop_cached(0)
    assert read(store, 0, 1) == data_of(1)
    store.close()


def test_a_closed_store_does_nothing(tmp_path):
    store = open_store(tmp_path)
    store.close()
    with pytest.raises(StoreError, match=r"segment-0000\.data: is closed"):
        write(store, 0, 1)
    with pytest.raises(StoreError, match=r"segment-0000\.records: is closed"):
        read(store, 0, 1)
    with pytest.raises(StoreError, match=r"segment-0000\.records: is closed"):
        store.recover()
