"""The deadline of one call: what `asyncio.timeout` does, at a third of its cost."""

import asyncio


class Deadline:
    """Cancels the task that made it at `at_s` of the loop's clock, until `end`."""

    __slots__ = ("_alone", "_cancelling", "_handle", "_settled", "_task", "at_s", "expired")

    def __init__(self, loop: asyncio.AbstractEventLoop, at_s: float) -> None:
        task = asyncio.current_task(loop)
        assert task is not None
        self.at_s = at_s
        self.expired = False
        self._task = task
        self._cancelling = task.cancelling()
        self._settled = False
        self._alone = False
        self._handle = loop.call_at(at_s, self._expire)

    def end(self) -> bool:
        """Whether a CancelledError that the task got is this deadline's, and nobody else's too.

        To be called whatever happened; again is harmless.
        """
        self._handle.cancel()
        if self.expired and not self._settled:
            self._settled = True
            self._alone = self._task.uncancel() <= self._cancelling
        return self._alone

    def _expire(self) -> None:
        self.expired = True
        self._task.cancel()
