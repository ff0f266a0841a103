"""Requests to instances that must arrive but that nobody waits for: finish and cancel.

Each is sent until it is acknowledged, a bounded number of times; how many are under way is bounded too.
What is given up here, the instance's own time limits clean up.
"""

import asyncio
import random
from dataclasses import dataclass

from cluster import subjects
from cluster.bus import Bus
from cluster.errors import MoonpoolError
from cluster.logs import Logger
from cluster.messages import Cancel, Finish
from cluster.tracing import TraceContext
from gateway.metrics import GatewayMetrics
from kvindex.core import InstanceId

Notice = Cancel | Finish

NOTICE_TRIES_MAX = 5
NOTICES_MAX = 4096
BACKOFF_S = 0.2
BACKOFF_S_MAX = 2.0


@dataclass(frozen=True, slots=True)
class _Key:
    instance: InstanceId
    notice: Notice


class Notices:
    """The same notice to the same instance is under way only once."""

    def __init__(self, bus: Bus, metrics: GatewayMetrics, log: Logger, *, timeout_s: float) -> None:
        self._bus = bus
        self._metrics = metrics
        self._log = log
        self._timeout_s = timeout_s
        self._under_way: dict[_Key, asyncio.Task[None]] = {}

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def send(self, instance: InstanceId, notice: Notice, trace: TraceContext | None) -> None:
        key = _Key(instance, notice)
        if key in self._under_way:
            return
        if len(self._under_way) >= NOTICES_MAX:
            self._given_up(key, f"{NOTICES_MAX} notices are under way already")
            return
        task = asyncio.create_task(self._deliver(key, trace))
        self._under_way[key] = task
        task.add_done_callback(lambda _: self._under_way.pop(key, None))

    async def settle(self, timeout_s: float) -> None:
        """Wait until what is under way has arrived or was given up."""
        if self._under_way:
            await asyncio.wait(self._under_way.values(), timeout=timeout_s)

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, key: _Key, trace: TraceContext | None) -> None:
        subject = subjects.instance(key.instance)
        for attempt in range(NOTICE_TRIES_MAX):
            try:
                # Any answer will do: accepted, or the instance knows nothing of it.
                await self._bus.request(subject, key.notice, timeout_s=self._timeout_s, trace=trace)
                return
            except MoonpoolError as error:
                failure = error
            await asyncio.sleep(min(BACKOFF_S * 2**attempt, BACKOFF_S_MAX) * random.uniform(0.5, 1.0))
        self._given_up(key, str(failure))

    def _given_up(self, key: _Key, detail: str) -> None:
        self._metrics.notices_given_up.inc()
        self._log.warning(
            "notice given up",
            kind=type(key.notice).__name__,
            peer=key.instance,
            request_id=key.notice.request_id,
            detail=detail,
        )
