"""The control frames of the rdma transport: what is packed is parsed, anything else is a FrameError."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import FrameError
from kvtransfer.rdma import frames
from kvtransfer.rdma.frames import LANES_MAX, OWN_BODY_BYTES_MAX, LaneEnd, RdmaKind
from kvtransfer.rdma.ports import MTU_BYTES
from kvtransfer.rdma.work import RemoteKeys
from kvtransfer.stream.frames import HEADER_BYTES, accepts, parse_header

pytestmark = pytest.mark.unit

LANE_ENDS = st.builds(
    LaneEnd,
    device=st.integers(0, 255),
    gid=st.integers(0, 2**128 - 1).map(
        lambda n: ":".join(f"{n:032x}"[at : at + 4] for at in range(0, 32, 4))
    ),
    number=st.integers(0, 2**24 - 1),
    first_packet=st.integers(0, 2**24 - 1),
    lid=st.integers(0, 2**16 - 1),
    mtu_bytes=st.sampled_from(MTU_BYTES),
    reads_max=st.integers(1, 255),
)


def body_of(frame: bytes, kind: RdmaKind, request: int) -> bytes:
    """Checks the header, against the limit of its kind too."""
    header = parse_header(memoryview(frame)[:HEADER_BYTES], accepts(own=OWN_BODY_BYTES_MAX))
    assert (header.kind, header.request) == (kind, request)
    assert header.body_bytes == len(frame) - HEADER_BYTES
    return frame[HEADER_BYTES:]


@given(st.lists(LANE_ENDS, min_size=1, max_size=LANES_MAX))
def test_lanes(lanes: list[LaneEnd]) -> None:
    assert frames.parse_lanes(body_of(frames.pack_lanes(lanes), RdmaKind.LANES, 0)) == lanes


@given(st.lists(st.booleans(), min_size=1, max_size=LANES_MAX).filter(any))
def test_ready(usable: list[bool]) -> None:
    body = body_of(frames.pack_ready(usable), RdmaKind.READY, 0)
    assert frames.parse_ready(body, len(usable)) == usable
    with pytest.raises(FrameError):
        frames.parse_ready(body, len(usable) + 1)


@given(st.integers(1, 40), st.integers(1, LANES_MAX), st.randoms(use_true_random=False))
def test_go(stretches: int, lanes: int, random) -> None:
    bounds = sorted(random.sample(range(1 << 44), 2 * stretches))
    key_numbers = [[random.randrange(1 << 32) for _ in range(lanes)] for _ in range(stretches)]
    keys = RemoteKeys(
        random.randrange(1 << 63),
        np.array(bounds[::2]),
        np.array(bounds[1::2]),
        np.array(key_numbers, np.uint32),
    )
    body = body_of(frames.pack_go(7, keys), RdmaKind.GO, 7)
    found = frames.parse_go(body, lanes)
    assert found.base_address == keys.base_address
    assert np.array_equal(found.starts, keys.starts)
    assert np.array_equal(found.ends, keys.ends)
    assert np.array_equal(found.keys, keys.keys)
    for wrong in (body[:-1], body + b"x"):
        with pytest.raises(FrameError):
            frames.parse_go(wrong, lanes)
    with pytest.raises(FrameError):
        frames.parse_go(body, lanes + 1)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_reset_and_fin(requests: list[int]) -> None:
    body = body_of(frames.pack_reset(requests), RdmaKind.RESET, 0)
    assert frames.parse_reset(body) == frozenset(requests)
    assert body_of(frames.pack_fin(9), RdmaKind.FIN, 9) == b""


@pytest.mark.parametrize(
    "bounds",
    [[(5, 5)], [(5, 4)], [(-1, 4)], [(0, 10), (9, 20)], [(10, 20), (0, 5)], [(0, (1 << 44) + 1)]],
)
def test_go_with_stretches_that_cannot_be(bounds: list[tuple[int, int]]) -> None:
    starts, ends = np.array(bounds).T
    keys = RemoteKeys(4096, starts, ends, np.zeros((len(bounds), 1), np.uint32))
    with pytest.raises(FrameError, match="stretches"):
        frames.parse_go(frames.pack_go(1, keys)[HEADER_BYTES:], 1)


PARSERS = (
    frames.parse_lanes,
    lambda body: frames.parse_ready(body, 2),
    lambda body: frames.parse_go(body, 2),
    frames.parse_reset,
)


@given(st.sampled_from(PARSERS), st.binary(max_size=400))
def test_garbage_is_a_frame_error_or_parses(parse, garbage: bytes) -> None:
    try:
        parse(garbage)
    except FrameError:
        return


@given(st.lists(LANE_ENDS, min_size=1, max_size=3), st.data())
def test_a_changed_byte_never_gives_a_queue_pair_that_cannot_be(lanes: list[LaneEnd], data) -> None:
    body = bytearray(frames.pack_lanes(lanes)[HEADER_BYTES:])
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = frames.parse_lanes(body)
    except FrameError:
        return
    for lane in found:
        assert lane.number < 2**24
        assert lane.first_packet < 2**24
        assert lane.mtu_bytes in MTU_BYTES
        assert lane.reads_max > 0
