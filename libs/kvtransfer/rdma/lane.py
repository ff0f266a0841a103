"""One queue pair in the event loop: posting without overrun, waiting for completions, handing out events."""

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import Callable

from kvtransfer.errors import TransferError
from kvtransfer.rdma.sendqueue import SendQueue
from kvtransfer.rdma.sendring import Columns, SendRing
from kvtransfer.rdma.verbs import Completion, QueuePair

SENDS_MAX = 128
"""Work requests outstanding on a queue pair."""
RECEIVES_MAX = 64
"""Receives that an owner keeps posted: so many immediates may arrive before it looks."""
_SIGNAL_EVERY = SENDS_MAX // 4
_POLLED_MAX = 64
"""Completions in one turn of the loop."""

_log = logging.getLogger(__name__)


class Lane:
    """Owns its queue pair, from `start` to `close`."""

    def __init__(
        self,
        pair: QueuePair,
        ring: SendRing,
        on_immediate: Callable[[int], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """`on_failure` is called once: the queue pair is in its error state then, nothing moves any more,
        and what waits here waits until `close`."""
        self.pair = pair
        self.turn = asyncio.Lock()
        """Held while a call posts a chain, so that calls take turns."""
        self.progress_at_s = time.monotonic()
        self._ring = ring
        self._on_immediate = on_immediate
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._queue = SendQueue(SENDS_MAX, _SIGNAL_EVERY)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waits = itertools.count()
        self._closed: TransferError | None = None
        self._failed = False

    @property
    def retired(self) -> int:
        """All work requests up to this number are complete."""
        return self._queue.retired

    def start(self, receives: int) -> None:
        self.pair.post_receives(receives)
        self._loop.add_reader(self.pair.event_descriptor, self._on_event)
        self.pair.arm()

    def write(self, columns: Columns, immediate: int | None) -> int:
        """Post WRITEs, at most `room`, the last one with the immediate, if any; returns the number of the
        last, which is signalled: a call may end after any chain. Raises OSError."""
        numbers = self._queue.take(len(columns.lengths))
        self.pair.post(self._ring.write(columns, numbers, self._signalled(numbers), immediate))
        return numbers[-1]

    def read(self, columns: Columns) -> int:
        """The same for READs."""
        numbers = self._queue.take(len(columns.lengths))
        self.pair.post(self._ring.read(columns, numbers, self._signalled(numbers)))
        return numbers[-1]

    async def room(self) -> int:
        """How many may be posted at once, at least one: waits for it. Raises the error of `close`."""
        while not self._queue.room or self._failed:
            await self.completed(self._queue.retired + 1)
        if self._closed is not None:
            raise self._closed
        return min(self._queue.room, self._ring.size)

    async def completed(self, number: int) -> None:
        """Returns when work request `number` is complete; raises the error of `close`."""
        if self._closed is not None:
            raise self._closed
        if number <= self._queue.retired:
            return
        future = self._loop.create_future()
        heapq.heappush(self._waiting, (number, next(self._waits), future))
        await future

    def close(self, error: TransferError) -> None:
        """The device touches no memory for it any more when this returns; then who waits gets `error`."""
        if self._closed is not None:
            return
        self._closed = error
        self._loop.remove_reader(self.pair.event_descriptor)
        try:
            self.pair.close()
        except OSError:
            _log.exception("a queue pair could not be destroyed")
        waiting, self._waiting = self._waiting, []
        for _, _, future in waiting:
            if not future.done():
                future.set_exception(error)

    def _signalled(self, numbers: range) -> list[bool]:
        return [self._queue.is_signalled(number) or number == numbers[-1] for number in numbers]

    def _on_event(self) -> None:
        try:
            # Completions of an event may have been polled with an earlier one: then the poll finds nothing.
            while self.pair.take_event():
                pass
            self.pair.arm()
        except OSError as error:
            self._fail(str(error))
            return
        self._poll()

    def _poll(self) -> None:
        if self._closed is not None:
            return
        try:
            completions = self.pair.poll(_POLLED_MAX)
            if completions:
                self.progress_at_s = time.monotonic()
            for completion in completions:
                self._take(completion)
                if self._closed is not None:
                    return
        except OSError as error:
            self._fail(str(error))
            return
        self._wake()
        if len(completions) == _POLLED_MAX:
            self._loop.call_soon(self._poll)

    def _take(self, completion: Completion) -> None:
        if completion.failure:
            self._fail(completion.failure)
        elif completion.number:
            self._queue.retire(completion.number)
        else:
            self.pair.post_receives(1)
            self._on_immediate(completion.immediate)

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._queue.retired:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._on_failure(reason)
