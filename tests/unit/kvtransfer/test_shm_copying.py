"""Copies: what lands, what a withdrawn permission leaves behind, when they stop, and the threads."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from tests.support.eventually import eventually

from kvtransfer.shm import copying
from kvtransfer.shm.board import Board, BoardView
from kvtransfer.shm.copying import TURN_CHUNKS_MAX, Copy, CopyThreads, Outcome
from kvtransfer.shm.pieces import merged
from kvtransfer.shm.system import Mapping, reads_itself

pytestmark = pytest.mark.unit

CHUNK = 4096
TOTAL = 20 * CHUNK


class Scene:
    """Two memories and a permission; `copy` makes a copy of all of the source."""

    def __init__(self) -> None:
        self.board = Board(4)
        self.slot = self.board.open()
        self.permission = BoardView(Mapping(self.board.memory.fileno())).permission(
            self.slot.index, self.slot.epoch
        )
        self.source = np.random.default_rng(1).integers(1, 250, TOTAL, dtype=np.uint8)
        self.target = np.full(TOTAL, 255, np.uint8)

    def copy(
        self,
        *,
        pieces: int = 1,
        gathers: bool = False,
        process=None,
        source: int | None = None,
        total: int = TOTAL,
    ) -> Copy:
        length = total // pieces
        ranges = np.stack((np.arange(pieces) * length, np.full(pieces, length)), axis=1)
        made = merged(
            *(ranges, self.target.ctypes.data, ranges),
            *(self.source.ctypes.data if source is None else source, CHUNK),
        )
        return Copy(
            *(made, self.permission, process, (self.source, self.target)),
            chunk_bytes=CHUNK,
            gathers=gathers,
        )


@pytest.fixture
def scene():
    made = Scene()
    yield made
    made.board.close()


def meanwhile(monkeypatch, name: str, number: int, then) -> None:
    """Do `then` right after call `number` of the function of that name in the copying module."""
    real, calls = getattr(copying, name), iter(range(1, 10_000))

    def replaced(*arguments):
        result = real(*arguments)
        if next(calls) == number:
            then()
        return result

    monkeypatch.setattr(copying, name, replaced)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("pieces", [1, 20, 2048])
def test_all_of_it_is_copied(scene, pieces, gathers):
    copy = scene.copy(pieces=pieces, gathers=gathers)
    copy.run()
    assert copy.outcome is Outcome.DONE
    assert copy.copied_bytes == TOTAL
    assert np.array_equal(scene.source, scene.target)


def test_many_small_pieces_go_in_few_system_calls(scene, monkeypatch):
    calls = []
    real = copying.read_process
    monkeypatch.setattr(copying, "read_process", lambda *given: calls.append(given[3]) or real(*given))
    scene.copy(pieces=2048, gathers=True).run()
    assert sum(calls) == 2048
    assert len(calls) == -(-2048 // (CHUNK // (TOTAL // 2048)))


@pytest.mark.parametrize("gathers", [False, True])
def test_a_copy_that_starves_for_the_interpreter_is_gathered(scene, monkeypatch, gathers):
    """As far as the kernel allows it."""
    calls = []
    real = copying.read_process
    monkeypatch.setattr(copying, "read_process", lambda *given: calls.append(given[3]) or real(*given))
    monkeypatch.setattr(copying, "GATHERED_PIECES_MIN", 10_000)
    monkeypatch.setattr(copying, "STARVED_S", 0.0)
    copy = scene.copy(pieces=40, gathers=gathers)
    copy.run()
    assert copy.outcome is Outcome.DONE
    assert sum(calls) == (38 if gathers else 0)  # all but those of the first chunk
    assert np.array_equal(scene.source, scene.target)


def test_where_the_kernel_forbids_it_small_pieces_are_moved(scene, monkeypatch):
    monkeypatch.setattr(copying, "read_process", None)
    copy = scene.copy(pieces=2048, gathers=False)
    copy.run()
    assert copy.outcome is Outcome.DONE
    assert np.array_equal(scene.source, scene.target)


def test_without_the_permission_nothing_is_touched(scene):
    scene.board.shut(scene.slot)
    copy = scene.copy()
    copy.run()
    assert copy.outcome is Outcome.WITHDRAWN
    assert (scene.target == 255).all()


@pytest.mark.parametrize(
    ("gathers", "function", "pieces"), [(False, "copy_memory", 20), (True, "read_process", 2000)]
)
def test_what_was_copied_after_the_withdrawal_is_wiped(scene, monkeypatch, gathers, function, pieces):
    """The reader stood still in the middle of a chunk while the memory was given away."""
    copy = scene.copy(pieces=pieces, gathers=gathers)
    meanwhile(monkeypatch, function, 3, lambda: scene.board.shut(scene.slot))
    copy.run()
    assert copy.outcome is Outcome.WITHDRAWN
    good = copy.copied_bytes
    assert 0 < good < TOTAL
    assert np.array_equal(scene.target[:good], scene.source[:good])
    wiped = int((scene.target == 0).sum())
    assert 0 < wiped <= CHUNK
    assert (scene.target[good : good + wiped] == 0).all()
    assert (scene.target[good + wiped :] == 255).all()


def test_a_stopped_copy_ends_before_its_next_chunk(scene, monkeypatch):
    copy = scene.copy()
    meanwhile(monkeypatch, "copy_memory", 3, lambda: setattr(copy, "stop", True))
    copy.run()
    assert copy.outcome is Outcome.STOPPED
    assert copy.copied_bytes == 3 * CHUNK
    assert (scene.target[3 * CHUNK :] == 255).all()


def test_an_ended_copy_lets_go_of_the_memories(scene):
    copy = scene.copy()
    before = sys.getrefcount(scene.source)
    copy.run()
    after = sys.getrefcount(scene.source)
    assert after == before - 1


class OtherProcess:
    """A peer's process as the copy sees it."""

    known = True

    def __init__(self, pid: int, alive: bool = True) -> None:
        self.pid = pid
        self._alive = alive

    def alive(self) -> bool:
        return self._alive


