"""A folder that appears whole or not at all."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ModelFolderError

PARTIAL_SUFFIX = ".partial"


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside `folder`; it becomes `folder` if the body ends well, else it is removed.

    A killed process leaves `.<name>-*.partial` behind, never a half-written `folder`;
    `remove_partial_folders` sweeps those up. Raises ModelFolderError if `folder` exists already.
    """
    if folder.exists():
        raise ModelFolderError(f"{folder} exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}-{uuid.uuid4().hex}{PARTIAL_SUFFIX}"
    partial.mkdir()
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError as error:
            raise ModelFolderError(f"{folder} cannot be put in place: {error}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_partial_folders(folder: Path) -> None:
    """Removes what killed writers of `folder` left; only for a caller that excludes running ones."""
    for partial in folder.parent.glob(f".{folder.name}-*{PARTIAL_SUFFIX}"):
        shutil.rmtree(partial, ignore_errors=True)
