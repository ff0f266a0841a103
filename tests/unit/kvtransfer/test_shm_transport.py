"""The shared memory transport between two sides of this process, and against another process."""

import asyncio
import ctypes
import mmap
import os
import resource
import socket
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.eventually import eventually
from tests.support.shm import ShmSide, shm_side
from tests.support.transfer import no_leaks, pattern

from kvtransfer import Access, GrantError, Limits, PeerLostError
from kvtransfer.errors import ArrivalError, ChecksumError, TransportUnavailable, TransportUnfit
from kvtransfer.shared_buffer import SharedBuffer
from kvtransfer.shm import admissions, board, caller, copying, owner, system
from kvtransfer.shm.frames import parse_region
from kvtransfer.shm.memories import Exports
from kvtransfer.stream.frames import HEADER_BYTES

pytestmark = pytest.mark.unit

MIB = 1 << 20
TOTAL = 8 * MIB
WHOLE = [(0, TOTAL)]
TIMEOUT_S = 10.0
Pair = tuple[ShmSide, ShmSide]


def shared(fill: int | None = None) -> SharedBuffer:
    buffer = SharedBuffer.create(TOTAL)
    if fill is not None:
        np.frombuffer(buffer, np.uint8)[:] = pattern(TOTAL) if fill == 1 else fill
    return buffer


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """`near` has a pattern, `far` has zeros; both in memory that the other can map."""
    async with no_leaks(), shm_side("near", shared(1)) as near, shm_side("far", shared()) as far:
        yield near, far


@pytest.fixture
async def private_pair() -> AsyncIterator[Pair]:
    """The same in memory that nobody can map."""
    async with (
        no_leaks(),
        shm_side("near", pattern(TOTAL)) as near,
        shm_side("far", np.zeros(TOTAL, np.uint8)) as far,
    ):
        yield near, far


@pytest.fixture
def read_processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pieces of each process_vm_readv."""
    calls: list[int] = []
    real = copying.read_process
    monkeypatch.setattr(copying, "read_process", lambda *given: calls.append(given[3]) or real(*given))
    return calls


def mappings() -> int:
    """Memfds of ours mapped read-only into this process: a peer's view of somebody's memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:moonpool" in line and "r--s" in line for line in lines)


async def write_and_read(near: ShmSide, far: ShmSide) -> None:
    link = await near.dial(far)
    await link.write(near.call(WHOLE, far.grant(WHOLE, "near"), WHOLE))
    assert np.array_equal(far.memory, near.memory)
    near.memory[:] = 0
    await link.read(near.call(WHOLE, far.grant(WHOLE, "near", Access.READ), WHOLE))
    assert np.array_equal(far.memory, near.memory)
    assert far.memory.any()


async def test_shared_memory_is_mapped(pair: Pair, read_processes: list[int]) -> None:
    await write_and_read(*pair)
    assert read_processes == []


async def test_other_memory_is_read_out_of_the_process(private_pair: Pair, read_processes: list[int]) -> None:
    await write_and_read(*private_pair)
    assert len(read_processes) == 2 * TOTAL // Limits().turn_bytes


async def test_a_part_of_a_shared_buffer_is_mapped_where_it_is(read_processes: list[int]) -> None:
    near_view, far_view = memoryview(shared(1))[12_345:], memoryview(shared())[777:]
    async with no_leaks(), shm_side("near", near_view) as near, shm_side("far", far_view) as far:
        link = await near.dial(far)
        await link.write(near.call([(5, 100_000)], far.grant([(9, 100_000)], "near"), [(9, 100_000)]))
        assert np.array_equal(far.memory[9 : 9 + 100_000], near.memory[5 : 5 + 100_000])
        assert not far.memory[:9].any()
        assert not far.memory[9 + 100_000 :].any()
        assert read_processes == []


