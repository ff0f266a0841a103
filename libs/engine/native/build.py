"""Compiles the kernels of `src` once for this machine and keeps the library in a cache folder.

The file's name is a hash of all that decides its content: sources, compiler, flags, CPU. A hash of the
content itself is its last bytes, where the loader does not look: the process that loads a library cut short
is killed. Several processes may ask at once: a file lock lets one compile while the others wait.

There must be one OpenMP runtime in the process, or torch and the kernels each start their own threads.
So the library is linked against the very libgomp that torch has loaded.
"""

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import uuid
from pathlib import Path

import torch

from engine.errors import EngineError
from engine.file_lock import FileLockTimeoutError, file_lock

COMPILE_S_MAX = 300.0
"""A compilation takes about 5 s on a quiet machine, and a minute was seen on a busy one."""
LOCK_WAIT_S_MAX = 400.0
LIBRARIES_KEPT_MAX = 4
"""Libraries of earlier versions are removed, oldest first."""

SEAL_BYTES = hashlib.sha256().digest_size
PARTIAL_SUFFIX = ".partial"
SOURCE_FOLDER = Path(__file__).parent / "src"
COMPILER_VARIABLE = "CXX"
COMPILERS = ("g++", "c++")
FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
)


class NativeUnavailableError(EngineError):
    """The kernels cannot be compiled or loaded here; the message says why."""


def build_library(cache_folder: Path, *, extra_flags: tuple[str, ...] = ()) -> Path:
    """The compiled library, made if it is not in `cache_folder` yet or is damaged there.

    Raises NativeUnavailableError with the reason. `extra_flags` narrow the CPU (`-mno-avx512f`) in tests.
    """
    runtime = loaded_openmp_runtime()
    compiler = _find_compiler()
    flags = (*FLAGS, *extra_flags)
    path = cache_folder / f"kernels-{_content_hash(compiler, flags, runtime)}.so"
    try:
        cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_trustworthy(cache_folder)
        if _is_whole(path):
            return path
        with file_lock(cache_folder / ".lock", wait_s_max=LOCK_WAIT_S_MAX):
            if not _is_whole(path):  # another process may have made it while we waited
                _compile(compiler, flags, runtime, path)
                _remove_old(cache_folder, keep=path)
    except FileLockTimeoutError as error:
        raise NativeUnavailableError(str(error)) from error
    except OSError as error:
        raise NativeUnavailableError(f"{cache_folder} cannot hold the compiled kernels: {error}") from error
    return path


def _is_whole(path: Path) -> bool:
    try:
        sealed = path.read_bytes()
    except FileNotFoundError:
        return False
    return _seal(sealed[:-SEAL_BYTES]) == sealed[-SEAL_BYTES:]


def _seal(library: bytes) -> bytes:
    return hashlib.sha256(library).digest()


def _check_trustworthy(cache_folder: Path) -> None:
    """What lies there is run as code of this process: nobody else may have put it there."""
    if cache_folder.stat().st_mode & stat.S_IWOTH:
        raise NativeUnavailableError(f"{cache_folder} may be written by everyone; chmod o-w makes it safe")


def loaded_openmp_runtime() -> Path:
    """The libgomp that torch computes with: its own, or the only one in the process."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError as error:
        raise NativeUnavailableError(f"the native kernels need Linux: {error}") from error
    mapped = {Path(fields[5]) for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    runtimes = sorted(path for path in mapped if path.name.startswith(("libgomp", "libomp", "libiomp")))
    # Other packages may have brought a second one; the linker binds our library to the first by its name.
    torch_folder = Path(torch.__file__).resolve().parent / "lib"
    candidates = [path for path in runtimes if path.parent == torch_folder] or runtimes
    if len(candidates) != 1 or not candidates[0].name.startswith("libgomp"):
        names = ", ".join(map(str, candidates)) or "none"
        raise NativeUnavailableError(f"torch must have loaded one OpenMP runtime, libgomp, not {names}")
    return candidates[0]


def _find_compiler() -> Path:
    wanted = os.environ.get(COMPILER_VARIABLE)
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name)
        if found is not None and _is_gcc(found):
            return Path(found)
    named = f"{COMPILER_VARIABLE}={wanted}" if wanted else " or ".join(COMPILERS)
    raise NativeUnavailableError(f"no GNU C++ compiler: {named} is not one (Debian, Ubuntu: apt install g++)")


def _is_gcc(compiler: str) -> bool:
    """Clang calls itself __GNUC__ too, but speaks to another OpenMP runtime."""
    macros = _run([compiler, "-dM", "-E", "-x", "c++", os.devnull])
    return "__GNUC__" in macros and "__clang__" not in macros


def _content_hash(compiler: Path, flags: tuple[str, ...], runtime: Path) -> str:
    digest = hashlib.sha256()
    for part in (_run([str(compiler), "--version"]), " ".join(flags), str(runtime), _cpu_description()):
        digest.update(part.encode() + b"\0")
    for source in _sources("*"):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


def _cpu_description() -> str:
    """What -march=native depends on: a home folder may be shared between unlike machines."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    lines = [line for line in cpu_info.splitlines() if line.startswith(wanted)]
    return "\n".join([platform.machine(), *lines])


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCE_FOLDER.glob(pattern))


def _compile(compiler: Path, flags: tuple[str, ...], runtime: Path, path: Path) -> None:
    """With the lock held."""
    for left_behind in path.parent.glob(f".kernels-*{PARTIAL_SUFFIX}"):
        left_behind.unlink(missing_ok=True)
    partial = path.with_name(f".{path.stem}-{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
    libraries = [f"-L{runtime.parent}", f"-l:{runtime.name}", f"-Wl,-rpath,{runtime.parent}"]
    try:
        _run([str(compiler), *flags, *map(str, _sources("*.cpp")), "-o", str(partial), *libraries])
        with partial.open("r+b") as file:
            file.write(_seal(file.read()))
            file.flush()
            os.fsync(file.fileno())  # after a power failure the name must not stand for a part of it
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailableError(f"{command[0]} took over {COMPILE_S_MAX:.0f} s") from error
    except OSError as error:
        raise NativeUnavailableError(f"{command[0]} does not start: {error}") from error
    if done.returncode != 0:
        message = done.stderr.strip()[-500:]
        raise NativeUnavailableError(f"{command[0]} failed with status {done.returncode}: {message}")
    return done.stdout


def _remove_old(cache_folder: Path, keep: Path) -> None:
    libraries = sorted(cache_folder.glob("kernels-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [path for path in libraries if path != keep][LIBRARIES_KEPT_MAX - 1 :]:
        path.unlink(missing_ok=True)
