"""What a load tool is asked for and what it found, in one form for all tools; and how a tool is run."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOG_TAIL_LINES = 30


class ToolError(Exception):
    """A tool failed, or wrote what we do not know; the text names it and ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load: `url` without /v1, the model, and its tokenizer's Hugging Face name."""

    url: str
    model: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random prompts, so many requests at a time."""

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """A trace (`trace` in the tool's own unit of time), sent when its requests are due."""

    trace: Path
    requests: int
    block_tokens: int


Load = Synthetic | Replayed


@dataclass(frozen=True, slots=True)
class Answered:
    """One answered request, as the tool saw it. `gap_ms` is the mean time between tokens, None where there
    was only one; `cached_tokens` None where the tool keeps no account of it."""

    first_token_ms: float
    gap_ms: float | None
    whole_ms: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class ToolRun:
    """`duration_s`: from the first request to the last answer."""

    answered: tuple[Answered, ...]
    failed: int
    duration_s: float


def run_tool(
    name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path, timeout_s: float
) -> None:
    """Run it to its end, with `folder` as its working folder and its output in `folder`/log.
    ToolError where it fails or takes longer than `timeout_s`."""
    log = folder / "log"
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except OSError as error:
            raise ToolError(f"{name} does not start: {error}") from error
        except subprocess.TimeoutExpired:
            raise ToolError(f"{name} took longer than {timeout_s:g} s\n{log_tail(log)}") from None
    if done.returncode != 0:
        raise ToolError(f"{name} ended with status {done.returncode}\n{log_tail(log)}")


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
