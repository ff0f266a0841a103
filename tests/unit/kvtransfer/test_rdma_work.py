"""How the rdma transport cuts calls into work requests, and how it counts them."""

import itertools
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.errors import FrameError
from kvtransfer.memory import checked_ranges
from kvtransfer.rdma import work
from kvtransfer.rdma.lane_cut import PART_BYTES_MAX, STRIPE_BYTES_MIN, LaneCut, lane_cut
from kvtransfer.rdma.sendqueue import SendQueue
from kvtransfer.rdma.work import RemoteKeys, planned

pytestmark = pytest.mark.unit

REGION_BYTES = 1000
PIECE_BYTES = 64


@given(st.integers(0, 100 << 20), st.integers(1, 16))
def test_parts_are_all_bytes_once(payload_bytes: int, lanes: int) -> None:
    cut = lane_cut(payload_bytes, lanes)
    assert 1 <= cut.lanes <= lanes
    dealt = sorted(part for lane in range(cut.lanes) for part in cut.parts_of(lane))
    assert dealt == list(range(cut.parts))
    at = 0
    for part in range(cut.parts):
        start, count = cut.stretch(part)
        assert start == at
        assert 0 < count <= PART_BYTES_MAX
        at += count
    assert at == payload_bytes
    assert all(len(cut.parts_of(lane)) > 0 for lane in range(cut.lanes) if payload_bytes)


def test_a_small_call_takes_the_nearest_lane_alone() -> None:
    assert lane_cut(2 * STRIPE_BYTES_MIN - 1, 8).lanes == 1
    assert lane_cut(2 * STRIPE_BYTES_MIN, 8).lanes == 2
    assert lane_cut(1 << 30, 8).lanes == 8


def shuffled_cuts(draw: st.DrawFn, total: int) -> np.ndarray:
    """Ranges of `total` bytes anywhere in the region."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=min(12, total - 1)))) if total > 1 else []
    bounds = [0, *cuts, total]
    ranges = [
        (draw(st.integers(0, REGION_BYTES - (end - begin))), end - begin)
        for begin, end in itertools.pairwise(bounds)
    ]
    return checked_ranges(ranges, REGION_BYTES, "ranges")


@st.composite
def calls(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, LaneCut, int]:
    total = draw(st.integers(1, 300))
    cut = LaneCut(total, draw(st.integers(1, total)), draw(st.integers(1, 3)))
    return shuffled_cuts(draw, total), shuffled_cuts(draw, total), cut, draw(st.integers(1, 400))


def byte_places(ranges: np.ndarray) -> list[int]:
    return [offset + at for offset, length in ranges.tolist() for at in range(length)]


def keys_for(piece_bytes: int) -> RemoteKeys:
    starts = np.arange(0, REGION_BYTES, piece_bytes)
    keys = np.arange(len(starts) * 3, dtype=np.uint32).reshape(-1, 3)
    return RemoteKeys(1 << 40, starts, np.minimum(starts + piece_bytes, REGION_BYTES), keys)


@given(calls())
def test_work_requests_are_all_bytes_in_order(call: tuple[np.ndarray, np.ndarray, LaneCut, int]) -> None:
    local, remote, cut, work_bytes_max = call
    with patch.object(work, "PIECE_BYTES", PIECE_BYTES):
        plan = planned(local, remote, keys_for(PIECE_BYTES), cut, work_bytes_max)
    rows = list(
        zip(plan.local_offsets.tolist(), plan.remote_offsets.tolist(), plan.lengths.tolist(), strict=True)
    )
    assert [at for begin, _, count in rows for at in range(begin, begin + count)] == byte_places(local)
    assert [at for _, begin, count in rows for at in range(begin, begin + count)] == byte_places(remote)
    for index, (near, far, count) in enumerate(rows):
        assert 0 < count <= work_bytes_max
        assert near // PIECE_BYTES == (near + count - 1) // PIECE_BYTES == plan.pieces[index]
        assert far // PIECE_BYTES == (far + count - 1) // PIECE_BYTES == plan.stretches[index]
    for part in range(cut.parts):
        rows_of_part = plan.of_part(part)
        assert plan.lengths[rows_of_part].sum() == cut.stretch(part)[1]
        assert plan.lengths[: rows_of_part.start].sum() == cut.stretch(part)[0]


def test_what_is_contiguous_at_both_ends_is_one_work_request() -> None:
    whole = np.array([(100, 400)])
    plan = planned(whole, whole, keys_for(REGION_BYTES), LaneCut(400, 400, 1), 1 << 20)
    assert plan.lengths.tolist() == [400]


def test_pieces_that_ranges_touch() -> None:
    size = work.PIECE_BYTES
    ranges = np.array([(size - 1, 2), (5 * size, size), (3 * size, 1)])
    assert work.pieces_of(ranges) == [0, 1, 3, 5]
    assert work.pieces_of(np.empty((0, 2), np.int64)) == []


def test_keys_that_do_not_cover_the_call_are_the_owners_lie() -> None:
    keys = keys_for(PIECE_BYTES)
    short = RemoteKeys(keys.base_address, keys.starts[2:4], keys.ends[2:4], keys.keys[2:4])
    one = LaneCut(10, 10, 1)
    near = np.array([(0, 10)])
    with patch.object(work, "PIECE_BYTES", PIECE_BYTES):
        planned(near, np.array([(128, 10)]), short, one, 100)
        for begin in (118, 127, 250, 256, 900):
            with pytest.raises(FrameError, match="cover"):
                planned(near, np.array([(begin, 10)]), short, one, 100)


class SendQueueMachine(RuleBasedStateMachine):
    """A device that completes in order, and only what is signalled."""

    DEPTH, EVERY = 8, 3

    def __init__(self) -> None:
        super().__init__()
        self.queue = SendQueue(self.DEPTH, self.EVERY)
        self.in_device: list[tuple[int, bool]] = []

    @precondition(lambda self: self.queue.room)
    @rule(data=st.data(), want_last=st.booleans())
    def post(self, data: st.DataObject, want_last: bool) -> None:
        numbers = self.queue.take(data.draw(st.integers(1, self.queue.room)))
        for number in numbers:
            signalled = self.queue.is_signalled(number) or (want_last and number == numbers[-1])
            self.in_device.append((number, signalled))

    @precondition(lambda self: any(signalled for _, signalled in self.in_device))
    @rule()
    def complete(self) -> None:
        while True:
            number, signalled = self.in_device.pop(0)
            if signalled:
                self.queue.retire(number)
                return

    @invariant()
    def never_overrun_and_never_stuck(self) -> None:
        assert len(self.in_device) == self.DEPTH - self.queue.room <= self.DEPTH
        assert self.queue.idle == (not self.in_device)
        # A full queue has a completion coming that makes room.
        assert self.queue.room or any(signalled for _, signalled in self.in_device)


TestSendQueue = SendQueueMachine.TestCase


def test_a_queue_that_would_get_stuck_is_refused() -> None:
    for signal_every in (0, 9):
        with pytest.raises(ValueError, match="signal_every"):
            SendQueue(8, signal_every)