_CHILD = """
import ctypes, sys
memory = ctypes.create_string_buffer(b"\\x07" * {total}, {total})
print(ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child():
    """Another process with TOTAL sevens at an address."""
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(total=TOTAL)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()


def test_another_process_is_read(scene, child):
    pid, address = child
    copy = scene.copy(pieces=20, process=OtherProcess(pid), source=address)
    copy.run()
    assert copy.outcome is Outcome.DONE
    assert (scene.target == 7).all()


def test_a_process_that_died_meanwhile_is_not_believed(scene, child):
    """Its number may be another process's by the time we read."""
    pid, address = child
    copy = scene.copy(process=OtherProcess(pid, alive=False), source=address)
    copy.run()
    assert copy.outcome is Outcome.LOST
    assert copy.copied_bytes == 0
    assert not (scene.target == 7).any()


def test_a_source_that_is_not_there_is_a_fault(scene, child):
    pid, _ = child
    copy = scene.copy(process=OtherProcess(pid), source=CHUNK)
    copy.run()
    assert copy.outcome is Outcome.FAULT
    assert (scene.target == 255).all()


def test_a_process_that_we_may_not_read_refuses(scene, monkeypatch):
    def refused(*_):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(copying, "read_process", refused)
    copy = scene.copy(process=OtherProcess(os.getpid()))
    copy.run()
    assert copy.outcome is Outcome.REFUSED


def test_a_process_that_is_gone_is_lost(scene):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    copy = scene.copy(process=OtherProcess(process.pid))
    copy.run()
    assert copy.outcome is Outcome.LOST


def test_this_kernel_reads_itself():
    """What the tests above rely on."""
    assert reads_itself()


def copy_threads() -> int:
    return sum(thread.name == "kvtransfer-copy" for thread in threading.enumerate())


