"""Files that are read again when they change: the table of keys, and the certificate.

By looking at them now and then, which works on every file system and for files that are replaced as a whole.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from cluster.errors import ConfigError
from cluster.logs import Logger

LOOK_S = 1.0

_Signature: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """`start` it within the event loop; `close` it."""

    def __init__(
        self, what: str, paths: Sequence[Path], read_again: Callable[[], Awaitable[None]], log: Logger
    ) -> None:
        """`read_again` raises ConfigError where what is there cannot be used: that is logged, and what held
        goes on holding until the files change once more."""
        self._what = what
        self._paths = tuple(paths)
        self._read_again = read_again
        self._log = log
        self._seen = _signature(self._paths)
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    async def look(self) -> None:
        """Read them again where they are others than before."""
        seen = await asyncio.to_thread(_signature, self._paths)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            await self._read_again()
        except ConfigError as error:
            self._log.error(f"{self._what} not read again: what held before goes on", error=error)
        except Exception as error:
            self._log.exception(f"{self._what} not read again: what held before goes on", error)
        else:
            self._log.info(f"{self._what} read again")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()


def _signature(paths: Sequence[Path]) -> _Signature:
    return tuple(_of_one(path) for path in paths)


def _of_one(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
