"""Services as processes of a benchmark: started, awaited, and asked what processor time they took."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.processes import Child

ASK_S_MAX = 5.0
POLL_S = 0.01
_STAT_USER_TICKS, _STAT_SYSTEM_TICKS = 11, 12
"""Places in /proc/PID/stat behind the command's closing parenthesis."""


async def start_service(name: str, arguments: Sequence[str], folder: Path) -> "Child":
    """Start `name`, such as kvmeta-0, with its log in `folder`; ready is a later matter."""
    # Here, and not above: other commands need none of it.
    from moonpool.processes import Child, ProcessSpec

    module = name.rpartition("-")[0]
    program = (sys.executable, "-m", module, "--instance", name, *arguments)
    return await Child.start(ProcessSpec(name=name, program=program), folder)


async def until_ready(http_port: int) -> None:
    """Return once the service behind that port says so. The caller bounds the wait."""
    import aiohttp

    url = f"http://127.0.0.1:{http_port}/ready"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S_MAX)) as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as answer:
                    if answer.status == HTTPStatus.OK:
                        return
            await asyncio.sleep(POLL_S)


def processor_s(pid: int) -> float:
    """Processor time of a running process since its start, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[_STAT_USER_TICKS]) + int(fields[_STAT_SYSTEM_TICKS])
    return ticks / os.sysconf("SC_CLK_TCK")
