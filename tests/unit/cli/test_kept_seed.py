"""A seed that outlives the registry it was made for."""

import threading
from pathlib import Path

import pytest

from cluster.service import SEED_BYTES
from moonpool.errors import CommandError
from moonpool.kept_seed import SEED_FILE, kept_seed

pytestmark = pytest.mark.unit


def test_a_folder_has_one_seed_and_another_folder_another(tmp_path: Path) -> None:
    seed = kept_seed(tmp_path / "new" / "folder")
    assert len(seed) == SEED_BYTES
    assert kept_seed(tmp_path / "new" / "folder") == seed
    assert kept_seed(tmp_path / "other") != seed


def test_it_is_nobody_elses_to_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    kept_seed(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [SEED_FILE]
    assert (tmp_path / SEED_FILE).stat().st_mode & 0o077 == 0


def test_all_who_make_one_at_once_get_the_same(tmp_path: Path) -> None:
    together = threading.Barrier(8)
    seeds: set[bytes] = set()

    def make() -> None:
        together.wait()
        seeds.add(kept_seed(tmp_path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seeds) == 1


@pytest.mark.parametrize("size_bytes", [0, SEED_BYTES - 1, SEED_BYTES + 1])
def test_what_is_no_seed_is_told(tmp_path: Path, size_bytes: int) -> None:
    (tmp_path / SEED_FILE).write_bytes(bytes(size_bytes))
    with pytest.raises(CommandError, match=f"{SEED_FILE} has {size_bytes} bytes, must have {SEED_BYTES}"):
        kept_seed(tmp_path)


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match=r"^--ssd-folder: \S*/file is not a folder$"):
        kept_seed(tmp_path / "file")
    with pytest.raises(CommandError, match=r"^--ssd-folder: cannot make the folder \S*/file/below: "):
        kept_seed(tmp_path / "file" / "below")


def test_a_seed_that_cannot_be_read_is_told_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / SEED_FILE).mkdir()
    with pytest.raises(CommandError, match=f"cannot keep {SEED_FILE} in {tmp_path}: Is a directory"):
        kept_seed(tmp_path)
