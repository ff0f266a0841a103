"""How late the event loop comes to what is due: everything that holds it up delays all streams by so much."""

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.25
"""Between two looks."""


class LoopLag:
    def __init__(self, observe: Callable[[float], None]) -> None:
        """`observe(late_s)` at each look."""
        self._observe = observe
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + INTERVAL_S
        self._timer = loop.call_at(due_s, self._look, loop, due_s)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self._observe(max(0.0, loop.time() - due_s))
        self.start()
