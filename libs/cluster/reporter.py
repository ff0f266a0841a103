"""Publishes an instance's load: every LOAD_INTERVAL_S, and soon after a change."""

import asyncio
import contextlib
from collections.abc import Callable

from cluster import subjects
from cluster.bus import Bus
from cluster.errors import MoonpoolError
from cluster.logs import Logger
from policy.core import LoadSnapshot

LOAD_INTERVAL_S = 1.0
LOAD_GAP_S_MIN = 0.1
"""Changes in quick succession make one snapshot: at most 10 a second."""


async def report_load(
    bus: Bus, load: Callable[[], LoadSnapshot], changed: asyncio.Event, log: Logger
) -> None:
    """Until cancelled. Nothing is sent while the bus is down: an old snapshot helps nobody."""
    while True:
        changed.clear()
        try:
            if bus.connected:
                await bus.publish(subjects.load(bus.instance), load())
        except MoonpoolError as error:
            log.warning("load not published", error=error)
        except Exception as error:
            log.exception("load not published", error)
        await asyncio.sleep(LOAD_GAP_S_MIN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOAD_INTERVAL_S - LOAD_GAP_S_MIN):
                await changed.wait()
