"""The fields of a JSON file, read with type and range checked: every error names the file and the field."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.errors import ModelFolderError

NUMBER_MAX = sys.float_info.max
INTEGER_MAX = 2**31 - 1
"""Sizes, positions and token ids are int32 on the wire and in the kernels."""


class Fields:
    """One JSON object; `prefix` is where it lies within its file."""

    def __init__(self, path: Path, fields: dict[str, Any] | None = None, prefix: str = "") -> None:
        self._path = path
        self._prefix = prefix
        self._fields = read_json_object(path) if fields is None else fields

    def error(self, field: str, reason: str) -> ModelFolderError:
        return ModelFolderError(f"{self._path}: field {self._prefix}{field}: {reason}")

    def get(self, field: str) -> Any:
        return self._fields.get(field)

    def names(self) -> Iterable[str]:
        return self._fields.keys()

    def __contains__(self, field: str) -> bool:
        return field in self._fields

    def require(self, field: str, allowed: tuple[object, ...]) -> None:
        """Fails where the field is present and has another value."""
        if field in self and self.get(field) not in allowed:
            raise self.error(field, f"{self.get(field)!r} is not supported, only {allowed[0]!r}")

    def nested(self, field: str) -> "Fields | None":
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(field, f"must be an object, not {value!r}")
        return Fields(self._path, value, f"{self._prefix}{field}.")

    def number(self, field: str, default: float | None = None) -> float:
        """A positive number; null counts as absent."""
        value = self.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= NUMBER_MAX:
            raise self.error(field, f"must be a positive number, not {value!r}")
        return float(value)

    def integer(self, field: str, default: int | None = None) -> int:
        """A whole number from 1 to INTEGER_MAX; null counts as absent."""
        value = self.number(field, default)
        if value != int(value) or value > INTEGER_MAX:
            raise self.error(field, f"must be a whole number of at most {INTEGER_MAX}, not {value!r}")
        return int(value)

    def count(self, field: str, default: int) -> int:
        """A whole number from 0 to INTEGER_MAX; null counts as absent."""
        return 0 if self.get(field) == 0 else self.integer(field, default)

    def boolean(self, field: str, default: bool) -> bool:
        value = self._fields.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, not {value!r}")
        return value


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or ModelFolderError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} must hold a JSON object")
    return value
