"""Every kernel compiled for sm_80 and sm_90 without a GPU: no spills, and the instructions that matter.

Prints a table of what ptxas made of each. `resident` is how many programs fit a multiprocessor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tests.support.cross_compile import CHIPS, Compiled, compile_for, launches
from tests.support.kernel_checks import AttentionCase, paged_batch

from engine.draw import Draw, DrawParameters
from engine.triton_kernels import cache_moves, elementwise, sampling
from engine.triton_kernels.common import INTERPRETED
from engine.triton_kernels.decode_attention import decode_attention
from engine.triton_kernels.prefill_attention import prefill_attention

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}
# Head dimension and window. With a window there is one loop more, and nothing that is not there without;
# half precision differs from bfloat16 by no more than an instruction's name.
ATTENTION_VARIANTS: dict[str, list[tuple[int, int | None]]] = {
    "bf16": [(64, None), (64, 512), (128, None), (128, 512)],
    "fp16": [(128, 512)],
    "f32": [(64, 512), (128, None), (128, 512)],
}
COMPILATION_S_MAX = 400
"""A minute on an idle core; test machines are not idle."""


pytestmark = [
    pytest.mark.unit,
    pytest.mark.timeout(COMPILATION_S_MAX),
    # It looks for a setting of the whole process; each launch says for itself what it wants.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(INTERPRETED.value, reason="TRITON_INTERPRET is set: nothing can be compiled"),
]


@dataclass(frozen=True, slots=True)
class Variant:
    label: str
    launch: Callable[[], object]


def attention_variants(dtype_name: str, architecture: int) -> list[Variant]:
    variants = []
    for head_dim, window in ATTENTION_VARIANTS[dtype_name]:
        label = f"{dtype_name} d{head_dim}{' window' if window else ''}"
        dtype = DTYPES[dtype_name]
        variants.append(Variant(f"{label} 512 new", _prefill(dtype, head_dim, window, 512, architecture)))
        variants.append(Variant(label, _decode(dtype, head_dim, window, architecture)))
    # Runs so short that the context is cut into parts.
    variants.append(Variant(f"{label} 64 new", _prefill(dtype, head_dim, window, 64, architecture)))
    variants.append(Variant(f"{label} 2 new", _prefill(dtype, head_dim, window, 2, architecture)))
    return variants


def _prefill(
    dtype: torch.dtype, head_dim: int, window: int | None, new: int, architecture: int
) -> Callable[[], object]:
    case = AttentionCase(runs=((0, new),), heads=32, kv_heads=8, head_dim=head_dim, dtype=dtype)
    batch = paged_batch(case, "cpu")
    return lambda: prefill_attention(
        batch.query, batch.keys, batch.values, batch.query_starts, batch.kv_tokens, batch.block_table,
        torch.empty(batch.query.shape, dtype=dtype),
        first_row=0, query_tokens_max=new, kv_tokens_max=8192, scale=0.1, window_tokens=window,
        chip=CHIPS[architecture], part_tokens_min=64,
    )  # fmt: skip


def _decode(dtype: torch.dtype, head_dim: int, window: int | None, architecture: int) -> Callable[[], object]:
    case = AttentionCase(runs=((63, 1),), heads=32, kv_heads=8, head_dim=head_dim, dtype=dtype)
    batch = paged_batch(case, "cpu")
    return lambda: decode_attention(
        batch.query, batch.keys, batch.values, batch.kv_tokens, batch.block_table,
        torch.empty(batch.query.shape, dtype=dtype),
        scale=0.1, window_tokens=window, chip=CHIPS[architecture],
    )  # fmt: skip


def other_variants(dtype_name: str) -> list[Variant]:
    """Of Llama 3 8B's shapes."""
    dtype = DTYPES[dtype_name]
    fused = torch.zeros(2, 48, 128, dtype=dtype)
    query, key, value = fused[:, :32], fused[:, 32:40], fused[:, 40:]
    cache = torch.zeros(3, 2, 2, 8, 16, 128, dtype=dtype)
    blocks = torch.empty(2, 2, 8, 16, 128, dtype=dtype)
    ids = torch.zeros(2, dtype=torch.int64)
    angles = torch.zeros(2, 64)
    hidden, delta = torch.zeros(2, 4096, dtype=dtype), torch.zeros(2, 4096, dtype=dtype)
    weight = torch.zeros(4096, dtype=dtype)
    gate_up = torch.zeros(2, 2 * 14336, dtype=dtype)
    return [
        Variant(
            f"{dtype_name} write",
            lambda: cache_moves.write_kv(cache[:, 1, 0], cache[:, 1, 1], key, value, ids),
        ),
        Variant(f"{dtype_name} gather", lambda: cache_moves.gather_layer(cache[:, 1], ids, blocks)),
        Variant(f"{dtype_name} scatter", lambda: cache_moves.scatter_layer(cache[:, 1], ids, blocks)),
        Variant(f"{dtype_name} rotate", lambda: elementwise.rotate_(query, key, angles, angles)),
        Variant(f"{dtype_name} norm of 4096", lambda: elementwise.rms_norm(hidden, weight, 1e-5)),
        Variant(f"{dtype_name} norm of heads", lambda: elementwise.rms_norm(query, weight[:128], 1e-6)),
        Variant(f"{dtype_name} add and norm", lambda: elementwise.add_rms_norm(delta, hidden, weight, 1e-5)),
        Variant(f"{dtype_name} gate", lambda: elementwise.gate(gate_up)),
    ]


