"""The compiled kernels as Python functions; arguments are addresses and sizes, checked by the caller.

The calls give up the interpreter's lock, so other threads of the process run meanwhile.
"""

from collections.abc import Callable
from ctypes import CDLL, c_float, c_int, c_int64, c_void_p
from pathlib import Path

from engine.native.build import NativeUnavailableError, build_library

_Kernel = Callable[..., None]


class NativeLibrary:
    """One loaded library. Each method's signature is that of the C++ function `moonpool_<method>`."""

    def __init__(self, path: Path) -> None:
        try:
            library = CDLL(str(path))
        except OSError as error:
            raise NativeUnavailableError(f"{path} does not load: {error}") from error

        def kernel(name: str, *argument_types: type) -> _Kernel:
            function = library[f"moonpool_{name}"]
            function.argtypes = argument_types
            function.restype = None
            return function

        pointer, size, flag = c_void_p, c_int64, c_int
        self.width: int = library["moonpool_width"]()
        """Floats in a vector register: attention needs a multiple of it as head_dim."""
        self.panel: int = library["moonpool_panel"]()
        """Outputs in a panel of a packed weight; a pair of matrices takes half of it each."""
        self.pack = kernel("pack", pointer, size, size, size, size, flag, flag, pointer)
        self.pack_bias = kernel("pack_bias", pointer, size, size, flag, flag, pointer)
        self.pack_int8 = kernel("pack_int8", pointer, size, size, size, size, flag, flag, pointer, pointer)
        self.linear = kernel(
            "linear", pointer, size, size, *(pointer,) * 4, size, size, flag, flag, pointer, size
        )
        self.rms_norm = kernel("rms_norm", pointer, size, size, size, size, size, pointer, c_float, pointer)
        self.add_rms_norm = kernel(
            "add_rms_norm", pointer, size, pointer, size, size, size, pointer, c_float, pointer
        )
        self.rotate = kernel("rotate", pointer, size, size, pointer, size, size, pointer, pointer, size, size)
        self.write_kv = kernel(
            "write_kv", *(pointer,) * 2, *(size,) * 4, pointer, size, pointer, size, pointer, *(size,) * 3
        )
        self.attend = kernel(
            "attend",
            *(pointer, size),
            *(pointer, pointer, size, size, size, size),
            *(pointer, pointer, pointer, size),
            *(size, size, size, size, size, c_float, size),
            pointer,
        )


def load_library(cache_folder: Path) -> NativeLibrary:
    """The kernels kept in `cache_folder`; compiled if they are not there, or are there but damaged.

    Raises NativeUnavailableError with the reason.
    """
    return NativeLibrary(build_library(cache_folder))
