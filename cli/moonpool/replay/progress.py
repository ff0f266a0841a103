"""How far a replay is, on standard error: one line that is written over, or a new one now and then."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

from moonpool.replay.records import Outcome, Results

TERMINAL_TICK_S = 1.0
LOG_TICK_S = 10.0
ERASE_LINE = "\r\x1b[K"


def progress_line(results: Results, requests: int, elapsed_s: float) -> str:
    """`requests` are to be sent in all."""
    outcomes = Counter(record.outcome for record in results.records)
    return (
        f"{elapsed_s:.0f} s: {len(results.records) + results.in_flight} of {requests} sent, "
        f"{results.in_flight} in flight, {outcomes[Outcome.SERVED]} served, "
        f"{outcomes[Outcome.REJECTED]} rejected, {outcomes[Outcome.FAILED]} failed"
    )


@asynccontextmanager
async def shown_progress(results: Results, requests: int, out: TextIO) -> AsyncIterator[None]:
    """Shows the progress for the length of a `with`; leaves a terminal's line empty."""
    ticking = asyncio.create_task(_tick(results, requests, out))
    try:
        yield
    finally:
        ticking.cancel()
        if out.isatty():
            print(ERASE_LINE, end="", file=out, flush=True)


async def _tick(results: Results, requests: int, out: TextIO) -> None:
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    terminal = out.isatty()
    while True:
        await asyncio.sleep(TERMINAL_TICK_S if terminal else LOG_TICK_S)
        line = progress_line(results, requests, loop.time() - started_s)
        print(ERASE_LINE + line if terminal else line, end="" if terminal else "\n", file=out, flush=True)
