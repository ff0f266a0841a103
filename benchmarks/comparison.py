"""What comparisons have alike: arguments, turns, the record of the moment, progress on standard error."""

import argparse
import datetime
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from moonpool.machine import machine_context

ItemT = TypeVar("ItemT")


def add_comparison_arguments(
    parser: argparse.ArgumentParser, peers: Sequence[str], cases: Iterable[str], *, python: str | None
) -> None:
    """`rounds`, `peers` as (name, python), `cases` and `output`. `python` is that of a peer that is named
    alone; without it each names its own."""
    names = ", ".join(peers)
    parser.add_argument("--rounds", type=int, default=5, help="samples of each case and system (default 5)")
    parser.add_argument(
        "--peer",
        dest="peers",
        type=partial(_peer, peers=peers, python=python),
        action="append",
        default=[],
        metavar="NAME[=PYTHON]" if python else "NAME=PYTHON",
        help=f"a system to compare with ({names}) and the python of its environment; repeatable",
    )
    parser.add_argument("--case", dest="cases", action="append", choices=list(cases), help="default: all")
    parser.add_argument(
        "--output", type=Path, required=True, help="file for the results, a JSON object a line"
    )


def _peer(text: str, peers: Sequence[str], python: str | None) -> tuple[str, Path]:
    name, _, its_python = text.partition("=")
    if name not in peers:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(peers)}")
    chosen = its_python or python
    if not chosen:
        raise argparse.ArgumentTypeError(f"{name}: the python of its environment is missing, NAME=PYTHON")
    return name, Path(chosen).expanduser()


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
