"""Tables of buffers against the kernel: what is sent and received, and the errors."""

import itertools
import os
import socket

import numpy as np
import pytest

from kvtransfer.limits import IOVECS_MAX
from kvtransfer.memory import Cursor, address_of, checked_ranges
from kvtransfer.stream.vectors import Vectors

pytestmark = pytest.mark.unit

SIZE = 3 * IOVECS_MAX * 20


def scattered() -> np.ndarray:
    """More small ranges than one system call takes, in random order."""
    places = np.random.default_rng(1).permutation(3 * IOVECS_MAX)
    return checked_ranges(np.stack((places * 20, 1 + places % 15), axis=1), SIZE, "ranges")


def test_many_ranges_from_end_to_end() -> None:
    source = np.random.default_rng(2).integers(1, 255, SIZE, dtype=np.uint8)
    target = np.zeros(SIZE, np.uint8)
    ranges, moved = scattered(), 0
    sending, receiving = Cursor(source.data, ranges), Cursor(target.data, ranges)
    near, far = socket.socketpair()
    vectors = Vectors()
    with near, far:
        for bytes_max in itertools.cycle((1, 700, 50_000, 3)):
            if not sending.remaining:
                break
            vectors.fill(sending, bytes_max)
            assert 0 < vectors.total_bytes <= bytes_max
            sent = vectors.send(near.fileno())
            sending.advance(sent)
            while moved < sending.payload_bytes - sending.remaining:
                vectors.fill(receiving, sent)
                count = vectors.receive(far.fileno())
                receiving.advance(count)
                moved += count
    expected = np.zeros(SIZE, np.uint8)
    for at, length in ranges.tolist():
        expected[at : at + length] = source[at : at + length]
    assert np.array_equal(target, expected)


def test_a_buffer_behind_the_ranges() -> None:
    memory, tail = np.zeros(SIZE, np.uint8), memoryview(bytearray(4))
    vectors = Vectors()
    near, far = socket.socketpair()
    with near, far:
        vectors.fill(Cursor(memory.data, scattered()), 10)
        vectors.add(address_of(tail), len(tail))
        near.send(b"0123456789tail and more")
        assert vectors.receive(far.fileno()) == vectors.total_bytes == 14
        assert far.recv(100) == b" and more"
    assert bytes(tail) == b"tail"


def test_errors_are_those_of_the_system() -> None:
    vectors = Vectors()
    vectors.fill(Cursor(np.zeros(SIZE, np.uint8).data, scattered()), SIZE)
    near, far = socket.socketpair()
    with near, far:
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            vectors.receive(far.fileno())
        near.close()
        assert vectors.receive(far.fileno()) == 0
        with pytest.raises(BrokenPipeError):
            vectors.send(far.fileno())
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    with pytest.raises(OSError, match="Bad file descriptor"):
        vectors.send(writer)
