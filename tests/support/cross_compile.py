"""Compiles kernels for GPUs that are not there, exactly as a launch on one would.

A stand-in driver names the chip, and a hook stops each launch where it would compile: so what is compiled
here has the very types, constants and alignments that the engine launches with. What ptxas says of
registers, shared memory and spills is read from its log.
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.triton_kernels.common import Chip

KIB = 1024
# sm_80's kernels also serve the consumer chips of its kind, which have the least shared memory.
CHIPS = {80: Chip(108, 99 * KIB), 90: Chip(132, 227 * KIB)}
SHARED_BYTES = {80: 164 * KIB, 90: 228 * KIB}
REGISTERS = 65_536
THREADS_MAX = 2048
SHARED_RESERVED_BYTES = KIB
"""What each program costs beyond what it asks for."""

USED = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as it was about to be compiled."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], object]
    attributes: dict[tuple[int, ...], object]
    options: dict[str, object]


@dataclass(frozen=True, slots=True)
class Compiled:
    name: str
    warps: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int
    ptx: str

    def resident(self, architecture: int) -> int:
        """Programs that fit a multiprocessor at once."""
        threads = 32 * self.warps
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * threads)
        by_shared = SHARED_BYTES[architecture] // (self.shared_bytes + SHARED_RESERVED_BYTES)
        return min(by_registers, by_shared, THREADS_MAX // threads)


class _Driver:
    """Enough of a Triton driver to come to the point where a kernel is compiled."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture  # Triton keeps what it knows of a target by device number

    def get_current_stream(self, device: int) -> int:
        return 0


def launches(architecture: int, launch: Callable[[], object]) -> list[Launch]:
    """The kernels that `launch` would run on a GPU of `architecture`; none is run."""
    held: list[Launch] = []

    def keep(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        held.append(
            Launch(
                fn.jit_function,
                compile["signature"],
                compile["constants"],
                compile["configs"][0],
                {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")},
            )
        )
        return True  # which says: do not compile, do not run

    with _no_gpu(architecture), triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = keep
        launch()
    return held


def compile_for(architecture: int, launch: Launch) -> Compiled:
    """Always from source: only then does ptxas run, and say what it did."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    target = GPUTarget("cuda", architecture, 32)
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=launch.options)
    used, spills = USED.search(log.getvalue()), SPILLS.search(log.getvalue())
    assert used is not None, f"ptxas said nothing of {launch.kernel.__name__}: {log.getvalue()!r}"
    assert spills is not None, f"ptxas said nothing of spills of {launch.kernel.__name__}"
    stack_bytes, spill_stores, spill_loads = map(int, spills.groups())
    return Compiled(
        name=launch.kernel.__name__,
        warps=compiled.metadata.num_warps,
        registers=int(used[1]),
        shared_bytes=compiled.metadata.shared,
        stack_bytes=stack_bytes,
        spill_bytes=spill_stores + spill_loads,
        ptx=compiled.asm["ptx"],
    )


@contextlib.contextmanager
def _no_gpu(architecture: int) -> Iterator[None]:
    driver = triton.runtime.driver
    before = driver._active  # reading `active` would look for a GPU
    driver.set_active(_Driver(architecture))
    try:
        yield
    finally:
        driver.set_active(before)
