"""The whole benchmark on small rows, and what is made of its samples."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from kvtransfer import TransportUnavailable
from moonpool.benchmarks.transfer import Moved, as_transfer_table, measure, summarise
from moonpool.benchmarks.transfer_caller import TransferCaller, WrongTransfer
from moonpool.benchmarks.transfer_ceilings import Ceilings
from moonpool.benchmarks.transfer_plan import DEPTH, ROWS, Direction, Row, Sample, Side, Walk, digest
from moonpool.errors import CommandError

pytestmark = pytest.mark.unit

MEMORY_BYTES = 1 << 20
ROW = Row(3, 4096)
WRITE, DEEP_WRITE = Moved("tcp", Direction.WRITE, 1), Moved("tcp", Direction.WRITE, DEPTH)


def without_rdma(
    running: Callable[[str, int], AbstractAsyncContextManager[TransferCaller]],
) -> Callable[[str, int], AbstractAsyncContextManager[TransferCaller]]:
    """A machine that lacks it, whatever this one has."""

    def running_here(transport: str, memory_bytes: int) -> AbstractAsyncContextManager[TransferCaller]:
        if transport == "rdma":
            raise TransportUnavailable("rdma: no device")
        return running(transport, memory_bytes)

    return running_here


async def test_every_transport_and_way_is_measured_beside_the_ceilings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TransferCaller, "running", without_rdma(TransferCaller.running))
    results = await measure(["tcp", "shm", "rdma"], [Row(2, 4096)], 2, MEMORY_BYTES)
    found = {(result.case, result.metric): result for result in results}
    shares = {"tcp": ("share_of_tcp_stream", "share_of_tcp_acked"), "shm": ("share_of_memcpy",)}
    for transport in shares:
        assert found[transport, "available"].value == 1
        for direction in Direction:
            case = f"{transport}/{direction}/2x4KiB"
            for metric in ("rate", "latency_p50", "latency_p99", *shares[transport]):
                assert found[case, metric].n == 2
                assert found[case, metric].min > 0
            assert found[f"{case}/depth_4", "rate"].context["depth"] == DEPTH
    assert {case for case, _ in found if case.startswith("memcpy")} == {"memcpy/2x4KiB"}
    assert found["rdma", "available"].value == 0
    assert not any(case.startswith("rdma/") for case, _ in found)
    assert as_transfer_table(results).splitlines()[-1] == "not measured: rdma: no device"


async def test_where_there_is_no_transport_that_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferCaller, "running", without_rdma(TransferCaller.running))
    with pytest.raises(CommandError, match="none of the transports"):
        await measure(["rdma"], [Row(2, 4096)], 1, MEMORY_BYTES)


async def test_a_call_that_another_transport_carries_does_not_count() -> None:
    async with TransferCaller.running("tcp", MEMORY_BYTES) as caller:
        caller.transport = "shm"
        with pytest.raises(WrongTransfer, match="carried by tcp, not shm"):
            await caller.sample(Direction.WRITE, ROW, 0, 1, 1)


async def test_bytes_that_do_not_arrive_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TransferCaller.running("tcp", MEMORY_BYTES) as caller:
        for direction in Direction:
            await caller.verify(direction, ROW)

        async def nothing(*_: object) -> Sample:
            return Sample(1.0, ())

        monkeypatch.setattr(caller, "sample", nothing)
        for direction in Direction:
            with pytest.raises(WrongTransfer, match=f"tcp {direction}: other bytes"):
                await caller.verify(direction, ROW)


async def test_a_sample_is_of_as_many_calls_as_were_asked_for() -> None:
    async with TransferCaller.running("tcp", MEMORY_BYTES) as caller:
        for depth in (1, DEPTH):
            sample = await caller.sample(Direction.WRITE, ROW, 5, 6, depth)
            assert len(sample.call_s) == 6
            assert max(sample.call_s) <= sample.seconds


def test_memcpy_copies_the_bytes_of_the_walk() -> None:
    with Ceilings(MEMORY_BYTES) as ceilings:
        ceilings._source[:] = 7
        sample = ceilings.memcpy(ROW, 3, 2)
        walk = Walk(ROW, MEMORY_BYTES)
        moved = walk.stretch(Side.OWNER, 3, 2)
        assert len(sample.call_s) == 2
        assert int((ceilings._target == 7).sum()) == 2 * ROW.call_bytes
        assert digest(ceilings._target, moved, ROW.range_bytes) == digest(
            ceilings._source, walk.stretch(Side.CALLER, 3, 2), ROW.range_bytes
        )


def test_the_other_ceilings_answer_again_and_again_and_end() -> None:
    with Ceilings(MEMORY_BYTES) as ceilings:
        for _ in range(2):
            assert len(ceilings.tcp(ROW, 0, 5, each_acknowledged=True).call_s) == 5
            assert len(ceilings.tcp(ROW, 5, 5, each_acknowledged=False).call_s) == 5
            assert len(ceilings.tcp_echo(4096, 7).call_s) == 7
            assert len(ceilings.unix_echo(64, 7).call_s) == 7
    assert ceilings._process.returncode == 0


def test_shares_are_taken_within_a_round_and_latencies_are_of_single_calls() -> None:
    def rounds(write_s: float, stream_s: float) -> dict:
        return {
            "memcpy": Sample(1.0, (0.5, 0.5)),
            "tcp_stream": Sample(stream_s, (0.0, stream_s)),
            "tcp_acked": Sample(8.0, (4.0, 4.0)),
            "tcp_echo": Sample(1.0, (0.001, 0.002)),
            WRITE: Sample(write_s, (0.002, write_s)),
            DEEP_WRITE: Sample(write_s / 2, (0.002, write_s)),
        }

    row = Row(2, 1 << 20)
    results = summarise(row, [rounds(4.0, 2.0), rounds(8.0, 1.0)], {"cpu": "x"})
    found = {(result.case, result.metric): result for result in results}
    rate = found["tcp/write/2x1MiB", "rate"]
    assert (rate.min, rate.max) == (4 * (1 << 20) / 8e9, 4 * (1 << 20) / 4e9)
    share = found["tcp/write/2x1MiB", "share_of_tcp_stream"]
    assert (share.min, share.max) == (0.125, 0.5)
    assert found["tcp/write/2x1MiB/depth_4", "share_of_tcp_acked"].max == 4.0
    p50, p99 = found["tcp/write/2x1MiB", "latency_p50"], found["tcp/write/2x1MiB", "latency_p99"]
    assert (p50.value, p99.min, p99.max) == (2000.0, 4e6, 8e6)
    assert found["tcp/write/2x1MiB", "latency_p50_over_tcp_echo"].value == 2.0
    assert ("tcp/write/2x1MiB/depth_4", "latency_p50") not in found
    table = as_transfer_table(results).splitlines()
    assert table[1].split()[0] == "tcp/write/2x1MiB"
    assert table[1].split()[5] == "tcp_stream"
    assert table[2].startswith("tcp_echo/2x1MiB: p50 1000 µs, p99 2000 µs")


def test_rows_are_told_apart_and_fill_the_depth() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.calls >= DEPTH for row in ROWS)
