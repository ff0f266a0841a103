"""Runs functions in a process of its own where Triton interprets kernels instead of compiling them.

Triton reads TRITON_INTERPRET when it is first imported, and the test session also compiles kernels for
real: so the two cannot share a process. The other process is started once a session and serves every test;
an assertion that fails there fails the test here, with its traceback.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

CALL_S_MAX = 90.0


class Interpreter:
    """A process whose Triton interprets."""

    def __init__(self) -> None:
        self._process = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret)

    def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """`function(*arguments)`, of an importable module, in that process."""
        return self._process.submit(function, *arguments).result(timeout=CALL_S_MAX)

    def close(self) -> None:
        self._process.shutdown(wait=True, cancel_futures=True)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    held = Interpreter()
    yield held
    held.close()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
