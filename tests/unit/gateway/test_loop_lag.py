"""The event loop's lag is what something held it up."""

import asyncio
import time

import pytest

from gateway import loop_lag
from gateway.loop_lag import LoopLag

pytestmark = pytest.mark.unit


async def test_what_holds_the_loop_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "INTERVAL_S", 0.01)
    seen: list[float] = []
    several = asyncio.Event()

    def observe(late_s: float) -> None:
        seen.append(late_s)
        if len(seen) == 3:
            several.set()

    lag = LoopLag(observe)
    lag.start()
    time.sleep(0.1)  # noqa: ASYNC251 (it is the loop that is to be held up)
    await asyncio.wait_for(several.wait(), 10)
    assert seen[0] >= 0.08
    assert min(seen) >= 0.0
    lag.stop()
    told = len(seen)
    await asyncio.sleep(0.05)
    assert len(seen) == told
