"""Moonpool's transfers as `moonpool bench transfer` drives them, over the transport of the argument."""

import asyncio
import platform
import sys
from contextlib import AsyncExitStack

from driven import main

from moonpool.benchmarks.transfer_caller import TransferCaller
from moonpool.benchmarks.transfer_plan import Direction, Row, Sample


class MoonpoolSystem:
    def __init__(self) -> None:
        self._transport = sys.argv[1]
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()  # never closed: the process ends at once when it is done
        self._caller: TransferCaller = self._loop.run_until_complete(
            self._stack.enter_async_context(TransferCaller.running(self._transport))
        )

    def about(self) -> dict[str, str]:
        return {"transport": self._transport, "python": platform.python_version()}

    def verify(self, direction: Direction, row: Row) -> None:
        self._loop.run_until_complete(self._caller.verify(direction, row))

    def sample(self, direction: Direction, row: Row, first: int, calls: int, depth: int) -> Sample:
        return self._loop.run_until_complete(self._caller.sample(direction, row, first, calls, depth))


main(MoonpoolSystem)