async def test_where_the_kernel_refuses_the_call_is_unfit_for_this_transport(
    private_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's filter or Yama: mapped memory still goes, other memory takes another transport."""

    def refused(*_: object) -> int:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(copying, "read_process", refused)
    near, far = private_pair
    link = await near.dial(far)
    with pytest.raises(TransportUnfit):
        await link.write(near.call(WHOLE, far.grant(WHOLE, "near"), WHOLE))
    with pytest.raises(TransportUnfit):
        await link.read(near.call(WHOLE, far.grant(WHOLE, "near", Access.READ), WHOLE))
    assert not link.closed
    assert not far.memory.any()


async def test_where_the_kernel_refuses_scattered_copies_of_mapped_memory_still_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(system, "read_process", refused)
    monkeypatch.setattr(copying, "read_process", refused)
    async with no_leaks(), shm_side("near", shared(1)) as near, shm_side("far", shared()) as far:
        ranges = [(at * 200, 100) for at in range(2000)]
        link = await near.dial(far)
        await link.write(near.call(ranges, far.grant(ranges, "near"), ranges))
        await link.read(near.call(ranges, far.grant(ranges, "near", Access.READ), ranges))
        assert np.array_equal(far.memory[:100], near.memory[:100])


async def test_a_peer_cannot_map_what_it_is_sent_for_writing() -> None:
    """The descriptor as it arrives at the other end of the socket."""
    ours, theirs = socket.socketpair()

    class Told:
        def send(self, frame: bytes, descriptor: int | None = None) -> None:
            socket.send_fds(ours, [frame], [descriptor])

    async with shm_side("near", shared(1)) as near:
        Exports(Told(), board.Board(1)).tell(near.region)
        frame, descriptors, _, _ = socket.recv_fds(theirs, 100, 4)
        offset = parse_region(frame[HEADER_BYTES:]).offset
        (received,) = descriptors
        with pytest.raises(PermissionError):
            mmap.mmap(received, TOTAL)
        with mmap.mmap(received, TOTAL, prot=mmap.PROT_READ, offset=offset) as seen:
            assert seen[:] == bytes(near.region.view)
        os.close(received)
    ours.close()
    theirs.close()


async def test_reads_under_one_grant_ask_once(pair: Pair) -> None:
    near, far = pair
    link = await near.dial(far)
    grant = far.grant([(0, 100), (200, 100)], "near", Access.READ)
    far.memory[:300] = pattern(300)
    await link.read(near.call([(0, 50)], grant, [(0, 50)]))
    asked = link._last_request
    await link.read(near.call([(50, 150)], grant, [(50, 50), (200, 100)]))
    assert link._last_request == asked
    assert np.array_equal(near.memory[:200], np.r_[far.memory[:100], far.memory[200:300]])
    with pytest.raises(GrantError, match="leave the granted"):
        await link.read(near.call([(0, 2)], grant, [(99, 2)]))
    assert link._last_request == asked + 1
    await eventually(lambda: far.context.statistics.peer("near").served_reads == 2)
    counters = far.context.statistics.peer("near")
    assert (counters.served_read_bytes, counters.served_failures) == (200, 1)


async def test_a_revoked_grant_is_not_read_again_without_asking(pair: Pair) -> None:
    near, far = pair
    link = await near.dial(far)
    grant = far.grant(WHOLE, "near", Access.READ)
    await link.read(near.call([(0, 50)], grant, [(0, 50)]))
    await far.revoke(grant)
    far.memory[:] = 255
    with pytest.raises(GrantError):
        await link.read(near.call([(0, 50)], grant, [(0, 50)]))
    assert not (near.memory == 255).any()


async def test_a_slot_of_another_grant_does_not_admit_to_the_old_one(pair: Pair) -> None:
    near, far = pair
    link = await near.dial(far)
    old = far.grant([(0, 100)], "near", Access.READ)
    await link.read(near.call([(0, 50)], old, [(0, 50)]))
    await far.revoke(old)
    new = far.grant([(5000, 100)], "near", Access.READ)
    await link.read(near.call([(0, 50)], new, [(5000, 50)]))
    with pytest.raises(GrantError):
        await link.read(near.call([(0, 50)], old, [(0, 50)]))


async def test_admissions_that_are_kept_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admissions, "ADMISSIONS_MAX", 3)
    near, far = pair
    link = await near.dial(far)
    for _ in range(10):
        await link.read(near.call([(0, 5)], far.grant(WHOLE, "near", Access.READ), [(0, 5)]))
    assert len(link._admissions) == 3


async def test_a_grant_of_many_stretches_is_asked_for_each_time(pair: Pair) -> None:
    near, far = pair
    link = await near.dial(far)
    grant = far.grant([(at * 4, 2) for at in range(2000)], "near", Access.READ)
    for number in range(3):
        await link.read(near.call([(0, 2)], grant, [(number * 4, 2)]))
    assert link._last_request == 3