@pytest.mark.parametrize("architecture", CHIPS)
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_attention(dtype_name: str, architecture: int, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _compile(attention_variants(dtype_name, architecture), architecture, capsys)
    for label, compiled in rows:
        if compiled.name == "_attend_runs" and label.endswith("512 new") and dtype_name != "f32":
            # Tensor cores do the products: of a whole warpgroup where the chip has them.
            product_name = "wgmma.mma_async" if architecture == 90 else "mma.sync"
            assert product_name in compiled.ptx, label
        elif compiled.name in ("_attend_runs", "_attend_items"):
            assert "mma.sync" in compiled.ptx or "wgmma" in compiled.ptx, label
        if not compiled.name.startswith("_merge"):
            # Keys and values come straight into shared memory, 16 bytes at a time, while a tile computes.
            assert "cp.async.cg.shared.global" in compiled.ptx, label
            assert "cp.async.ca" not in compiled.ptx, label


@pytest.mark.parametrize("architecture", CHIPS)
def test_the_rest(architecture: int, capsys: pytest.CaptureFixture[str]) -> None:
    variants = [variant for dtype_name in DTYPES for variant in other_variants(dtype_name)]
    logits, parameters = torch.zeros(2, 128_256), DrawParameters.of([Draw()] * 2, CPU)
    rows = _compile(variants, architecture, capsys)
    rows += _compile([Variant("draw", lambda: sampling.draw(logits, parameters))], architecture, capsys)
    for label, compiled in rows:
        assert ".v4" in compiled.ptx, f"{label} moves fewer than 16 bytes at a time"


def _compile(
    variants: list[Variant], architecture: int, capsys: pytest.CaptureFixture[str]
) -> list[tuple[str, Compiled]]:
    rows = [
        (variant.label, compile_for(architecture, launch))
        for variant in variants
        for launch in launches(architecture, variant.launch)
    ]
    with capsys.disabled():
        print(
            f"\nsm_{architecture}  {'kernel':<16}{'variant':<24}warps  registers  shared B  spills  resident"
        )
        for label, compiled in rows:
            print(
                f"       {compiled.name:<16}{label:<24}{compiled.warps:>5}{compiled.registers:>11}"
                f"{compiled.shared_bytes:>10}{compiled.spill_bytes:>8}{compiled.resident(architecture):>10}"
            )
    for label, compiled in rows:
        assert compiled.spill_bytes == 0, f"{compiled.name} {label} spills"
        assert compiled.stack_bytes == 0, f"{compiled.name} {label} keeps {compiled.stack_bytes} B on a stack"
        assert compiled.shared_bytes <= CHIPS[architecture].shared_bytes, f"{compiled.name} {label}"
    return rows
