"""The conductor's view of the cluster, kept current by registry, load snapshots and peers' decisions.

The view itself is frozen and every change is a fold of `policy.view`; this holds the latest one and
does the I/O that feeds it.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial

from cluster import subjects
from cluster.bus import Bus, Received
from cluster.errors import ProtocolError, RetryableError
from cluster.instance_view import instance_view
from cluster.logs import Logger
from cluster.messages import Decision, Describe, InstanceRecord
from kvindex.core import InstanceId
from policy.core import LoadSnapshot, Placement
from policy.view import (
    ClusterView,
    InstanceView,
    expire,
    with_instances,
    with_load,
    with_placement,
)

LOADS_PENDING_MAX = 4096
"""Load snapshots waiting to be folded; those beyond are dropped, the next ones say the same."""
DESCRIBED_SEQ = 0
"""An answer to Describe carries no number: it counts only where no snapshot came yet."""


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
    ) -> None:
        self._bus = bus
        self._log = log
        self._clock = clock
        self._booking_ttl_s = booking_ttl_s
        self._describe_timeout_s = describe_timeout_s
        self._view = ClusterView()
        self._load_came = asyncio.Event()
        self._describing: dict[InstanceId, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Follow loads and decisions from now on."""
        await self._bus.subscribe(
            subjects.LOAD_ALL, self._on_load, concurrency_max=1, pending_max=LOADS_PENDING_MAX
        )
        await self._bus.subscribe(subjects.DECISION, self._on_decision, concurrency_max=1)

    def current(self) -> ClusterView:
        """The view as of now, without the bookings that ran out."""
        self._view = expire(self._view, self._clock(), self._booking_ttl_s)
        return self._view

    def book(
        self,
        placement: Placement,
        prompt_tokens: int,
        *,
        samples: int,
        priority: int,
        elsewhere: bool = False,
    ) -> None:
        """What a placement will bring. `elsewhere`: another conductor's."""
        self._view = with_placement(
            self._view,
            placement,
            prompt_tokens,
            self._clock(),
            samples=samples,
            priority=priority,
            elsewhere=elsewhere,
        )

    def registry_changed(self, records: Mapping[InstanceId, InstanceRecord]) -> None:
        """Take over the registry, and ask those whose load is not known yet for it."""
        now_s = self._clock()
        workers = (instance_view(record, now_s) for record in records.values())
        self._view = with_instances(self._view, (worker for worker in workers if worker is not None))
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
            self._view = with_load(self._view, load, instance.incarnation, DESCRIBED_SEQ, self._clock())

    def _described_one(self, instance: InstanceId, _: "asyncio.Task[None]") -> None:
        del self._describing[instance]

    async def _on_load(self, received: Received) -> None:
        load, envelope = received.body, received.envelope
        if not isinstance(load, LoadSnapshot) or load.instance != envelope.sender:
            raise ProtocolError(f"{envelope.kind} of {envelope.sender} is no load snapshot of its own")
        self._view = with_load(self._view, load, envelope.incarnation, envelope.seq, self._clock())
        self._load_came.set()

    async def _on_decision(self, received: Received) -> None:
        decision, envelope = received.body, received.envelope
        if not isinstance(decision, Decision):
            raise ProtocolError(f"{envelope.kind} of {envelope.sender} is no decision")
        if envelope.sender == self._bus.instance or decision.placement is None:
            return
        self.book(
            decision.placement,
            decision.prompt_tokens,
            samples=decision.samples,
            priority=decision.priority,
            elsewhere=True,
        )


def _busy_heard_at_s(view: ClusterView) -> Iterator[float]:
    booked = {name for booking in view.bookings.values() for name in (booking.prefill, booking.decode)}
    for name, instance in view.instances.items():
        load = instance.load
        if name in booked or (load is not None and (load.queued or load.running)):
            yield instance.heard_at_s