async def test_a_reader_that_stood_still_while_the_memory_was_given_away(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in the middle of a chunk, so it does copy bytes of the new owner: none of them stays."""
    near, far = pair
    link = await near.dial(far)
    far.memory[:] = 7
    grant = far.grant(WHOLE, "near", Access.READ)
    loop = asyncio.get_running_loop()
    seen: list[int] = []
    real = copying.copy_memory

    async def give_away() -> None:
        await far.revoke(grant)  # does not wait for a reader
        far.memory[:] = 255

    def late(to: int, source: int, count: int) -> None:
        if len(seen) == 3:
            asyncio.run_coroutine_threadsafe(give_away(), loop).result(TIMEOUT_S)
        real(to, source, count)
        seen.append(int(np.ctypeslib.as_array(copying_bytes(to, count)).max()))

    monkeypatch.setattr(copying, "copy_memory", late)
    with pytest.raises(GrantError) as raised:
        await link.read(near.call(WHOLE, grant, WHOLE))
    assert seen == [7, 7, 7, 255]
    assert raised.value.landed == ((0, 3 * MIB),)
    assert (near.memory[: 3 * MIB] == 7).all()
    assert not (near.memory == 255).any()


def copying_bytes(address: int, count: int) -> "ctypes.Array[ctypes.c_uint8]":
    return (ctypes.c_uint8 * count).from_address(address)


async def test_an_owner_that_stood_still_while_the_source_was_given_away(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write was cancelled and waited no longer for the owner: it is not completed with foreign bytes."""
    monkeypatch.setattr(caller, "ABORT_S_MAX", 0.01)
    near, far = pair
    link = await near.dial(far)
    grant = far.grant(WHOLE, "near")
    loop = asyncio.get_running_loop()
    seen: list[int] = []
    real = copying.copy_memory

    async def give_up() -> None:
        writing.cancel()
        await asyncio.wait([writing])
        near.memory[:] = 255

    def late(to: int, source: int, count: int) -> None:
        if len(seen) == 3:
            asyncio.run_coroutine_threadsafe(give_up(), loop).result(TIMEOUT_S)
        real(to, source, count)
        seen.append(int(np.ctypeslib.as_array(copying_bytes(to, count)).max()))

    monkeypatch.setattr(copying, "copy_memory", late)
    writing = asyncio.create_task(link.write(near.call(WHOLE, grant, WHOLE)))
    with pytest.raises(asyncio.CancelledError):
        await writing
    await eventually(lambda: far.context.statistics.peer("near").served_failures == 1)
    assert seen == [249, 249, 249, 255]
    assert not (far.memory == 255).any()
    assert grant.landed_bytes == 3 * MIB
    assert far.context.statistics.peer("near").served_writes == 0


async def test_revoke_waits_for_the_chunk_that_lands(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = pair
    link = await near.dial(far)
    grant = far.grant(WHOLE, "near")
    loop = asyncio.get_running_loop()
    chunks: list[bool] = []
    real = copying.copy_memory

    def slow(to: int, source: int, count: int) -> None:
        if len(chunks) == 2:
            revoking.append(asyncio.run_coroutine_threadsafe(far.revoke(grant), loop))
            while not grant.revoked:
                os.sched_yield()
        real(to, source, count)
        chunks.append(bool(revoking) and revoking[0].done())

    revoking: list = []
    monkeypatch.setattr(copying, "copy_memory", slow)
    with pytest.raises(GrantError) as raised:
        await link.write(near.call(WHOLE, grant, WHOLE))
    await asyncio.wrap_future(revoking[0])
    assert chunks == [False, False, False]
    assert raised.value.landed == ((0, 3 * MIB),)
    assert grant.landed_bytes == 3 * MIB
    assert not far.memory[3 * MIB :].any()


async def test_closing_a_link_ends_its_calls_after_their_chunk(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    link = await near.dial(far)
    loop = asyncio.get_running_loop()
    real, chunks = copying.copy_memory, iter(range(100))

    async def close() -> None:
        link.close()

    def closing(to: int, source: int, count: int) -> None:
        if next(chunks) == 3:
            asyncio.run_coroutine_threadsafe(close(), loop).result(TIMEOUT_S)
        real(to, source, count)

    monkeypatch.setattr(copying, "copy_memory", closing)
    with pytest.raises(PeerLostError):
        await link.read(near.call(WHOLE, far.grant(WHOLE, "near", Access.READ), WHOLE))
    near.memory[:] = 9
    assert link.closed
    monkeypatch.undo()
    again = await near.dial(far)
    await again.read(near.call([(0, 1)], far.grant(WHOLE, "near", Access.READ), [(0, 1)]))
    assert (near.memory[1:] == 9).all()


async def test_a_new_link_waits_for_what_the_old_one_still_copies(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    old = await near.dial(far)
    grant = far.grant(WHOLE, "near")
    loop = asyncio.get_running_loop()
    real, entered = copying.copy_memory, asyncio.Event()
    resume = threading.Event()

    def held(to: int, source: int, count: int) -> None:
        if not entered.is_set():
            loop.call_soon_threadsafe(entered.set)
            resume.wait(TIMEOUT_S)
        real(to, source, count)

    monkeypatch.setattr(copying, "copy_memory", held)
    first = asyncio.create_task(old.write(near.call(WHOLE, grant, WHOLE)))
    await entered.wait()
    new = await near.dial(far)
    with pytest.raises(PeerLostError):
        await first
    second = asyncio.create_task(new.write(near.call([(0, 1)], grant, [(0, 1)])))
    done, _ = await asyncio.wait([second], timeout=0.05)
    assert not done
    near.memory[0] = 99
    resume.set()
    await second
    assert far.memory[0] == 99


async def test_a_write_waits_for_what_one_that_was_given_up_still_copies(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the owner, which finds the first one withdrawn, wipes what the second one brought."""
    near, far = pair
    link = await near.dial(far)
    grant = far.grant(WHOLE, "near")
    loop = asyncio.get_running_loop()
    real, entered = copying.copy_memory, asyncio.Event()
    resume = threading.Event()

    def held(to: int, source: int, count: int) -> None:
        if not entered.is_set():
            loop.call_soon_threadsafe(entered.set)
            resume.wait(TIMEOUT_S)
        real(to, source, count)

    monkeypatch.setattr(copying, "copy_memory", held)
    monkeypatch.setattr(caller, "ABORT_S_MAX", 0.01)
    first = asyncio.create_task(link.write(near.call(WHOLE, grant, WHOLE)))
    await entered.wait()
    first.cancel()
    await asyncio.wait([first])
    near.memory[0] = 99
    second = asyncio.create_task(link.write(near.call([(0, 1)], grant, [(0, 1)])))
    await asyncio.wait([second], timeout=0.05)
    resume.set()
    await second
    await eventually(lambda: far.context.statistics.peer("near").served_failures == 1)
    assert far.memory[0] == 99


async def test_a_caller_hears_from_an_owner_that_copies_for_long(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a call that runs out of time meanwhile would take the link for stalled."""
    monkeypatch.setattr(owner, "ALIVE_S", 0.0)
    monkeypatch.setattr(copying, "PROGRESS_S", 0.0)
    near, far = pair
    link = await near.dial(far)
    grant = far.grant(WHOLE, "near")
    await link.write(near.call([(0, 1)], grant, [(0, 1)]))
    loop = asyncio.get_running_loop()
    begun_s: list[float] = []
    real = copying.copy_memory

    async def hear() -> None:
        await eventually(lambda: link._channel.progress_at_s > begun_s[0])

    def held(to: int, source: int, count: int) -> None:
        begun_s.append(link._channel.progress_at_s)
        if len(begun_s) == 5:
            asyncio.run_coroutine_threadsafe(hear(), loop).result(TIMEOUT_S)
        real(to, source, count)

    monkeypatch.setattr(copying, "copy_memory", held)
    await link.write(near.call(WHOLE, grant, WHOLE))
    assert len(begun_s) == TOTAL // MIB


async def test_tags_are_handed_over_after_the_bytes(pair: Pair) -> None:
    near, far = pair
    link = await near.dial(far)
    seen = []
    grant = far.grant(
        WHOLE, "near", on_arrival=lambda arrival: seen.append((arrival.tag, int(far.memory[TOTAL - 1])))
    )
    await link.write(near.call(WHOLE, grant, WHOLE, tag=b"layer 3", verify=True))
    assert seen == [(b"layer 3", int(near.memory[-1]))]
    await link.write(near.call([], grant, [], tag=b"done"))
    assert seen[1][0] == b"done"
    with pytest.raises(GrantError, match="takes no tags"):
        await link.write(near.call([(0, 1)], far.grant(WHOLE, "near"), [(0, 1)], tag=b"x"))

    def fails(_: object) -> None:
        raise ValueError("not today")

    with pytest.raises(ArrivalError):
        await link.write(near.call([(0, 1)], far.grant(WHOLE, "near", on_arrival=fails), [(0, 1)], tag=b"x"))


@pytest.mark.parametrize("size", [1000, TOTAL])
async def test_a_checksum_that_differs_fails_the_call(
    pair: Pair, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    link = await near.dial(far)
    write, read = far.grant(WHOLE, "near"), far.grant(WHOLE, "near", Access.READ)
    await link.write(near.call([(0, size)], write, [(0, size)], verify=True))
    await link.read(near.call([(0, size)], read, [(0, size)], verify=True))
    real = copying.copy_memory

    damage: list[int] = []

    def damaged(to: int, source: int, count: int) -> None:
        real(to, source, count)
        if damage:
            copying.fill_memory(to, damage.pop(), 1)

    monkeypatch.setattr(copying, "copy_memory", damaged)
    damage.append(255)
    with pytest.raises(ChecksumError):
        await link.write(near.call([(0, size)], write, [(0, size)], verify=True))
    damage.append(254)
    with pytest.raises(ChecksumError):
        await link.read(near.call([(0, size)], read, [(0, size)], verify=True))


async def test_a_region_that_is_released_is_mapped_no_more(pair: Pair) -> None:
    near, far = pair
    before = mappings()
    link = await near.dial(far)
    write, read = far.grant(WHOLE, "near"), far.grant(WHOLE, "near", Access.READ)
    await link.write(near.call([(0, 1)], write, [(0, 1)]))
    await link.read(near.call([(0, 1)], read, [(0, 1)]))
    assert mappings() == before + 4  # a board and a region, each way
    await near.transport.release(near.region)
    await eventually(lambda: mappings() == before + 3)
    await far.revoke(read)
    await far.transport.release(far.region)
    # What the caller keeps of its admission goes with the link, or with the next read that is refused.
    with pytest.raises(GrantError):
        await link.read(near.call([(0, 1)], read, [(0, 1)]))
    await eventually(lambda: mappings() == before + 2)
    link.close()
    await eventually(lambda: mappings() == before)


async def test_a_process_that_may_open_no_more_files(pair: Pair) -> None:
    """Another transport may need none: the call is worth another try."""
    near, far = pair
    link = await near.dial(far)
    grant = far.grant(WHOLE, "near")
    await link.write(near.call([(0, 1)], grant, [(0, 1)]))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(PeerLostError, match="no more files"):
            await link.read(near.call(WHOLE, far.grant(WHOLE, "near", Access.READ), WHOLE))
        with pytest.raises(PeerLostError, match="open files"):
            await near.dial(far)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await (await near.dial(far)).read(near.call(WHOLE, far.grant(WHOLE, "near", Access.READ), WHOLE))
    assert np.array_equal(near.memory, far.memory)


async def test_many_links_leave_nothing_behind(pair: Pair) -> None:
    near, far = pair
    before = mappings()
    grant = far.grant(WHOLE, "near")
    for _ in range(20):
        link = await near.dial(far)
        await link.write(near.call([(0, 10)], grant, [(0, 10)]))
        link.close()
    await eventually(lambda: mappings() == before)


def entries(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_closing_while_a_connection_comes() -> None:
    loop, failures = asyncio.get_running_loop(), []
    async with shm_side("far", shared()) as far:
        await asyncio.sleep(0)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"\0{far.address['name']}")
            loop.set_exception_handler(lambda _, context: failures.append(context))
            await asyncio.sleep(0)  # the loop knows of it, and will accept it after what we do now
            await far.transport.close()
    assert failures == []


async def test_the_socket_lies_in_the_folder_while_it_listens(tmp_path: Path) -> None:
    async with (
        no_leaks(),
        shm_side("near", shared(1), folder=tmp_path) as near,
        shm_side("far", shared(), folder=tmp_path) as far,
    ):
        paths = entries(tmp_path)
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
        assert str(far.address["path"]) in map(str, paths)
        assert near.transport.reaches(far.address)
        await write_and_read(near, far)
    assert entries(tmp_path) == []


async def test_a_folder_whose_name_is_too_long_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    with pytest.raises(ValueError, match=r"shm_folder: .*107 bytes"):
        async with no_leaks(), shm_side("near", shared(), folder=folder):
            pass


async def test_only_this_boot_and_network_are_reached(pair: Pair) -> None:
    near, far = pair
    assert near.transport.reaches(far.address)
    assert not near.transport.reaches({**far.address, "host_id": "another"})
    assert not near.transport.reaches({**far.address, "network": 1})
    assert not near.transport.reaches({"kind": "shm"})


async def test_memory_that_cannot_be_sealed_makes_it_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.shared_buffer._SEALS", 1 << 30)
    with pytest.raises(TransportUnavailable, match=r"5\.1"):
        async with no_leaks(), shm_side("near", np.zeros(8, np.uint8)):
            pass
