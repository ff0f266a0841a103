"""Arena: zeroed, writable, shared with forked processes, safe to close under views."""

import mmap
import os

import numpy as np
import pytest

from kvpool import Arena, ArenaError
from kvtransfer.shared_buffer import SharedBuffer

pytestmark = pytest.mark.unit


def test_blocks_lie_one_after_the_other_in_zeroed_memory():
    with Arena.create(3, 5000) as arena:
        assert len(arena.buffer) == 15_000
        assert not any(arena.buffer)
        arena.block(1)[:] = b"\x07" * 5000
        assert arena.buffer[4999:10_001].tobytes() == b"\0" + b"\x07" * 5000 + b"\0"


def test_arrays_over_the_buffer_share_its_memory():
    with Arena.create(2, 64) as arena:
        array = np.frombuffer(arena.buffer, np.float32).reshape(2, 16)
        array[1] = 1.5
        assert np.frombuffer(arena.block(1), np.float32).tolist() == [1.5] * 16


def test_a_forked_process_writes_into_the_same_memory():
    with Arena.create(1, 8) as arena:
        child = os.fork()
        if child == 0:
            arena.buffer[0] = 42
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert arena.buffer[0] == 42


def test_a_view_outlives_closing():
    arena = Arena.create(1, 8)
    array = np.frombuffer(arena.buffer, np.uint8)
    writable = np.asarray(arena.buffer)
    arena.close()
    arena.close()
    writable[:] = 9
    assert array.tolist() == [9] * 8


def test_a_closed_arena_gives_no_views():
    arena = Arena.create(1, 8)
    arena.close()
    with pytest.raises(ValueError, match="released"):
        _ = arena.buffer
    with pytest.raises(ValueError, match="released"):
        arena.block(0)


@pytest.mark.parametrize("block_id", [-1, 2])
def test_a_block_that_is_none_is_refused(block_id):
    with Arena.create(2, 8) as arena, pytest.raises(IndexError, match="the arena has 2 blocks"):
        arena.block(block_id)


@pytest.mark.parametrize(
    ("blocks", "block_bytes", "message"),
    [
        (0, 8, "blocks: 0, from 1 to"),
        (2**31, 8, "blocks: 2147483648, from 1 to 2147483647"),
        (1, 0, "block_bytes: 0, at least 1"),
        (2**31 - 1, 2**40, "2147483647 blocks of 1099511627776 bytes"),
        (2**20, 2**36, "1048576 blocks of 68719476736 bytes"),
    ],
)
def test_an_arena_that_cannot_be_is_refused(blocks, block_bytes, message):
    with pytest.raises(ArenaError, match=message):
        Arena.create(blocks, block_bytes)


def test_peers_of_the_host_can_map_it_but_not_write_to_it():
    """What kvtransfer's shared memory transport finds behind the buffer that a worker registers."""
    with Arena.create(2, 4096) as arena:
        shared = arena.buffer.obj
        assert isinstance(shared, SharedBuffer)
        with mmap.mmap(shared.fileno(), 8192, prot=mmap.PROT_READ) as seen:
            arena.block(1)[0] = 5
            assert seen[4096] == 5
        with pytest.raises(PermissionError):
            mmap.mmap(shared.fileno(), 8192)


def test_its_memory_can_be_taken_at_once():
    with Arena.create(9, 1 << 20) as arena:
        arena.block(3)[7] = 9
        if not arena.take_memory():
            pytest.skip("this kernel does not collapse shared memory (it came with Linux 6.1)")
        assert arena.block(3)[7] == 9
        assert os.fstat(arena.buffer.obj.fileno()).st_blocks * 512 >= 6 << 20
