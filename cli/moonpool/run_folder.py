"""The folder of one local stack: its lock, its logs, and the file by which other commands find it.

$MOONPOOL_HOME or ~/.cache/moonpool / run / <name> / { lock, stack.json, logs/<process>.log, … }
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import orjson

from moonpool.errors import CommandError

HOME_VARIABLE = "MOONPOOL_HOME"
DEFAULT_NAME = "default"
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""What a stack may be called: it names a folder."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process of the stack; `name` is its instance id where it is an instance."""

    name: str
    pid: int
    log: str


@dataclass(frozen=True, slots=True)
class StackState:
    """What `moonpool up` writes down once the stack is ready. No secret is in it."""

    name: str
    pid: int
    model: str
    """The name by which clients ask for it."""
    model_folder: str
    url: str
    nats_url: str
    etcd_url: str
    processes: tuple[ProcessState, ...]


def moonpool_home() -> Path:
    """Where models and stacks are kept on this machine."""
    home = os.environ.get(HOME_VARIABLE)
    return Path(home) if home else Path.home() / ".cache" / "moonpool"


def run_folder(name: str) -> Path:
    return moonpool_home() / "run" / name


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder; CommandError where another living process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"a stack named {folder.name!r} is already running; stop it, or give another --name"
            ) from None
        yield


def write_state(folder: Path, state: StackState) -> None:
    """Replace the file in one step, so that a reader never sees half of it."""
    draft = folder / "stack.json.new"
    draft.write_bytes(orjson.dumps(asdict(state), option=orjson.OPT_INDENT_2))
    draft.replace(folder / "stack.json")


def remove_state(folder: Path) -> None:
    (folder / "stack.json").unlink(missing_ok=True)


def read_state(folder: Path) -> StackState | None:
    """The stack that runs in `folder`; None where none is ready or `moonpool up` is gone."""
    try:
        state = msgspec.convert(orjson.loads((folder / "stack.json").read_bytes()), StackState)
    except FileNotFoundError:
        return None
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise CommandError(f"{folder / 'stack.json'} is not readable: {error}") from error
    return state if _is_alive(state.pid) else None


def running_names() -> list[str]:
    """Names of the stacks that run on this machine, sorted."""
    return sorted(path.parent.name for path in run_folder("").glob("*/stack.json") if _runs(path.parent))


def _runs(folder: Path) -> bool:
    try:
        return read_state(folder) is not None
    except CommandError:
        return False  # Nobody can be told where it is.


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
