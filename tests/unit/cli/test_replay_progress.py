"""How far a replay is, on a terminal and in a log."""

import asyncio
import io

import pytest

from moonpool.replay import progress
from moonpool.replay.progress import ERASE_LINE, progress_line, shown_progress
from moonpool.replay.records import Outcome, Record, Results

pytestmark = pytest.mark.unit


class Out(io.StringIO):
    """Tells when three lines were written."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal
        self.shown = asyncio.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if self.getvalue().count(" sent, ") >= 3:
            self.shown.set()
        return super().write(text)


def results() -> Results:
    ended = [Outcome.SERVED, Outcome.SERVED, Outcome.REJECTED, Outcome.FAILED]
    records = [Record(due_s=0, sent_s=0, ended_s=1, outcome=outcome) for outcome in ended]
    return Results(records=records, in_flight=3)


def test_the_line_has_all_counts() -> None:
    assert progress_line(results(), 40, 12.4) == (
        "12 s: 7 of 40 sent, 3 in flight, 2 served, 1 rejected, 1 failed"
    )


@pytest.mark.parametrize("terminal", [True, False])
async def test_a_terminal_has_one_line_and_a_log_has_many(terminal, monkeypatch) -> None:
    monkeypatch.setattr(progress, "TERMINAL_TICK_S", 0.001)
    monkeypatch.setattr(progress, "LOG_TICK_S", 0.001)
    out = Out(terminal)
    async with shown_progress(results(), 40, out), asyncio.timeout(5):
        await out.shown.wait()
    written = out.getvalue()
    if terminal:
        assert "\n" not in written
        assert written.startswith(ERASE_LINE + "0 s: 7 of 40")
        assert written.endswith(ERASE_LINE)
    else:
        assert all(line.startswith("0 s: 7 of 40") for line in written.splitlines())
        assert ERASE_LINE not in written
