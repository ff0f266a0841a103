"""The key-value fields of a GGUF file, read with type and range checked."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from gguf import ReaderField

from engine.errors import ModelFolderError


class GGUFFields:
    """Every error is a ModelFolderError that names the file and the field."""

    def __init__(self, path: Path, fields: Mapping[str, ReaderField]) -> None:
        self._path = path
        self._fields = fields

    def error(self, name: str, reason: str) -> ModelFolderError:
        return ModelFolderError(f"{self._path}: field {name}: {reason}")

    def tensor_error(self, tensor: str, reason: str) -> ModelFolderError:
        return ModelFolderError(f"{self._path}: tensor {tensor} {reason}")

    def names(self) -> Iterable[str]:
        return self._fields.keys()

    def has(self, name: str) -> bool:
        return name in self._fields

    def equals(self, name: str, value: object) -> bool:
        """Whether the field is there and has this value."""
        return self.has(name) and self._value(name) == value

    def require(self, name: str, expected: object) -> None:
        """Fails unless the field has this one value."""
        found = self._value(name)
        if found != expected:
            raise self.error(name, f"{found!r} is not supported, only {expected!r}")

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"must be a whole number of at least 1, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; GGUF stores float32, so 1e-5 is read as 1e-5 and not as 9.99999975e-06."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(name, f"must be a positive number, not {value!r}")
        return float(str(np.float32(value)))

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def text(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str):
            raise self.error(name, f"must be a text, not {value!r}")
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def token_id(self, name: str, vocab_size: int) -> int | None:
        """A token id, or None where the file has no such field."""
        if not self.has(name):
            return None
        value = self._value(name)
        if not isinstance(value, int) or not 0 <= value < vocab_size:
            raise self.error(name, f"{value!r} is not a token id below {vocab_size}")
        return value

    def texts(self, name: str) -> list[str]:
        value = self._value(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "must be a list of texts")
        return value

    def integers(self, name: str) -> list[int]:
        value = self._value(name)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self.error(name, "must be a list of whole numbers")
        return value

    def numbers(self, name: str) -> list[float]:
        value = self._value(name)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self.error(name, "must be a list of numbers")
        return value

    def _value(self, name: str, default: object = None) -> object:
        field = self._fields.get(name)
        try:
            value: object = default if field is None else field.contents()
        except (ValueError, IndexError, TypeError) as error:  # texts that are none, lists without an end
            raise self.error(name, f"cannot be read: {error}") from error
        if value is None:
            raise self.error(name, "is missing")
        return value
