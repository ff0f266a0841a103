"""Logs: one JSON object a line on standard error.

    {"time": "...", "level": "info", "service": "decode", "instance": "...", "message": "...", ...}

`request_id` and `trace_id` are fields like any other, by these names everywhere. Secrets never reach a
line: fields by a secret's name and credentials within URLs are blanked. What libraries log through the
standard `logging` goes the same way (`capture_standard_logging`).
"""

import logging
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import TextIO

import orjson

_SECRET_FIELDS = frozenset(
    {"cluster_secret", "cluster_seed", "secret", "password", "authorization", "api_key", "grant"}
)
_URL_CREDENTIALS = re.compile(r"(://)[^/\s]+@")
_BLANK = "***"
NESTING_MAX = 4
"""Deeper structures are written as text."""
FIELD_CHARS_MAX = 4096
"""Longer strings are cut: a log line is never as long as a prompt."""


class Level(IntEnum):
    DEBUG = logging.DEBUG
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR

    @classmethod
    def parse(cls, name: str) -> "Level":
        return LEVELS[name]


LEVELS = {"debug": Level.DEBUG, "info": Level.INFO, "warning": Level.WARNING, "error": Level.ERROR}


class Logger:
    """Writes lines of one service; `bind` gives one that adds fields to each line."""

    def __init__(self, level: Level = Level.INFO, stream: TextIO | None = None, **fields: object) -> None:
        """`stream` None is standard error as it is when the line is written."""
        self._level = level
        self._stream = stream
        self._fields = fields

    @property
    def level(self) -> Level:
        return self._level

    def bind(self, **fields: object) -> "Logger":
        return Logger(self._level, self._stream, **{**self._fields, **fields})

    def debug(self, message: str, **fields: object) -> None:
        self.log(Level.DEBUG, message, **fields)

    def info(self, message: str, **fields: object) -> None:
        self.log(Level.INFO, message, **fields)

    def warning(self, message: str, **fields: object) -> None:
        self.log(Level.WARNING, message, **fields)

    def error(self, message: str, **fields: object) -> None:
        self.log(Level.ERROR, message, **fields)

    def exception(self, message: str, error: BaseException | None = None, **fields: object) -> None:
        """An error that nobody expected, with its traceback; None is the one being handled."""
        error = error if error is not None else sys.exc_info()[1]
        trace = "".join(traceback.format_exception(error)) if error is not None else ""
        self.log(Level.ERROR, message, error=repr(error), traceback=trace, **fields)

    def log(self, level: Level, message: str, **fields: object) -> None:
        if level < self._level:
            return
        now = datetime.now(UTC)
        try:
            line = render(level, message, {**self._fields, **fields}, now)
        except Exception as error:
            # A value whose repr or copy breaks must not break the one who logs it.
            line = render(level, message, {**self._fields, "fields_lost": repr(error)}, now)
        stream = self._stream if self._stream is not None else sys.stderr
        try:
            stream.write(line)
            stream.flush()
        except (OSError, ValueError):
            # Whoever read our standard error is gone; serving goes on without logs.
            return


def render(level: Level, message: str, fields: dict[str, object], now: datetime) -> str:
    """One line, newline included."""
    line: dict[str, object] = {
        "time": now.isoformat(timespec="milliseconds"),
        "level": level.name.lower(),
        "message": _clean_text(message),
    }
    for name, value in fields.items():
        line.setdefault(_clean_text(name), _clean_named(name, value, NESTING_MAX))
    return orjson.dumps(line).decode() + "\n"


def _clean_named(name: object, value: object, nesting_left: int) -> object:
    return _BLANK if name in _SECRET_FIELDS else _clean(value, nesting_left)


def _clean(value: object, nesting_left: int) -> object:
    """`value` as what JSON can carry; what it cannot becomes text."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, str):
        return _clean_text(value)
    if isinstance(value, BaseException):
        return _clean_text(f"{type(value).__name__}: {value}")
    if nesting_left == 0:
        return _clean_text(repr(value))
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {
            _clean_text(str(key)): _clean_named(key, inner, nesting_left - 1) for key, inner in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(inner, nesting_left - 1) for inner in value]
    return _clean_text(repr(value))


def without_credentials(text: str) -> str:
    """`text` with user and password blanked in every URL."""
    # Most lines have none, and a conductor writes one for each decision.
    if "://" not in text:
        return text
    return _URL_CREDENTIALS.sub(rf"\1{_BLANK}@", text)


def _clean_text(text: str) -> str:
    text = without_credentials(text)
    if not text.isascii():
        # A lone surrogate (from undecodable input) cannot be written as UTF-8.
        text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= FIELD_CHARS_MAX else text[:FIELD_CHARS_MAX] + "…"


class _Bridge(logging.Handler):
    def __init__(self, log: Logger) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, object] = {"logger": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        level = max((level for level in Level if level <= record.levelno), default=Level.DEBUG)
        self._log.log(level, record.getMessage(), **fields)


def capture_standard_logging(log: Logger) -> None:
    """Send what libraries log at warning and above through `log`. For a process's main only."""
    root = logging.getLogger()
    root.handlers[:] = [_Bridge(log)]
    root.setLevel(max(log.level, Level.WARNING))
