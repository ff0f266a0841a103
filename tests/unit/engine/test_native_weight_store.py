"""Packed weights shared as files: packed once, mapped by all, private where the disk refuses."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine.native import weight_store
from engine.native.weight_store import SHARED_BYTES_MIN, FloatArray, WeightStore

pytestmark = pytest.mark.unit

SIZE = SHARED_BYTES_MIN // 4


class Packer:
    """Writes a value over the whole weight and counts how often it was asked to."""

    def __init__(self, value: float, size: int = SIZE) -> None:
        self.calls = 0
        self._data = np.full(size, value, dtype=np.float32)

    def __call__(self, address: int) -> None:
        self.calls += 1
        ctypes.memmove(address, self._data.ctypes.data, self._data.nbytes)


def _is_file_mapped(array: FloatArray) -> bool:
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line.endswith(".weight")
    raise AssertionError("the array lies nowhere")


def test_packed_once_and_mapped_by_every_store(tmp_path: Path) -> None:
    packer = Packer(3.0)
    first = WeightStore(tmp_path).obtain("key", SIZE, packer)
    second = WeightStore(tmp_path).obtain("key", SIZE, packer)
    assert packer.calls == 1
    for array in (first, second):
        assert _is_file_mapped(array)
        assert not array.flags.writeable
        assert np.array_equal(array, np.full(SIZE, 3.0, dtype=np.float32))
    assert [path.name for path in tmp_path.iterdir()] == ["key.weight"]


def test_a_file_of_another_size_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "key.weight").write_bytes(b"short")
    assert WeightStore(tmp_path).obtain("key", SIZE, Packer(1.0))[-1] == 1.0


def test_small_weights_stay_private(tmp_path: Path) -> None:
    array = WeightStore(tmp_path).obtain("key", 10, Packer(2.0, 10))
    assert array.tolist() == [2.0] * 10
    assert not list(tmp_path.iterdir())


def test_a_packing_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(address: int) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        WeightStore(tmp_path).obtain("key", SIZE, fail)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("obstacle", ["no folder", "no room"])
def test_private_where_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    folder = tmp_path / "weights"
    if obstacle == "no folder":
        folder.write_text("a file")
    else:
        monkeypatch.setattr(weight_store, "FREE_BYTES_MIN", 1 << 60)
    store = WeightStore(folder)
    for key in ("first", "second"):
        array = store.obtain(key, SIZE, Packer(4.0))
        assert not _is_file_mapped(array)
        assert array[-1] == 4.0
    assert caplog.text.count("stay private") == 1


def test_a_folder_that_is_only_read_shares_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in an image, or another user's."""
    WeightStore(tmp_path).obtain("key", SIZE, Packer(6.0))

    def refuse(path: Path) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(weight_store.os, "utime", refuse)
    packer = Packer(6.0)
    assert _is_file_mapped(WeightStore(tmp_path).obtain("key", SIZE, packer))
    assert packer.calls == 0


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    held = {key: store.obtain(key, SIZE, Packer(float(i))) for i, key in enumerate(("a", "b", "c"))}
    for age_s, key in enumerate(("b", "c", "a")):
        os.utime(tmp_path / f"{key}.weight", (1e9 - age_s, 1e9 - age_s))
    WeightStore(tmp_path, bytes_max=2 * SHARED_BYTES_MIN)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["b", "c"]
    assert held["a"][-1] == 0.0, "a mapped weight outlives its file"


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    old, young = tmp_path / ".key-1.partial", tmp_path / ".key-2.partial"
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (1e9, 1e9))
    WeightStore(tmp_path)
    assert list(tmp_path.iterdir()) == [young]


def test_several_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        arrays = list(pool.map(lambda _: WeightStore(tmp_path).obtain("key", SIZE, Packer(5.0)), range(8)))
    assert all(np.array_equal(array, arrays[0]) for array in arrays)
    assert arrays[0][0] == 5.0
    assert [path.name for path in tmp_path.iterdir()] == ["key.weight"]
