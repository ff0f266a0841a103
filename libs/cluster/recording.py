"""The form of a recording: JSON lines, one for each fold into a conductor's view, with its time.

    {"at_s": 12.5, "kind": "load", "body": {...}}

The first line says who records (`begin`), the last why it ended (`end`); one without it was cut off. Bodies
are written as on the bus (see `cluster.wire`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from cluster.errors import ProtocolError
from cluster.folds import Decided, DecisionHeard, Fold, LoadHeard, Registered
from kvindex.core import InstanceId

VERSION = 1
LINE_BYTES_MAX = 64 << 20
"""Of one fold: a registry of thousands of instances fits."""


@dataclass(frozen=True, slots=True)
class Begun:
    version: int
    instance: InstanceId
    incarnation: int
    booking_ttl_s: float
    unix_s: float
    """The time of day at this line's `at_s`."""


@dataclass(frozen=True, slots=True)
class Ended:
    reason: str


Entry = Begun | Fold | Ended

KINDS: dict[str, type[Entry]] = {
    "begin": Begun,
    "registry": Registered,
    "load": LoadHeard,
    "heard": DecisionHeard,
    "decided": Decided,
    "end": Ended,
}
_KIND_OF = {cls: kind for kind, cls in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Line:
    at_s: float
    """By the conductor's clock."""
    entry: Entry


@dataclass(frozen=True, slots=True)
class _Written:
    at_s: float
    kind: str
    body: object


_ENCODER = msgspec.json.Encoder()
"""As `cluster.wire` writes, in a fifth of the time: a conductor records loads with hundreds of requests."""


@dataclass(frozen=True, slots=True)
class _Read:
    at_s: float
    kind: str
    body: msgspec.Raw


_READ = msgspec.json.Decoder(_Read)
_BODIES: dict[str, msgspec.json.Decoder[Entry]] = {
    kind: msgspec.json.Decoder(entry_class) for kind, entry_class in KINDS.items()
}


class RecordingError(Exception):
    """A recording cannot be read; the text names line and field."""


def encode_line(line: Line) -> bytes:
    """With its line break. ProtocolError where a value has no JSON form."""
    kind = _KIND_OF[type(line.entry)]
    try:
        return _ENCODER.encode(_Written(line.at_s, kind, line.entry)) + b"\n"
    except (UnicodeEncodeError, OverflowError) as error:
        raise ProtocolError(f"{kind} cannot be recorded: {error}") from error


def read_recording(path: Path) -> Iterator[Line]:
    """Its lines as they are read. RecordingError; OSError where the file cannot be read."""
    with path.open("rb") as file:
        yield from decode_lines(_lines(file), str(path))


def decode_lines(lines: Iterable[bytes], name: str) -> Iterator[Line]:
    """RecordingError, with `name` and the line's number, for the first that is wrong. A last line without its
    line break was cut off while it was written: it is left out."""
    clock_s = -float("inf")
    number = complete = 0
    for number, data in enumerate(lines, start=1):
        if len(data) > LINE_BYTES_MAX:
            raise RecordingError(f"{name}:{number}: longer than {LINE_BYTES_MAX} bytes")
        if not data.endswith(b"\n"):
            break
        try:
            line = _decoded(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise RecordingError(f"{name}:{number}: {error}") from None
        if (number == 1) != isinstance(line.entry, Begun):
            raise RecordingError(f"{name}:{number}: kind: a recording has `begin` as its first line, only")
        if line.at_s < clock_s:
            raise RecordingError(f"{name}:{number}: at_s: {line.at_s}, before the line above")
        clock_s, complete = line.at_s, number
        yield line
    if not complete:
        what = "has no complete line" if number else "empty"
        raise RecordingError(f"{name}: {what}, no recording")


def _decoded(data: bytes) -> Line:
    read = _READ.decode(data)
    body = _BODIES.get(read.kind)
    if body is None:
        raise ValueError(f"kind: {read.kind[:64]!r}, must be one of {', '.join(KINDS)}")
    try:
        entry = body.decode(read.body)
    except msgspec.ValidationError as error:
        raise ValueError(f"body of {read.kind}: {error}") from None
    if isinstance(entry, Begun) and entry.version != VERSION:
        raise ValueError(f"version: {entry.version}, this reads {VERSION}")
    return Line(read.at_s, entry)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is too long only so much that this can be told."""
    return iter(lambda: file.readline(LINE_BYTES_MAX + 1), b"")
