"""A call in parts over several streams, of which one fails."""

import asyncio

import numpy as np
import pytest

from kvtransfer import BusyError, Limits, Region, TransferError
from kvtransfer.tcp.link import TcpLink
from kvtransfer.transport import Call, LocalMemory

pytestmark = pytest.mark.unit

PART_BYTES = 100
LIMITS = Limits(tcp_part_bytes_min=PART_BYTES)
RANGES = np.array([(0, 2 * PART_BYTES)], np.int64)


class FakeStream:
    """Fails each part with `error`, if there is one; else it never ends."""

    closed = False
    settling = None
    outstanding_bytes = 0

    def __init__(self, error: TransferError | None = None) -> None:
        self.error = error
        self.given_up = 0

    def start(self, on_lost: object) -> None:
        pass

    async def write(self, call: Call, **_: object) -> None:
        if self.error is not None:
            raise self.error
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise


def call(region: Region) -> Call:
    return Call(LocalMemory(region, RANGES, 2 * PART_BYTES), "token", RANGES)


async def test_a_write_whose_other_part_was_given_up_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.tcp.link.CallerStream", FakeStream)
    refused = BusyError("one request too many")
    refused.landed = ((0, 10),)
    streams = [FakeStream(refused), FakeStream()]
    link = TcpLink(streams, "peer", LIMITS)
    with pytest.raises(BusyError, match="one request too many") as raised:
        await link.write(call(Region(1, bytearray(2 * PART_BYTES))))
    assert streams[1].given_up == 1
    assert not raised.value.settled
    assert raised.value.landed == ((0, 10),)


async def test_what_landed_of_a_call_is_not_told_of_others_that_fail_with_the_same_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtransfer.tcp.link.CallerStream", FakeStream)
    lost = TransferError("the stream is gone")
    lost.landed = ((0, 10),)
    link = TcpLink([FakeStream(), FakeStream(lost)], "peer", LIMITS)
    with pytest.raises(TransferError) as raised:
        await link.write(call(Region(1, bytearray(2 * PART_BYTES))))
    assert raised.value.landed == ((PART_BYTES, 10),)
    assert raised.value is not lost
    assert lost.landed == ((0, 10),)
    assert lost.settled
