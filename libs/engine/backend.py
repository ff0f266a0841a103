"""Which backend computes: picked once, when an engine starts.

CUDA means Triton, a CPU with float32 weights means the compiled kernels, everything else plain torch.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from engine.errors import EngineError
from engine.native.build import NativeUnavailableError
from engine.native.native_ops import NativeOps
from engine.native.packing import WeightDtype
from engine.ops import Ops
from engine.torch_ops import TorchOps


class Backend(StrEnum):
    AUTO = "auto"
    TORCH = "torch"
    NATIVE = "native"
    TRITON = "triton"


@dataclass(frozen=True, slots=True)
class ChosenOps:
    """`detail`: why it is not a faster one, where that needs saying."""

    ops: Ops
    backend: Backend
    detail: str = ""


def computes_on_device(wanted: Backend, weight_dtype: WeightDtype = WeightDtype.FLOAT32) -> bool:
    """Whether `choose_ops` picks what computes in a device's memory. Loads and builds nothing."""
    if wanted is Backend.AUTO and weight_dtype is not WeightDtype.INT8:
        return torch.cuda.is_available()
    return wanted is Backend.TRITON


def choose_ops(
    wanted: Backend,
    dtype_name: str,
    kernels_folder: Path,
    weight_dtype: WeightDtype = WeightDtype.FLOAT32,
) -> ChosenOps:
    """The operations an engine computes with; `kernels_folder` keeps what is compiled for this machine.

    AUTO falls back where a backend is not to be had; a named one raises EngineError saying why not. So do
    int8 weights, which the compiled kernels alone have: other weights make other KV.
    """
    if weight_dtype is WeightDtype.INT8:
        if wanted not in (Backend.AUTO, Backend.NATIVE):
            raise EngineError(f"weight_dtype int8 needs backend native, not {wanted}")
        return _native(dtype_name, kernels_folder, weight_dtype)
    match wanted:
        case Backend.TORCH:
            return ChosenOps(TorchOps(), Backend.TORCH)
        case Backend.TRITON:
            return _triton()
        case Backend.NATIVE:
            return _native(dtype_name, kernels_folder)
        case Backend.AUTO:
            if computes_on_device(wanted, weight_dtype):
                return _triton()
            try:
                return _native(dtype_name, kernels_folder)
            except NativeUnavailableError as error:
                return ChosenOps(TorchOps(), Backend.TORCH, str(error))


def _native(
    dtype_name: str, kernels_folder: Path, weight_dtype: WeightDtype = WeightDtype.FLOAT32
) -> ChosenOps:
    if dtype_name != "float32":
        raise NativeUnavailableError(f"the compiled kernels compute in float32, not in {dtype_name}")
    return ChosenOps(NativeOps.build(kernels_folder, weight_dtype), Backend.NATIVE)


def _triton() -> ChosenOps:
    if not torch.cuda.is_available():
        raise EngineError("backend triton needs a CUDA device, and torch sees none")
    from engine.triton_ops import TritonOps  # imports Triton, which a CPU engine does without

    return ChosenOps(TritonOps(), Backend.TRITON)
