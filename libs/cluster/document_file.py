"""Writing a generated document to a file: the command that each of them has."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def write_document(program: str, example: str, make: Callable[[], bytes], arguments: Sequence[str]) -> int:
    """What `python -m <program> FILE` does; the exit status. `example` is where the document is kept."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description="Write the document.")
    parser.add_argument("file", type=Path, help=f"such as {example}")
    file: Path = parser.parse_args(arguments).file
    try:
        file.write_bytes(make())
    except OSError as error:
        print(f"cannot write {file}: {error.strerror}", file=sys.stderr)
        return 1
    return 0
