"""Every kernel compiled, on shapes that the interpreter is too slow for, against float64."""

import pytest
import torch
from tests.support import kernel_checks
from tests.support.kernel_checks import AttentionCase

pytestmark = pytest.mark.gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CUDA = "cuda"
LARGE = {"heads": 32, "kv_heads": 8, "head_dim": 128}
SMALL = {"heads": 9, "kv_heads": 3, "head_dim": 64}

DECODE_CASES = [
    *(AttentionCase(runs=((tokens - 1, 1),), dtype=BF16, **LARGE) for tokens in (1, 15, 16, 17, 4096)),
    *(
        AttentionCase(
            runs=((0, 1), (1999, 1), (16, 1), (300, 1), (15, 1)), dtype=dtype, window_tokens=window, **shape
        )
        for dtype in (BF16, F16, F32)
        for shape in (LARGE, SMALL)
        for window in (None, 100)
    ),
    AttentionCase(runs=((700, 1),) * 70, dtype=BF16, heads=8, kv_heads=2, head_dim=64),
    AttentionCase(runs=((5, 1),) * 300, dtype=BF16, **SMALL),
    AttentionCase(runs=((400, 1), (90, 1)), dtype=BF16, heads=32, kv_heads=1, head_dim=80),
]
PREFILL_CASES = [
    *(AttentionCase(runs=((0, tokens),), dtype=BF16, **LARGE) for tokens in (1, 15, 16, 17, 1000)),
    *(
        AttentionCase(
            runs=((0, 3), (700, 300), (0, 260), (15, 17)), dtype=dtype, window_tokens=window, **shape
        )
        for dtype in (BF16, F16, F32)
        for shape in (LARGE, SMALL)
        for window in (None, 100)
    ),
    AttentionCase(runs=((1500, 2), (30, 3)), dtype=BF16, **LARGE),
    AttentionCase(runs=((0, 20),) * 300, dtype=BF16, **SMALL),
    AttentionCase(runs=((40, 130), (0, 9)), dtype=BF16, heads=32, kv_heads=1, head_dim=80),
]


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode_attention(case: AttentionCase, multiprocessors: int) -> None:
    kernel_checks.check_decode_attention(case, CUDA, multiprocessors, 64)


def test_decode_attention_of_a_padded_row() -> None:
    kernel_checks.check_decode_of_nothing(CUDA)


@pytest.mark.parametrize("shared_bytes", [99 * 1024, None], ids=["small tiles", "this chip's tiles"])
@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_prefill_attention(case: AttentionCase, shared_bytes: int | None) -> None:
    kernel_checks.check_prefill_attention(case, CUDA, shared_bytes)


@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_prefill_attention_of_parts_of_the_context(case: AttentionCase) -> None:
    kernel_checks.check_prefill_attention(case, CUDA, 99 * 1024, 1000, 64)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (8, 128), (1, 80)])
def test_write_kv(dtype: torch.dtype, kv_heads: int, head_dim: int) -> None:
    kernel_checks.check_write_kv(dtype, kv_heads, head_dim, CUDA)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(("block_tokens", "head_dim"), [(16, 64), (16, 128), (5, 80)])
def test_gather_and_scatter(dtype: torch.dtype, block_tokens: int, head_dim: int) -> None:
    kernel_checks.check_gather_scatter(dtype, block_tokens, head_dim, CUDA)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (1, 1, 80)])
def test_rotate(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    kernel_checks.check_rotate(dtype, heads, kv_heads, head_dim, CUDA)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("width", [64, 128, 576, 4096, 8192])
def test_norms(dtype: torch.dtype, width: int) -> None:
    kernel_checks.check_norms(dtype, width, CUDA)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("width", [64, 1000, 14_336])
def test_gate(dtype: torch.dtype, width: int) -> None:
    kernel_checks.check_gate(dtype, width, CUDA)


@pytest.mark.parametrize("vocabulary", [300, 5000, 32_003, 128_256])
def test_draw(vocabulary: int) -> None:
    kernel_checks.check_draw(vocabulary, CUDA)


def test_draw_of_what_is_not_finite() -> None:
    kernel_checks.check_draw_of_what_is_not_finite(CUDA)


def test_offsets_beyond_two_to_the_31() -> None:
    """The last of many blocks: its keys lie more than 2**31 numbers into the cache."""
    kernel_checks.check_far_block(CUDA)
