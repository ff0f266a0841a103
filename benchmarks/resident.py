"""A compared system in processes of its own: loaded once, asked by lines, stopped while others measure."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

LOAD_S_MAX = 600.0
"""vLLM compiles for about 100 s the first time on two cores."""
ANSWER_S_MAX = 300.0
"""Half a minute is seen: 32 prompts of 512 tokens."""
EXIT_S_MAX = 10.0
REALTIME_PRIORITY = 10
REALTIME_PAUSE_S = 1.0
"""Linux lets real-time threads have 95 % of each second: who begins a second well rested runs through."""
LOG_TAIL_LINES = 15
READ_BYTES = 1 << 16


class ResidentError(Exception):
    """A system did not start, did not answer in time or ended; the message has the end of its log."""


def make_realtime(process: int) -> None:
    """Whatever else wants the processor waits while this process runs. PermissionError if not root."""
    for thread in os.listdir(f"/proc/{process}/task"):
        os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(REALTIME_PRIORITY))


class Resident:
    """One system. Between questions all its processes are stopped: an idle thread pool may spin."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        """Use `start`."""
        assert process.stdin is not None
        assert process.stdout is not None
        self.name = name
        self.about: dict[str, str] = {}
        self._process = process
        self._questions = process.stdin
        self._answers = process.stdout
        self._log = log
        self._received = b""

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], environment: Mapping[str, str], log_folder: Path
    ) -> Self:
        """Starts and loads it; what it prints goes to a log of its own."""
        log = log_folder / f"{name}.log"
        with log.open("wb") as log_file:
            process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,  # so that a signal reaches its helpers and not us
            )
        resident = cls(name, process, log)
        try:
            resident.about = resident._receive(LOAD_S_MAX)["about"]
        except BaseException:
            resident.close()
            raise
        resident._signal(signal.SIGSTOP)
        return resident

    def ask(self, **question: object) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        try:
            self._questions.write(json.dumps(question).encode() + b"\n")
            self._questions.flush()
            return self._receive(ANSWER_S_MAX)
        except BrokenPipeError:
            raise self._error("ended") from None
        finally:
            self._signal(signal.SIGSTOP)

    def make_realtime(self) -> None:
        make_realtime(self._process.pid)

    def close(self) -> None:
        """Ends its processes, whatever they are doing."""
        self._signal(signal.SIGKILL)
        self._process.wait(EXIT_S_MAX)
        self._questions.close()
        self._answers.close()

    def _receive(self, seconds_max: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + seconds_max
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise self._error(f"did not answer within {seconds_max:.0f} s")
                data = os.read(self._answers.fileno(), READ_BYTES)
                if not data:
                    raise self._error("ended")
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _error(self, what: str) -> ResidentError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return ResidentError("\n".join([f"{self.name} {what}; the end of {self._log}:", *lines]))
