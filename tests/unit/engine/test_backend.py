"""Which backend an engine gets, and why not another."""

from pathlib import Path

import pytest

from engine import backend
from engine.backend import Backend, choose_ops
from engine.errors import EngineError
from engine.native.build import NativeUnavailableError
from engine.native.native_ops import NativeOps
from engine.native.packing import WeightDtype
from engine.torch_ops import TorchOps

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.torch.cuda, "is_available", lambda: False)


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    return request.config.cache.mkdir("native")


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/does/not/exist")


@pytest.mark.parametrize("wanted", [Backend.AUTO, Backend.NATIVE])
def test_a_cpu_gets_the_compiled_kernels(wanted: Backend, folder: Path) -> None:
    chosen = choose_ops(wanted, "float32", folder)
    assert (chosen.backend, chosen.detail) == (Backend.NATIVE, "")
    assert isinstance(chosen.ops, NativeOps)


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_auto_computes_in_torch_and_says_why(folder: Path) -> None:
    chosen = choose_ops(Backend.AUTO, "float32", folder)
    assert isinstance(chosen.ops, TorchOps)
    assert "CXX=/does/not/exist" in chosen.detail
    with pytest.raises(NativeUnavailableError, match="CXX=/does/not/exist"):
        choose_ops(Backend.NATIVE, "float32", folder)


def test_half_precision_on_a_cpu_is_for_torch(folder: Path) -> None:
    chosen = choose_ops(Backend.AUTO, "bfloat16", folder)
    assert chosen.backend is Backend.TORCH
    assert "float32" in chosen.detail
    assert isinstance(choose_ops(Backend.TORCH, "float32", folder).ops, TorchOps)


def test_triton_needs_a_device(folder: Path) -> None:
    with pytest.raises(EngineError, match="CUDA"):
        choose_ops(Backend.TRITON, "float32", folder)


@pytest.mark.usefixtures("_no_compiler")
def test_int8_weights_never_fall_back_to_other_weights(folder: Path) -> None:
    with pytest.raises(NativeUnavailableError):
        choose_ops(Backend.AUTO, "float32", folder, WeightDtype.INT8)
    with pytest.raises(EngineError, match="weight_dtype int8 needs backend native, not torch"):
        choose_ops(Backend.TORCH, "float32", folder, WeightDtype.INT8)


def test_int8_weights(folder: Path) -> None:
    assert choose_ops(Backend.AUTO, "float32", folder, WeightDtype.INT8).backend is Backend.NATIVE
