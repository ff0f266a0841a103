"""What compared transfer systems have alike, with a peer that only copies within this process."""

from collections import deque
from typing import Any

import numpy as np
import pytest
from benchmarks.transfer_systems.driven import SynchronousSystem, in_flight, one_by_one

from moonpool.benchmarks.transfer_plan import DEPTH, Direction, Memory, Row, answer

pytestmark = pytest.mark.unit

MEMORY_BYTES = 1 << 16
ROW = Row(3, 512)


class Remote:
    def __init__(self) -> None:
        self.memory = np.ones(MEMORY_BYTES, np.uint8)

    def ask(self, **question: object) -> dict[str, Any]:
        return answer(self.memory, question)


class CopyingSystem(SynchronousSystem):
    """`shift` bytes beside the mark where it is not 0: a system that lies."""

    def __init__(self, shift: int) -> None:
        self.memory: Memory = np.ones(MEMORY_BYTES, np.uint8)
        self.owner = Remote()
        self.shift = shift
        self.calls = 0
        self.prepared = 0

    def prepare(self, direction: Direction, local: Any, remote: Any, size: int) -> Any:
        self.prepared += 1
        return local, remote, size

    def call(self, direction: Direction, prepared: Any) -> None:
        local, remote, size = prepared
        self.calls += 1
        for here, there in zip(local, remote, strict=True):
            there = min(there + self.shift, MEMORY_BYTES - size)
            if direction is Direction.WRITE:
                self.owner.memory[there : there + size] = self.memory[here : here + size]
            else:
                self.memory[here : here + size] = self.owner.memory[there : there + size]

    def begin(self, direction: Direction, prepared: Any) -> Any:
        return direction, prepared

    def finish_one(self, running: deque[Any]) -> None:
        assert len(running) <= DEPTH
        self.call(*running.popleft())

    def let_go(self, prepared: Any) -> None:
        self.prepared -= 1


@pytest.mark.parametrize("direction", Direction)
def test_bytes_are_looked_at_on_both_sides(direction: Direction) -> None:
    CopyingSystem(0).verify(direction, ROW)
    with pytest.raises(RuntimeError, match=f"{direction} 3x512B: other bytes"):
        CopyingSystem(8).verify(direction, ROW)


@pytest.mark.parametrize("depth", [1, DEPTH])
def test_every_call_is_prepared_made_once_and_let_go(depth: int) -> None:
    system = CopyingSystem(0)
    sample = system.sample(Direction.WRITE, ROW, 2, 9, depth)
    assert (system.calls, system.prepared) == (9, 0)
    assert len(sample.call_s) == (9 if depth == 1 else 0)


def test_no_more_than_the_depth_is_under_way_and_never_less_while_there_is_more() -> None:
    seen: list[int] = []
    finished: list[int] = []

    def finish_one(running: deque[int]) -> None:
        seen.append(len(running))
        finished.append(running.popleft())

    in_flight(lambda one: one, finish_one, list(range(7)), 3)
    assert seen == [3, 3, 3, 3, 3, 2, 1]
    assert finished == list(range(7))
    made: list[int] = []
    one_by_one(made.append, [1, 2, 3])
    assert made == [1, 2, 3]
