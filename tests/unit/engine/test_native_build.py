"""Compiling the kernels: made once, by one process at a time, with reasons where it cannot be."""

import fcntl
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.native import build
from engine.native.build import NativeUnavailableError, build_library, loaded_openmp_runtime
from engine.native.kernel_library import NativeLibrary, load_library

pytestmark = pytest.mark.unit

KERNELS = (
    *("pack", "pack_bias", "pack_int8", "linear"),
    *("rms_norm", "add_rms_norm", "rotate", "write_kv", "attend"),
)
ONE_RUNTIME = """
import sys
from pathlib import Path
import torch
from engine.native.native_ops import NativeOps
ops = NativeOps.build(Path(sys.argv[1]))
torch.set_num_threads(2)
torch.ones(512, 512) @ torch.ones(512, 512)
ops.linear(torch.ones(2, 8), ops.pack([torch.ones(40, 8)]))
maps = Path("/proc/self/maps").read_text().splitlines()
print(len({line.split()[5] for line in maps if "gomp" in line or "libomp" in line or "iomp" in line}))
print(len(list(Path("/proc/self/task").iterdir())))
"""


@pytest.fixture
def trivial_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder that compiles in no time."""
    folder = tmp_path / "src"
    folder.mkdir()
    source = folder / "trivial.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCE_FOLDER", folder)
    return source


def _fake_compiler(folder: Path, script: str) -> Path:
    path = folder / "fake-compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_one_openmp_runtime_and_one_set_of_threads(request: pytest.FixtureRequest) -> None:
    folder = request.config.cache.mkdir("native")
    done = subprocess.run(
        [sys.executable, "-c", ONE_RUNTIME, str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    runtimes, threads = map(int, done.stdout.split())
    assert runtimes == 1
    alone = ONE_RUNTIME.replace("ops = NativeOps.build(Path(sys.argv[1]))", "").replace("ops.linear", "0 #")
    done = subprocess.run(
        [sys.executable, "-c", alone, str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert threads == int(done.stdout.split()[1]), "the kernels started threads of their own"


def test_a_library_is_compiled_once(trivial_source: Path, tmp_path: Path) -> None:
    first = build_library(tmp_path / "cache")
    made_ns = first.stat().st_mtime_ns
    assert build_library(tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == made_ns
    trivial_source.write_text('extern "C" int answer() { return 43; }\n')
    assert build_library(tmp_path / "cache") != first
    assert build_library(tmp_path / "cache", extra_flags=("-O1",)) != first


def test_builders_at_once_share_one_compilation(
    trivial_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    real = build._find_compiler()
    compiler = _fake_compiler(tmp_path, f'case "$*" in *-shared*) echo x >> {log};; esac; exec {real} "$@"')
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build_library(tmp_path / "cache"), range(4)))
    assert len(paths) == 1
    assert log.read_text().split() == ["x"]
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_another_process_that_compiles_for_too_long(
    trivial_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LOCK_WAIT_S_MAX", 0.05)
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(NativeUnavailableError, match="held by another process"):
            build_library(tmp_path)


def test_old_libraries_are_removed(trivial_source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for number in range(build.LIBRARIES_KEPT_MAX + 2):
        trivial_source.write_text(f'extern "C" int answer() {{ return {number}; }}\n')
        last = build_library(cache)
    assert len(list(cache.glob("kernels-*.so"))) == build.LIBRARIES_KEPT_MAX
    assert last.is_file()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailableError, match=r"no GNU C\+\+ compiler: g\+\+ or c\+\+"):
        build_library(tmp_path)
    monkeypatch.setenv("CXX", "/does/not/exist")
    with pytest.raises(NativeUnavailableError, match="CXX=/does/not/exist"):
        build_library(tmp_path)


def test_another_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clang = _fake_compiler(tmp_path, "echo '#define __GNUC__ 4'; echo '#define __clang__ 1'")
    monkeypatch.setenv("CXX", str(clang))
    with pytest.raises(NativeUnavailableError, match="no GNU C"):
        build_library(tmp_path)


def test_a_source_that_does_not_compile(trivial_source: Path, tmp_path: Path) -> None:
    trivial_source.write_text("int broken(\n")
    with pytest.raises(NativeUnavailableError, match=r"failed with status 1: .*error"):
        build_library(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so")) + list((tmp_path / "cache").glob("*.partial"))


def test_a_compiler_that_hangs(trivial_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILE_S_MAX", 0.2)
    monkeypatch.setenv("CXX", str(_fake_compiler(tmp_path, "exec sleep 30")))
    with pytest.raises(NativeUnavailableError, match="took over"):
        build_library(tmp_path / "cache")


def test_a_cache_folder_that_cannot_be_made(trivial_source: Path, tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match="cannot hold the compiled kernels"):
        build_library(trivial_source / "cache")


def test_a_damaged_library(tmp_path: Path) -> None:
    damaged = tmp_path / "kernels.so"
    damaged.write_bytes(b"not a library")
    with pytest.raises(NativeUnavailableError, match=r"kernels\.so does not load"):
        NativeLibrary(damaged)


def test_a_damaged_library_is_made_again(trivial_source: Path, tmp_path: Path) -> None:
    """As a disk leaves it that lost its last writes: else the machine would do without for good, or load
    what kills the process."""
    empty = "".join(f"void moonpool_{name}() {{}}\n" for name in KERNELS)
    sizes = "int moonpool_width() { return 4; }\nint moonpool_panel() { return 16; }\n"
    trivial_source.write_text(f'extern "C" {{\n{sizes}{empty}}}\n')
    cache = tmp_path / "cache"
    built = build_library(cache)
    whole = built.read_bytes()
    overwritten = whole[:5000] + bytes(1000) + whole[6000:]
    for damaged in (b"", whole[:100], whole[: len(whole) // 3], whole[:-1], overwritten):
        built.unlink()  # this process may have it mapped
        built.write_bytes(damaged)
        assert load_library(cache).panel == 16
        assert len(built.read_bytes()) == len(whole)


def test_what_a_killed_compilation_left_is_removed(trivial_source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / ".kernels-0-1.partial").write_bytes(b"x")
    built = build_library(cache)
    assert sorted(path.name for path in cache.iterdir()) == [".lock", built.name]


def test_code_is_not_taken_from_a_folder_that_everyone_may_write(
    trivial_source: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    build_library(cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    cache.chmod(0o1777)
    with pytest.raises(NativeUnavailableError, match="cache may be written by everyone"):
        build_library(cache)


def test_the_runtime_is_the_one_that_torch_loaded() -> None:
    assert loaded_openmp_runtime().name.startswith("libgomp")
