"""How many transfers and bytes are let in at once, and in which order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import BusyError, Limits
from kvtransfer.admission import Admission
from kvtransfer.kinds import TransportKind
from kvtransfer.statistics import PEERS_COUNTED_MAX, Statistics

pytestmark = pytest.mark.unit


@asynccontextmanager
async def admitted(admission: Admission, payload_bytes: int) -> AsyncIterator[None]:
    await admission.enter(payload_bytes)
    try:
        yield
    finally:
        admission.leave(payload_bytes)


async def test_bytes_in_flight_and_arrival_order() -> None:
    admission = Admission(Limits(bytes_in_flight_max=100, transfers_in_flight_max=10))
    entered: list[str] = []
    gates = {name: asyncio.Event() for name in "abcd"}

    async def transfer(name: str, payload_bytes: int) -> None:
        async with admitted(admission, payload_bytes):
            entered.append(name)
            await gates[name].wait()

    async with asyncio.TaskGroup() as tasks:
        for name, payload_bytes in (("a", 60), ("b", 500), ("c", 10), ("d", 30)):
            tasks.create_task(transfer(name, payload_bytes))
        await asyncio.sleep(0)
        assert entered == ["a"]  # c would fit but came after b
        gates["a"].set()
        await asyncio.sleep(0.01)
        assert entered == ["a", "b"]  # too large for the limit: alone
        gates["b"].set()
        await asyncio.sleep(0.01)
        assert entered == ["a", "b", "c", "d"]
        gates["c"].set()
        gates["d"].set()
    assert admission.idle
    assert admission.payload_bytes == 0


async def test_waiting_calls_are_bounded() -> None:
    admission = Admission(Limits(transfers_in_flight_max=1, transfers_waiting_max=1))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(admitted(admission, 1))
        waiting = asyncio.create_task(stack.enter_async_context(admitted(admission, 1)))
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="transfers_waiting_max of 1"):
            await stack.enter_async_context(admitted(admission, 1))
        waiting.cancel()
        await asyncio.wait([waiting])
    assert admission.idle


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 6), st.booleans()), min_size=1, max_size=15),
    st.integers(1, 4),
)
def test_cancellation_at_any_moment_gives_all_room_back(
    calls: list[tuple[int, int, bool]], transfers_max: int
) -> None:
    async def example() -> None:
        admission = Admission(Limits(transfers_in_flight_max=transfers_max, bytes_in_flight_max=100))

        async def call(payload_bytes: int, turns: int) -> None:
            async with admitted(admission, payload_bytes):
                assert admission.transfers <= transfers_max
                assert admission.payload_bytes <= 100 or admission.transfers == 1
                for _ in range(turns):
                    await asyncio.sleep(0)

        tasks = [(asyncio.create_task(call(size, turns)), doomed) for size, turns, doomed in calls]
        for (task, doomed), (_, turns, _) in zip(tasks, calls, strict=True):
            for _ in range(turns):
                await asyncio.sleep(0)
            if doomed:
                task.cancel()
        results = await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert admission.idle
        assert (admission.transfers, admission.payload_bytes) == (0, 0)

    asyncio.run(example())


def test_counters_are_kept_for_a_bounded_number_of_peers() -> None:
    statistics = Statistics()
    for number in range(PEERS_COUNTED_MAX):
        statistics.of(str(number), TransportKind.TCP).writes += 1
    statistics.of("0", TransportKind.TCP).writes += 1
    statistics.of("one more", TransportKind.SHM).reads += 1
    kept = statistics.snapshot()
    assert len(kept) == PEERS_COUNTED_MAX
    assert kept["0"].writes == 2
    assert "1" not in kept
    totals = statistics.totals()
    assert (totals[TransportKind.TCP].writes, totals[TransportKind.SHM].reads) == (PEERS_COUNTED_MAX + 1, 1)
