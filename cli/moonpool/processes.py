"""Child processes of a stack: started in their own session, logged to a file, stopped within a bound."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

LOG_TAIL_BYTES_MAX = 4096
LOG_TAIL_LINES_MAX = 15
COMPLAINT_BYTES_MAX = 256 * 1024
"""Of the end of a log, where a process said why it ended: a line with a traceback fits."""
COMPLAINT_CHARS_MAX = 500
UNCONCERNED_LEVELS = frozenset({"debug", "info", "warn", "warning"})
"""Lines of these levels say nothing of why a process ended."""
KILL_WAIT_S_MAX = 5.0
"""How long a killed process may take to go; longer means that the kernel holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to run. `program` is an absolute path; `environment` is added to our own."""

    name: str
    program: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_s_max: float = 5.0
    """How long it may take to go after SIGTERM, before it is killed."""


class Child:
    """One running child process."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self._process = process

    @classmethod
    async def start(cls, spec: ProcessSpec, log_folder: Path) -> "Child":
        """Start it in its own session (the terminal's Ctrl-C does not reach it), to die with us."""
        log_path = log_folder / f"{spec.name}.log"
        launcher = [sys.executable, "-I", "-S", str(Path(__file__).with_name("child.py")), str(os.getpid())]
        with open(log_path, "wb") as log:  # noqa: ASYNC230 - a local file, opened once
            process = await asyncio.create_subprocess_exec(
                *launcher,
                *spec.program,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )
        return cls(spec, process, log_path)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self) -> bool:
        """SIGTERM, then SIGKILL after `stop_s_max`. True where it went by itself."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.spec.stop_s_max):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
            return False
        return True

    async def kill(self) -> None:
        self._signal(signal.SIGKILL)
        async with asyncio.timeout(KILL_WAIT_S_MAX):
            await self._process.wait()

    def log_tail(self) -> str:
        """The last lines that the process wrote."""
        return "\n".join(self._log_end(LOG_TAIL_BYTES_MAX)[-LOG_TAIL_LINES_MAX:])

    def ending(self) -> str:
        """How it ended, and why, where it said so itself; to be called once it has ended."""
        return ending(self._process.returncode or 0, self._log_end(COMPLAINT_BYTES_MAX))

    def _log_end(self, bytes_max: int) -> list[str]:
        with open(self.log_path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - bytes_max))
            return log.read().decode("utf-8", "replace").splitlines()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)


def ending(status: int, log: Sequence[str]) -> str:
    """`ended with status 2: what it complained of`, or the signal that killed it. `log` is its last lines."""
    if status < 0:
        return f"was killed by {_signal_name(-status)}"
    complaint = next(filter(None, map(_complaint, reversed(log))), "")
    return f"ended with status {status}" + (f": {complaint[:COMPLAINT_CHARS_MAX]}" if complaint else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _complaint(line: str) -> str:
    """What a line of a log says is wrong; empty where that is nothing. A line that is no JSON is a last word
    on standard error; etcd calls `msg` what our services call `message`."""
    if not line.startswith("{"):
        return line.strip()
    try:
        entry = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError:
        return ""
    if entry.get("level") in UNCONCERNED_LEVELS:
        return ""
    said = (entry.get("message") or entry.get("msg"), entry.get("reason") or entry.get("error"))
    return ": ".join(str(text) for text in said if text)
