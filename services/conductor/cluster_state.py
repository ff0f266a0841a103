"""The conductor's view of the cluster, kept current by registry, load snapshots and peers' decisions.

The view itself is frozen and every change is one of `cluster.folds`; this holds the latest one, does the
I/O that feeds it, and tells a recorder of each fold.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

from cluster import subjects
from cluster.bus import Bus, Received
from cluster.errors import ProtocolError, RetryableError
from cluster.folds import DecisionHeard, Fold, LoadHeard, Registered, folded
from cluster.logs import Logger
from cluster.messages import Describe, InstanceRecord
from conductor.checks import checked_decision
from kvindex.core import InstanceId
from policy.core import LoadSnapshot
from policy.view import ClusterView, InstanceView, expire

LOADS_PENDING_MAX = 4096
"""Load snapshots waiting to be folded; those beyond are dropped, the next ones say the same."""
DESCRIBED_SEQ = 0
"""An answer to Describe carries no number: it counts only where no snapshot came yet."""


class Recorder(Protocol):
    def record(self, fold: Fold, now_s: float) -> None:
        """Called after each fold, in the event loop: returns at once."""


class ClusterState:
    """One event loop's; `view` is replaced, never changed."""

    def __init__(
        self,
        bus: Bus,
        log: Logger,
        clock: Callable[[], float],
        *,
        booking_ttl_s: float,
        describe_timeout_s: float,
        recorder: Recorder | None = None,
        load_heard: Callable[[LoadSnapshot, int], None] | None = None,
    ) -> None:
        """`load_heard` is told of each snapshot, whosever it is, and of its sender's incarnation."""
        self._bus = bus
        self._log = log
        self._clock = clock
        self._booking_ttl_s = booking_ttl_s
        self._describe_timeout_s = describe_timeout_s
        self._recorder = recorder
        self._load_heard = load_heard
        self._view = ClusterView()
        self._load_came = asyncio.Event()
        self._describing: dict[InstanceId, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Follow loads and decisions from now on."""
        await self._bus.follow(subjects.LOAD_ALL, self._on_load, pending_max=LOADS_PENDING_MAX)
        await self._bus.follow(subjects.DECISION, self._on_decision)

    def current(self) -> ClusterView:
        """The view as of now, without the bookings that ran out."""
        return self.as_of(self._clock())

    def as_of(self, now_s: float) -> ClusterView:
        self._view = expire(self._view, now_s, self._booking_ttl_s)
        return self._view

    def fold(self, fold: Fold, now_s: float) -> None:
        """The one way in which the view changes, but for time."""
        self._view = folded(self._view, fold, now_s, self._booking_ttl_s)
        if self._recorder is not None:
            self._recorder.record(fold, now_s)

    def registry_changed(self, records: Mapping[InstanceId, InstanceRecord]) -> None:
        """Take over the registry, and ask those whose load is not known yet for it."""
        self.fold(Registered(tuple(records.values())), self._clock())
        for name, instance in self._view.instances.items():
            if instance.load is None and name not in self._describing:
                task = asyncio.create_task(self._describe(instance))
                self._describing[name] = task
                task.add_done_callback(partial(self._described_one, name))

    async def described(self) -> None:
        """Return when each instance of the registry has told its load, or had its time to."""
        while self._describing:
            await asyncio.wait(tuple(self._describing.values()))

    async def busy_heard_since(self, at_s: float, timeout_s: float) -> None:
        """Return when each instance that has something to do, as far as we know, has told its load after
        `at_s`, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(heard_at_s < at_s for heard_at_s in _busy_heard_at_s(self._view)):
                    self._load_came.clear()
                    await self._load_came.wait()

    async def close(self) -> None:
        for task in tuple(self._describing.values()):
            task.cancel()
        await asyncio.gather(*self._describing.values(), return_exceptions=True)

    async def _describe(self, instance: InstanceView) -> None:
        subject = subjects.instance(instance.instance)
        try:
            load = await self._bus.request(subject, Describe(), timeout_s=self._describe_timeout_s)
        except (RetryableError, ProtocolError) as error:
            # Not worth a second try: it publishes its load every second.
            self._log.info("instance did not describe itself", peer=instance.instance, error=error)
            return
        if isinstance(load, LoadSnapshot) and load.instance == instance.instance:
            self.fold(LoadHeard(load, instance.incarnation, DESCRIBED_SEQ), self._clock())

    def _described_one(self, instance: InstanceId, _: "asyncio.Task[None]") -> None:
        del self._describing[instance]

    def _on_load(self, received: Received) -> None:
        load, envelope = received.body, received.envelope
        if not isinstance(load, LoadSnapshot) or load.instance != envelope.sender:
            raise ProtocolError(f"{envelope.kind} of {envelope.sender} is no load snapshot of its own")
        self.fold(
            LoadHeard(load, envelope.incarnation, envelope.seq, lag_s(received)),
            self._clock(),
        )
        if self._load_heard is not None:
            self._load_heard(load, envelope.incarnation)
        self._load_came.set()

    def _on_decision(self, received: Received) -> None:
        if received.envelope.sender == self._bus.instance:
            return
        decision = checked_decision(received.body)
        if decision.placement is None:
            return
        self.fold(DecisionHeard(decision), self._clock())


def lag_s(received: Received) -> float:
    """How long ago the message was sent, by the clocks of both machines."""
    return time.time() - received.envelope.sent_at_s


def _busy_heard_at_s(view: ClusterView) -> Iterator[float]:
    booked = {name for booking in view.bookings.values() for name in (booking.prefill, booking.decode)}
    for name, instance in view.instances.items():
        load = instance.load
        if name in booked or (load is not None and (load.queued or load.running)):
            yield instance.heard_at_s