class Gate:
    """Holds copies in their first chunk until it is opened."""

    def __init__(self, monkeypatch) -> None:
        self._open = threading.Event()
        self.entered = threading.Semaphore(0)
        real = copying.copy_memory

        def held(to, source, count):
            self.entered.release()
            assert self._open.wait(5)
            return real(to, source, count)

        monkeypatch.setattr(copying, "copy_memory", held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
async def threads():
    made = CopyThreads(1)
    yield made
    await made.close()
    assert copy_threads() == 0


async def started(threads: CopyThreads, copy: Copy) -> asyncio.Future[None]:
    ended = asyncio.get_running_loop().create_future()
    assert threads.ready()
    threads.start(copy, lambda: ended.set_result(None))
    return ended


async def test_a_thread_copies_and_tells_the_loop(scene, threads):
    copy = scene.copy()
    await (await started(threads, copy))
    assert copy.outcome is Outcome.DONE
    assert np.array_equal(scene.source, scene.target)


async def test_a_copy_that_waits_for_a_thread_stops_at_once(scene, threads, monkeypatch):
    gate = Gate(monkeypatch)
    first, second = scene.copy(), scene.copy()
    first_ended, second_ended = await started(threads, first), await started(threads, second)
    await asyncio.to_thread(gate.entered.acquire)
    threads.stop(second)
    assert second.outcome is Outcome.STOPPED
    await second_ended
    assert not first_ended.done()
    gate.open()
    await first_ended
    assert first.outcome is Outcome.DONE


async def test_a_copy_that_runs_stops_after_its_chunk(scene, threads, monkeypatch):
    gate = Gate(monkeypatch)
    copy = scene.copy()
    ended = await started(threads, copy)
    await asyncio.to_thread(gate.entered.acquire)
    threads.stop(copy)
    assert not ended.done()
    gate.open()
    await ended
    assert copy.outcome is Outcome.STOPPED
    assert copy.copied_bytes == CHUNK


async def test_copies_take_turns(scene, threads, monkeypatch):
    """A short one behind a long one waits for some chunks of it, not for all."""
    gate = Gate(monkeypatch)
    long, short = scene.copy(), scene.copy(total=CHUNK)
    long_ended = await started(threads, long)
    seen = asyncio.get_running_loop().create_future()
    assert threads.ready()
    threads.start(short, lambda: seen.set_result(long_ended.done()))
    gate.open()
    assert await seen is False
    await long_ended
    assert long.outcome is short.outcome is Outcome.DONE
    assert TOTAL // CHUNK > TURN_CHUNKS_MAX


async def test_progress_is_told_while_it_goes(scene, threads, monkeypatch):
    monkeypatch.setattr(copying, "PROGRESS_S", 0.0)
    copy, told = scene.copy(), []
    ended = asyncio.get_running_loop().create_future()
    assert threads.ready()
    threads.start(copy, lambda: ended.set_result(None), lambda: told.append(copy.copied_bytes))
    await ended
    assert told
    assert all(0 < count <= TOTAL for count in told)


async def test_closing_stops_what_runs_and_ends_the_threads(scene, monkeypatch):
    threads = CopyThreads(2)
    gate = Gate(monkeypatch)
    copies = [scene.copy() for _ in range(5)]
    ended = [await started(threads, copy) for copy in copies]
    await asyncio.to_thread(gate.entered.acquire)
    closing = asyncio.create_task(threads.close())
    await eventually(lambda: sum(copy.outcome is Outcome.STOPPED for copy in copies) >= 3)
    gate.open()
    await closing
    assert all(future.done() for future in ended)
    assert {copy.outcome for copy in copies} == {Outcome.STOPPED}
    assert copy_threads() == 0
    assert not threads.ready()


async def test_a_system_that_gives_no_thread(scene, monkeypatch):
    threads = CopyThreads(2)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert not threads.ready()
    monkeypatch.undo()
    await (await started(threads, scene.copy()))
    monkeypatch.setattr(threading.Thread, "start", refused)
    gate = Gate(monkeypatch)
    copies = [scene.copy() for _ in range(3)]
    ended = [await started(threads, copy) for copy in copies]
    gate.open()
    await asyncio.gather(*ended)
    await threads.close()


async def test_a_defect_in_a_thread_ends_that_copy_only(scene, threads, monkeypatch):
    broken, well = scene.copy(), scene.copy()
    monkeypatch.setattr(copying, "copy_memory", ctypes.c_int)  # not callable with three arguments
    await (await started(threads, broken))
    assert broken.outcome is Outcome.FAULT
    monkeypatch.undo()
    await (await started(threads, well))
    assert well.outcome is Outcome.DONE
