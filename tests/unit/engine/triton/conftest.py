"""The process in which Triton interprets, for the tests of this folder."""

from tests.support.interpreted import interpreter

__all__ = ["interpreter"]
