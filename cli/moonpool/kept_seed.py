"""The seed of the hashes of a local stack, kept beside the files of its SSD tiers.

Hashes begin with the cluster's seed, which is made anew with each registry. A stack whose blocks are to
outlive it takes its seed from where they are.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from cluster.service import SEED_BYTES
from moonpool.errors import CommandError

SEED_FILE = "cluster.seed"
"""The folders beside it have names of instances, in which there is no dot."""
_FILE_MODE = 0o600
"""Who knows the seed can tell from hashes what was asked."""


def kept_seed(folder: Path) -> bytes:
    """The seed in `folder`, which is made where there is none; of two who make one at once both get the same.

    CommandError where it cannot be read or written, or is none, and where there can be no such folder.
    """
    path = folder / SEED_FILE
    _make(folder)
    try:
        if not path.exists():
            _write_whole(path, secrets.token_bytes(SEED_BYTES))
        seed = path.read_bytes()
    except OSError as error:
        raise CommandError(
            f"--ssd-folder: cannot keep {SEED_FILE} in {folder}: {error.strerror or error}"
        ) from error
    if len(seed) != SEED_BYTES:
        raise CommandError(
            f"{path} has {len(seed)} bytes, must have {SEED_BYTES}; "
            "without this file the next stack begins anew, and the blocks in the folder are lost"
        )
    return seed


def _make(folder: Path) -> None:
    """CommandError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise CommandError(f"--ssd-folder: {folder} is not a folder") from error
    except OSError as error:
        raise CommandError(
            f"--ssd-folder: cannot make the folder {folder}: {error.strerror or error}"
        ) from error


def _write_whole(path: Path, data: bytes) -> None:
    """It is there with all of `data`, or not at all; one that is there already stays."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)
