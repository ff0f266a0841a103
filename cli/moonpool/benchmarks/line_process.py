"""A helper process of a benchmark: asked by JSON lines on its standard input, one answer to each.

Needs the standard library only, since it is used in peers' own environments too.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

ANSWER_S_MAX = 60.0
EXIT_S_MAX = 5.0
READ_BYTES = 1 << 16

Json = dict[str, Any]


class LineProcessError(Exception):
    """The process ended, did not answer in time or told of an error."""


class LineProcess:
    """Ends when our side is closed or dies: its standard input ends then."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._name = " ".join(command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        self._received = b""

    @classmethod
    def module(cls, name: str) -> Self:
        """A module of ours, in this environment."""
        return cls([sys.executable, "-m", name])

    def ask(self, **question: object) -> Json:
        """Raises LineProcessError, also with what the other side says is wrong."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise LineProcessError(f"{self._name} ended") from None
        answer = self._receive()
        if "error" in answer:
            raise LineProcessError(f"{self._name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Its standard input ends, and it with it; killed if it does not go."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> Json:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + ANSWER_S_MAX
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise LineProcessError(f"{self._name} did not answer within {ANSWER_S_MAX:.0f} s")
                data = os.read(self._process.stdout.fileno(), READ_BYTES)
                if not data:
                    raise LineProcessError(f"{self._name} ended")
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        found: Json = json.loads(line)
        return found


def own_the_output() -> int:
    """Libraries print what they like to standard output: that goes to standard error, answers go here."""
    replies = os.dup(1)
    os.dup2(2, 1)
    return replies


def reply(replies: int, found: Json) -> None:
    data = json.dumps(found).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


def serve(replies: int, answer: Callable[[Json], Json]) -> None:
    """Answers one line after the other until standard input ends; an error is told and ends nothing."""
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except Exception as error:
            found = {"error": repr(error)}
        reply(replies, found)
