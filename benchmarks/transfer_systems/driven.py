"""What every compared transfer system does: obey one JSON line after the other on standard input.

Runs inside the peers' own environments, so it needs the standard library, numpy and Moonpool's modules that
need no more than these (the driver puts them on PYTHONPATH). A system is a caller, loaded once, with an
owner of the memory it calls in a process of its own; the driver stops both while another system measures.
"""

import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from moonpool.benchmarks.line_process import LineProcess, own_the_output, reply, serve
from moonpool.benchmarks.transfer_plan import (
    DEPTH,
    MEMORY_BYTES,
    Direction,
    Memory,
    Row,
    Sample,
    Side,
    Walk,
    answer,
    sides,
    touched_memory,
)

OWNER = "owner"
"""Argument that makes a system's script the owner's side."""

CallT = TypeVar("CallT")
RunningT = TypeVar("RunningT")


class System(Protocol):
    def about(self) -> dict[str, str]:
        """Versions and settings, for the record."""

    def verify(self, direction: Direction, row: Row) -> None:
        """Raises if bytes do not arrive."""

    def sample(self, direction: Direction, row: Row, first: int, calls: int, depth: int) -> Sample:
        """Times calls from number `first` of the walk on, `depth` at once, prepared before."""


class SynchronousSystem(ABC):
    """What peers have alike: memory here, an owner that tells of its own, and calls without an event loop.

    A subclass says what a call is, how to make it and wait for it, and how to have several under way.
    """

    def __init__(self) -> None:
        self.memory: Memory = touched_memory(MEMORY_BYTES)
        self.owner = LineProcess([sys.executable, sys.argv[0], OWNER])

    @abstractmethod
    def prepare(self, direction: Direction, local: Sequence[int], remote: Sequence[int], size: int) -> Any:
        """A call that can be made again; offsets of ranges of `size` bytes. Not timed."""

    @abstractmethod
    def call(self, direction: Direction, prepared: Any) -> None:
        """Makes one call; returns when its bytes are there."""

    @abstractmethod
    def begin(self, direction: Direction, prepared: Any) -> Any:
        """Makes one call without waiting for it."""

    @abstractmethod
    def finish_one(self, running: deque[Any]) -> None:
        """Waits until one of the calls under way is done, and takes it out."""

    def let_go(self, prepared: Any) -> None:  # noqa: B027 - most have nothing to let go of
        """Of a call that will not be made again."""

    def verify(self, direction: Direction, row: Row) -> None:
        source, target = sides(direction)
        about = {"row": [row.ranges, row.range_bytes], "first": 0, "calls": row.verified_calls}
        self._ask(source, "fill", about)
        for depth in (1, DEPTH):  # these are different functions of most systems
            self._ask(target, "clear", about)
            self.sample(direction, row, 0, row.verified_calls, depth)
            if self._ask(source, "digest", about) != self._ask(target, "digest", about):
                raise RuntimeError(f"{direction} {row.name}: other bytes arrived than were sent")

    def sample(self, direction: Direction, row: Row, first: int, calls: int, depth: int) -> Sample:
        walk = Walk(row, len(self.memory))
        prepared = []
        for number in range(first, first + calls):
            local, remote = (walk.offsets(side, number).tolist() for side in (Side.CALLER, Side.OWNER))
            prepared.append(self.prepare(direction, local, remote, row.range_bytes))
        found = (
            one_by_one(lambda one: self.call(direction, one), prepared)
            if depth == 1
            else in_flight(lambda one: self.begin(direction, one), self.finish_one, prepared, depth)
        )
        for one in prepared:
            self.let_go(one)
        return found

    def _ask(self, side: Side, do: str, about: dict[str, Any]) -> dict[str, Any]:
        question = {"do": do, "side": side, **about}
        return self.owner.ask(**question) if side is Side.OWNER else answer(self.memory, question)


def one_by_one(call: Callable[[CallT], None], prepared: Sequence[CallT]) -> Sample:
    call_s = []
    started_s = time.perf_counter()
    for one in prepared:
        call_started_s = time.perf_counter()
        call(one)
        call_s.append(time.perf_counter() - call_started_s)
    return Sample(time.perf_counter() - started_s, tuple(call_s))


def in_flight(
    begin: Callable[[CallT], RunningT],
    finish_one: Callable[[deque[RunningT]], None],
    prepared: Sequence[CallT],
    depth: int,
) -> Sample:
    """The next call begins as soon as one of `depth` is done. Single calls are not timed."""
    running: deque[RunningT] = deque()
    started_s = time.perf_counter()
    for one in prepared:
        if len(running) == depth:
            finish_one(running)
        running.append(begin(one))
    while running:
        finish_one(running)
    return Sample(time.perf_counter() - started_s, ())


def main(load: Callable[[], System]) -> None:
    """Serves the system until standard input ends."""
    replies = own_the_output()
    system = load()
    reply(replies, {"about": system.about()})
    serve(replies, lambda question: _obey(system, question))
    # At once: some libraries hang in their destructors, and nothing is left to save.
    os._exit(0)


def own(load: Callable[[Memory], tuple[object, dict[str, Any]]]) -> None:
    """The owner's side: `load` registers the memory and gives what has to live as long as it is in use, and
    what the caller needs to know."""
    replies = own_the_output()
    memory = touched_memory(MEMORY_BYTES)
    _kept, address = load(memory)  # until the process ends, without its destructor
    serve(replies, lambda question: address if question["do"] == "address" else answer(memory, question))
    os._exit(0)


def _obey(system: System, command: dict[str, Any]) -> dict[str, Any]:
    row, direction = Row(*command["row"]), Direction(command["direction"])
    match command:
        case {"do": "verify"}:
            system.verify(direction, row)
            return {}
        case {"do": "sample", "first": first, "depth": depth}:
            system.sample(direction, row, first, row.warm_calls, depth)
            found = system.sample(direction, row, first + row.warm_calls, row.calls, depth)
            return {"seconds": found.seconds, "call_s": found.call_s}
    raise ValueError(f"unknown command {command}")
