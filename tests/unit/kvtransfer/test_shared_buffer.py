"""SharedBuffer: writable here and in children, read-only for everybody who gets its descriptor."""

import errno
import fcntl
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvtransfer import shared_buffer
from kvtransfer.huge_pages import HUGE_BYTES
from kvtransfer.memory import address_of
from kvtransfer.shared_buffer import F_GET_SEALS, SharedBuffer, SharedBufferError

pytestmark = pytest.mark.unit

SIZE = 3 * mmap.PAGESIZE + 5


def test_it_is_a_zeroed_writable_buffer_of_its_size():
    buffer = SharedBuffer.create(SIZE)
    view = memoryview(buffer)
    assert view.nbytes == buffer.size_bytes == SIZE
    assert not any(view)
    np.frombuffer(buffer, np.uint8)[SIZE - 1] = 7
    assert view[-1] == 7
    view.release()
    buffer.close()


def test_a_view_of_it_leads_back_to_it():
    buffer = SharedBuffer.create(SIZE)
    assert memoryview(buffer)[100:200].cast("B").obj is buffer


def test_whoever_has_the_descriptor_maps_it_read_only():
    buffer = SharedBuffer.create(SIZE)
    with pytest.raises(PermissionError) as refused:
        mmap.mmap(buffer.fileno(), SIZE)
    assert refused.value.errno == errno.EPERM
    with mmap.mmap(buffer.fileno(), SIZE, prot=mmap.PROT_READ) as seen:
        memoryview(buffer)[SIZE - 1] = 9
        assert seen[SIZE - 1] == 9


def test_a_new_description_of_the_same_file_may_not_write_either():
    """A peer can open its copy of the descriptor anew, for writing."""
    buffer = SharedBuffer.create(SIZE)
    opened = os.open(f"/proc/self/fd/{buffer.fileno()}", os.O_RDWR)
    try:
        for attempt in (
            lambda: mmap.mmap(opened, SIZE),
            lambda: os.pwrite(opened, b"x", 0),
            lambda: os.truncate(opened, 1),
            lambda: os.truncate(opened, 2 * SIZE),
            lambda: fcntl.fcntl(opened, shared_buffer.F_ADD_SEALS, 0),
        ):
            with pytest.raises(PermissionError):
                attempt()
    finally:
        os.close(opened)


def test_its_seals_say_that_it_never_shrinks():
    buffer = SharedBuffer.create(SIZE)
    seals = fcntl.fcntl(buffer.fileno(), F_GET_SEALS)
    assert seals & shared_buffer.F_SEAL_SHRINK
    assert seals & shared_buffer.F_SEAL_FUTURE_WRITE


def test_a_forked_process_writes_into_the_same_memory():
    buffer = SharedBuffer.create(SIZE)
    child = os.fork()
    if child == 0:
        memoryview(buffer)[0] = 42
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert memoryview(buffer)[0] == 42


def test_pages_take_memory_only_once_they_are_touched():
    buffer = SharedBuffer.create(1 << 30)
    assert os.fstat(buffer.fileno()).st_blocks == 0
    memoryview(buffer)[1 << 29] = 1
    assert 0 < os.fstat(buffer.fileno()).st_blocks * 512 <= 4 << 20


def test_a_view_outlives_closing_and_the_descriptor_does_not():
    buffer = SharedBuffer.create(SIZE)
    array = np.frombuffer(buffer, np.uint8)
    buffer.close()
    buffer.close()
    array[0] = 3
    assert array[0] == 3
    with pytest.raises(SharedBufferError, match="closed"):
        buffer.fileno()


def test_one_that_is_forgotten_leaves_no_descriptor():
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        SharedBuffer.create(SIZE)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_without_sealing_it_is_private_memory_with_a_reason(monkeypatch):
    """A kernel before 5.1 refuses the seal; the descriptor must then reach nobody."""
    monkeypatch.setattr(shared_buffer, "_SEALS", 1 << 30)
    buffer = SharedBuffer.create(SIZE)
    assert "5.1" in buffer.private_reason
    with pytest.raises(SharedBufferError, match=r"5\.1"):
        buffer.fileno()
    memoryview(buffer)[SIZE - 1] = 1
    buffer.close()


def test_without_memfd_it_is_private_memory_with_a_reason(monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "memfd_create", refused)
    buffer = SharedBuffer.create(SIZE)
    assert "memfd_create" in buffer.private_reason
    memoryview(buffer)[SIZE - 1] = 1


@pytest.mark.parametrize("size_bytes", [0, -1, (1 << 44) + 1])
def test_sizes_out_of_bounds_are_refused(size_bytes):
    with pytest.raises(SharedBufferError, match=f"size_bytes: {size_bytes}, from 1 to"):
        SharedBuffer.create(size_bytes)


def test_more_than_the_machine_can_ever_hold_is_refused_at_once():
    with pytest.raises(SharedBufferError, match=r"bytes of shared memory: .*memory"):
        SharedBuffer.create(1 << 44)


def huge_pages_bytes(buffer: SharedBuffer) -> int:
    """Of its mapping, that the kernel maps in pages of 2 MiB."""
    address = address_of(memoryview(buffer))
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            found = next(entry for entry in lines if entry.startswith("ShmemPmdMapped:"))
            return int(found.split()[1]) << 10
    raise AssertionError("not mapped")


def test_large_ones_have_the_borders_of_huge_pages_where_their_file_has_them():
    """Without that the kernel cannot use huge pages, wherever in memory they come to lie."""
    gaps = [mmap.mmap(-1, size) for size in range(HUGE_BYTES, 6 * HUGE_BYTES, 300 * 4096)]
    buffers = [SharedBuffer.create(HUGE_BYTES * count + 1) for count in range(1, 9)]
    for gap in gaps[::2]:
        gap.close()
    buffers += [SharedBuffer.create(HUGE_BYTES * count + 1) for count in range(1, 9)]
    beyond = [address_of(memoryview(buffer)) - buffer.offset_bytes for buffer in buffers]
    assert [address % HUGE_BYTES for address in beyond] == [0] * 16
    for number, buffer in enumerate(buffers):
        memoryview(buffer)[HUGE_BYTES] = number
        assert os.pread(buffer.fileno(), 1, buffer.offset_bytes + HUGE_BYTES) == bytes([number])


def test_taking_the_memory_gathers_it_into_huge_pages_and_keeps_its_content():
    buffer = SharedBuffer.create(4 * HUGE_BYTES)
    view = memoryview(buffer)
    view[HUGE_BYTES + 7] = 9
    if not buffer.take_memory():
        pytest.skip("this kernel does not collapse shared memory (it came with Linux 6.1)")
    assert huge_pages_bytes(buffer) >= 3 * HUGE_BYTES
    assert view[HUGE_BYTES + 7] == 9
    assert sum(view[::4096]) == 0


def test_where_huge_pages_cannot_be_had_nothing_changes(monkeypatch):
    monkeypatch.setattr(shared_buffer, "collapse", lambda *_: False)
    buffer = SharedBuffer.create(HUGE_BYTES)
    memoryview(buffer)[5] = 5
    assert not buffer.take_memory()
    assert memoryview(buffer)[5] == 5
    assert not SharedBuffer.create(SIZE).take_memory()
