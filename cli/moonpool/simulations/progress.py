"""How far a simulation is: one line that is written over on a terminal; elsewhere a line for each part that
is done, where there are parts."""

from time import monotonic
from types import TracebackType
from typing import TextIO

INTERVAL_S = 0.2
ERASE_LINE = "\r\x1b[K"


class Progress:
    """Used in a `with`; leaves a terminal's line empty."""

    def __init__(self, total: int, what: str, out: TextIO) -> None:
        self._total = total
        self._what = what
        self._out = out
        self._terminal = out.isatty()
        self._began_s = self._shown_at_s = monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._terminal:
            print(ERASE_LINE, end="", file=self._out, flush=True)

    def show(self, done: int, now_at: str = "") -> None:
        """So many of all, and what is being done; written at most every INTERVAL_S, on a terminal."""
        if not self._terminal:
            return
        now_s = monotonic()
        if now_s - self._shown_at_s >= INTERVAL_S:
            self._shown_at_s = now_s
            share, elapsed_s = done / self._total, now_s - self._began_s
            line = f"{done} of {self._total} {self._what} ({share:.0%}), {elapsed_s:.0f} s"
            line += f", at {now_at}" if now_at else ""
            print(ERASE_LINE + line, end="", file=self._out, flush=True)

    def finished(self, done: int, found: str) -> None:
        """So many of all are done, and what was found for the last; not said on a terminal."""
        if not self._terminal:
            elapsed_s = monotonic() - self._began_s
            line = f"{done} of {self._total} {self._what}, {elapsed_s:.0f} s: {found}"
            print(line, file=self._out, flush=True)
