"""A real local stack for tests: `moonpool up` as a process, found and asked the way a person would."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import orjson

from moonpool import child
from moonpool.api import Api
from moonpool.run_folder import HOME_VARIABLE, StackState

READY_S_MAX = 180.0
"""With a conversion of the model, on a machine that does other things as well."""
STOP_S_MAX = 60.0
ANSWER_S_MAX = 120.0
STATUS_S_MAX = 60.0
STATUS_POLL_S = 0.2
LOG_TAIL_LINES = 40

Status = dict[str, Any]


class MoonpoolProcess:
    """A `moonpool` command that runs on, its output read as it comes. It dies with the test run."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", child.__file__, str(os.getpid())),
                *(sys.executable, "-m", "moonpool", *arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, HOME_VARIABLE: str(home)},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        with self._changed:
            return "\n".join(self._lines)

    def wait_line(self, pattern: str, timeout_s: float = READY_S_MAX) -> str:
        """The first line in which `pattern` is found; AssertionError with all output where none comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._find(pattern), timeout_s)
            line = self._find(pattern)
        assert line is not None, f"no line {pattern!r} within {timeout_s:g} s:\n{self.output}"
        return line

    def interrupt_and_wait(self, number: int, timeout_s: float = STOP_S_MAX) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = STOP_S_MAX) -> int:
        status = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _find(self, pattern: str) -> str | None:
        return next((line for line in self._lines if re.search(pattern, line)), None)


class RunningStack:
    """A stack that is ready."""

    def __init__(self, up: MoonpoolProcess, name: str) -> None:
        self.up = up
        self.name = name
        self.folder = up.home / "run" / name
        self.state = msgspec.convert(orjson.loads((self.folder / "stack.json").read_bytes()), StackState)
        self.api = Api(self.state.url, timeout_s=ANSWER_S_MAX)

    @classmethod
    def start(cls, home: Path, name: str, *flags: str) -> Self:
        up = MoonpoolProcess(home, "up", "--name", name, "--port", "0", *flags)
        try:
            up.wait_line("^ready ")
            return cls(up, name)
        except BaseException:
            up.kill()
            raise

    def command(
        self, *arguments: str, typed: str = "", timeout_s: float = ANSWER_S_MAX
    ) -> subprocess.CompletedProcess[str]:
        """Run `moonpool …` where this stack is found."""
        return moonpool(self.up.home, *arguments, typed=typed, timeout_s=timeout_s)

    def status(self) -> Status:
        """What `moonpool status --json` prints."""
        done = self.command("status", "--json", "--name", self.name)
        assert done.returncode == 0, done.stderr
        status: Status = json.loads(done.stdout)
        return status

    def wait_status(self, holds: Callable[[Status], bool], timeout_s: float = STATUS_S_MAX) -> Status:
        """The first status for which `holds` is true; AssertionError with the last one after `timeout_s`."""
        pause, waited_s = threading.Event(), 0.0
        while True:
            status = self.status()
            if holds(status):
                return status
            assert waited_s < timeout_s, f"not within {timeout_s:g} s: {json.dumps(status, indent=1)}"
            # Another process's counters: there is nothing to wait on but time.
            pause.wait(STATUS_POLL_S)
            waited_s += STATUS_POLL_S

    def instances(self, role: str) -> list[dict[str, Any]]:
        return [instance for instance in self.status()["instances"] if role in instance["roles"]]

    def logs(self) -> str:
        """The ends of all logs, for a failed test."""
        parts = [f"--- moonpool up ---\n{self.up.output}"]
        for path in sorted((self.folder / "logs").glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            parts.append(f"--- {path.name} ---\n" + "\n".join(tail))
        return "\n".join(parts)


@contextmanager
def running_stack(home: Path, name: str, *flags: str) -> Iterator[RunningStack]:
    """A stack for the length of a `with`, then stopped the gentle way."""
    stack = RunningStack.start(home, name, *flags)
    try:
        yield stack
    finally:
        if stack.up.process.poll() is None:
            stack.up.process.terminate()
        try:
            stack.up.wait()
        except subprocess.TimeoutExpired:
            stack.up.kill()
            raise


def moonpool(
    home: Path, *arguments: str, typed: str = "", timeout_s: float = ANSWER_S_MAX
) -> subprocess.CompletedProcess[str]:
    """Run one `moonpool` command to its end, with `typed` on its standard input."""
    return subprocess.run(
        [sys.executable, "-m", "moonpool", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, HOME_VARIABLE: str(home)},
        check=False,
    )


def processes_of(home: Path) -> list[str]:
    """Command lines of every process that was started, however indirectly, for a stack in `home` (Linux)."""
    mark = f"{HOME_VARIABLE}={home}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in environment and command:
            found.append(f"{folder.name} {command}")
    return found
