"""Files are read again when they change, and only then."""

import io
import json
import os
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.logs import Logger
from gateway.tenants.watched_files import WatchedFiles

pytestmark = pytest.mark.unit


class Watched:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.reads: list[str] = []
        self.log = io.StringIO()
        self.files = WatchedFiles("the file", [path], self._read, Logger(stream=self.log))

    async def _read(self) -> None:
        text = self.path.read_text()
        if text == "broken":
            raise ConfigError("it is broken")
        self.reads.append(text)

    def logged(self) -> list[tuple[str, str]]:
        lines = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [(line["level"], line["message"]) for line in lines]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    path = tmp_path / "file"
    path.write_text("first")
    return Watched(path)


async def test_what_did_not_change_is_not_read(watched: Watched) -> None:
    for _ in range(3):
        await watched.files.look()
    assert watched.reads == []


async def test_a_change_is_read_once(watched: Watched) -> None:
    watched.path.write_text("another")
    await watched.files.look()
    await watched.files.look()
    assert watched.reads == ["another"]
    assert watched.logged() == [("info", "the file read again")]


async def test_a_file_of_the_same_size_in_its_place_is_a_change(watched: Watched) -> None:
    new = watched.path.with_name("new")
    new.write_text("third")
    os.utime(new, ns=(watched.path.stat().st_atime_ns, watched.path.stat().st_mtime_ns))
    new.replace(watched.path)
    await watched.files.look()
    assert watched.reads == ["third"]


async def test_a_broken_file_is_told_once_and_the_next_change_is_read(watched: Watched) -> None:
    watched.path.write_text("broken")
    await watched.files.look()
    await watched.files.look()
    watched.path.unlink()
    await watched.files.look()
    watched.path.write_text("mended")
    await watched.files.look()
    assert watched.reads == ["mended"]
    assert [level for level, _ in watched.logged()] == ["error", "error", "info"]
