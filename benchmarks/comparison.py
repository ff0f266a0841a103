"""What comparisons have alike: turns, the record of the moment, and progress on standard error."""

import datetime
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from moonpool.machine import machine_context

ItemT = TypeVar("ItemT")


def rotated(items: Sequence[ItemT], start: int) -> Iterator[ItemT]:
    """All items in turn, beginning with number `start`, counted round and round."""
    for index in range(len(items)):
        yield items[(start + index) % len(items)]


def now() -> dict[str, object]:
    """The date, the kernel and how busy the machine is."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": date, "kernel": os.uname().release, **machine_context()}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
