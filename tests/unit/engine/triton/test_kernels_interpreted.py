"""Every kernel against float64 in Triton's interpreter, on tiny shapes. Cases vary all at once, pairwise."""

import pytest
import torch
from tests.support import kernel_checks
from tests.support.interpreted import Interpreter
from tests.support.kernel_checks import AttentionCase

pytestmark = pytest.mark.unit

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CPU = "cpu"

# Lengths around the block size, and a ragged batch; the decode ones say what was there before the new token.
DECODE_CASES = [
    AttentionCase(runs=((0, 1),)),
    AttentionCase(runs=((14, 1),), dtype=BF16, head_dim=128, heads=8, kv_heads=2),
    AttentionCase(runs=((15, 1),), dtype=F16, window_tokens=5),
    AttentionCase(runs=((16, 1),), head_dim=128, heads=8, kv_heads=2, window_tokens=16),
    AttentionCase(runs=((0, 1), (14, 1), (15, 1), (16, 1), (63, 1))),
    AttentionCase(runs=((63, 1), (0, 1), (31, 1)), dtype=BF16, head_dim=128, window_tokens=20),
    AttentionCase(runs=((40, 1), (63, 1)), dtype=F16, heads=8, kv_heads=2, window_tokens=63),
    AttentionCase(runs=((50, 1), (7, 1)), heads=4, kv_heads=4, head_dim=80),
    AttentionCase(runs=((50, 1), (7, 1)), heads=32, kv_heads=1, head_dim=32, block_tokens=5),
]
PREFILL_CASES = [
    AttentionCase(runs=((0, 1),)),
    AttentionCase(runs=((0, 15),), dtype=BF16, head_dim=128, heads=8, kv_heads=2),
    AttentionCase(runs=((0, 16),), dtype=F16, window_tokens=5),
    AttentionCase(runs=((0, 17),), head_dim=128, heads=8, kv_heads=2, window_tokens=16),
    AttentionCase(runs=((16, 1), (0, 15), (15, 16), (0, 17), (16, 33))),
    AttentionCase(runs=((30, 34), (0, 1), (3, 17)), dtype=BF16, head_dim=128, window_tokens=20),
    AttentionCase(runs=((0, 64), (63, 1)), dtype=F16, heads=8, kv_heads=2, window_tokens=33),
    AttentionCase(runs=((0, 64), (1, 63)), dtype=BF16, heads=8, kv_heads=2, head_dim=64),
    # Longer than two tiles: with tiles that the window cuts, and one between them that it does not.
    AttentionCase(runs=((0, 64), (64, 44)), window_tokens=40),
    AttentionCase(runs=((84, 40),), window_tokens=90),
    AttentionCase(runs=((10, 30), (0, 7)), heads=4, kv_heads=4, head_dim=80),
    AttentionCase(
        runs=((33, 9), (60, 2)), heads=32, kv_heads=1, head_dim=32, block_tokens=5, window_tokens=7
    ),
    AttentionCase(runs=((62, 2), (14, 2)), dtype=F16, heads=8, kv_heads=2, head_dim=128),
]
SPLIT_PREFILL_CASES = [
    AttentionCase(runs=((0, 1),)),
    AttentionCase(runs=((60, 15),), dtype=BF16, head_dim=128, heads=8, kv_heads=2),
    AttentionCase(runs=((110, 10), (0, 3), (31, 2))),
    AttentionCase(runs=((100, 20), (0, 17)), window_tokens=50),
    AttentionCase(runs=((128, 5),), dtype=F16, heads=8, kv_heads=2, window_tokens=70),
]


@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode_attention(interpreter: Interpreter, case: AttentionCase) -> None:
    # One multiprocessor and short items: contexts of more than one tile are split.
    interpreter.call(kernel_checks.check_decode_attention, case, CPU, 1, 1)


def test_decode_attention_on_a_chip_that_needs_no_split(interpreter: Interpreter) -> None:
    case = AttentionCase(runs=((63, 1), (30, 1)))
    interpreter.call(kernel_checks.check_decode_attention, case, CPU, 4, 64)


def test_decode_attention_of_a_padded_row(interpreter: Interpreter) -> None:
    interpreter.call(kernel_checks.check_decode_of_nothing, CPU)


@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_prefill_attention(interpreter: Interpreter, case: AttentionCase) -> None:
    interpreter.call(kernel_checks.check_prefill_attention, case, CPU)


@pytest.mark.parametrize("case", SPLIT_PREFILL_CASES, ids=str)
def test_prefill_attention_of_parts_of_the_context(interpreter: Interpreter, case: AttentionCase) -> None:
    # Many multiprocessors, and parts as short as a tile.
    interpreter.call(kernel_checks.check_prefill_attention, case, CPU, 99 * 1024, 64, 1)


@pytest.mark.parametrize(("dtype", "kv_heads", "head_dim"), [(F32, 3, 64), (BF16, 2, 128), (F16, 1, 80)])
def test_write_kv(interpreter: Interpreter, dtype: torch.dtype, kv_heads: int, head_dim: int) -> None:
    interpreter.call(kernel_checks.check_write_kv, dtype, kv_heads, head_dim, CPU)


@pytest.mark.parametrize(
    ("dtype", "block_tokens", "head_dim"), [(F32, 16, 64), (BF16, 5, 128), (F16, 16, 80)]
)
def test_gather_and_scatter(
    interpreter: Interpreter, dtype: torch.dtype, block_tokens: int, head_dim: int
) -> None:
    interpreter.call(kernel_checks.check_gather_scatter, dtype, block_tokens, head_dim, CPU)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim"), [(F32, 9, 3, 64), (BF16, 8, 2, 128), (F16, 1, 1, 80)]
)
def test_rotate(
    interpreter: Interpreter, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    interpreter.call(kernel_checks.check_rotate, dtype, heads, kv_heads, head_dim, CPU)


@pytest.mark.parametrize(("dtype", "width"), [(F32, 576), (BF16, 64), (F16, 2048)])
def test_norms(interpreter: Interpreter, dtype: torch.dtype, width: int) -> None:
    interpreter.call(kernel_checks.check_norms, dtype, width, CPU)


@pytest.mark.parametrize(("dtype", "width"), [(F32, 1536), (BF16, 64), (F16, 1000)])
def test_gate(interpreter: Interpreter, dtype: torch.dtype, width: int) -> None:
    interpreter.call(kernel_checks.check_gate, dtype, width, CPU)


@pytest.mark.parametrize("vocabulary", [300, 5000])
def test_draw(interpreter: Interpreter, vocabulary: int) -> None:
    interpreter.call(kernel_checks.check_draw, vocabulary, CPU)


def test_draw_of_what_is_not_finite(interpreter: Interpreter) -> None:
    interpreter.call(kernel_checks.check_draw_of_what_is_not_finite, CPU)
